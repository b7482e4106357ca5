"""The kernels compile for Hopper on a machine without a GPU: pipelined, on its matrix units, and without spills.

What is compiled is what `tatten.ops.cuda.decode` would launch: a subprocess calls it with tensors that have no data,
takes down the arguments of each kernel instead of launching it, and compiles the kernel for them.
"""

from __future__ import annotations

import pytest
from compiled import FUSIBLE, TRITON_3_6, compile_in_subprocess, last_program_waits
from slow import slow_but

SCRIPT = """
import json, sys
import torch, triton
from compiled import Recorder, compile_launch
from tatten.ops.cuda import prefix_sm90
from tatten.ops.cuda import decode
from tatten.ops.cuda import decode_grid
from tatten.ops.cuda import combine
from tatten.ops.cuda import segment_launches
from tatten.ops.cuda import block_mask
from tatten.ops.cuda.gpu_rates import GpuRates
from tatten.ops.cuda.heuristics import Tiles
from tatten.ops.kernel_signatures import bifurcated_call, decode_call

def attend(
    dtype, dim, rows, mask=None, lens=False, sinks=False, tiles=None, sm90=False, float8=False, int8=False,
    per_key=False, indexed=False, page=0, lanes=False, **options
):
    decode_grid._most_lanes = lambda *_: 8 if lanes else 1
    dtype, kv_len = getattr(torch, dtype), 4096
    kv_dtype = torch.float8_e4m3fn if float8 else torch.int8 if int8 else dtype
    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")
    query = empty(2, 2 * rows, 1, dim)
    key, value = (empty(2, 2, kv_len, dim, dtype=kv_dtype) for _ in "kv")
    scaled = (2, 2, kv_len) if per_key else (2,)
    pages = {}
    if page:
        key, value = (empty(2 * kv_len // page, page, 2, dim, dtype=kv_dtype) for _ in "kv")
        scaled = key.shape[:3] if per_key else (2,)
        pages["block_table"], lens = empty(2, kv_len // page, dtype=torch.int32), True
    scales = (empty(*scaled, dtype=torch.float32),) * 2 if float8 or int8 else (None, None)
    groups = empty(4, 3, dtype=torch.int32) if indexed else None
    if sm90:
        call = bifurcated_call(query, [key], [value], scale=0.1, row_groups=[groups])
        return segment_launches.plan_prefix_segment(call, call.segments[0])(call, call.segments[0])
    if mask is not None:
        mask = empty(*mask[1:], kv_len, dtype=getattr(torch, mask[0]))
    lens = empty(2, dtype=torch.int64) if lens else None
    sinks = empty(query.shape[1]) if sinks else None
    if tiles is not None:
        chosen.append(getattr(segment_launches, tiles) if isinstance(tiles, str) else Tiles(*tiles))
        options["tiles"] = chosen[0]
    variant, places = (
        {name: options.pop(name) for name in names if name in options}
        for names in (("window", "softcap", "batch_invariant"), ("final", "max_and_sum", "beside_previous"))
    )
    place = decode_grid.Place(**places)
    blocks = None
    if indexed and mask is not None:
        blocks = empty(2, kv_len // 64 + 1, 2, dtype=torch.int64)
    call = decode_call(
        query, key, value, mask, lens, 0.1, blocks, sinks=sinks, key_scale=scales[0], value_scale=scales[1], **pages,
        **variant,
    )
    stored = call.segments[0]._replace(row_groups=groups)
    segment = decode.plan_segment(call, stored, place, **options)
    partials = segment(call, stored)
    twice = 1 if place.final else 2
    combine.plan_combine(query, dim, *[segment.tile_space] * twice, dtype=dtype)(*[partials] * twice)

launches, chosen = [], []
tiles_for = decode_grid.tiles_for
decode.gpu_rates = lambda device: GpuRates(tma_least_bytes=0)
decode_grid.tiles_for = lambda *args, **kwargs: chosen.append(tiles_for(*args, **kwargs)) or chosen[-1]
decode_grid.multiprocessors = segment_launches.multiprocessors = lambda device: 132
for module in (decode, combine, block_mask, prefix_sm90):
    for name, x in list(vars(module).items()):
        if isinstance(x, triton.JITFunction) and name.endswith("_kernel"):
            setattr(module, name, Recorder(x, launches))

variants = []
for args, options in json.loads(sys.argv[1]):
    launches.clear()
    chosen.clear()
    attend(*args, **options)
    per_sm = chosen[0].per_sm if chosen else 1
    variants.append({"per_sm": per_sm, "kernels": [compile_launch(*launch) for launch in launches]})
print(json.dumps(variants))
"""

