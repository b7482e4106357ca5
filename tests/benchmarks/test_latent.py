"""Sections of `benchmarks/latent.py` time nothing whose result is wrong on some rank."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist
from ranks import run_ranks

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from support import latent_product, latent_sharded
from support.together import Ranks


def row() -> dict[str, object]:
    return latent_sharded.measure(latent_sharded.shapes("cpu")[0], Ranks(dist.get_world_size(), "cpu"), 1, 1)


def test_sharded_latents() -> None:
    for found in run_ranks(2, row):
        assert set(found["us"]) == set(found["errors"]) == {"local", "sharded"}
        assert max(found["errors"].values()) < 1e-2
        assert found["ranks"] == 2


def test_products() -> None:
    row = latent_product.measure(latent_product.shapes("cpu")[0], "cpu", 1e9, 1)
    assert row["us"].keys() == row["errors"].keys() == {"tatten", "rounded"}
    assert row["errors"]["tatten"] < row["errors"]["rounded"]
