"""A decode step in a package of AOTInductor: it runs where tatten is not, from Python and from C++."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tatten
from tatten.passes import cost

RATES = dict(cost.RATES)  # before the fixture that makes other kernels free
EXAMPLE = Path(__file__).parents[2] / "examples" / "aoti"
NEW_TOKENS = 6

WITHOUT_TATTEN = """
import sys
sys.modules["tatten"] = None  # so that an import of it raises
import torch
tokens = [int(sys.argv[2])]
step = torch._inductor.aoti_load_package(sys.argv[1])
for position in range(int(sys.argv[3])):
    logits = step(input_ids=torch.tensor([tokens[-1:]]), cache_position=torch.tensor([position]))
    tokens.append(int(logits[0, -1].argmax()))
print(*tokens)
"""


def run(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_is_rewritten_at_its_default_size(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(cost.RATES, "cpu", RATES["cpu"])
    example = runpy.run_path(str(EXAMPLE / "export.py"))
    example["export"](example["build"](layers=1, max_cache_len=example["SLOTS"]))
    assert "1 of 1 attention calls rewritten" in capsys.readouterr().out


@pytest.mark.slow
def test_a_package_runs_without_tatten_and_reads_no_unused_slot(tmp_path: Path) -> None:
    """The slots of the cache that nothing was written to are NaN, which eager attention would return."""
    example = runpy.run_path(str(EXAMPLE / "export.py"))
    module = example["build"](layers=2, max_cache_len=300)
    with torch.no_grad():
        expected = example["decode"](module, NEW_TOKENS)
        for name, buffer in module.named_buffers():
            if name.startswith(("key_cache", "value_cache")):
                buffer.fill_(float("nan"))
        program = example["export"](module)
        logits = module(input_ids=torch.tensor([[1]]), cache_position=torch.tensor([3]))
    assert logits.isnan().all()
    assert not [node for node in program.graph.nodes if "tatten" in str(node.target)]
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "step.pt2"))
    out = run(sys.executable, "-c", WITHOUT_TATTEN, path, str(example["FIRST"]), str(NEW_TOKENS))
    assert out.split() == list(map(str, expected))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cmake") is None, reason="the example is built by CMake")
def test_the_example_decodes_from_cpp(tmp_path: Path) -> None:
    package, build = tmp_path / "decode.pt2", tmp_path / "build"
    lines = run(sys.executable, EXAMPLE / "export.py", package, "--layers", "1", "--new-tokens", str(NEW_TOKENS))
    eager, packaged, verdict = lines.splitlines()[-3:]
    assert verdict == "tokens: identical"
    assert eager.split()[1:] == packaged.split()[1:]
    assert len(eager.split()) == NEW_TOKENS + 2
    run("cmake", "-S", EXAMPLE, "-B", build, f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}")
    run("cmake", "--build", build)
    assert run(build / "decode", package, str(NEW_TOKENS)).split() == eager.split()[1:]


class Attend(torch.nn.Module):
    """Ragged sequences: by a mask, by lengths, beside shared keys, with keys that are the values, and of latents.

    And with keys that are computed in the layout `[batch, length, kv_heads, d]` in which `stored` is, and with a
    computed bias for each query that all heads share.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, lens: Tensor, sinks: Tensor, stored: Tensor
    ):
        masked = tatten.decode_attention(query, key, value, attn_mask=mask, return_lse=True)
        variant = {"window": 9, "softcap": 3.0, "sinks": sinks}
        windowed = tatten.decode_attention(query, key, value, kv_lens=lens, **variant, return_lse=True)
        shared = tatten.bifurcated_attention(
            query, [query[:1, :2], key], [query[:1, :2], value], attn_masks=[None, mask], return_lse=True
        )
        bias = torch.where(mask, sinks[0].to(query.dtype), float("-inf"))
        biased = tatten.bifurcated_attention(
            query, [query[:1, :2], key], [query[:1, :2], value], attn_masks=[None, bias], return_lse=True
        )
        same = tatten.decode_attention(query, key, key, attn_mask=mask, return_lse=True)
        ropes = query[..., :8], value[:, :1, :, :8]
        latents = tatten.latent_attention(
            query, ropes[0], key[:, :1], ropes[1], attn_mask=mask, scale=0.1, return_lse=True
        )
        computed = stored.transpose(1, 2).neg()
        turned = tatten.decode_attention(query, computed, computed, attn_mask=mask, return_lse=True)
        places = torch.arange(60)
        seen = (places <= lens[:2, None]) & (places < lens[:, None])[:, None, None]
        floor = torch.where(seen, 0.0, float("-inf")).to(query.dtype)
        several = tatten.decode_attention(query, key, value, attn_mask=floor, return_lse=True)
        return *masked, *windowed, *shared, *biased, *same, *latents, *turned, *several


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_package_keeps_what_a_sequence_does_not_use_out_of_its_result(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    query, (key, value) = torch.randn(3, 4, 2, 32).to(dtype), torch.randn(2, 3, 2, 60, 32).to(dtype)
    lens = torch.tensor([60, 7, 0])
    mask = (torch.arange(60) < lens[:, None])[:, None, None]
    sinks = torch.randn(4)

    def inputs(unused: float) -> tuple[Tensor, ...]:
        k, v = (x.masked_fill(~mask.transpose(2, 3), unused) for x in (key, value))
        return query, k, v, mask, lens, sinks, k.transpose(1, 2).contiguous()

    with torch.no_grad():
        program = torch.export.export(Attend(), tuple(map(torch.ones_like, inputs(1.0))))
        program = program.run_decompositions(tatten.decompositions())
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attend.pt2"))
        packaged = torch._inductor.aoti_load_package(path)
        for unused in (1.0, float("nan")):
            for x, y in zip(packaged(*inputs(unused)), Attend()(*inputs(unused)), strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=torch.finfo(dtype).eps * 4)


class Lengths(torch.nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, lens: Tensor):
        def attend(heads: int, softcap: float | None) -> tuple[Tensor, Tensor]:
            k, v = key[:, :heads], value[:, :heads]
            return tatten.decode_attention(query, k, v, kv_lens=lens, softcap=softcap, return_lse=True)

        return *attend(2, None), *attend(2, 2.0), *attend(1, None), *attend(1, 2.0)


@pytest.mark.slow
def test_a_package_takes_any_batch_and_any_length(tmp_path: Path) -> None:
    def inputs(batch: int, length: int) -> tuple[Tensor, ...]:
        query, lens = torch.randn(batch, 4, 1, 16), torch.randint(length + 1, (batch,))
        key, value = torch.randn(2, batch, 2, length, 16)
        unused = (torch.arange(length) >= lens[:, None])[:, None, :, None]
        return query, key.masked_fill(unused, float("nan")), value.masked_fill(unused, float("nan")), lens

    torch.manual_seed(0)
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=4096)
    sizes = {0: batch}, {0: batch, 2: length}, {0: batch, 2: length}, {0: batch}
    with torch.no_grad():
        program = torch.export.export(Lengths(), inputs(3, 40), dynamic_shapes=sizes)
        program = program.run_decompositions(tatten.decompositions())
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "lengths.pt2"))
    packaged = torch._inductor.aoti_load_package(path)
    for given in (inputs(3, 40), inputs(1, 2), inputs(5, 77)):
        torch.testing.assert_close(tuple(packaged(*given)), Lengths()(*given))


