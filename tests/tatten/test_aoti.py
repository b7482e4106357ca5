"""A decode step in a package of AOTInductor: it runs where tatten is not, from Python and from C++."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tatten

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
    """Ragged sequences by a mask, by lengths, and beside keys that they share."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, lens: Tensor, sinks: Tensor):
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
        return *masked, *windowed, *shared, *biased


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_package_keeps_what_a_sequence_does_not_use_out_of_its_result(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    query, (key, value) = torch.randn(3, 4, 2, 32).to(dtype), torch.randn(2, 3, 2, 60, 32).to(dtype)
    lens = torch.tensor([60, 7, 0])
    mask = (torch.arange(60) < lens[:, None])[:, None, None]
    key, value = (x.masked_fill(~mask.transpose(2, 3), float("nan")) for x in (key, value))
    inputs = query, key, value, mask, lens, torch.randn(4)
    with torch.no_grad():
        program = torch.export.export(Attend(), tuple(map(torch.ones_like, inputs)))
        program = program.run_decompositions(tatten.decompositions())
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attend.pt2"))
        got, want = torch._inductor.aoti_load_package(path)(*inputs), Attend()(*inputs)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=torch.finfo(dtype).eps * 4)
