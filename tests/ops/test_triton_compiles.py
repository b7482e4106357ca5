"""The Triton kernels compile for Hopper on a machine without a GPU, use its matrix units and do not spill."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tatten.ops import triton_decode, triton_merge

def build(kernel, pointers, constants, num_warps):
    names = kernel.arg_names
    constants = {**constants, **{name: 1 for name in ("query_d", "key_d", "value_d", "mask_s") if name in names}}
    signature, attrs = {}, {}
    for i, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in pointers:
            signature[name] = pointers[name]
            attrs[(i,)] = [["tt.divisibility", 16]]
        elif name == "scale":
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if "_" in name and name.split("_")[0] in ("query", "key", "value", "mask"):
                attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={"num_warps": num_warps, "num_stages": 2})

dtype, dim, mask, per_row = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
p = f"*{dtype}"
pointers = {"query": p, "key": p, "value": p, "mask": "*u8" if mask == 1 else p, "kv_lens": "*i64"}
pointers |= {"out": "*fp32", "lse": "*fp32"}
constants = dict(HEAD_DIM=dim, VALUE_DIM=dim, BLOCK_D=triton.next_power_of_2(dim), BLOCK_DV=triton.next_power_of_2(dim),
    BLOCK_M=16, BLOCK_N=64 if dim <= 128 and dtype != "fp32" else 32, MASK=mask, MASK_PER_ROW=per_row, HAS_LENS=True,
    UPCAST=False)
decode = build(triton_decode._decode_kernel, pointers, constants, 4)
merged = {"out": "*fp32", "lse": "*fp32", "merged_out": p, "merged_lse": "*fp32"}
merge = build(triton_merge._merge_kernel, merged, dict(DIM=dim, BLOCK_D=triton.next_power_of_2(dim), BLOCK_N=8), 2)
print(json.dumps([{"ptx": x.asm["ptx"], "shared": x.metadata.shared} for x in (decode, merge)]))
"""


@pytest.mark.parametrize(
    ("dtype", "dim", "mask", "per_row"),
    [
        ("bf16", 128, 0, False),
        ("bf16", 128, 1, False),
        ("fp16", 96, 2, True),
        ("bf16", 256, 1, True),
        ("fp32", 64, 1, False),
    ],
)
def test_compiles_for_sm_90(dtype: str, dim: int, mask: int, per_row: bool) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT, dtype, str(dim), str(mask), str(per_row)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    decode, merge = json.loads(done.stdout.splitlines()[-1])
    if dtype != "fp32":
        assert "mma.sync" in decode["ptx"]
    assert "ld.global.v4" in decode["ptx"] or "cp.async" in decode["ptx"], "loads of K and V are not 16 bytes wide"
    for kernel in (decode, merge):
        assert ".local" not in kernel["ptx"], "registers spill to local memory"
        assert kernel["shared"] <= 227 * 1024
