"""Attention of one sequence in a decode step leaves room for the L1, where the linear layers after it load weights.

An SM keeps its split between shared memory and L1 while launches overlap. The split follows from the kernel's shared
memory, and from the programs that its registers let an SM run. On an H200, the layers of a step took 9 % longer where
attention took 213 KiB of an SM than where it took 63 or 117 KiB.
"""

from __future__ import annotations

import pytest
from compiled import compile_in_subprocess

MOST_KIB = 132  # of shared memory, one of the sizes that an SM of Hopper may have: 124 KiB are left

SCRIPT = """
import json, sys
import torch, triton
from compiled import Recorder, compile_launch
from tatten.ops.cuda import block_mask, combine, decode, decode_grid
from tatten.ops.cuda.gpu_rates import GpuRates
from tatten.ops.kernel_signatures import decode_call

def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

launches = []
for module in (decode, combine, block_mask, decode_grid):
    for name, x in list(vars(module).items()):
        if isinstance(x, triton.JITFunction) and name.endswith("_kernel"):
            setattr(module, name, Recorder(x, launches))
    vars(module).update(
        multiprocessors=lambda device: 132,
        gpu_rates=lambda device: GpuRates(),
        has_early_launches=lambda device: True,
        has_large_shared_memory=lambda device: True,
    )

head_dim, kind = json.loads(sys.argv[1])
query, key, value = empty(1, 32, 1, head_dim), empty(1, 8, 8192, head_dim), empty(1, 8, 8192, head_dim)
mask = empty(1, 1, 1, 8192, dtype=torch.bool) if kind == "mask" else None
blocks = empty(1, 129, 2, dtype=torch.int64) if kind == "mask" else None
lens = empty(1, dtype=torch.int64) if kind == "lens" else None
call = decode_call(query, key, value, mask, lens, 0.1, blocks)
decode.plan_segment(call, call.segments[0])(call, call.segments[0])
built = compile_launch(*launches[-1])
print(json.dumps({name: built[name] for name in ("kernel", "registers", "threads", "shared")}))
"""


@pytest.mark.parametrize("head_dim, kind", [(64, "mask"), (64, "lens"), (128, "mask"), (128, "lens")])
def test_one_sequence(head_dim: int, kind: str) -> None:
    built = compile_in_subprocess(SCRIPT, (head_dim, kind))
    assert built["kernel"] == "_decode_kernel"
    registers, shared = -(-built["registers"] // 8) * 8 * built["threads"], built["shared"] + 1024
    programs = min(65536 // registers, (228 << 10) // shared)
    assert programs * shared <= MOST_KIB << 10
