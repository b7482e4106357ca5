"""`benchmarks/generate.py` times tokens and no compiling, of models in the published shapes, and knows their floors."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from slow import slow_but
from torch._dynamo.utils import counters
from transformers import CompileConfig

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import generate
from support import models

PARAMETERS = {  # as published, without the benchmarks' smaller vocabularies and MLPs
    "llama": ({"vocab_size": 128256}, 8_030_261_248),
    "gemma2": ({}, 9_241_705_984),
    "gemma3_text": ({}, 11_766_034_176),
    "gpt_oss": ({}, 20_914_757_184),
    "llama_1b": ({}, 1_235_814_400),
    "qwen3_600m": ({}, 596_049_920),
    "deepseek_v3": ({"vocab_size": 129280, "intermediate_size": 18432, "first_k_dense_replace": 3}, 671_026_404_352),
}  # of DeepSeek-V3's 671,026,419,200 those that are no biases of its routers: 58 x 256


@pytest.mark.parametrize("name", models.SHAPES)
def test_shapes(name: str) -> None:
    changes, published = PARAMETERS[name]
    assert models.build(models.shape(name, **changes), "meta", torch.bfloat16).num_parameters() == published


def keys_and_values(name: str, batch: int, used: int) -> int:
    """Elements that a step of 2 tiny layers reads; of a window of 64, no more."""
    if name == "deepseek_v3":
        return 2 * batch * used * (32 + 16)
    keys = min(64, used) + used if name in ("gemma2", "gemma3_text", "gpt_oss") else 2 * used
    return batch * keys * 2 * 2 * 32


@pytest.mark.parametrize("used", [16, 100])
@pytest.mark.parametrize("name", models.SHAPES)
def test_floors(name: str, used: int) -> None:
    model = models.build(models.shape(name, tiny=True), "cpu", torch.float32)
    weights = sum(p.numel() for p in model.parameters())
    if name not in ("gemma2", "gemma3_text", "llama_1b", "qwen3_600m"):  # their embedding is the output projection, too
        weights -= 512 * 128
    if name == "gpt_oss":  # each token picks 2 of 4 experts, so 3 tokens leave an eighth of them
        weights -= sum(p.numel() for layer in model.model.layers for p in layer.mlp.experts.parameters()) // 8
    assert models.floor_bytes(model, 3, used) == 4 * (weights + keys_and_values(name, 3, used))


@pytest.mark.drawn(2, "whole programs")
@pytest.mark.parametrize("name", slow_but(["gemma2"], models.SHAPES))
def test_timed_calls_compile_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []
    in_turns = generate.in_turns

    def watched(*given: Any) -> dict[str, float]:
        counters.clear()
        took = in_turns(*given)
        compiled.append(counters["stats"]["unique_graphs"])
        return took

    monkeypatch.setattr(generate, "in_turns", watched)
    monkeypatch.setattr(generate, "BACKENDS", ("eager", "aot_eager"))
    args = argparse.Namespace(device="cpu", capacity=64, used=8, rounds=1)
    with torch.no_grad():
        model = models.build(models.shape(name, tiny=True), "cpu", torch.float32)
        found = generate.measure(model, 2, "default", args)
    assert compiled == [0]
    assert set(found["token_ms"]) == set(found["compile_s"]) == {"eager", "aot_eager"}


@pytest.mark.drawn(2, "whole programs")
def test_how_the_model_would_compile_by_itself_is_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` takes that for compiled already, as its default mode of Inductor."""
    monkeypatch.setattr(generate, "BACKENDS", ("eager", "aot_eager"))
    args = argparse.Namespace(device="cpu", capacity=64, used=8, rounds=1)
    with torch.no_grad():
        model = models.build(models.shape("llama", tiny=True), "cpu", torch.float32)
        model.generation_config.compile_config = CompileConfig(backend="eager", **generate.MODES["default"])
        assert generate.measure(model, 1, "default", args)["token_ms"].keys() == {"eager", "aot_eager"}


Measured = dict[str, dict[str, float]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[dict[str, Any]]]:
    """The rows of a command, of which nothing is measured."""

    def measure(model: torch.nn.Module, batch: int, mode: str, args: argparse.Namespace) -> Measured:
        return {key: {"inductor": 2.0, "tatten": 1.0} for key in ("token_ms", "compile_s")}

    def rows(options: str) -> list[dict[str, Any]]:
        path = tmp_path / "x.json"
        monkeypatch.setattr(sys, "argv", ["generate.py", *options.split(), "--json", str(path)])
        generate.main()
        return json.loads(path.read_text())["rows"]

    monkeypatch.setattr(generate, "measure", measure)
    monkeypatch.setattr(generate, "read_rate", lambda device: 1e9)
    return rows


@pytest.mark.drawn(2, "whole programs")
def test_cells(run: Callable[[str], list[dict[str, Any]]]) -> None:
    cells = [(r["layers"], r["batch"], r["mode"]) for r in run("--layers 1 2 --batch 1 8 --modes default")]
    assert cells == [(1, 1, "default"), (1, 8, "default"), (2, 1, "default"), (2, 8, "default")]
    rows = run("--models gemma2 gpt_oss --layers 1 2 --batch 1 8 --paired --modes default reduce-overhead")
    cells = [(r["model"], r["layers"], r["batch"]) for r in rows]
    assert cells[::2] == cells[1::2] == [(name, n, b) for name in ("gemma2", "gpt_oss") for n, b in ((1, 1), (2, 8))]
    assert {r["ratio"] for r in rows} == {0.5}
    assert rows[0]["floor_ms"] < rows[2]["floor_ms"]


def test_pairs_of_unequal_lists(run: Callable[[str], list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--layers 2 --batch 1 8 --paired")
    assert "as many --layers as --batch, got [2] and [1, 8]" in capsys.readouterr().err
