"""Latent attention's kernels within a derived bound of float64: on a GPU, or in Triton's interpreter on tiny shapes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from devices import GPU
from latent_calls import LatentCall
from op_bounds import assert_within_bound
from op_calls import Call, Segment
from op_masks import Mask
from slow import slow_but
from torch import Tensor

import tatten
from tatten.ops import latent_validation
from tatten.ops.cuda import latent as on_cuda
from tatten.ops.cuda import mask_plan
from tatten.ops.kernel_signatures import latent_call
from tatten.ops.masks import block_list
from tatten.ops.reference import latent_attention_reference

HOPPER = GPU and torch.cuda.get_device_capability() == (9, 0)
needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or the interpreter"
)
pytestmark = pytest.mark.gpu if GPU else needs_interpreter
DEVICE = "cuda" if GPU else "cpu"

SHAPES = [
    (2, 5, 1, 33, 24, 8),
    (1, 17, 2, 70, 16, 0),
    (2, 3, 2, 90, 40, 16),
]  # batch, heads, q_len, kv_len, rank, width
SHAPES += [(2, 128, 1, 1000, 512, 64), (3, 16, 4, 777, 512, 64), (2, 20, 3, 300, 256, 32)] if GPU else []
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "holes": {"mask": Mask(pattern="holes")},
    "padding": {"mask": Mask(pattern="padding", dims="bk")},
    "causal": {"mask": Mask(pattern="causal", dims="qk")},
    "heads": {"mask": Mask(pattern="holes", dims="hk")},
    "nothing": {"mask": Mask(pattern="nothing", dims="k")},
    "bias": {"mask": Mask(torch.float32, pattern="holes", bias="noise")},
    "lens": {"lens": torch.int64},
    "everything": {"mask": Mask(pattern="padding"), "window": 40, "softcap": 3.0, "sinks": "some", "lens": torch.int64},
}


def call_of(
    dtype: torch.dtype,
    variant: str,
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    rank: int,
    width: int,
    unrounded: bool = False,
) -> LatentCall:
    """A call of those sizes, with a mask and more as VARIANTS have it."""
    options = dict(VARIANTS[variant])
    mask = options.pop("mask", None)
    segment = Segment(batch, kv_len, mask, batch if mask is not None and "b" in mask.dims else 1)
    sizes = {"q_heads": heads, "kv_heads": 1, "q_len": q_len, "head_dim": rank + width, "value_dim": rank}
    scale = (rank + width) ** -0.5
    return LatentCall(
        Call(dtype, segments=(segment,), batch=batch, scale=scale, **sizes, **options), unrounded=unrounded
    )


def run(given: dict[str, Any], out_dtype: torch.dtype, found: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The op's answer, in the interpreter by its plan; `found` is the mask's block list, if it was found before."""
    names = "query", "query_rope", "latent", "key_rope", "attn_mask", "kv_lens", "scale", "window", "softcap", "sinks"
    call = latent_call(**{name: given.get(name) for name in names}, block_mask=found, out_dtype=out_dtype)
    return on_cuda.plan_latents(call)(call)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("variant", slow_but(["plain", "holes", "lens"], VARIANTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_float64(shape: tuple[int, ...], dtype: torch.dtype, variant: str) -> None:
    kv_len, rank = shape[3:5]
    if dtype == torch.float32 and rank > 256:
        pytest.skip("float32 goes to a rank of 256")
    given, expanded = call_of(dtype, variant, *shape).inputs(DEVICE)
    for out_dtype in {dtype, torch.float32}:
        out, lse = run(given, out_dtype)
        assert_within_bound(out, lse, expanded, parts=2 + kv_len // 16, out_dtype=out_dtype)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("variant", slow_but(["plain", "holes", "lens"], VARIANTS))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_queries_that_were_not_rounded(shape: tuple[int, ...], variant: str) -> None:
    """Both halves of each number count; any kernel for such queries takes as many of them as they are."""
    given, expanded = call_of(torch.bfloat16, variant, *shape, unrounded=True).inputs(DEVICE)
    assert given["query"].dtype == torch.float32
    for out_dtype in (torch.bfloat16, torch.float32):
        out, lse = run(given, out_dtype)
        assert_within_bound(out, lse, expanded, parts=2 + shape[3] // 16, out_dtype=out_dtype)


FOUND = ["holes", "padding", "causal", "heads", "nothing", "bias", "everything"]


@pytest.mark.parametrize("variant", slow_but(["heads", "everything"], FOUND))
def test_a_block_list_found_before(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken for the mask's, and not found again; beside lengths or a window it is not what counts."""
    given, expanded = call_of(torch.bfloat16, variant, 2, 5, 2, 150, 24, 8).inputs(DEVICE)
    found = block_list(given["attn_mask"], 2)
    if not GPU:
        monkeypatch.setattr(latent_validation, "check_block_masks", lambda call: None)  # which wants a CPU's there
    if variant != "everything":
        monkeypatch.setattr(mask_plan, "plan_block_list", None)
    out, lse = run(given, torch.float32, found)
    assert_within_bound(out, lse, expanded, parts=12, out_dtype=torch.float32)


@pytest.mark.parametrize("dims", ["k", "bk"])
@pytest.mark.parametrize("pattern", ["padding", "holes", "nothing"])
@pytest.mark.parametrize(
    "sizes", [(5, 2, 70, 24, 8), *([(64, 2, 1100, 512, 64), (8, 2, 1100, 512, 64)] if GPU else [])], ids=str
)
def test_views_of_one_cache_beside_nan(sizes: tuple[int, ...], pattern: str, dims: str) -> None:
    """Latents and rope by their strides, with NaN in what the mask leaves out."""
    heads, q_len, kv_len, rank, width = sizes
    segment = Segment(2, kv_len, Mask(pattern=pattern, dims=dims), 2 if "b" in dims else 1)
    options = {"q_heads": heads, "kv_heads": 1, "q_len": q_len, "head_dim": rank + width, "value_dim": rank}
    call = Call(torch.float16, segments=(segment,), batch=2, scale=(rank + width) ** -0.5, poison=True, **options)
    given, expanded = LatentCall(call, joined=True).inputs(DEVICE)
    assert given["latent"].stride(2) == rank + width
    assert given["latent"].isnan().any()
    out, lse = run(given, torch.float16)
    assert_within_bound(out, lse, expanded, parts=2 + kv_len // 16)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("heads", [70, 11])
@pytest.mark.parametrize("masked", [False, True], ids=["lengths", "masks"])
def test_many_ragged_sequences(masked: bool, heads: int) -> None:
    """More sequences than a warp has threads, some empty, with NaN behind each."""
    lens = torch.randint(0, 700, (45,), generator=torch.Generator().manual_seed(0))
    lens[:3] = torch.tensor([0, 64, 700])
    shapes = (45, heads, 1, 512), (45, heads, 1, 64), (45, 1, 700, 512), (45, 1, 700, 64)
    query, query_rope, latent, key_rope = (torch.randn(x, device=DEVICE, dtype=torch.bfloat16) for x in shapes)
    used = (torch.arange(700) < lens[:, None]).cuda()
    for x in (latent, key_rope):
        x.masked_fill_(~used[:, None, :, None], float("nan"))
    mask, kv_lens = (used[:, None, None], None) if masked else (None, lens.cuda())
    given = {"attn_mask": mask, "kv_lens": kv_lens, "scale": 0.05, "window": None, "softcap": None}
    names = "query", "query_rope", "latent", "key_rope"
    out, lse = run(given | dict(zip(names, (query, query_rope, latent, key_rope), strict=True)), torch.float32)
    known = [x.double().nan_to_num() for x in (query, query_rope, latent, key_rope)]
    want, want_lse = latent_attention_reference(*known, used[:, None, None], scale=0.05)
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)


def test_unrounded_queries_need_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cuda, "has_large_shared_memory", lambda device: False)
    given, _ = call_of(torch.bfloat16, "plain", 2, 5, 1, 21, 24, 8, unrounded=True).inputs(
        DEVICE
    )  # planned nowhere else
    with pytest.raises(NotImplementedError, match=r"`query` must have the dtype of `latent`.* got torch\.float32"):
        run(given, torch.float32)


@pytest.mark.parametrize("name", ["latent", "key_rope"])
def test_nan_comes_out(name: str) -> None:
    sizes = {"q_heads": 5, "kv_heads": 1, "q_len": 1, "head_dim": 32, "value_dim": 24}
    call = Call(torch.float32, segments=(Segment(2, 70, None, 1),), batch=2, scale=0.2, **sizes)
    given, _ = LatentCall(call).inputs(DEVICE)
    given[name][0, 0, 7, 3] = float("nan")
    out, lse = run(given, torch.float32)
    assert lse[0].isnan().all()
    assert out[0].isnan().all()
    assert lse[1].isfinite().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("sizes", [(17, 24, 8), *([(128, 512, 64)] if GPU else [])], ids=str)
def test_scores_beyond_float32(sizes: tuple[int, int, int]) -> None:
    """Products that overflow to -inf leave their keys out; where all of a tile do, a state has nothing yet."""
    heads, rank, width = sizes
    shapes = (2, heads, 1, rank), (2, heads, 1, width), (2, 1, 300, rank), (2, 1, 300, width)
    query, query_rope, latent, key_rope = (torch.randn(x).to(DEVICE, torch.bfloat16) for x in shapes)
    query[..., 0] = 0
    query[:, 1, 0, 0] = 3e38
    latent[0, 0, 40:, 0] = -1e20
    latent[0, 0, :40, 0] = latent[1, :, :, 0] = 0
    names = "query", "query_rope", "latent", "key_rope"
    given = dict(zip(names, (query, query_rope, latent, key_rope), strict=True))
    given |= dict.fromkeys(("attn_mask", "kv_lens", "window", "softcap"))
    out, lse = run({**given, "scale": 0.2}, torch.float32)
    want, want_lse = latent_attention_reference(*(x.double() for x in given.values() if x is not None), scale=0.2)
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mask", slow_but(["of a sequence"], ["none", "of a query", "of a sequence"]))
def test_sequences_share_latents(mask: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (4, 3, 2, 24), (4, 3, 2, 8), (2, 1, 70, 24), (2, 1, 70, 8)
    inputs = [torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16) for shape in shapes]
    shape = {"none": None, "of a query": (2, 70), "of a sequence": (4, 1, 1, 70)}[mask]
    attn_mask = None if shape is None else (torch.rand(shape, generator=generator) < 0.5).to(DEVICE)
    names = "query", "query_rope", "latent", "key_rope"
    given = dict(zip(names, inputs, strict=True))
    given |= {"attn_mask": attn_mask, "kv_lens": None, "scale": 0.2, "window": None, "softcap": None}
    out, lse = run(given, torch.float32)
    query, query_rope, latent, key_rope = inputs
    key, value = (x.repeat_interleave(2, dim=0) for x in (torch.cat((latent, key_rope), dim=3), latent))
    expanded = {"query": torch.cat((query, query_rope), dim=3), "key": key, "value": value, "attn_mask": attn_mask}
    expanded |= {"kv_lens": None, "scale": 0.2}
    assert_within_bound(out, lse, expanded, parts=8, out_dtype=torch.float32)


@pytest.mark.parametrize(
    ("rank", "width", "dtype", "says"),
    [
        (513, 8, torch.bfloat16, "`latent` must have a rank of at most 512 in torch.bfloat16 on CUDA, got 513"),
        (257, 8, torch.float32, "`latent` must have a rank of at most 256 in torch.float32 on CUDA, got 257"),
        (512, 65, torch.bfloat16, "`key_rope` must have a width of at most 64 on CUDA, got 65"),
    ],
)
def test_too_wide(rank: int, width: int, dtype: torch.dtype, says: str) -> None:
    given = dict.fromkeys(("attn_mask", "kv_lens", "window", "softcap"))
    for name, heads, columns in (
        ("query", 2, rank),
        ("query_rope", 2, width),
        ("latent", 1, rank),
        ("key_rope", 1, width),
    ):
        given[name] = torch.zeros(1, heads, 3, columns, dtype=dtype, device=DEVICE)
    with pytest.raises(NotImplementedError, match=says):
        run({**given, "scale": 0.1}, dtype)


@pytest.mark.skipif(not HOPPER, reason="runs on a GPU of capability 9.0")
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "batch, heads, q_len, kv_len",
    [
        *[(2, 128, 1, 1000), (1, 128, 1, 64), (1, 70, 1, 33), (3, 64, 1, 777), (2, 40, 4, 1500), (5, 128, 2, 3000)],
        *[(140, 128, 1, 130), (1, 17, 1, 20000), (2, 16, 1, 1000), (1, 1, 1, 64), (3, 5, 3, 777), (140, 16, 1, 130)],
        *[(1, 16, 1, 40000), (5, 2, 8, 1500)],
    ],
)
def test_the_kernels_for_hopper(batch: int, heads: int, q_len: int, kv_len: int, out_dtype: torch.dtype) -> None:
    """Under a CUDA graph as well: whole and partial work tiles, tiles that end early; few queries are in float32."""
    from tatten.ops.cuda import latent_sm90

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    joined, keys = randn(batch, q_len, heads, 576).transpose(1, 2), randn(batch, 1, kv_len, 576)
    inputs = joined[..., :512], joined[..., 512:], keys[..., :512], keys[..., 512:]
    if heads * q_len <= 16:
        joined = joined.float() * torch.linspace(0.99, 1.01, 576, device="cuda")
        joined[..., 512:] = inputs[1]
        inputs = joined[..., :512], *inputs[1:]
    planned = []
    with pytest.MonkeyPatch.context() as patch:
        plan = latent_sm90.plan_latent_segment
        patch.setattr(
            latent_sm90, "plan_latent_segment", lambda *args, **kwargs: planned.append(args) or plan(*args, **kwargs)
        )
        out, lse = tatten.latent_attention(*inputs, scale=0.05, out_dtype=out_dtype, return_lse=True)
    assert planned, "another kernel ran"
    expanded = {"query": joined, "key": keys, "value": inputs[2], "attn_mask": None, "kv_lens": None, "scale": 0.05}
    assert_within_bound(out, lse, expanded, parts=4, out_dtype=out_dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again, _ = tatten.latent_attention(*inputs, scale=0.05, out_dtype=out_dtype, return_lse=True)
    joined.normal_()
    graph.replay()
    want, _ = latent_attention_reference(*(x.double() for x in inputs), scale=0.05)
    assert (again - want).norm() <= 4e-3 * want.norm()


@pytest.mark.parametrize(
    ("heads", "dtype", "masked", "hopper"),
    [
        *[(16, torch.float32, False, True), (16, torch.bfloat16, True, True), (16, torch.bfloat16, False, False)],
        *[(17, torch.bfloat16, False, True), (17, torch.float32, True, False)],
    ],
    ids=str,
)
def test_what_the_kernels_for_hopper_take(
    heads: int, dtype: torch.dtype, masked: bool, hopper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tatten.ops.cuda import combine

    monkeypatch.setattr(combine, "INTERPRETED", False)
    monkeypatch.setattr(on_cuda, "takes_tma", lambda x: True)
    shapes = (2, heads, 1, 512), (2, heads, 1, 64), (2, 1, 640, 512), (2, 1, 640, 64)
    inputs = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    inputs[0] = inputs[0].to(dtype)
    mask = torch.empty(2, 1, 1, 640, dtype=torch.bool, device="meta") if masked else None
    call = latent_call(*inputs, mask, scale=0.1)
    assert on_cuda._takes_sm90(call, mask_plan.plan_mask(call.query, call.segments[0])) == hopper


def test_more_sequences_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for Hopper keeps a number for each in shared memory; more of them go through the decode kernel."""
    from tatten.ops.cuda import combine

    monkeypatch.setattr(combine, "INTERPRETED", False)
    monkeypatch.setattr(on_cuda, "takes_tma", lambda x: True)
    for batch in (2048, 2049):
        shapes = (batch, 128, 1, 512), (batch, 128, 1, 64), (batch, 1, 64, 512), (batch, 1, 64, 64)
        inputs = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
        for lens in (None, torch.empty(batch, dtype=torch.int32, device="meta")):
            call = latent_call(*inputs, None, lens, scale=0.1)
            mask = mask_plan.plan_mask(call.query, call.segments[0])
            assert on_cuda._takes_sm90(call, mask) == (lens is None or batch == 2048)
