"""The kernels of latent attention compile for Hopper on a machine without a GPU, and use its matrix units."""

from __future__ import annotations

import re

import pytest
from compiled import FUSIBLE, TRITON_3_6, compile_in_subprocess

pytestmark = pytest.mark.drawn(2, "compiled for Hopper")

SCRIPT = """
import json, sys
import torch
from compiled import Recorder, compile_launch
from tatten.ops.cuda import decode, decode_grid, latent_sm90
from tatten.ops.cuda.mask_plan import plan_mask
from tatten.ops.kernel_signatures import latent_call

decode_grid.multiprocessors = latent_sm90.multiprocessors = lambda device: 132

def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

built = []
for kernel, heads, rank, rope, mask, lens, kv_len, *more in json.loads(sys.argv[1]):
    batch, q_len, page, *_ = *more, *(2, 1, 0)[len(more):]
    launches = []
    q, c = empty(batch, heads, q_len, rank), empty(batch, 1, kv_len, rank)
    if kernel in ("few unrounded", "unrounded"):
        q = empty(*q.shape, dtype=torch.float32)
    ropes = (empty(batch, heads, q_len, rope), empty(batch, 1, kv_len, rope)) if rope else (None, None)
    pages = {}
    if page:
        pool = empty(batch * kv_len // page, page, 1, rank + rope)
        c, ropes = pool[..., :rank], (ropes[0], pool[..., rank:])
        pages, lens = {"block_table": empty(batch, kv_len // page, dtype=torch.int32)}, True
    mask = empty(batch, 1, 1, kv_len, dtype=getattr(torch, mask)) if mask else None
    lens = empty(batch, dtype=torch.int32) if lens else None
    hopper = kernel in ("sm90", "few", "few unrounded")
    options = {"out_dtype": torch.float32} if hopper else {"batch_invariant": kernel == "invariant"}
    call = latent_call(q, ropes[0], c, ropes[1], mask, lens, scale=0.1, **pages, **options)
    if hopper:
        segment = latent_sm90.plan_latent_segment(call, plan_mask(q, call.segments[0]))
    else:
        segment = decode.plan_segment(call, call.segments[0])
    segment.launch.kernel = Recorder(segment.launch.kernel, launches)
    stored = call.segments[0]
    if segment.mask.find_blocks is not None:
        stored = stored._replace(block_mask=empty(batch, 2 * (kv_len // 64 + 1), dtype=torch.int64))
        object.__setattr__(segment.mask, "find_blocks", None)
    segment(call, stored)
    built += [compile_launch(*launch, sass=hopper) for launch in launches]
print(json.dumps(built))
"""


