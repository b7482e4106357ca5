"""The Triton kernels under the interpreter, on shapes small enough for it. conftest.py turns it on where no GPU is."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from attention_cases import NEG_INF, Case, assert_state, places_in_reach
from pairs import pairs
from poison import fresh_memory_is_poison
from slow import slow_after, slow_but
from stream_k_schedule import Schedule
from torch import Tensor

from tatten.ops.cuda.gpu_rates import GpuRates
from tatten.ops.kernel_signatures import bifurcated_call, bifurcated_kernel, decode_call
from tatten.ops.layout import pack_gqa
from tatten.ops.masks import block_list
from tatten.ops.reference import bifurcated_attention_reference
from tatten.ops.states import combine_partials, merge

pytestmark = [
    pytest.mark.drawn(16),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs where no GPU is"),
]

MASKS = ["none", "causal", "broadcast", "2d", "keys", "holes", "per_head", "empty_rows", "all_false", "one_key"]
MASKS += ["additive", "additive_f32", "finfo_min", "alibi", "one_column", "nearly_full", "nearly_zero"]
BATCH = 4  # of segments
PROGRAMS = (1, 5, 8)  # 8 are more than there are tiles in `MASKED`
SMALL = Case(q_heads=2, kv_heads=1, q_len=2, kv_len=70, head_dim=16)
MASKED = [
    (replace(SMALL, mask=mask, lens=lens, window=window, softcap=softcap, sinks=sinks), programs)
    for mask, lens, window, softcap, sinks, programs in pairs(
        MASKS, (False, True), (None, 20), (None, 1.5), (False, True), PROGRAMS
    )
]


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    with fresh_memory_is_poison():
        yield


def lean(inputs: dict, block_mask: Tensor | None = None, **options) -> tuple[Tensor, Tensor]:
    from tatten.ops.cuda.decode import plan_attention

    call = decode_call(**inputs, block_mask=block_mask)
    return plan_attention(call, **options)(call)


def launch_and_merge(inputs: dict, **options) -> tuple[Any, tuple[Tensor, Tensor]]:
    """The parts that a launch leaves, and what they are merged to."""
    from tatten.ops.cuda.combine import plan_combine
    from tatten.ops.cuda.decode import plan_segment
    from tatten.ops.cuda.decode_grid import Place

    call = decode_call(**inputs)
    place = Place(**{name: options.pop(name) for name in ("final", "max_and_sum") if name in options})
    segment = plan_segment(call, call.segments[0], place, **options, pdl=False)
    parts = segment(call, call.segments[0])
    state = plan_combine(inputs["query"], inputs["value"].shape[3], segment.tile_space, pdl=False)(parts)
    return parts, (state.out, state.lse)


def triton_segments(*args: Any, **variant: Any) -> tuple[Tensor, Tensor]:
    from tatten.ops.cuda.segments import plan_segments

    call = bifurcated_call(*args, **variant)
    return plan_segments(call)(call)


def assert_equal(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    """To the bit."""
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("case, programs", slow_after(10, MASKED), ids=str)
def test_masks(case: Case, programs: int) -> None:
    inputs = case.inputs(poison=case.mask != "finfo_min")
    assert_state(*lean(inputs, programs=programs), inputs)


@pytest.mark.parametrize(
    "case",
    [
        Case(mask="holes", kv_len=200, head_dim=16),
        Case(mask="causal", kv_len=200, head_dim=16, q_len=3, lens=True, sinks=True),
        Case(mask="additive", kv_len=130, head_dim=16, window=20),
        Case(kv_len=200, head_dim=16, lens=True, window=20, sinks=True),
    ],
    ids=str,
)
def test_few_keys_are_not_split(case: Case) -> None:
    """Where a mask or lengths decide how many keys count, a program does all of a work tile."""
    inputs = case.inputs() | {"scale": 0.25}
    parts, state = launch_and_merge(inputs)
    assert_state(*state, inputs)
    assert not parts.partial_out.numel()


@pytest.mark.parametrize("mask, programs", pairs(["keys", "2d", "broadcast", "alibi"], [1, 2, 4]))
def test_equal_work_tiles_are_not_split_where_programs_divide_them(mask: str, programs: int) -> None:
    """A mask that all sequences share leaves each of 4 work tiles as many blocks, whatever their number."""
    inputs = Case(kv_len=700, head_dim=16, mask=mask, sinks=True).inputs() | {"scale": 0.25}
    parts, state = launch_and_merge(inputs, programs=programs)
    assert_state(*state, inputs)
    assert not parts.partial_out.numel()


def test_sequences_with_masks_of_their_own_are_split() -> None:
    inputs = Case(kv_len=700, head_dim=16, mask="causal").inputs() | {"scale": 0.25}
    parts, state = launch_and_merge(inputs, programs=4)
    assert_state(*state, inputs)
    assert parts.partial_out.numel()


def test_many_ragged_keys_are_split() -> None:
    """Whole work tiles of one long sequence among short ones would leave all programs but its own idle."""
    from tatten.ops.cuda.decode import plan_attention

    inputs = Case(kv_len=600, head_dim=16, lens=True).inputs() | {"scale": 0.25}
    space = plan_attention(decode_call(**inputs)).segment.tile_space
    assert space.chunk == 0
    assert space.split


@pytest.mark.parametrize("programs", slow_but([7], [2, 7]))
@pytest.mark.parametrize(
    "case",
    [
        Case(dtype=torch.bfloat16, head_dim=16, mask="causal", kv_len=70),
        Case(dtype=torch.float16, head_dim=24, mask="causal", value_dim=40),
        Case(dtype=torch.bfloat16, head_dim=80, kv_len=100, sinks=True),
        Case(batch=1, q_heads=17, kv_heads=1, q_len=5, head_dim=16, kv_len=70),
        Case(q_heads=3, kv_heads=3, head_dim=23, value_dim=7, lens=True, window=9),
        Case(kv_len=0, head_dim=16),
        Case(kv_len=0, head_dim=16, mask="holes", lens=True, sinks=True),
        Case(kv_len=1, head_dim=16, scale=0.5),
        Case(batch=1, kv_heads=4, head_dim=80, kv_len=35),
        Case(head_dim=16, scale=-1.0, mask="causal", sinks=True, kv_len=70),
        Case(head_dim=32, value_dim=64, q_heads=2, kv_len=65, mask="additive"),
    ],
    ids=str,
)
def test_shapes(case: Case, programs: int) -> None:
    inputs = case.inputs()
    assert_state(*lean(inputs, programs=programs), inputs)


@pytest.mark.parametrize(("value_dim", "programs"), slow_but([(320, 33)], [(192, 40), (260, 64), (320, 33), (512, 12)]))
@pytest.mark.parametrize("lens", [False, True], ids=["one length", "ragged"])
def test_wide_states_are_combined_in_blocks_of_columns(value_dim: int, programs: int, lens: bool) -> None:
    """Many partials of each: beyond 256 columns a program of the combine takes some, and the last one maybe fewer."""
    from tatten.ops.cuda.decode import Tiles

    case = Case(batch=2, q_heads=2, kv_heads=1, head_dim=16, value_dim=value_dim, kv_len=700, lens=lens)
    inputs = case.inputs() | {"scale": 0.25}
    parts, state = launch_and_merge(inputs, tiles=Tiles(16, 16, 4, 1), programs=programs)
    assert_state(*state, inputs)
    assert parts.partial_out.numel()


def test_bfloat16_beyond_the_range_of_float16() -> None:
    inputs = Case(dtype=torch.bfloat16, kv_len=70, head_dim=16).inputs()
    for factor in (2.0**20, 2.0**-50):
        assert_state(*lean(given := inputs | {"value": inputs["value"] * factor}, programs=2), given)


def test_a_query_without_keys_is_zero_whatever_the_factors() -> None:
    inputs = Case(narrow="scaled", kv_len=70, head_dim=16).inputs(poison=False)
    inputs |= {"kv_lens": torch.tensor([0, 70]), "value_scale": torch.tensor([float("inf"), 1.0])}
    out, lse = lean(inputs)
    assert not out[0].any()
    assert (lse[0] == NEG_INF).all()
    assert not out[1, :2].isfinite().any()


@pytest.mark.parametrize(
    "kind, int8, mask, options, dtype",
    slow_after(
        4,
        pairs(
            ["plain", "scaled", "per_key"],
            [False, True],
            ["none", "holes", "additive", "nearly_full"],
            [{}, {"lens": True, "sinks": True}, {"window": 20, "softcap": 1.5}],
            [torch.float32, torch.float16],
        ),
    ),
    ids=str,
)
def test_eight_bits(kind: str, int8: bool, mask: str, options: dict, dtype: torch.dtype) -> None:
    sizes = {"q_len": 2, "kv_len": 150, "head_dim": 16, "value_dim": 24}
    case = Case(narrow=kind, int8=int8, mask=mask, dtype=dtype, **sizes, **options)
    inputs = case.inputs()
    assert_state(*lean(inputs, programs=5), inputs)


@pytest.mark.parametrize("mask", slow_but(["holes"], ["none", "holes", "additive", "nearly_full", "nearly_zero"]))
@pytest.mark.parametrize("layout", ["heads_inside", "transposed", "one_batch", "slice"])
def test_strides(layout: str, mask: str) -> None:
    inputs = Case(mask=mask, q_len=2, kv_len=70, head_dim=16).inputs(poison=layout != "one_batch")
    for name in ("query", "key", "value"):
        x = inputs[name]
        match layout:
            case "heads_inside":
                inputs[name] = x.transpose(1, 2).contiguous().transpose(1, 2)
            case "transposed":
                inputs[name] = x.mT.contiguous().mT
            case "one_batch":
                inputs[name] = x[:1].expand_as(x)
            case "slice":
                inputs[name] = torch.nn.functional.pad(x, (2, 1, 1, 1), value=float("nan"))[:, :, 1:-1, 2:-1]
    if mask != "none":
        inputs["attn_mask"] = inputs["attn_mask"].mT.contiguous().mT
    assert_state(*lean(inputs, programs=3), inputs)


@pytest.mark.parametrize("options", [{}, {"window": 33}, {"window": 33, "q_len": 3}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("dims", [pytest.param((16, 16), marks=pytest.mark.slow), (24, 40)])
def test_tensor_descriptors(dims: tuple[int, int], options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy engine reads all of a tile, and so keys outside a window too, which may be NaN."""
    from tatten.ops.cuda import decode as module

    monkeypatch.setattr(module, "INTERPRETED", False)
    monkeypatch.setattr(module, "gpu_rates", lambda device: GpuRates(tma_least_bytes=0))
    inputs = Case(kv_len=150, head_dim=dims[0], value_dim=dims[1], dtype=torch.float16, scale=0.2, **options).inputs()
    assert_state(*launch_and_merge(inputs, programs=5)[1], inputs)


