"""The Gluon kernels for Hopper, run on a CPU in many orders of their partitions, against float64."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from gluon_interpreted import Interpreted, import_with_fault
from poison import fresh_memory_is_poison
from slow import slow_after, slow_but
from torch import Tensor

from tatten.ops.kernel_signatures import latent_call
from tatten.ops.reference import decode_attention_reference, latent_attention_reference

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs where no GPU is")

State = tuple[Tensor, Tensor]
NAN = float("nan")


def latents(batch: int, heads: int, q_len: int, kv_len: int, keys: str) -> tuple[list[Tensor | None], Tensor]:
    """The tensors of a call, with NaN in latents that no query attends to, and the mask that says which those are.

    `keys` are "all", or those of "lengths", a "mask" for all sequences, "masks" with one for each, or "both".
    """
    shapes = (heads, q_len, 512), (heads, q_len, 64), (1, kv_len, 512), (1, kv_len, 64)
    query, query_rope, latent, key_rope = (torch.randn(batch, *shape).to(torch.bfloat16) for shape in shapes)
    places, mask, lens = torch.arange(kv_len), None, None
    used = torch.ones(batch, kv_len, dtype=torch.bool)
    if keys in ("lengths", "both"):
        lens = torch.randint(kv_len + 1, (batch,))
        odd = torch.tensor([0, 5 - 2**32, kv_len + 3, 64])[: batch // 2]
        lens[: len(odd)] = odd
        used &= places < lens[:, None]
    if keys in ("mask", "masks", "both"):
        mask = torch.rand(1 if keys == "mask" else batch, kv_len) < 0.9
        mask[:, 64 : kv_len // 2] = True  # full blocks
        mask[:, 2 * kv_len // 3 : 2 * kv_len // 3 + 130] = False  # empty ones
        mask[0] &= keys == "mask"
        used &= mask
        mask = mask[:, None, None]
    for x in (latent, key_rope):
        x.masked_fill_(~used[:, None, :, None], NAN)
    return [query, query_rope, latent, key_rope, mask, lens], used[:, None, None]


LATENT_MODULES = [f"tatten.ops.cuda.kernels.latent_{name}" for name in ("visits", "tile", "sm90")]
FEW_MODULES = [*LATENT_MODULES[:2], "tatten.ops.cuda.kernels.latent_few_sm90"]


def attend(tensors: list[Tensor | None], programs: int, seed: int, *modules: ModuleType) -> State:
    """Run the op as CUDA does where it takes the kernel, which is in `modules`."""
    from tatten.ops.cuda import latent_sm90
    from tatten.ops.cuda.mask_plan import plan_mask

    query = tensors[0]
    few = query.shape[1] * query.shape[2] <= 16
    names, kernel = (FEW_MODULES, "_latent_few_kernel") if few else (LATENT_MODULES, "_latent_kernel")
    modules = modules or tuple([importlib.import_module(name) for name in reversed(names)])
    with pytest.MonkeyPatch.context() as patch, fresh_memory_is_poison():
        patch.setattr(latent_sm90, kernel, Interpreted(patch, seed, kernel, *modules))
        patch.setattr(latent_sm90, "multiprocessors", lambda device: programs)
        call = latent_call(*tensors, scale=0.05, out_dtype=torch.float32)
        return latent_sm90.plan_latents_sm90(call, plan_mask(query, call.segments[0]))(call)


def assert_latents(state: State, tensors: list[Tensor | None], used: Tensor) -> None:
    known = [x.double().nan_to_num() for x in tensors[:4] if x is not None]
    out, lse = latent_attention_reference(*known, used, scale=0.05)
    torch.testing.assert_close(state[0].double(), out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(state[1].double(), lse, rtol=1e-4, atol=1e-4)


LATENTS = [
    ((3, 9, 2, 300, "lengths"), 4),
    ((2, 17, 1, 450, "masks"), 5),
    ((1, 70, 1, 400, "all"), 3),
    ((2, 3, 6, 65, "mask"), 7),
    ((2, 66, 1, 500, "masks"), 4),
    ((2, 35, 2, 200, "both"), 5),
    ((1, 20, 4, 130, "lengths"), 1),
    ((1, 17, 1, 64, "all"), 2),
    ((3, 66, 1, 300, "mask"), 3),
    ((35, 17, 1, 100, "lengths"), 13),
]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("sizes", "programs"), slow_after(5, LATENTS), ids=str)
def test_latents(sizes: tuple[int, int, int, int, str], programs: int) -> None:
    """Work tiles of one program and of several, ragged and empty ones; more programs than tiles."""
    torch.manual_seed(0)
    tensors, used = latents(*sizes)
    assert_latents(attend(tensors, programs, 0), tensors, used)


FEW = [
    ((3, 5, 2, 300, "lengths"), 4, False),
    ((2, 16, 1, 450, "masks"), 5, True),
    ((1, 1, 1, 400, "all"), 3, True),
    ((2, 3, 5, 65, "mask"), 7, True),
    ((2, 2, 8, 200, "both"), 5, True),
    ((1, 4, 4, 130, "lengths"), 1, True),
    ((1, 7, 1, 64, "all"), 2, False),
    ((35, 16, 1, 100, "lengths"), 13, True),
]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("sizes", "programs", "unrounded"), slow_after(4, FEW), ids=str)
def test_few_queries(sizes: tuple[int, int, int, int, str], programs: int, unrounded: bool) -> None:
    """In bfloat16, or in float32 with digits of which an lse tells whether they were left out."""
    torch.manual_seed(0)
    tensors, used = latents(*sizes)
    if unrounded:
        tensors[0] = tensors[0] * torch.linspace(0.99, 1.01, 512)
    assert_latents(attend(tensors, programs, 0), tensors, used)


@pytest.mark.parametrize("programs", [8, 9])
def test_neighbours_attend_to_the_same_latents(programs: int) -> None:
    from tatten.ops.cuda.kernels import latent_visits

    share_of_program = latent_visits.share_of_program.fn
    with pytest.MonkeyPatch.context() as patch:
        shares = []
        for program in range(programs):
            patch.setitem(share_of_program.__globals__, "gl", SimpleNamespace(program_id=lambda _, p=program: p))
            shares.append(share_of_program(2, programs))
    assert shares == ([0, 4, 1, 5, 2, 6, 3, 7] if programs == 8 else [*range(9)])


def test_nan_in_latents_that_count_comes_out() -> None:
    torch.manual_seed(0)
    tensors, used = latents(2, 17, 1, 130, "all")
    key_rope = tensors[3]
    assert key_rope is not None
    key_rope[0, 0, 70, 3] = NAN
    out, lse = attend(tensors, 3, 0)
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert_latents((out[1:], lse[1:]), [x if x is None else x[1:] for x in tensors], used[1:])


FAULTS = {
    "scores wait for queries of both": ("mbarrier.init(q_full, count=2)", "mbarrier.init(q_full, count=1)"),
    "scores wait for the left half": ("mbarrier.wait(left_full.index(PLACE), uses & 1)", "pass"),
    "scores wait for the right half": ("mbarrier.wait(right_full.index(PLACE), uses & 1)", "pass"),
    "TMA waits for the left place": ("mbarrier.wait(left_empty.index(place), phase)", "pass"),
    "TMA waits for the right place": ("mbarrier.wait(right_empty.index(place), phase)", "pass"),
    "places are counted apart": ("gl.where(place == 0, evens, odds)", "evens"),
    "values wait for p": ("mbarrier.wait(p_full.index(PLACE), uses & 1)", "pass"),
    "p is fenced": ("store(new_row_max)\n    fence_async_shared()", "store(new_row_max)"),
    "values are cleared": ("clear(latents, attended)", "pass"),
    "what is cleared is fenced": ("attended)\n            fence_async_shared()", "attended)"),
    "the right scores wait for products": (
        "warpgroup_mma_wait(1, deps=[scores])",
        "warpgroup_mma_wait(4, deps=[scores])",
    ),
    "sums wait for the other's": ("mbarrier.wait(sum_full.index(OTHER), visits & 1)", "pass"),
}
FAULTS_OF_FEW = {
    "both halves of queries": ("residue.to(place.dtype)", "0 * residue.to(place.dtype)"),
    "scores wait for the left half": ("mbarrier.wait(left_full.index(place), phase)\n            both", "both"),
    "scores wait for the right half": ("mbarrier.wait(right_full.index(place), phase)\n            both", "both"),
    "TMA waits for the left place": FAULTS["TMA waits for the left place"],
    "places are counted apart": ("odds += place\n            attended", "attended"),
    "values are cleared": ("clear(k_left, attended)", "pass"),
    "p is fenced": ("fence_async_shared()\n            _barrier()\n            p =", "p ="),
    "sums are waited for": ("wait(0, deps=[acc_left", "wait(4, deps=[acc_left"),
    "weights are scaled": ("gl.fma(weights, alpha[None, :], exponents)", "weights + exponents"),
}
ALL_FAULTS = [
    *((LATENT_MODULES, name, *fault) for name, fault in FAULTS.items()),
    *((FEW_MODULES, name, *fault) for name, fault in FAULTS_OF_FEW.items()),
]
NAMES = [f"{'few, ' if modules is FEW_MODULES else ''}{name}" for modules, name, *_ in ALL_FAULTS]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("fault", slow_but([0, 1, 2, 12, 13, 14], range(len(ALL_FAULTS))), ids=NAMES)
def test_a_fault_shows(fault: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one of these lines of the kernel, some order of its partitions deadlocks or gives something else."""
    names, _, line, instead = ALL_FAULTS[fault]
    modules = import_with_fault(monkeypatch, names, line, instead, tmp_path)
    torch.manual_seed(0)
    tensors, used = latents(1, 16 if names is FEW_MODULES else 66, 1, 500, "mask")
    tensors[0] = tensors[0] if tensors[0].shape[1] > 16 else tensors[0] * torch.linspace(0.99, 1.01, 512)

    def attend_in_any_order() -> None:
        for seed in range(20):
            assert_latents(attend(tensors, 1, seed, *reversed(modules)), tensors, used)

    with pytest.raises(AssertionError):
        attend_in_any_order()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "sizes", [(6, 2, 35, 3, 500, 64), (3, 3, 20, 3, 129, 128), (2, 1, 1, 1, 127, 64), (1, 1, 70, 2, 128, 128)], ids=str
)
def test_shared_keys(sizes: tuple[int, int, int, int, int, int], seed: int) -> None:
    """The prefix kernel, with a program for each work tile and with one for all of them."""
    from tatten.ops.cuda import prefix_sm90
    from tatten.ops.cuda.kernels import prefix_sm90 as kernel
    from tatten.ops.sizes import ceil_div

    batch, kv_batch, heads_per_kv, q_len, kv_len, dim = sizes
    torch.manual_seed(seed)
    query = torch.randn(batch, 2 * heads_per_kv, q_len, dim).half()
    key, value = torch.randn(2, kv_batch, 2, kv_len, dim).half()
    shared = batch // kv_batch
    expanded = [x.repeat_interleave(shared, dim=0).double() for x in (key, value)]
    want, want_lse = decode_attention_reference(query.double(), *expanded, scale=0.1)
    for programs in 1, 2 * kv_batch * ceil_div(heads_per_kv * shared * q_len, kernel.BLOCK_M):
        with pytest.MonkeyPatch.context() as patch, fresh_memory_is_poison():
            patch.setattr(prefix_sm90, "_prefix_kernel", Interpreted(patch, seed, "_prefix_kernel", kernel))
            plan = prefix_sm90.plan_prefix_attention(query, key, value, 0.1, programs)
            out, lse, _, _ = plan(query, key, value)
        torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-3, atol=1e-3)