Variant = tuple[tuple[str, int, int], dict[str, object]]  # dtype, head_dim, packed rows; and options of `plan_segment`

PER_SEQUENCE, LENS = {"mask": ("bool", 2, 1, 1)}, {"lens": True}
FLOAT8, INT8, PER_KEY = {"float8": True}, {"int8": True}, {"per_key": True}
EXTRAS = {"window": 1000, "softcap": 30.0, "sinks": True}
CAPPED = {"softcap": 30.0, "sinks": True, "final": False, "beside_previous": True}
FOUR_ON_AN_SM, FOUR_STAGES, THREE_ON_AN_SM = (
    {"lanes": True, "tiles": tiles} for tiles in ((16, 32, 4, 3, 4, 128), (16, 64, 4, 4), (16, 64, 4, 3, 3, 160))
)


def shapes(dtype: str, dims: tuple[int, ...], rows: tuple[int, ...], *options: dict[str, object]) -> list[Variant]:
    return [((dtype, dim, n), given) for dim in dims for n in rows for given in options]


GROUPS: dict[str, list[Variant]] = {
    "few rows": shapes("bfloat16", (128,), (1, 4, 16), {}, LENS, PER_SEQUENCE),
    "float16": shapes("float16", (128,), (4,), {}, LENS, PER_SEQUENCE),
    "many rows": shapes("bfloat16", (128,), (32, 64, 128), {}, LENS, PER_SEQUENCE),
    "head_dim": [
        *shapes("bfloat16", (64, 80, 192, 256, 512), (4,), {}, LENS),
        (("bfloat16", 64, 4), {**LENS, "tiles": (16, 64, 4, 2, 2)}),
        *shapes("bfloat16", (64, 256, 512), (64,), {}),
    ],
    "head_dim, listed": [
        *shapes("bfloat16", (64, 80, 192, 256, 512), (4,), PER_SEQUENCE),
        *shapes("bfloat16", (64, 256, 512), (64,), PER_SEQUENCE, LENS),
    ],
    "masks": [
        variant
        for n in (4, 64)
        for mask in (("bool", 2, 2 * n, 1), ("bfloat16", 2, 1, 1), ("float32", 1, 2 * n, 1))
        for variant in shapes("bfloat16", (128,), (n,), {"mask": mask})
    ],
    "extras": shapes("bfloat16", (128,), (4, 64), EXTRAS, {**EXTRAS, **LENS}, {**EXTRAS, **LENS, **PER_SEQUENCE}),
    "float8": [
        *shapes("bfloat16", (64, 128), (4, 64), FLOAT8, {**FLOAT8, **LENS}, {**FLOAT8, **PER_SEQUENCE}),
        *shapes("float16", (128,), (4,), FLOAT8, {**FLOAT8, **EXTRAS}),
        *shapes("bfloat16", (80, 256), (4,), FLOAT8),
    ],
    "8 bits per key": [
        *shapes("bfloat16", (64, 128), (4,), {**FLOAT8, **PER_KEY, **PER_SEQUENCE}, {**INT8, **PER_KEY, **LENS}),
        *shapes("bfloat16", (128,), (4, 64), {**INT8, **PER_KEY}, {**INT8, **PER_KEY, **PER_SEQUENCE}),
        *shapes("float16", (128,), (4,), {**INT8, **PER_KEY, **PER_SEQUENCE}),
        *shapes("bfloat16", (128,), (4,), INT8, {**INT8, **PER_SEQUENCE}),
    ],
    "float32": shapes("float32", (64, 128, 256), (4,), {}, PER_SEQUENCE),
    "segments": [
        *shapes("bfloat16", (128,), (4, 64), {"final": False}, {"final": False, "beside_previous": True}),
        *shapes("bfloat16", (64, 128), (4,), {"final": False, "beside_previous": True, "tiles": "SHORT_ROWS"}),
        *shapes("bfloat16", (64, 128), (128,), {"sm90": True}),
    ],
    "capped segments": shapes(
        *("bfloat16", (128,), (4, 64), CAPPED, {**CAPPED, "max_and_sum": True}, {**CAPPED, "indexed": True})
    ),
    "batch invariant": shapes(
        *("bfloat16", (128,), (4, 64), *({"batch_invariant": True, **x} for x in ({}, LENS, PER_SEQUENCE, EXTRAS))),
        *({"batch_invariant": True, "indexed": True, "final": False, **x} for x in ({}, PER_SEQUENCE)),
    ),
    "pages": [
        *shapes("bfloat16", (128,), (1, 4, 16), *({"page": page} for page in (1, 16, 64, 256))),
        *shapes("bfloat16", (64, 192, 256), (4,), *({"page": page} for page in (1, 16, 256))),
        *shapes("float16", (80, 512), (4,), {"page": 16}),
        *shapes("float32", (64, 128, 256), (4,), {"page": 16}),
    ],
    "pages, resized": [  # the tiles of `page_tiles` and of own parts
        *shapes("bfloat16", (128,), (4,), *({"page": page, "tiles": (16, 32, 4, 4, 2)} for page in (16, 64))),
        *shapes(
            "bfloat16", (128,), (4,), *({"page": page, "tiles": (16, 32, 4, 3, 4, 128)} for page in (1, 8, 16, 32))
        ),
        (("bfloat16", 128, 4), {"page": 1, "tiles": (16, 64, 4, 2, 3, 160)}),
        (("bfloat16", 64, 4), {"page": 64, "tiles": (16, 32, 4, 3, 4, 128)}),
        *shapes("bfloat16", (64,), (4,), *({"page": page, "tiles": (16, 64, 4, 3, 3, 160)} for page in (16, 64))),
        *shapes("bfloat16", (64,), (4,), *({"page": page, "tiles": (16, 64, 4, 3, 4, 128)} for page in (16, 32, 64))),
        (("bfloat16", 64, 4), {"page": 16, "tiles": (16, 128, 4, 2, 3, 160)}),
        *shapes("bfloat16", (128,), (32,), *({**x, "tiles": (32, 64, 4, 3, 2, 192)} for x in ({"page": 16}, LENS))),
        *shapes("bfloat16", (128,), (4,), *({"page": page, "tiles": (16, 64, 4, 4)} for page in (64, 256))),
    ],
    "pages, in step": [
        *shapes("bfloat16", (64, 128), (4,), *({"page": page, "lanes": True} for page in (1, 16, 64, 256))),
        *shapes("bfloat16", (128,), (4,), *({"page": page, **FOUR_ON_AN_SM} for page in (1, 8, 16, 32))),
        (("bfloat16", 128, 4), {"page": 1, "lanes": True, "tiles": (16, 64, 4, 2, 3, 160)}),
        *shapes("bfloat16", (128,), (4,), *({"page": page, **FOUR_STAGES} for page in (64, 256))),
        *shapes("bfloat16", (64,), (4,), *({"page": page, **THREE_ON_AN_SM} for page in (16, 64))),
        *shapes("bfloat16", (128,), (4,), *({"page": page, "lanes": True, **EXTRAS} for page in (16, 256))),
        *shapes("bfloat16", (128,), (4,), *({"page": page, "lanes": True, **PER_SEQUENCE} for page in (16, 256))),
    ],
    "pages, many rows": shapes("bfloat16", (128,), (32, 64, 128), *({"page": page} for page in (1, 16, 256))),
    "pages and variants": [
        *shapes("bfloat16", (128,), (4, 64), *({"page": page, **EXTRAS} for page in (1, 16, 256))),
        *shapes("bfloat16", (128,), (4, 64), *({"page": page, **PER_SEQUENCE} for page in (16, 256))),
        # A tile of the run of full blocks begins at any block, so it may cross from one page to the next.
        (("bfloat16", 128, 4), {"page": 256, "tiles": (16, 128, 4, 2, 2), **PER_SEQUENCE}),
        *shapes("bfloat16", (64, 128), (4,), *({"page": 16, **FLOAT8, **x} for x in ({}, PER_KEY))),
        *shapes("bfloat16", (128,), (4,), *({"page": 16, **INT8, **x} for x in ({}, PER_KEY, PER_SEQUENCE))),
        *shapes("bfloat16", (64, 192, 256), (4,), {"page": 16, **PER_SEQUENCE}),
        *shapes("float32", (128,), (4,), {"page": 16, **PER_SEQUENCE}),
        *shapes("float16", (128,), (4,), {"page": 64, **INT8, **PER_KEY, **PER_SEQUENCE}),
        *shapes("bfloat16", (128,), (4, 64), *({"page": page, "batch_invariant": True} for page in (16, 256))),
    ],
    "rows": [
        *shapes("bfloat16", (128,), (4, 64), {"indexed": True}, {"indexed": True, **PER_SEQUENCE}),
        *shapes("bfloat16", (128,), (4,), {"indexed": True, "beside_previous": True, "final": False}),
        *shapes("bfloat16", (64, 128), (128,), {"indexed": True, "sm90": True}),
    ],
}


