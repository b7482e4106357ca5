"""`benchmarks/prefill.py` is right: its arms agree, as logits tell, and the bytes it reports are those sent."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


def sections() -> tuple[list[dict[str, Any]], list[int], str]:
    """Rows, what a rank sent in both sections, and what is said of logits over another prompt."""
    import prefill  # imports transformers
    from support.together import Ranks

    ranks = Ranks(dist.get_world_size(), "cpu")
    args = argparse.Namespace(device="cpu", rounds=1, layers=None, chunk=None, rate=1e11)
    args.mesh = init_device_mesh("cpu", (ranks.size,), mesh_dim_names=("kv",))
    sent, send = [0], dist.batch_isend_irecv

    def counting(ops: list[dist.P2POp]) -> list[dist.Work]:
        sent[-1] += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return send(ops)

    dist.batch_isend_irecv = counting
    rows = prefill.prompt(ranks, args, 131)
    sent.append(0)
    args.chunk = 50
    rows += prefill.long(ranks, args, 131)
    model, ids = prefill.make_model("cpu", None, 131), prefill.make_prompt("cpu", 512, 131)
    want = prefill.by_sdpa(model, ids)
    ids[:, :65] = ids[:, 65:130].clone()
    try:
        prefill.difference(ranks, "another", prefill.by_sdpa(model, ids), want)
    except ArithmeticError as error:
        return rows, sent, str(error)
    return rows, sent, "accepted"


@pytest.mark.drawn(2, "whole programs")
def test_sections() -> None:
    for rows, sent, refused in run_ranks(2, sections):
        assert [row.get("arm", "long") for row in rows] == ["sdpa", "alone", "striped", "long"]
        assert all(row["s"] > 0 and row["floor_s"] > 0 for row in rows)
        assert rows[2]["floor_s"] == rows[0]["floor_s"] / 2
        assert [row["ring_bytes"] for row in rows[:2]] == [0, 0]
        assert sent[0] == 2 * rows[2]["ring_bytes"]  # checked, and timed once
        assert sent[1] == rows[3]["ring_bytes"] + 2 * 2 * 2 * 2 * 32 * 2  # of 4 tokens before
        assert rows[3]["finite"]
        assert "logits of another differ by" in refused


def test_products() -> None:
    """Those of PyTorch's own count, but for attention, where that counts keys that are masked."""
    import prefill
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model, ids = prefill.make_model("cpu", None, 64), prefill.make_prompt("cpu", 512, 64)
        prefill.by_sdpa(model, ids)
    config = model.config
    head = 2 * config.hidden_size * config.vocab_size
    counted = counter.flop_counts["Global"]
    linear = sum(counted.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.bmm)) - head  # of one row: either
    causal = 2 * 64**2 * config.hidden_size * config.num_hidden_layers
    angles = 2 * 64 * config.head_dim // 2  # of the rope, which transformers 5.17 multiplies by `bmm`
    assert linear + causal - prefill.products(model, 64) in (0, angles)
