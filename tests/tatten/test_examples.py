"""The examples run to their end, on small sizes; those that decode find the same tokens both ways."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def output(name: str, options: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", [name, *options.split()])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def test_best_of_n(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = output("best_of_n", "--layers 1 --n 4 --prompt-len 300 --new-tokens 6", monkeypatch, capsys)
    assert "1 of 1 SDPA calls rewritten" in out
    assert "tokens: identical (4 sequences of 6)" in out
    assert "of 4; the best 3:" in out
    assert "backend     ms per step    KV MiB\ninductor" in out
    assert "times as fast" in out


def test_prefix_tree(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # Inductor takes most of the time, and makes no difference here.
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda gm, example_inputs, **_: gm)
    options = "--layers 2 --system 300 --question 5 --samples 3 --new-tokens 6"
    out = output("prefix_tree", options, monkeypatch, capsys)
    assert out.count("2 of 2 SDPA calls rewritten") == 2
    assert "tokens: identical (2 rounds of 12 sequences of 6)" in out
    assert "2  tatten" in out
    assert "1 x 300 + 4 x 5 + 4 x 6 + 12 x 6" in out
    assert "times as fast" in out


def test_draw_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "schedule.svg"
    out = output("draw_schedule", f"--lengths 1000 300 --kv-heads 2 --programs 7 --out {path}", monkeypatch, capsys)
    assert "<svg" in path.read_text()
    assert "FlashAttention-2                 2       40%         5       40.0%    1.00x               0" in out
    assert "Lean Attention                   5      100%         2      100.0%    2.50x               6" in out
    assert "Lean Attention                   7      100%         4       78.6%    2.00x" in out
