"""`benchmarks/sharded_prefix.py` is right: all of its arms agree, or none is timed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import sharded_prefix
from support.sharded_llama import Decoder
from support.sharded_step import ARMS, Samples, SampleStep
from support.together import Ranks

ARGS = argparse.Namespace(device="cpu", rounds=1, rate=1e9, products=1e11)


def arms(dtype: torch.dtype) -> tuple[Ranks, dict[str, SampleStep]]:
    ranks = Ranks(dist.get_world_size(), "cpu")
    model = Decoder(sharded_prefix.MODELS["cpu"], ranks, dtype)
    return ranks, {name: SampleStep(model, ranks, name) for name in ARMS}


def op() -> dict[str, object]:
    return sharded_prefix.measure_op(sharded_prefix.SHAPES["cpu"][0], Ranks(dist.get_world_size(), "cpu"), ARGS)


def step() -> tuple[dict[str, object], list[float]]:
    """A row, and how far arms in float32 are from the first one."""
    ranks, found = arms(torch.bfloat16)
    row = sharded_prefix.measure_step(sharded_prefix.SAMPLES["cpu"][0], found, ranks, ARGS)
    ranks, found = arms(torch.float32)
    torch.manual_seed(0)
    sizes, samples = sharded_prefix.MODELS["cpu"], Samples(33, 3, 8)
    kv = [
        [(k.float(), v.float()) for k, v in sharded_prefix.random_kv(ranks, sizes, batch, length)]
        for batch, length in ((1, samples.prefix), (samples.batch, samples.suffix))
    ]
    logits = [arm.make(samples, *kv)() for arm in found.values()]
    half = [[(k[:, :, : k.shape[2] // 2], v[:, :, : v.shape[2] // 2]) for k, v in kv[0]], kv[1]]
    logits.append(found["one"].make(samples, *half)())
    return row, [sharded_prefix.relative_error(x, logits[0]) for x in logits]


def refused() -> str:
    ranks = Ranks(dist.get_world_size(), "cpu")
    try:
        sharded_prefix.require(ranks, {"local": 1e-3, "one": float("nan") if ranks.rank == 1 else 1e-3}, 1e-2)
    except ArithmeticError as error:
        return str(error)
    return "accepted"


def test_op() -> None:
    rows = run_ranks(2, op)
    for row in rows:
        assert row["us"].keys() == {"local", "sharded", "one"}
        assert max(row["errors"].values()) < 1e-2
        assert row["over_local"] == row["us"]["sharded"] - row["us"]["local"]
        assert len(row["rank_us"]) == 2
        assert row["spread"] >= 1
    assert rows[0]["us"] == rows[1]["us"]


@pytest.mark.drawn(2, "whole programs")
@pytest.mark.parametrize("n", [2, 4])
def test_step(n: int) -> None:
    for row, differences in run_ranks(n, step):
        assert row["ms"].keys() == row["floor_ms"].keys() == set(ARMS)
        assert row["faster"] == pytest.approx(row["ms"]["one"] / row["ms"]["sequence"], rel=1e-12)
        floors = row["floor_ms"]
        assert floors["heads"] < floors["sequence"] < floors["one"]
        one, sequence, heads, without_half = differences
        assert one == 0
        assert max(sequence, heads) < 1e-5
        assert without_half > 0.2  # so that the bound of bfloat16 would not hide it


def test_what_is_wrong_on_one_rank_is_an_error_on_all() -> None:
    first, second = run_ranks(2, refused)
    assert first == second
    assert first.startswith("rank 1 has relative errors {'one': nan}")