RUN_ON_CUDA = """
import sys
sys.modules["tatten"] = sys.modules["triton"] = None
import torch
args, expected = torch.load(sys.argv[2])
out = torch._inductor.aoti_load_package(sys.argv[1])(*args)
torch.testing.assert_close(out, expected, rtol=0, atol=0)
"""


class StaticCache(torch.nn.Module):
    """Attention over a cache that it writes to, which is NaN where it was not written."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("k", "v"):
            self.register_buffer(name, torch.full((2, 8, 4096, 128), float("nan"), dtype=torch.bfloat16, device="cuda"))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, position: Tensor) -> Tensor:
        self.k.index_copy_(2, position, key)
        self.v.index_copy_(2, position, value)
        mask = (torch.arange(4096, device="cuda") <= position)[None, None, None]
        return torch.nn.functional.scaled_dot_product_attention(query, self.k, self.v, mask, enable_gqa=True)


@pytest.mark.slow
@pytest.mark.gpu
def test_a_package_for_cuda_holds_the_kernels(tmp_path: Path) -> None:
    def randn(heads: int) -> Tensor:
        return torch.randn(2, heads, 1, 128, dtype=torch.bfloat16, device="cuda")

    args = randn(32), randn(8), randn(8), torch.tensor([0], device="cuda")
    with torch.no_grad():
        program = tatten.rewrite(torch.export.export(StaticCache(), args))
        expected = program.module()(*args)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "step.pt2"))
    torch.save((args, expected), tmp_path / "given.pt")
    run(sys.executable, "-c", RUN_ON_CUDA, path, tmp_path / "given.pt")
