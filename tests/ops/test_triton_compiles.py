"""The Triton kernels compile for Hopper on a machine without a GPU, use its matrix units and do not spill."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, re, subprocess, sys, tempfile
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

def stack_bytes(kernel):
    # ptxas spills to a stack, which PTX does not show
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\\d+)", usage).group(1))

dtype, dim, mask, rows = sys.argv[1], *map(int, sys.argv[2:])
block_m, block_n, num_warps = triton_decode.tile_sizes(rows, dim, 4 if dtype == "fp32" else 2)
p = f"*{dtype}"
pointers = {"query": p, "key": p, "value": p, "mask": "*u8" if mask == 1 else p, "kv_lens": "*i64"}
pointers |= {"out": "*fp32", "lse": "*fp32"}
constants = dict(HEAD_DIM=dim, VALUE_DIM=dim, BLOCK_D=triton.next_power_of_2(dim), BLOCK_DV=triton.next_power_of_2(dim),
    BLOCK_M=block_m, BLOCK_N=block_n, MASK=mask, MASK_PER_ROW=rows > 16, HAS_LENS=True, WIDE=False, UPCAST=False)
decode = build(triton_decode._decode_kernel, pointers, constants, num_warps)
merged = {"out": "*fp32", "lse": "*fp32", "merged_out": p, "merged_lse": "*fp32"}
constants = dict(DIM=dim, BLOCK_D=triton.next_power_of_2(dim), BLOCK_N=8, PARTIALS=True)
merge = build(triton_merge._merge_kernel, merged, constants, 2)
pair = {name: p for name in ("out_a", "out_b", "out")} | {name: "*fp32" for name in ("lse_a", "lse_b", "lse")}
constants = dict(DIM=dim, BLOCK_D=triton.next_power_of_2(dim), BLOCK_R=max(1, 1024 // triton.next_power_of_2(dim)))
pair = build(triton_merge._merge_pair_kernel, pair, constants, 4)
kernels = decode, merge, pair
print(json.dumps([{"ptx": x.asm["ptx"], "shared": x.metadata.shared, "stack": stack_bytes(x)} for x in kernels]))
"""


@pytest.mark.parametrize(
    ("dtype", "dim", "mask", "rows"),
    [
        ("bf16", 128, 0, 4),
        ("bf16", 128, 1, 4),
        ("bf16", 128, 1, 64),
        ("fp16", 64, 2, 20),
        ("bf16", 256, 1, 64),
        ("bf16", 512, 1, 8),
        ("fp32", 64, 1, 4),
        ("fp32", 128, 1, 64),
    ],
)
def test_compiles_for_sm_90(dtype: str, dim: int, mask: int, rows: int) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT, dtype, str(dim), str(mask), str(rows)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    decode, merge, pair = json.loads(done.stdout.splitlines()[-1])
    if dtype != "fp32":
        assert "mma.sync" in decode["ptx"] or "wgmma" in decode["ptx"]
    assert "ld.global.v4" in decode["ptx"] or "cp.async" in decode["ptx"], "loads of K and V are not 16 bytes wide"
    for kernel in (decode, merge, pair):
        assert kernel["stack"] == 0, "registers spill to local memory"
        assert kernel["shared"] <= 227 * 1024
