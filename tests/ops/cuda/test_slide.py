"""Moving a cache on by a slot, in place: under the interpreter, and compiled for Hopper."""

from __future__ import annotations

import itertools
import os
import re

import pytest
import torch
from compiled import compile_in_subprocess

from tatten.ops import slide as slides
from tatten.ops.cuda import slide

SCRIPT = """
import json, sys, torch
from compiled import Recorder, compile_launch
from tatten.ops.cuda import slide
from tatten.ops.cuda.kernels import slide as kernels
kernel, launches = kernels._slide_kernel, []
kernels._slide_kernel = Recorder(kernel, launches)
torch.library.wrap_triton = lambda x: x
for shape, dtype in json.loads(sys.argv[1]):
    b, h, s, d = shape
    dtype = getattr(torch, dtype)
    cache, new = (torch.empty(b, h, n, d, device="meta", dtype=dtype) for n in (s, 1))
    slide.slide_on_cuda_(cache, new)
print(json.dumps([compile_launch(*x) for x in launches]))
"""


@pytest.mark.drawn(3)
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs where no GPU is")
@pytest.mark.skipif(torch.__version__ < "2.12", reason="PyTorch wraps no kernel that is interpreted")
@pytest.mark.parametrize("chunk_bytes", [1, 512, slide.CHUNK_BYTES])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 5, 7), (1, 2, 50, 16), (2, 1, 33, 24), (1, 2, 64, 18)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_holds_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, ...], chunk_bytes: int
) -> None:
    monkeypatch.setattr(slide, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(slides, "BLOCK_BYTES", chunk_bytes)
    b, h, _, d = shape
    cache = (torch.randn(shape) * 50).to(dtype)
    new = (torch.randn(b, 1, h, d) * 50).to(dtype).transpose(1, 2)
    on_cpu, want = cache.clone(), torch.cat((cache[:, :, 1:], new), 2)
    slide.slide_on_cuda_(cache, new)
    torch.ops.tatten.slide_(on_cpu, new)
    assert torch.equal(cache, want)
    assert torch.equal(on_cpu, want)


def test_all_have_read_before_any_writes() -> None:
    """A barrier stands between the loads of a block and its stores; and wide caches are moved in wide accesses."""
    shapes = [((8, 8, 4096, 256), "bfloat16"), ((1, 8, 4096, 256), "bfloat16"), ((2, 8, 1024, 80), "float32")]
    for built in compile_in_subprocess(SCRIPT, shapes):
        order = re.findall(r"(ld\.global|bar\.sync|st\.global)(\.v4)?", built["ptx"])
        assert [kind for kind, _ in itertools.groupby(kind for kind, _ in order)] == [
            "ld.global",
            "bar.sync",
            "st.global",
        ]
        assert all(width for kind, width in order if kind == "st.global"), order
        assert built["stack"] == 0


@pytest.mark.parametrize(
    "cache, new, message",
    [
        (
            torch.zeros(2, 3, 4),
            torch.zeros(2, 3, 1),
            r"`cache` must be \[batch, heads, slots, head_dim\].* \(2, 3, 4\)",
        ),
        (torch.zeros(2, 3, 4, 5).mT, torch.zeros(2, 3, 1, 4), r"`cache` must be .* contiguous, got .*strides"),
        (torch.zeros(2, 3, 4, 5), torch.zeros(2, 1, 1, 5), r"`new` must be \(2, 3, 1, 5\).*\(2, 1, 1, 5\)"),
        (torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 1, 5).half(), "`new` must be torch.float32 on cpu.* torch.float16"),
    ],
)
def test_bad_input(cache: torch.Tensor, new: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        torch.ops.tatten.slide_(cache, new)
