"""The Gluon kernel for picked latents, run on a CPU in many orders of its partitions, and compiled for Hopper."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import FUSIBLE, compile_in_subprocess
from gluon_interpreted import Interpreted, import_with_fault
from poison import fresh_memory_is_poison
from slow import slow_after, slow_but

from tatten.ops.call import AttentionCall
from tatten.ops.kernel_signatures import latent_call
from tatten.ops.reference import attention_reference
from tatten.ops.states import State

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs where no GPU is")

NAN = float("nan")
MODULES = [f"tatten.ops.cuda.kernels.{name}" for name in ("latent_visits", "latent_tile", "picked_sm90")]


def picked(
    batch: int, heads: int, q_len: int, kv_len: int, picks: int, keys: str = ""
) -> tuple[AttentionCall, AttentionCall]:
    """A call with NaN in latents that are not attended to, and one in float64 without NaN.

    `keys` says what narrows the picks: "mask", "masks" with one for each query, "lengths", and "none" for no pick.
    """
    shapes = (heads, q_len, 512), (heads, q_len, 64), (1, kv_len, 512), (1, kv_len, 64)
    query, query_rope, latent, rope = (torch.randn(batch, *shape).to(torch.bfloat16) for shape in shapes)
    mask = lens = None
    outside = torch.tensor([-1, -(2**31), kv_len, 2**31 - 1])
    order = torch.rand(batch, 1, q_len, kv_len + 4).argsort(-1)[..., :picks]
    indices = torch.cat((torch.arange(kv_len), outside))[order].int()
    used = torch.zeros(batch, 1, q_len, kv_len, dtype=torch.bool)
    used.scatter_(3, indices.long().clamp(0, kv_len - 1), True)
    if "mask" in keys:
        mask = torch.rand(batch, 1, q_len if "masks" in keys else 1, kv_len) < 0.7
        mask[..., 0] = False  # of the row that is read where none is wanted
        mask &= "none" not in keys
        used &= mask
    if "lengths" in keys:
        lens = torch.randint(kv_len, (batch,))
        lens[:1] = 5 - 2**32 if batch > 1 else kv_len // 2
        used &= torch.arange(kv_len) < lens[:, None, None, None]
    for x in (latent, rope):
        x.masked_fill_(~used.any(2)[..., None], NAN)
    options = {"scale": 0.05, "indices": indices, "out_dtype": torch.float32}
    known = [x.double().nan_to_num() for x in (query, query_rope, latent, rope)]
    exact = latent_call(*known, mask, lens, **{**options, "out_dtype": torch.float64})
    return latent_call(query, query_rope, latent, rope, mask, lens, **options), exact


def attend(call: AttentionCall, tiles: int, seed: int, *modules: ModuleType) -> State:
    """Run the plan with splits of `tiles` tiles of picks and the kernel, which is in `modules`."""
    from tatten.ops.cuda import picked as plans
    from tatten.ops.cuda import picked_sm90
    from tatten.ops.sizes import ceil_div

    modules = modules or tuple([importlib.import_module(name) for name in reversed(MODULES)])
    indices = call.segments[0].indices
    assert indices is not None
    with pytest.MonkeyPatch.context() as patch, fresh_memory_is_poison():
        kernel = "_picked_sm90_kernel"
        patch.setattr(picked_sm90, kernel, Interpreted(patch, seed, kernel, *modules))
        patch.setattr(plans, "_takes_sm90", lambda call: True)
        split = plans.Split(tiles, max(1, ceil_div(ceil_div(indices.shape[3], 64), tiles)))
        return plans.plan_picked(call, split=split)(call)


def assert_exact(state: State, exact: AttentionCall) -> None:
    out, lse = attention_reference(exact)
    torch.testing.assert_close(state[0].double(), out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(state[1].double(), lse, rtol=1e-4, atol=1e-4)


CALLS = [
    ((2, 70, 1, 600, 300, "mask"), 2),
    ((1, 17, 3, 400, 257, "masks, lengths"), 5),
    ((2, 8, 1, 300, 130, "mask"), 2),
    ((2, 128, 1, 300, 64), 1),
    ((1, 20, 1, 500, 504, "mask"), 3),
    ((2, 66, 2, 150, 1, "lengths"), 1),
    ((1, 64, 1, 200, 130, "mask, none"), 2),
    ((3, 33, 1, 64, 68, "lengths"), 8),
    ((1, 18, 1, 100, 0), 1),
]


@interpreted
@pytest.mark.drawn(1)
@pytest.mark.parametrize(("sizes", "tiles"), slow_after(4, CALLS), ids=str)
def test_picked_latents(sizes: tuple, tiles: int) -> None:
    """One split and several, of even and odd numbers of tiles; a ragged last tile, and rows without keys."""
    torch.manual_seed(0)
    call, exact = picked(*sizes)
    for seed in range(2):
        assert_exact(attend(call, tiles, seed), exact)


@interpreted
def test_nan_in_latents_that_count_comes_out() -> None:
    torch.manual_seed(0)
    call, _ = picked(1, 20, 2, 200, 130)
    stored = call.segments[0]
    assert stored.indices is not None
    assert stored.rope is not None
    first = stored.indices[0, 0, 0]
    in_range = first[(first >= 0) & (first < 200)].long()
    only = in_range[~torch.isin(in_range, stored.indices[0, 0, 1])][0]
    stored.rope[0, 0, only, 3] = NAN
    out, lse = attend(call, 2, 0)
    assert out[0, :, 0].isnan().all()
    assert lse[0, :, 0].isnan().all()
    assert not out[0, :, 1].isnan().any()


FAULTS = {
    "the left half is waited for": ("mbarrier.wait(left_full.index(PLACE), uses & 1)\n", "pass\n"),
    "the right half is waited for": ("mbarrier.wait(right_full.index(PLACE), uses & 1)\n", "pass\n"),
    "the left half is fenced": (
        "(left_full.index(PLACE), uses & 1)\n    if GATHERED",
        "(left_full.index(PLACE), uses & 1)\n    if 0",
    ),
    "the right half is fenced": (
        "(right_full.index(PLACE), uses & 1)\n    if GATHERED",
        "(right_full.index(PLACE), uses & 1)\n    if 0",
    ),
    "a copy waits for the left place": ("mbarrier.wait(left_empty.index(place), phase)\n        _copy", "_copy"),
    "a copy waits for the right place": ("mbarrier.wait(right_empty.index(place), phase)\n        _copy", "_copy"),
    "flags are waited for": ("count=_PRODUCER_THREADS + 1", "count=_PRODUCER_THREADS"),
    "rows that don't count are zeros": (
        "_copy(right.index(place), latents + HALF, mask=counted[:, None])",
        "_copy(right.index(place), latents + HALF, mask=counted[:, None] | True)",
    ),
    "scores are left out": ("gl.where(counted[None, :], scores", "gl.where(counted[None, :] | True, scores"),
}


@interpreted
@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", slow_but(["flags are waited for", "the left half is fenced"], FAULTS))
def test_a_fault_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one of these lines of the kernel, some order of its partitions deadlocks or gives something else."""
    line, instead = FAULTS[name]
    modules = import_with_fault(monkeypatch, MODULES, line, instead, tmp_path)
    torch.manual_seed(0)
    call, exact = picked(1, 20, 1, 500, 400, "mask")

    def attend_in_any_order() -> None:
        for seed in range(20):
            assert_exact(attend(call, 7, seed, *reversed(modules)), exact)

    with pytest.raises(AssertionError):
        attend_in_any_order()


