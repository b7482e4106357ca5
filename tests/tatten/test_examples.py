"""The examples run to their end, on small sizes; those that decode find the same tokens both ways."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from caused_warnings import no_warnings
from ranks import run_torchrun
from torch.distributed.device_mesh import DeviceMesh

EXAMPLES = Path(__file__).parents[2] / "examples"


def output(name: str, options: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", [name, *options.split()])
    with no_warnings():
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.drawn(2, "whole programs")
def test_best_of_n(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # Inductor takes most of the time, and makes no difference here.
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda gm, example_inputs, **_: gm)
    out = output("best_of_n", "--layers 1 --n 4 --prompt-len 300 --new-tokens 6", monkeypatch, capsys)
    assert "1 of 1 attention calls rewritten" in out
    assert "tokens: identical (4 sequences of 6)" in out
    assert "of 4; the best 3:" in out
    assert "backend     ms per step    KV MiB\ninductor" in out
    assert "times as fast" in out


@pytest.mark.drawn(2, "whole programs")
def test_chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # Inductor takes most of the time, and makes no difference here.
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda gm, example_inputs, **_: gm)
    out = output("chat", "--layers 1 --new-tokens 6", monkeypatch, capsys)
    texts = re.findall(r"^(?:generate|decode_loop):\n(.*)\n", out, re.MULTILINE)
    assert len(texts) == 2
    assert texts[0] == texts[1]
    assert len(texts[0].split()) == 6
    assert "the same text" in out
    assert "because" not in out


@pytest.mark.drawn(2, "whole programs")
def test_prefix_tree(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # Inductor takes most of the time, and makes no difference here.
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda gm, example_inputs, **_: gm)
    options = "--layers 2 --system 300 --question 5 --samples 3 --new-tokens 6"
    out = output("prefix_tree", options, monkeypatch, capsys)
    assert out.count("2 of 2 attention calls rewritten") == 2
    assert "tokens: identical (2 rounds of 12 sequences of 6)" in out
    assert "2  tatten" in out
    assert "1 x 300 + 4 x 5 + 4 x 6 + 12 x 6" in out
    assert "times as fast" in out


@pytest.mark.drawn(2, "whole programs")
def test_paged_decode(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # Inductor takes most of the time, and makes no difference here.
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda gm, example_inputs, **_: gm)
    out = output(
        "paged_decode", "--requests 6 --prompt-len 40 --new-tokens 20 --pages 20 --rows 5", monkeypatch, capsys
    )
    assert "samples of 6 requests" in out
    assert "compiled: 1 graph\n" in out
    assert "tokens: those of a forward of each whole text" in out
    assert "of 19 in use, 19 free in the end" in out


@pytest.mark.parametrize("prompt", [[5], [5] * 16, [5] * 17, [5] * 33])
def test_paged_decode_shares_full_pages(prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples hold the full pages before the last token of the prompt together, and go on to pages of their own."""
    example = runpy.run_path(str(EXAMPLES / "paged_decode.py"))
    engine = example["Engine"](example["Model"](9, 48), 9, 3, 3)
    monkeypatch.setattr(engine, "step", engine.model.step)
    engine.queue.append((prompt, [len(prompt) + 3, len(prompt) + 5]))
    with torch.no_grad():
        first, second = engine.run()
        for sample in (first, second):
            example["check"](sample, engine.model)
    shared = (len(prompt) - 1) // 16
    assert first.pages[:shared] == second.pages[:shared]
    assert not set(first.pages[shared:]) & set(second.pages[shared:])
    assert sorted(engine.free) == [*range(1, 9)]
    assert len(second.text) == len(prompt) + 5


def test_paged_decode_of_more_than_fits() -> None:
    example = runpy.run_path(str(EXAMPLES / "paged_decode.py"))
    engine = example["Engine"](example["Model"](3, 48), 3, 3, 3)
    engine.queue.append(([5], [20, 20]))
    with pytest.raises(ValueError, match="2 samples of a request must fit into the rows and the pages"):
        engine.run()


@pytest.mark.drawn(2, "whole programs")
def test_rollouts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # Inductor takes most of the time, and makes no difference here.
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda gm, example_inputs, **_: gm)
    out = output("rollouts", "--prompts 3 --prompt-len 40 --samples 4 --ends 8 --new-tokens 20", monkeypatch, capsys)
    for backend in ("inductor", "tatten"):
        assert f"generate, {backend}: tokens: identical (12 sequences, " in out
    assert out.count("log-probabilities: those of a forward of the whole texts up to ") == 2
    assert "after a change of the weights: nothing was compiled or captured" in out
    assert [int(n) for n in re.findall(r"(?:tor|ten|rollout) +(\d+) ", out)] == [12 * 40] * 2 + [3 * 39] * 2
    assert " of 12 + " in out  # the rest in a batch of 6


