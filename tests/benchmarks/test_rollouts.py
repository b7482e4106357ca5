"""`benchmarks/rollouts.py` is right: all arms draw the same tokens, from which rates are computed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.mark.drawn(2, "whole programs")
def test_row(monkeypatch: pytest.MonkeyPatch) -> None:
    import rollouts  # imports transformers

    # Inductor takes most of the time, and makes no difference here.
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda gm, example_inputs, **_: gm)
    sizes = {"shape": "tiny", "prompts": 2, "prompt_len": 20, "new_tokens": 6}
    args = argparse.Namespace(device="cpu", dtype=torch.float32, **sizes)
    row = rollouts.measure(rollouts.example.build(args), 3, args)
    assert row["prefilled"] == {"inductor": 6 * 20, "tatten": 6 * 20, "fork": 2 * 19}
    token = 2 * 2 * 64 * 4  # bytes of the keys and values of one
    assert row["kv_bytes"] == {"inductor": 6 * 26 * token, "tatten": 6 * 26 * token, "fork": (2 * 19 + 6 * 6) * token}
    assert row["first"] == {"inductor": 1, "tatten": 1}
    for name, seconds in row["seconds"].items():
        assert row["tokens_per_second"][name] == pytest.approx(6 * 6 / seconds)


def test_other_tokens() -> None:
    import rollouts

    ours = torch.arange(1, 41).view(8, 5)
    parted = torch.cat([ours[:, :1], ours[:, 1:] + 1], 1)
    assert rollouts.check(ours, parted, torch.bfloat16) == 1
    with pytest.raises(SystemExit, match="DIFFERENT in 8 of 8 sequences"):
        rollouts.check(ours, parted, torch.float32)
    with pytest.raises(ArithmeticError, match="at least 25% of the first tokens must be the same, got 0%"):
        rollouts.check(ours, ours + 1, torch.bfloat16)