@pytest.mark.parametrize(
    ("mask", "lens", "q_len"),
    [(None, False, 1), (None, True, 1), ("bool", False, 1), ("bool", False, 3), ("bool", False, 16)],
)
def test_the_kernel_for_hopper(mask: str | None, lens: bool, q_len: int) -> None:
    (built,) = compile_in_subprocess(SCRIPT, [("sm90", 128, 512, 64, mask, lens, 4096, 2, q_len)])
    ptx = built["ptx"]
    assert built["stack"] == 0, "registers spill to local memory"
    assert built["shared"] <= 227 * 1024
    assert built["launch_pdl"], "griddepcontrol.wait would not wait"
    # The scores of 576 columns by each warpgroup, and half of the values of 64 keys: of both tiles, and of a last one.
    assert ptx.count("wgmma.mma_async") == 2 * 36 + 2 * 4 + 3 * 4
    divisions = len(re.findall(r"\b(?:div|rem)\.[su]\d", ptx))
    assert divisions <= 16 if q_len == 1 else divisions > 30, "one query for each head is divided by nothing"
    # One for a few products each. Behind a branch in which threads may part, there would be two for each product.
    assert len(re.findall(r"\bWARPGROUP\.", built["sass"])) < 30
    assert not FUSIBLE.search(ptx)
    # More in sum than the three warpgroups start with would hang.
    assert re.search(r"\.maxnreg 168\b", ptx)
    assert {"232", "40"} <= set(re.findall(r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32\s+(\d+)", ptx))
    assert -1 < ptx.find("griddepcontrol.wait") < ptx.find("ld.global")


@pytest.mark.parametrize("lens", [False, True], ids=["masks", "lengths"])
@pytest.mark.parametrize("batch", [256, pytest.param(2048, marks=pytest.mark.slow)])
def test_the_kernel_for_hopper_and_many_sequences(batch: int, lens: bool) -> None:
    """State that is searched once for each visit takes registers: for 2048 sequences, more than there are."""
    (built,) = compile_in_subprocess(SCRIPT, [("sm90", 128, 512, 64, None if lens else "bool", lens, 4096, batch, 1)])
    assert built["stack"] <= (0 if batch == 256 else 704), "registers spill to local memory"
    assert built["shared"] <= 227 * 1024
    assert len(re.findall(r"\bWARPGROUP\.", built["sass"])) < 30


@pytest.mark.parametrize("kernel", ["few", "few unrounded"])
@pytest.mark.parametrize(
    ("mask", "lens", "heads", "q_len"),
    [(None, False, 16, 1), (None, True, 16, 1), ("bool", False, 16, 1), ("bool", False, 5, 3), (None, False, 1, 16)],
)
def test_the_kernel_for_few_queries(kernel: str, mask: str | None, lens: bool, heads: int, q_len: int) -> None:
    (built,) = compile_in_subprocess(SCRIPT, [(kernel, heads, 512, 64, mask, lens, 4096, 2, q_len)])
    ptx = built["ptx"]
    assert built["stack"] <= (0 if TRITON_3_6 else 64), "registers spill to local memory"  # outside the loop over tiles
    assert built["shared"] <= 227 * 1024
    assert built["launch_pdl"], "griddepcontrol.wait would not wait"
    # The scores of both halves of queries, of 576 columns, and 512 columns of values of 64 keys, 64 at a time.
    assert ptx.count("wgmma.mma_async") == 36 + 4 * 8
    assert len(re.findall(r"m64n32k16", ptx)) >= 36
    assert len(re.findall(r"\bWARPGROUP\.", built["sass"])) < 12
    assert not FUSIBLE.search(ptx)
    assert re.search(r"\.maxnreg 144\b", ptx)
    assert {"248", "40"} <= set(re.findall(r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32\s+(\d+)", ptx))
    assert -1 < ptx.find("griddepcontrol.wait") < ptx.find("ld.global")


@pytest.mark.parametrize("lens", [False, True], ids=["masks", "lengths"])
@pytest.mark.parametrize("batch", [256, pytest.param(2048, marks=pytest.mark.slow)])
def test_the_kernel_for_few_queries_of_many_sequences(batch: int, lens: bool) -> None:
    (built,) = compile_in_subprocess(SCRIPT, [("few", 16, 512, 64, None if lens else "bool", lens, 4096, batch, 1)])
    assert built["stack"] <= (128 if batch == 256 else 800), "registers spill to local memory"
    assert built["shared"] <= 227 * 1024


VARIANTS = [
    (None, heads, *rest)
    for heads in (16, 128)
    for rest in ((512, 64, None, False, 65536), (512, 64, "bool", False, 4096), (512, 64, None, True, 4096))
]
VARIANTS += [(None, 16, 512, 64, None, False, 4096), (None, 40, 256, 32, "bool", False, 4096)]
VARIANTS += [(None, heads, 512, 64, dtype, False, 4096) for heads in (16, 128) for dtype in ("float32", "bfloat16")]
VARIANTS += [("unrounded", heads, 512, 64, mask, False, 4096) for heads in (16, 128) for mask in (None, "bool")]
VARIANTS += [("invariant", heads, 512, 64, "bool", False, 4096) for heads in (16, 128)]
PAGED = [(None, heads, 512, 64, None, True, 4096, 2, 1, page) for heads in (16, 128) for page in (1, 16, 64, 256)]
PAGED += [(None, heads, 512, 64, "bool", True, 4096, 2, 1, page) for heads in (16, 128) for page in (16, 256)]
PAGED += [
    (kind, heads, 512, 64, None, True, 4096, 2, 1, 64) for kind in ("unrounded", "invariant") for heads in (16, 128)
]
PAGED += [(None, 16, 512, 64, "float32", True, 4096, 2, 1, 64), (None, 40, 256, 32, None, True, 4096, 2, 1, 16)]


@pytest.mark.parametrize("variant", [*VARIANTS, *PAGED], ids=str)
def test_the_decode_kernel(variant: tuple) -> None:
    (built,) = compile_in_subprocess(SCRIPT, [variant])
    if variant[0] == "unrounded":  # what another kernel computes for the usual masks
        assert built["stack"] <= 880
    elif variant[1] <= 16 or (variant[2] > 256 and variant[4]):  # 64 x 512 sums leave 256 threads too few registers
        assert built["stack"] <= (256 if variant[4] else 64), "registers spill to local memory"
    if variant in PAGED:
        assert variant[0] == "unrounded" or built["stack"] <= 192, "registers spill to local memory"
        assert "cp.async.cg" in built["ptx"], "no asynchronous copies of 16 bytes: the loop is not pipelined"
    assert built["shared"] <= 227 * 1024
    assert not FUSIBLE.search(built["ptx"])
    assert "mma.sync" in built["ptx"] or "wgmma.mma_async" in built["ptx"]
