"""The kernels for mixed batches compile for Hopper on a machine without a GPU, as `test_compiles.py` does it."""

from __future__ import annotations

import pytest
from compiled import FUSIBLE, compile_in_subprocess
from slow import slow_but

SCRIPT = """
import json, sys
import torch, triton
from compiled import Recorder, compile_launch
from tatten.ops.cuda import decode, decode_grid, mixed_shared, ragged, ragged_launches
from tatten.ops.mixed_batch import MixedCall

def attend(
    dtype, dim, tokens, heads=(32, 8), page=16, narrow=None, per_key=False, sinks=False, shared=False, **variant
):
    dtype, batch, columns = getattr(torch, dtype), 32, 4096 // page
    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")
    q_heads, kv_heads = heads
    pool = empty(batch * columns, page, kv_heads, dim, dtype=getattr(torch, narrow) if narrow else dtype)
    scale = empty(*pool.shape[:3] if per_key else (kv_heads,), dtype=torch.float32) if narrow else None
    call = MixedCall(
        empty(tokens, q_heads, dim), pool, pool, empty(batch, columns, dtype=torch.int32),
        empty(batch + 1, dtype=torch.int32), empty(batch, dtype=torch.int32),
        key_scale=scale, value_scale=scale, sinks=empty(q_heads) if sinks else None,
        shared_pages=empty(18, 2 * batch + 1, dtype=torch.int32) if shared else None, **variant,
    )
    plan = ragged.plan_ragged(call)
    plan(call)
    return [x.per_sm for x in ragged.ragged_tiles(call)]

launches = []
ragged.multiprocessors = decode_grid.multiprocessors = lambda device: 132
for module in (ragged, ragged_launches, mixed_shared, decode):
    for name, x in list(vars(module).items()):
        if isinstance(x, triton.JITFunction) and name.endswith("_kernel"):
            setattr(module, name, Recorder(x, launches))
variants = []
for args, options in json.loads(sys.argv[1]):
    launches.clear()
    per_sm = attend(*args, **options)
    kernels = [compile_launch(*launch) for launch in launches]
    for kernel, launch in zip(kernels, launches, strict=True):
        kernel["tile"] = launch[2].get("TILE")
    variants.append({"per_sm": per_sm, "kernels": kernels})
print(json.dumps(variants))
"""

Variant = tuple[tuple[str, int, int], dict[str, object]]  # dtype, head_dim, tokens of 32 sequences; and options
FEW, MANY = 160, 2080
PER_KEY = {"per_key": True}
STACK_ALLOWED = 40  # bytes: the second of two loops finds there what it needs


def variants(dtype: str, dims: tuple[int, ...], tokens: tuple[int, ...], *options: dict[str, object]) -> list[Variant]:
    return [((dtype, dim, n), given) for dim in dims for n in tokens for given in options]


COMBINES = "_combine_shares_kernel", "_combine_chunks_kernel", "_combine_shared_kernel"
GROUPS: dict[str, list[Variant]] = {
    "pages": variants("bfloat16", (128,), (FEW, MANY), *({"page": page} for page in (1, 16, 64, 256))),
    "head_dim": [
        *variants("bfloat16", (64, 80), (FEW, MANY), {}),
        *variants("bfloat16", (192, 256, 512), (MANY,), {}),
        *variants("float16", (128,), (MANY,), {}),
    ],
    "float32": variants("float32", (64, 128, 256), (MANY,), {}),
    "windows": [
        *variants("bfloat16", (64, 128), (FEW, MANY), {"window": 128, "sinks": True}),
        *variants("bfloat16", (256,), (MANY,), {"window": 4096, "softcap": 50.0}),
        *variants("bfloat16", (128,), (FEW, MANY), {"softcap": 30.0}),
    ],
    "8 bits": [
        *variants("bfloat16", (64, 128), (FEW, MANY), {"narrow": "float8_e4m3fn"}),
        *variants("bfloat16", (128,), (FEW, MANY), {"narrow": "int8", **PER_KEY}, {"narrow": "int8"}),
        *variants("float16", (128,), (MANY,), {"narrow": "int8", **PER_KEY}),
        *variants("bfloat16", (256,), (MANY,), {"narrow": "float8_e4m3fn"}),
    ],
    "batch invariant": variants(
        *("bfloat16", (128,), (FEW, MANY), {"batch_invariant": True}, {"batch_invariant": True, "window": 100})
    ),
    "heads": variants("bfloat16", (128,), (MANY,), {"heads": (8, 8)}, {"heads": (64, 8)}, {"heads": (32, 1)}),
    "shared pages": [
        *variants("bfloat16", (64, 128, 256), (FEW, MANY), {"shared": True}),
        *variants("bfloat16", (128,), (MANY,), {"shared": True, "softcap": 30.0, "sinks": True}),
        *variants("bfloat16", (128,), (MANY,), {"shared": True, "heads": (32, 1)}),
        *variants("bfloat16", (128,), (MANY,), {"shared": True, "narrow": "int8", **PER_KEY}),
        *variants("float32", (128,), (MANY,), {"shared": True}),
    ],
}


def faults(kernel: dict, per_sm: list[int], dtype: str) -> list[str]:
    """List the faults of a compiled kernel."""
    found, name, ptx = [], kernel["kernel"], kernel["ptx"]
    # Over row groups in 8 bits, tiles are those of `test_shared_pages.py`.
    if kernel["stack"] > (136 if name == "_decode_kernel" else STACK_ALLOWED):
        found.append(f"{kernel['stack']} bytes of stack: registers spill")
    if kernel["shared"] > 227 << 10:
        found.append(f"{kernel['shared']} bytes of shared memory do not fit a program")
    if name == "_ragged_kernel":
        together = per_sm[kernel["tile"][0] > 16]
        registers = -(-kernel["registers"] // 8) * 8 * kernel["threads"]  # given out by eights
        if registers * together > 65536 or (kernel["shared"] + 1024) * together > 228 << 10:
            found.append(f"{registers} registers, {kernel['shared']} bytes of shared memory: not {together} on an SM")
        if "cp.async.cg" not in ptx:
            found.append("no asynchronous copies: the loop is not pipelined")
        if dtype != "float32" and "mma.sync" not in ptx and "wgmma.mma_async" not in ptx:
            found.append("no matrix units")
    if min(ptx.find("griddepcontrol.wait"), ptx.find("griddepcontrol.launch")) < 0:
        found.append("programs do not overlap")
    if FUSIBLE.search(ptx):
        found.append("products and sums that ptxas may fuse or not")
    # Lists are complete before a combine begins, but partials, which alone are loaded past the L1, are not.
    load = "ld.global" if name == "_combine_shared_kernel" else "ld.global.cg"
    if name in COMBINES and not -1 < ptx.find("griddepcontrol.wait") < ptx.find(load):
        found.append("loads before the launch before is done")
    tile = "" if kernel["tile"] is None else f" {kernel['tile']}"
    return [f"{name}{tile}: {fault}" for fault in found]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("group", slow_but(["batch invariant"], GROUPS))
def test_compiles_for_sm_90(group: str) -> None:
    compiled = compile_in_subprocess(SCRIPT, GROUPS[group])
    found = [
        f"{variant}: {fault}"
        for variant, built in zip(GROUPS[group], compiled, strict=True)
        for kernel in built["kernels"]
        for fault in faults(kernel, built["per_sm"], variant[0][0])
    ]
    assert not found, "\n".join(found)
