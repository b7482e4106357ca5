"""Writing new tokens to the slots of a pool: under the interpreter, on a GPU, and compiled for Hopper."""

from __future__ import annotations

import pytest
import torch
from compiled import compile_in_subprocess

from tatten.ops.cuda.write_tokens import write_tokens_on_cuda_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCRIPT = """
import json, sys, torch
from compiled import Recorder, compile_launch
from tatten.ops.cuda import write_tokens
from tatten.ops.cuda.kernels import write_tokens as kernels
kernel, launches = kernels._write_tokens_kernel, []
kernels._write_tokens_kernel = Recorder(kernel, launches)
for tokens, heads, dim in json.loads(sys.argv[1]):
    pools = [torch.empty(4096, heads, dim, device="meta", dtype=torch.bfloat16) for _ in "kv"]
    new = [torch.empty(heads, tokens, dim, device="meta", dtype=torch.bfloat16).transpose(0, 1) for _ in "kv"]
    write_tokens.write_tokens_on_cuda_(*pools, *new, torch.empty(tokens, device="meta", dtype=torch.int64))
print(json.dumps([compile_launch(*x) for x in launches]))
"""


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("heads, dim", [(1, 1), (2, 16), (3, 80), (8, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_holds_the_bits_of_index_copy(dtype: torch.dtype, heads: int, dim: int, tokens: int) -> None:
    pools = [(torch.randn(13, heads, dim, device=DEVICE) * 50).to(dtype) for _ in "kv"]
    key = (torch.randn(heads, tokens, dim, device=DEVICE) * 50).to(dtype).transpose(0, 1)
    value = (torch.randn(tokens, heads, dim + 3, device=DEVICE) * 50).to(dtype)[..., 3:]
    slots = torch.randperm(13, device=DEVICE)[:tokens]
    want = [pool.index_copy(0, slots, new) for pool, new in zip(pools, (key, value), strict=True)]
    write_tokens_on_cuda_(*pools, key, value, slots)
    assert torch.equal(pools[0], want[0])
    assert torch.equal(pools[1], want[1])


def test_offsets_have_64_bits() -> None:
    pools = [torch.zeros(2100, 1024, 1024, device=DEVICE, dtype=torch.int8) for _ in "kv"]  # no page of it is touched
    new = torch.randint(1, 100, (2, 1024, 1024), device=DEVICE).to(torch.int8)
    write_tokens_on_cuda_(*pools, new, -new, torch.tensor([2099, 0], device=DEVICE))
    assert torch.equal(pools[0][[2099, 0]], new)
    assert torch.equal(pools[1][[2099, 0]], -new)


def test_wide_accesses() -> None:
    (built,) = compile_in_subprocess(SCRIPT, [(64, 8, 128)])
    assert built["ptx"].count("st.global.v4") == built["ptx"].count("st.global") > 0
    assert built["stack"] == 0


def test_another_dtype_than_that_of_the_pool() -> None:
    pools, new = torch.zeros(2, 4, 1, 8).bfloat16(), torch.zeros(2, 1, 8)
    message = r"`value` must be torch\.bfloat16, the dtype of its pool, got torch\.float32"
    with pytest.raises(ValueError, match=message):
        write_tokens_on_cuda_(*pools, new.bfloat16(), new, torch.tensor([0, 1]))