@pytest.mark.parametrize(
    "mask, tma, programs",
    slow_after(2, pairs(["causal", "nearly_full", "nearly_zero"], [False, True], [1, 5, 13, None])),
)
def test_a_run_of_full_blocks(mask: str, tma: bool, programs: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks at a time, from wherever a program begins, or whole work tiles (None); by the copy engine too."""
    from tatten.ops.cuda import decode as module
    from tatten.ops.cuda import decode_grid

    monkeypatch.setattr(decode_grid, "gpu_rates", lambda device: GpuRates(most_whole_tiles=16))
    monkeypatch.setattr(module, "INTERPRETED", not tma)
    monkeypatch.setattr(module, "gpu_rates", lambda device: GpuRates(tma_least_bytes=0))
    case = Case(kv_len=1000, head_dim=16, dtype=torch.float16, scale=0.2, q_len=2, mask=mask)
    inputs = case.inputs()
    parts, state = launch_and_merge(inputs, tiles=module.Tiles(16, 128, 4, 2), programs=programs)
    run = parts.block_list[:, 0, 1]
    assert (run > 4).all()
    assert_state(*state, inputs)


def test_wide_offsets_and_long_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compiled for more than 2^31 elements, or tiles times programs, give the same result."""
    from tatten.ops.cuda import combine
    from tatten.ops.cuda import decode as module

    kernel, combine_kernel = module._decode_kernel, combine._combine_kernel

    class With64Bits:
        def __init__(self, kernel, *flags: str) -> None:
            assert set(flags) <= set(kernel.arg_names)  # the interpreter ignores what a kernel does not know
            self.kernel, self.flags, self.arg_names = kernel, dict.fromkeys(flags, True), kernel.arg_names

        def __getitem__(self, grid):
            return lambda *args, **kwargs: self.kernel[grid](*args, **{**kwargs, **self.flags})

    inputs = Case(lens=True, kv_len=150, head_dim=16).inputs()
    want = lean(inputs, programs=5)
    monkeypatch.setattr(module, "_decode_kernel", With64Bits(kernel, "INT64_OFFSETS", "INT64_TILES"))
    monkeypatch.setattr(combine, "_combine_kernel", With64Bits(combine_kernel, "INT64_TILES"))
    assert_equal(lean(inputs, programs=5), want)


@pytest.mark.parametrize(
    "options", slow_but([{"mask": "causal"}], [{}, {"mask": "causal"}, {"mask": "alibi"}, {"window": 40}]), ids=str
)
@pytest.mark.parametrize("lens", [(0, 0, 0), (150, 0, 1), (0, 64, 65), (1000, -1, 2)], ids=str)
def test_ragged(lens: tuple[int, ...], options: dict) -> None:
    """Lengths outside the keys are clamped."""
    inputs = Case(batch=3, q_heads=2, kv_heads=1, kv_len=150, head_dim=16, **options).inputs(poison=False)
    inputs["kv_lens"] = torch.tensor(lens, dtype=torch.int32)
    beyond = torch.arange(150) >= inputs["kv_lens"][:, None]
    for name in ("key", "value"):
        inputs[name] = inputs[name].masked_fill(beyond[:, None, :, None], float("nan"))
    assert_state(*lean(inputs, programs=7), {**inputs, "kv_lens": inputs["kv_lens"].clamp(0, 150)})


@pytest.mark.parametrize("programs", slow_but([5], [1, 5]))
@pytest.mark.parametrize("per", ["keys", "sequence", "head", "query"])
def test_holes_may_hold_nan(per: str, programs: int) -> None:
    """Keys and values that no query attends to are not read, even in the middle of a block."""
    inputs = Case(q_heads=2, kv_heads=1, q_len=2, kv_len=150, head_dim=16).inputs(poison=False)
    shape = {"keys": (150,), "sequence": (2, 1, 1, 150), "head": (2, 2, 1, 150), "query": (2, 1, 2, 150)}[per]
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.7
    inputs["attn_mask"] = mask
    used = mask.expand(2, 2, 2, 150).flatten(1, 2).any(dim=1)[:, None, :, None]
    for name in ("key", "value"):
        inputs[name] = inputs[name].masked_fill(~used, float("nan"))
    assert_state(*lean(inputs, programs=programs), inputs)


@pytest.mark.parametrize("programs", slow_but([3], [1, 3, 5]))
def test_nan_in_keys_that_count_comes_out(programs: int) -> None:
    inputs = Case(kv_len=150, head_dim=16).inputs()
    inputs["key"][0, 1, 7] = float("nan")
    out, lse = lean(inputs, programs=programs)
    assert out[0, 2:].isnan().all()
    assert lse[0, 2:].isnan().all()
    assert out[0, :2].isfinite().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize(
    "case", slow_after(1, [replace(SMALL, mask="holes", sinks=True), SMALL, replace(SMALL, lens=True)]), ids=str
)
def test_the_same_to_the_bit(case: Case) -> None:
    inputs = case.inputs()
    assert_equal(lean(inputs, programs=5), lean(inputs, programs=5))


@pytest.mark.parametrize(
    "mask", slow_but(["holes"], ["causal", "holes", "keys", "additive", "empty_rows", "all_false"])
)
def test_blocks_found_before_give_the_same(mask: str) -> None:
    inputs = replace(SMALL, mask=mask).inputs()
    blocks = block_list(inputs["attn_mask"], 2)
    assert_equal(lean(inputs, programs=3, block_mask=blocks), lean(inputs, programs=3))


@pytest.mark.parametrize("seed", slow_after(2, range(8)))
def test_cuts_anywhere_in_ragged_work_tiles_and_margins(seed: int) -> None:
    from tatten.ops.cuda.decode import Tiles

    rng = random.Random(seed)
    variant = {"window": rng.choice((None, 70)), "sinks": rng.random() < 0.5, "mask": rng.choice(("none", "causal"))}
    case = Case(batch=6, kv_len=230, head_dim=16, q_len=2, dtype=torch.bfloat16, lens=True, **variant)
    inputs = case.inputs(poison=False)
    inputs["kv_lens"] = torch.tensor([rng.choice((seed % 2, 1, 40, 230, rng.randint(2, 229))) for _ in range(6)])
    for programs in (1, 2, 3, 7, 11, 19, 40):
        assert_state(*lean(inputs, tiles=Tiles(16, 16, 4, 2), programs=programs), inputs)


@pytest.mark.parametrize("programs", slow_but([7], [4, 7, 40]))
@pytest.mark.parametrize(
    "kind, q_heads",
    slow_after(
        4,
        [
            ("ragged", 24),
            ("empty", 4),
            ("window", 4),
            ("mask", 4),
            ("ragged", 4),
            ("uniform", 4),
            ("uniform", 24),
            ("with an empty one", 4),
            ("equal", 4),
        ],
    ),
)
def test_the_schedule_is_that_of_python(kind: str, q_heads: int, programs: int) -> None:
    """Each program leaves the states of the tiles that `Schedule.visits` says, in their slots, and writes no others."""
    from tatten.ops.cuda.decode import Tiles, plan_segment

    batch, kv_heads, q_len, kv_len, dim = 3, 2, 2, 230, 16
    dtype = torch.bfloat16 if q_heads == 4 else torch.float32  # in 16 bits, work tiles have margins
    query = torch.randn(batch, q_heads, q_len, dim, dtype=dtype)
    key, value = torch.randn(2, batch, kv_heads, kv_len, dim, dtype=dtype)
    lengths = {"ragged": [230, 20, 70], "with an empty one": [230, 0, 70], "equal": [220] * 3, "empty": [0] * 3}
    lens = torch.tensor(lengths[kind]) if kind in lengths else None
    window = 50 if kind == "window" else None
    mask = None
    if kind == "mask":  # blocks 0 and 3 of the first sequence, all of the second, none of the third
        mask = torch.arange(kv_len) % 192 < 50
        mask = torch.stack((mask, torch.ones_like(mask), torch.zeros_like(mask)))[:, None, None]
    call = decode_call(query, key, value, mask, lens, window=window)
    segment = plan_segment(call, call.segments[0], tiles=Tiles(16, 32, 4, 2), programs=programs)
    parts, space = segment(call, call.segments[0]), segment.tile_space
    assert (space.margin > 0) == (kind not in ("uniform", "window") and q_heads == 4)
    block_n, block_m = space.block_n, space.block_m

    blocks_of = []  # of each sequence
    for n in [kv_len] * batch if lens is None else lens.tolist():
        begin = 0 if window is None else max(n - q_len - window + 1, 0)
        blocks_of.append(list(range(begin // block_n, -(-n // block_n))))
    if mask is not None:
        blocks_of = [[0, 3], [0, 1, 2, 3], []]
    rows = [(b, h, m) for b in range(batch) for h in range(kv_heads) for m in range(space.q_blocks)]
    tiles = tuple(max(1, len(blocks_of[b])) for b, _, _ in rows)
    schedule = Schedule(tiles, programs, most_margin=space.margin)
    visits = [visit for program in range(programs) for visit in schedule.visits(program)]
    slots = sorted(visit.slot for visit in visits if visit.slot is not None)
    assert (~parts.partial_lse[:, 0].isnan()).nonzero().flatten().tolist() == slots
    assert (~parts.partial_out[:, 0, 0].isnan()).nonzero().flatten().tolist() == slots

    reach = places_in_reach(lens, batch, q_len, kv_len, window)
    reach = reach if mask is None else reach & mask
    reach = pack_gqa(reach.expand(batch, q_heads, q_len, kv_len), kv_heads)
    scores = (pack_gqa(query.float(), kv_heads) @ key.float().mT * dim**-0.5).masked_fill(~reach, NEG_INF)
    whole = pack_gqa(parts.lse[..., None], kv_heads).squeeze(-1)
    wrote = torch.zeros_like(whole, dtype=torch.bool)
    for visit in visits:
        b, head, m = rows[visit.work_tile]
        queries = slice(m * block_m, min((m + 1) * block_m, whole.shape[2]))
        keys = torch.zeros(kv_len, dtype=torch.bool)
        for block in blocks_of[b][visit.start : visit.stop]:
            keys[block * block_n : (block + 1) * block_n] = True
        want = scores[b, head, queries].masked_fill(~keys, NEG_INF).logsumexp(dim=1)
        if visit.slot is None:
            wrote[b, head, queries] = True
            torch.testing.assert_close(whole[b, head, queries], want)
        else:
            torch.testing.assert_close(parts.partial_lse[visit.slot, : len(want)], want)
    assert torch.equal(whole.isnan(), ~wrote)


@dataclass(frozen=True)
class Segments:
    """Segments as `(rows, length, kind of mask)` of a batch of `BATCH`; `kv_heads` of each, or of all."""

    segments: tuple[tuple[int, int, str], ...]
    q_heads: int = 4
    kv_heads: int | tuple[int, ...] = 2
    q_len: int = 1
    dim: int = 16
    value_dim: int = 16

    def __str__(self) -> str:
        segments = ",".join(f"{rows}x{length}{kind}" for rows, length, kind in self.segments)
        return f"{segments}-H{self.q_heads}x{self.kv_heads}-L{self.q_len}-D{self.dim}x{self.value_dim}"

    def inputs(self) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor | None]]:
        """Keys and values that no query of a row attends to are NaN."""
        generator = torch.Generator().manual_seed(0)
        query = torch.randn(BATCH, self.q_heads, self.q_len, self.dim, generator=generator)
        all_heads = (self.kv_heads,) * len(self.segments) if isinstance(self.kv_heads, int) else self.kv_heads
        keys, values, masks = [], [], []
        for (rows, length, kind), heads in zip(self.segments, all_heads, strict=True):
            key, value = (torch.randn(rows, heads, length, d, generator=generator) for d in (self.dim, self.value_dim))
            mask = self.mask(kind, rows, length, generator)
            if mask is not None:
                used = mask if mask.dtype == torch.bool else mask != NEG_INF
                used = used.expand(max(rows, mask.shape[0]), -1, -1, -1).unflatten(0, (rows, -1))
                unread = ~used.flatten(1, 3).any(dim=1)[:, None, :, None]
                key, value = (x.masked_fill(unread, float("nan")) for x in (key, value))
            keys.append(key)
            values.append(value)
            masks.append(mask)
        return query, keys, values, masks

    def mask(self, kind: str, rows: int, length: int, generator: torch.Generator) -> Tensor | None:
        def some(*shape: int) -> Tensor:
            return torch.rand(*shape, length, generator=generator) > 0.6

        match kind:
            case "":
                return None
            case "rows":
                return some(rows, 1, 1)
            case "sequences":
                return some(BATCH, 1, 1)
            case "last":  # only the last sequence attends to anything, in the last block
                return (torch.arange(BATCH)[:, None] == 3).expand(BATCH, length)[:, None, None] & some(1, 1, 1)
            case "one":
                return some(1, 1, 1).expand(BATCH, -1, -1, -1)
            case "all":
                return some(BATCH, self.q_heads, self.q_len)
            case "heads":
                return some(1, self.q_heads, 1)
            case "additive":
                return torch.where(some(BATCH, self.q_heads, 1), torch.randn(length, generator=generator), NEG_INF)
            case "row_bias":
                return torch.randn(rows, 1, 1, length, generator=generator)
            case "nothing":
                return torch.zeros(1, 1, 1, length, dtype=torch.bool)
        raise ValueError(kind)


SEGMENTS = [
    Segments(((1, 150, ""), (4, 70, ""))),
    Segments(((2, 130, ""), (4, 33, "")), kv_heads=1, q_len=2),
    Segments(((1, 90, ""), (4, 65, "")), q_heads=5, kv_heads=1),  # more packed queries than a tile has rows
    Segments(((1, 150, "rows"), (4, 70, "all")), q_len=2),
    Segments(((2, 150, "rows"), (4, 70, "sequences"))),
    Segments(((2, 150, "sequences"), (4, 70, "one"))),
    Segments(((1, 150, "sequences"), (4, 70, ""))),
    Segments(((1, 150, "last"),)),
    Segments(((2, 150, "all"), (4, 70, "additive")), q_len=2),
    Segments(((1, 70, "additive"), (2, 70, "row_bias"), (4, 70, "heads"))),
    Segments(((1, 70, ""), (2, 65, ""), (4, 9, "")), q_len=2),
    Segments(((4, 70, ""), (1, 70, "nothing"), (2, 1, "one"))),
    Segments(((1, 0, ""), (4, 70, ""))),
    Segments(((1, 0, ""), (4, 0, ""))),
    Segments(((1, 0, "rows"), (4, 70, "nothing"), (1, 0, ""))),
    Segments(((1, 40, ""), (2, 70, "rows"), (4, 20, ""), (1, 0, ""), (4, 5, "nothing"), (4, 33, ""))),
    Segments(((4, 150, ""),), dim=20, value_dim=12),
    Segments(((1, 130, ""), (4, 70, "")), kv_heads=(2, 4)),
    Segments(((2, 130, ""), (4, 70, "")), kv_heads=(4, 1), q_len=2),
]


@pytest.mark.parametrize("programs", slow_but([3], [3, 25]))
@pytest.mark.parametrize("case", slow_after(6, SEGMENTS), ids=str)
def test_segments(case: Segments, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from tatten.ops.cuda import decode_grid as module

    monkeypatch.setattr(module, "multiprocessors", lambda device: programs)
    monkeypatch.setattr(module, "tiles_for", lambda *args, **kwargs: module.Tiles(16, 32, 4, 2))
    query, keys, values, masks = case.inputs()
    out, lse = triton_segments(query, keys, values, masks, [None] * len(keys), case.dim**-0.5)
    want_out, want_lse = bifurcated_attention_reference(query, keys, values, masks)
    torch.testing.assert_close(out.double(), want_out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "case, programs, softcap",
    slow_after(8, pairs([*SEGMENTS[:4], *SEGMENTS[7:12], SEGMENTS[-5]], [3, 25], [None, 1.5])),
    ids=str,
)
def test_segments_of_variants(
    case: Segments, programs: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sink counts once, in whatever parts the segments are read; -inf is none."""
    from tatten.ops.cuda import decode_grid as module

    monkeypatch.setattr(module, "multiprocessors", lambda device: programs)
    monkeypatch.setattr(module, "tiles_for", lambda *args, **kwargs: module.Tiles(16, 32, 4, 2))
    query, keys, values, masks = case.inputs()
    sinks = torch.tensor([2.0, NEG_INF, 0.0, -1.0, 3.0])[: case.q_heads]
    variant = {"softcap": softcap, "sinks": sinks}
    got = triton_segments(query, keys, values, masks, [None] * len(keys), case.dim**-0.5, **variant)
    want = bifurcated_attention_reference(query, keys, values, masks, **variant)
    torch.testing.assert_close([x.double() for x in got], [*want], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("q_len", slow_but([4], [1, 4]))
def test_the_op_narrows_segments_to_a_window(q_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of three segments is cut, and all sequences read it; the last one's keys are ahead of some queries."""
    from tatten.ops.cuda import dispatch

    monkeypatch.setattr(dispatch, "on_device_of", lambda x, run, *args: run(*args))
    query, keys, values, masks = Segments(((1, 70, ""), (2, 5, ""), (4, 9, "rows")), q_len=q_len).inputs()
    keys[0][:, :, : 70 - 16 - q_len + 1] = float("nan")
    variant = {"window": 30, "softcap": 1.5, "sinks": torch.tensor([2.0, NEG_INF, 0.0, -1.0])}
    got = bifurcated_kernel(dispatch.attention)(query, keys, values, masks, [None] * 3, **variant)
    want = bifurcated_attention_reference(query, keys, values, masks, **variant)
    torch.testing.assert_close([x.double() for x in got], [*want], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_segments_in_low_precision(dtype: torch.dtype) -> None:
    query, keys, values, _ = SEGMENTS[0].inputs()
    query, keys, values = query.to(dtype), [x.to(dtype) for x in keys], [x.to(dtype) for x in values]
    out, _ = triton_segments(query, keys, values, [None, None], [None, None], 0.25)
    assert out.dtype == dtype
    want, _ = bifurcated_attention_reference(query, keys, values)
    torch.testing.assert_close(out, want.to(dtype), atol=2e-3, rtol=2 * torch.finfo(dtype).eps)


def test_segments_take_blocks_found_before() -> None:
    query, keys, values, masks = Segments(((2, 150, "sequences"), (4, 70, "all")), q_len=2).inputs()
    blocks = [block_list(mask, key.shape[0]) for mask, key in zip(masks, keys, strict=True)]
    given = triton_segments(query, keys, values, masks, blocks, 0.25)
    assert_equal(given, triton_segments(query, keys, values, masks, [None, None], 0.25))


@pytest.mark.parametrize("n_states", [1, 2, 9, 20])
@pytest.mark.parametrize("dim", [16, 24])
def test_merge(n_states: int, dim: int) -> None:
    from tatten.ops.cuda.merge_states import plan_merge_states

    out = torch.randn(n_states, 2, 3, dim)
    lse = torch.randn(n_states, 2, 3) * 10
    lse[:, 0, 0] = float("-inf")
    for i, empty in enumerate((float("-inf"), float("inf"), float("nan"))):
        lse[i % n_states, 1, i] = empty
        out[i % n_states, 1, i] = float("nan")
    got, want = plan_merge_states(out, lse)(out, lse), merge(out, lse)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("many_states", [1, 4096])
@pytest.mark.parametrize("wholes", [2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_combine_of_whole_states(
    dtype: torch.dtype, wholes: int, many_states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of segments, some empty, several to a program or one."""
    from tatten.ops.cuda import combine

    monkeypatch.setattr(combine, "gpu_rates", lambda device: GpuRates(many_states=many_states))
    outs, lses = torch.randn(wholes, 3, 4, 3, 24), torch.randn(wholes, 3, 4, 3) * 5
    for states in ((0, 0), (1, 1), (slice(None), 2)):
        outs[states][..., 0, 0, :], lses[states][..., 0, 0] = 0, float("-inf")
    outs[1, 2, 3, 2] = lses[1, 2, 3, 2] = float("nan")  # of NaN in keys that count
    none = torch.empty(0)
    partials = [combine.Partials(out, lse, none, none) for out, lse in zip(outs, lses, strict=True)]
    plan = combine.plan_combine(torch.empty(3, 4, 3, 16), 24, wholes=[False] * wholes, dtype=dtype)
    got = plan(wholes=partials)
    out, lse = combine_partials(outs, lses)
    assert got.out.dtype == dtype
    assert got.out.is_contiguous()
    assert got.out.isnan().any()
    torch.testing.assert_close((got.out, got.lse), (out.to(dtype), lse), equal_nan=True, rtol=1e-3, atol=1e-3)


def test_lengths_and_sinks_may_be_strided() -> None:
    """A column of a table, and one length for all."""
    inputs = Case(lens=True, sinks=True, kv_len=150, head_dim=16).inputs(poison=False)
    want = lean(inputs | {"scale": 0.25})
    for name in ("kv_lens", "sinks"):
        inputs[name] = torch.stack((inputs[name], inputs[name] + 1), dim=1)[:, 0]
    assert_equal(lean(inputs | {"scale": 0.25}), want)
    one = inputs["kv_lens"][:1].expand(2)
    assert_equal(
        lean(inputs | {"scale": 0.25, "kv_lens": one}),
        lean(inputs | {"scale": 0.25, "kv_lens": one.clone()}),
    )


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_a_window_of_any_size(mask: str) -> None:
    case = Case(q_len=5, kv_len=70, head_dim=16, lens=True, mask=mask, window=(1 << 31) - 1)
    inputs = case.inputs(poison=False)
    assert_state(*lean(inputs | {"scale": 0.25}), inputs | {"scale": 0.25})


def test_masks_with_large_strides() -> None:
    """A head of the mask lies 2 ** 30 elements behind the one before, in memory that is not touched in between."""
    from tatten.ops.cuda.block_mask import plan_block_list

    storage = torch.empty(3 * (1 << 30) + 64, dtype=torch.bool)
    mask = storage.as_strided((1, 4, 1, 64), (1 << 32, 1 << 30, 64, 1))
    mask.copy_(torch.rand(1, 4, 1, 64) > 0.9)
    got, want = plan_block_list(mask, 1)(mask), block_list(mask, 1)
    assert torch.equal(got[0, : 1 + want[0, 0, 0]], want[0, : 1 + want[0, 0, 0]])