SCRIPT = """
import json, sys
import torch
from compiled import Recorder, compile_launch
from tatten.ops.cuda import picked, picked_sm90
from tatten.ops.kernel_signatures import latent_call

picked.multiprocessors = lambda device: 132
launches = []
picked_sm90._picked_sm90_kernel = Recorder(picked_sm90._picked_sm90_kernel, launches)
picked._combine_splits_kernel = Recorder(picked._combine_splits_kernel, [])

def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

built = []
for batch, mask, lens, q_len in json.loads(sys.argv[1]):
    launches.clear()
    queries, stored = ([empty(batch, n, m, width) for width in (512, 64)] for n, m in ((128, q_len), (1, 4096)))
    mask = empty(batch, 1, 1, 4096, dtype=torch.bool) if mask else None
    lens = empty(batch, dtype=torch.int32) if lens else None
    indices = empty(batch, 1, q_len, 2048, dtype=torch.int32)
    call = latent_call(queries[0], queries[1], *stored, mask, lens, scale=0.1, indices=indices)
    picked.plan_picked(call)(call)
    built += [compile_launch(*launch, sass=True) for launch in launches]
print(json.dumps(built))
"""


@pytest.mark.drawn(1, "compiled for Hopper")
@pytest.mark.parametrize("variant", [(64, True, False, 1), (2, False, True, 2)], ids=str)
def test_the_kernel_compiles(variant: tuple[int, bool, bool, int]) -> None:
    (built,) = compile_in_subprocess(SCRIPT, [variant])
    ptx = built["ptx"]
    assert built["stack"] == 0, "registers spill to local memory"
    assert built["shared"] <= 227 * 1024
    assert built["launch_pdl"], "griddepcontrol.wait would not wait"
    # A tile of 64 rows of 1152 bytes, by 128 threads.
    assert len(re.findall(r"cp\.async\.cg\.shared\.global [^;]*0x10,", ptx)) == 36
    assert ptx.count("cp.async.mbarrier.arrive.noinc") == 2
    assert ptx.count("wgmma.mma_async") == 2 * 36 + 2 * 4 + 3 * 4
    # One for a few products each. Behind a branch in which threads may part, there would be two for each product.
    assert len(re.findall(r"\bWARPGROUP\.", built["sass"])) < 30
    assert not FUSIBLE.search(ptx)
    # More in sum than the three warpgroups start with would hang.
    assert re.search(r"\.maxnreg 168\b", ptx)
    assert {"216", "72"} <= set(re.findall(r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32\s+(\d+)", ptx))
    assert -1 < ptx.find("griddepcontrol.wait") < ptx.find("ld.global")


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("batch", [1, 2, 8, 20, 64])
def test_the_splits_of_a_launch_run_at_once(batch: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from tatten.ops.cuda import picked as plans

    monkeypatch.setattr(plans, "multiprocessors", lambda device: 132)
    call, _ = picked(1, heads, 1, 2100, 2048)
    call = call._replace(query=call.query.expand(batch, -1, -1, -1))
    split = plans.split_picks(call, call.segments[0], plans.GATHERED_TILES)
    programs = batch * heads // 64 * split.splits
    assert programs <= 132
    assert split.tiles * split.splits >= 32  # tiles of 64
    if batch == 1:
        assert split.splits >= 16  # one sequence is spread over many SMs
    if batch * heads // 64 > 66:
        assert split.splits == 1  # and a split more would need a second wave