def test_a_rollout_of_one_token(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda gm, example_inputs, **_: gm)
    out = output("rollouts", "--prompts 1 --prompt-len 20 --samples 1 --new-tokens 1", monkeypatch, capsys)
    assert out.count(": tokens: identical (1 sequences, 1 tokens)") == 2
    assert "after a change of the weights: nothing was compiled or captured" in out


@pytest.mark.slow
def test_latent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--layers 1 --batch 2 --max-cache-len 256 --prompt-len 40 --new-tokens 8"
    out = output("latent", options, monkeypatch, capsys)
    assert "model.layers.0.self_attn: tatten.latent_attention.default" in out
    assert "1 of 1 attention calls rewritten" in out
    assert "tokens: " in out
    assert "(2 sequences of 8)" in out or "2 sequences of 8, " in out
    assert "backend    ms per token\ninductor" in out
    assert "times as fast" in out


def test_latent_takes_ties_for_the_same_tokens() -> None:
    compare = runpy.run_path(str(EXAMPLES / "latent.py"))["compare"]
    theirs = torch.tensor([[0, 1], [0, 1]])
    ours = torch.tensor([[0, 1], [0, 2]])
    logits = torch.tensor([1.0, 2.0, 2.0 - 1e-6]).expand(2, 2, 3)
    assert compare(theirs, theirs, logits, torch.float32) == "tokens: identical (2 sequences of 2)"
    said = compare(ours, theirs, logits, torch.float32)
    assert said == "tokens: 2 sequences of 2, 1 of them the same up to a tie within the rounding of torch.float32"
    with pytest.raises(SystemExit, match=r"tokens: DIFFERENT, by 1\.0 in the logits of sequence 1, token 1"):
        compare(torch.tensor([[0, 1], [0, 0]]), theirs, logits, torch.float32)


def test_draw_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "schedule.svg"
    out = output("draw_schedule", f"--lengths 1000 300 --kv-heads 2 --programs 7 --out {path}", monkeypatch, capsys)
    assert "<svg" in path.read_text()
    assert "FlashAttention-2                 2       40%         5       40.0%    1.00x               0" in out
    assert "Lean Attention                   5      100%         2      100.0%    2.50x               6" in out
    assert "Lean Attention                   7      100%         4       78.6%    2.00x" in out


CONNECT = """
import argparse, runpy, sys
import torch
import torch.distributed as dist
torch.cuda.is_available = lambda: True
example = runpy.run_path(sys.argv[1])
mesh = example["connect"]("cpu")
assert mesh.get_group().group_name == dist.group.WORLD.group_name
config = argparse.Namespace(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
args = argparse.Namespace(device="cpu", dtype=torch.float32)
example["say"](dist.get_backend(mesh.get_group()), example["costs"](config, 64, mesh, args))
"""


@pytest.mark.drawn(2, "whole programs")
def test_tree_decode_on_cpus_of_a_machine_with_gpus(tmp_path: Path) -> None:
    """PyTorch would set up NCCL for a CPU mesh, which fails here, and for ranks that share a GPU."""
    script = tmp_path / "connect.py"
    script.write_text(CONNECT)
    lines = run_torchrun(2, str(script), str(EXAMPLES / "tree_decode.py")).splitlines()
    assert lines[-2] == "gloo"
    assert lines[-1].split()[0] == "64"
    assert lines[-1].endswith("x")


def test_tree_decode_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU for each rank, with NCCL; without a GPU for each, an error that says so."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: calls.append(index))
    monkeypatch.setattr(dist, "init_process_group", lambda backend: calls.append(backend))
    monkeypatch.setattr(DeviceMesh, "from_group", lambda group, device, **names: calls.append((device, names)))
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    connect = runpy.run_path(str(EXAMPLES / "tree_decode.py"))["connect"]
    connect("cuda")
    assert calls == [1, "nccl", ("cuda", {"mesh_dim_names": ("kv",)})]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(SystemExit, match="must have a GPU for each rank, got 3 ranks and 2 GPUs"):
        connect("cuda")


@pytest.mark.slow
def test_sharded_samples() -> None:
    example = EXAMPLES / "sharded_samples.py"
    out = run_torchrun(2, str(example), *["--prompt-len", "65", "--samples", "6", "--new-tokens", "3"])
    assert "tokens: identical on all ranks and in one process" in out
    assert "FutureWarning" not in out
    assert "deprecated" not in out