# Triton 3.6 takes 218 registers for it where newer ones take 168: of three programs for each SM one starts late.
TWO_ON_AN_SM_IN_3_6 = (("bfloat16", 64, 4), {**FLOAT8, **PER_KEY, **PER_SEQUENCE})


def stack_allowed(kernel: str, options: dict) -> int:
    """Bytes: up to four words for what is kept from a visit's start to its end.

    Newer Triton needs six in the prefix kernel (test_prefix_sm90_compiles.py looks closely). Triton 3.6 keeps on the
    stack what the second of two loops needs while the first runs. That is no slower: 95 us on an H200, and 101 for the
    first loop in a kernel of its own (256 packed rows, 8192 keys, 32 heads). Lengths make two loops, too. With pages,
    tiles are the fastest of a sweep on an H100 with Triton 3.6. Triton 3.9 keeps more, and was not measured.
    """
    if kernel == "_prefix_kernel":
        return 24
    if kernel != "_decode_kernel":
        return 16
    if TRITON_3_6:
        return 128 if {"mask", "lens", "page"} & options.keys() else 16
    return 136 if "page" in options else 16


def faults(kernel: dict, per_sm: int, variant: Variant) -> list[str]:
    """List the faults of a compiled kernel of which `per_sm` programs are to be on an SM at once."""
    (dtype, _, rows), options = variant
    listed, follows = "mask" in options, "beside_previous" in options
    name, ptx = kernel["kernel"], kernel["ptx"]
    found = []
    if kernel["stack"] > stack_allowed(name, options):
        found.append(f"{kernel['stack']} bytes of stack: registers spill")
    if kernel["shared"] > 227 << 10:
        found.append(f"{kernel['shared']} bytes of shared memory do not fit a program")
    if name in ("_decode_kernel", "_prefix_kernel"):
        registers = -(-kernel["registers"] // 8) * 8 * kernel["threads"]  # given out by eights
        if registers * per_sm > 65536 or (kernel["shared"] + 1024) * per_sm > 228 << 10:
            found.append(f"{registers} registers, {kernel['shared']} bytes of shared memory: not {per_sm} on an SM")
        # Of the two loops over a mask's list the first has the copy engine, and many rows leave no registers for more.
        copies = ("cp.async.cg",) if listed and rows <= 64 else ("cp.async.cg", "cp.async.bulk.tensor")
        if not any(x in ptx for x in copies):
            found.append("no asynchronous copies: the loop is not pipelined")
        if dtype != "float32" and "mma.sync" not in ptx and "wgmma.mma_async" not in ptx:
            found.append("no matrix units")
        wait, release, load = (ptx.find(x) for x in ("griddepcontrol.wait", "griddepcontrol.launch", "ld.global"))
        if min(wait, release) < 0:
            found.append("programs do not overlap")
        elif follows and not release < load < ptx.rfind("st.global") < wait:
            found.append("does not run beside the launch before, or ends before it")
        elif follows and not last_program_waits(ptx):
            found.append("more programs than the last one wait for the launch before, or none does")
        elif not follows and not wait < release < load:
            found.append("loads before the launch before is done")
    if FUSIBLE.search(ptx):
        found.append("products and sums that ptxas may fuse or not")
    if name == "_combine_kernel" and not -1 < ptx.find("griddepcontrol.wait") < ptx.find("ld.global.cg"):
        found.append("loads states before the launch before is done")
    return [f"{name}: {fault}" for fault in found]


@pytest.mark.drawn(2, "compiled for Hopper")
@pytest.mark.parametrize("group", slow_but(["float16"], GROUPS))
def test_compiles_for_sm_90(group: str) -> None:
    compiled = compile_in_subprocess(SCRIPT, GROUPS[group])
    found = [
        f"{variant}: {fault}"
        for variant, built in zip(GROUPS[group], compiled, strict=True)
        for kernel in built["kernels"]
        for fault in faults(kernel, 2 if TRITON_3_6 and variant == TWO_ON_AN_SM_IN_3_6 else built["per_sm"], variant)
    ]
    assert not found, "\n".join(found)
