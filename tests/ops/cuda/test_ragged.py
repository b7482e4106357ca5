"""The kernels for mixed batches, in Triton's interpreter: within a derived bound of float64, and in equal shares."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from fuzz import settings
from hypothesis import given
from hypothesis import strategies as st
from mixed_calls import MixedBatch, draw_mixed_batch
from op_bounds import assert_within_bound
from poison import fresh_memory_is_poison
from slow import slow_but

from tatten.ops.mixed_batch import MixedCall

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs where no GPU is")


@st.composite
def batches(draw: st.DrawFn) -> MixedBatch:
    return draw_mixed_batch(lambda options: draw(st.sampled_from(options)), tiny=True)


def small_tiles(few_n: int = 16, many_m: int = 32, many_n: int = 16) -> Any:
    from tatten.ops.cuda.heuristics import Tiles

    return Tiles(16, few_n, 4, 2), Tiles(many_m, many_n, 4, 2)


SIZES = st.sampled_from([None, (16, 32, 16), (64, 64, 16), (16, 128, 64)])


@pytest.mark.parametrize("n", slow_but([10], [10, 200]))
def test_random_calls(n: int) -> None:
    @settings(n)
    @given(batches(), st.integers(1, 9), SIZES, st.booleans())
    def test(drawn: MixedBatch, programs: int, sizes: tuple[int, int, int] | None, invariant: bool) -> None:
        from tatten.ops.cuda import ragged

        inputs, dense = drawn.inputs()
        call = MixedCall(**inputs, batch_invariant=invariant)
        tiles = None if sizes is None else small_tiles(*sizes)
        with fresh_memory_is_poison(), pytest.MonkeyPatch.context() as patch:
            if tiles is not None:
                patch.setattr(ragged, "LEAST_CHUNK", tiles[0].block_n)  # chunks of a tile, so that there are many
            out, lse = ragged.plan_ragged(call, tiles=tiles, programs=programs)(call)
        drawn.check(out, lse, dense, parts=12)

    test()


@pytest.mark.parametrize("change", [{}, {"window": 5, "dtype": torch.bfloat16}, {"dtype": torch.float64}])
def test_a_plan_checks_the_call_first(change: dict[str, Any]) -> None:
    from tatten.ops.cuda.mixed import _plan

    drawn = MixedBatch(((1, 70), (40, 30)), padding=3, **change)
    inputs, dense = drawn.inputs()
    call = MixedCall(**inputs)
    out, lse = _plan(*call)(call)
    assert_within_bound(
        out[: drawn.used, :, None].to(drawn.dtype).contiguous(), lse[: drawn.used, :, None].contiguous(), dense, 8
    )
    with pytest.raises(ValueError, match="`cu_seqlens_q` must have shape"):
        _plan(*call._replace(cu_seqlens_q=call.cu_seqlens_q[1:]))
    wide = torch.randn(3, 4, 2, 600), torch.randn(3, 4, 600)
    with pytest.raises(NotImplementedError, match=r"head_dim <= 256 in torch\.float32 on CUDA, got 600"):
        _plan(*call._replace(query=wide[1], key=wide[0], value=wide[0]))


def list_of(call: MixedCall, tiles: Any) -> tuple[Any, list[list[list[int]]], list[list[int]]]:
    """The plan, and the blocks and ends that the device lists for each class."""
    from tatten.ops.cuda.allocation import allocate
    from tatten.ops.cuda.ragged import plan_ragged

    plan = plan_ragged(call, tiles=tiles)
    with fresh_memory_is_poison():
        _, _, scratch, blocks, ends, _, _ = allocate(call.query, *plan.writes)
        plan.list_blocks(call.cu_seqlens_q, call.kv_lens, scratch, blocks, ends)
    few = plan.list_blocks.arguments["few"]
    return plan, [x.tolist() for x in blocks.tensor_split((few,))], [x.tolist() for x in ends.tensor_split((few,))]


@pytest.mark.parametrize("window", [None, 20])
def test_the_list_has_each_row_once_and_the_tiles_that_it_sees(window: int | None) -> None:
    sequences = ((1, 70), (40, 30), (0, 9), (8, -3), (9, 100), (1, -1))
    drawn = MixedBatch(sequences, window=window, padding=20)  # 2 query heads for each kv head
    call = MixedCall(**drawn.inputs()[0])
    _, blocks, ends = list_of(call, small_tiles(16, 32, 16))
    starts = [0, *torch.tensor([q for q, _ in sequences]).cumsum(0).tolist()]
    for is_many, (own, own_ends, block_m) in enumerate(zip(blocks, ends, (16, 32), strict=True)):
        want = []
        for b, (q_len, start, length) in enumerate(
            zip([*(q for q, _ in sequences), 20], starts, [*drawn.lengths, 0], strict=True)
        ):
            if (2 * q_len > 16) != is_many:
                continue
            for row in range(0, 2 * q_len, block_m):
                first, last = (length - q_len + r // 2 for r in (row, min(row + block_m, 2 * q_len) - 1))
                skipped = 0 if window is None else max(0, first - window + 1) // 16
                tiles = max(1, -(-max(0, last + 1) // 16) - skipped)
                want.append([b, row, start, q_len, length, skipped, tiles])
        assert [block[:-1] for block in own[: len(want)]] == want
        assert own[0][-1] == 0  # programs take equal parts
        each = torch.tensor([2 * tiles for *_, tiles in want]).cumsum(0).tolist()
        assert own_ends == each + [each[-1]] * (len(own_ends) - len(each))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("tokens", [1, 2, 50])
@pytest.mark.parametrize("heads", [(4, 2), (20, 1), (1, 1)])
def test_there_is_room_for_all_lengths_of_a_shape(tokens: int, heads: tuple[int, int]) -> None:
    """One plan, and with it one captured graph, serves any starts."""
    from tatten.ops.cuda.ragged import plan_ragged

    generator = torch.Generator().manual_seed(tokens)
    plan = None
    for i in range(6):
        cuts = torch.randint(0, tokens + 1, (3,), generator=generator).sort().values.tolist()
        q_lens = [y - x for x, y in zip([0, *cuts], cuts, strict=False)] if i else [tokens, 0, 0]
        lens = torch.randint(0, 65, (3,), generator=generator).tolist()
        drawn = MixedBatch(
            tuple((q, n - q) for q, n in zip(q_lens, lens, strict=True)), heads, page=64, padding=tokens - sum(q_lens)
        )
        inputs, dense = drawn.inputs()
        inputs["block_table"] = torch.nn.functional.pad(inputs["block_table"], (0, 1 - inputs["block_table"].shape[1]))
        call = MixedCall(**inputs)
        plan = plan or plan_ragged(call, tiles=small_tiles(), programs=5)
        with fresh_memory_is_poison():
            out, lse = plan(call)
        drawn.check(out, lse, dense, parts=8)


@pytest.mark.parametrize(
    ("given_starts", "read"),
    [([7, 3, 6], [0, 3, 6]), ([0, 5, 3], [0, 5, 5]), ([-9, -3, 40], [0, 0, 8]), ([0, 2**31 - 1, 0], [0, 8, 8])],
)
def test_starts_that_do_not_add_up(given_starts: list[int], read: list[int]) -> None:
    from tatten.ops.cuda.ragged import plan_ragged
    from tatten.ops.reference import mixed_reference

    call = MixedCall(**MixedBatch(((2, 20), (6, 10))).inputs()[0])
    finite = {name: getattr(call, name).nan_to_num(0.5) for name in ("key", "value")}
    call = call._replace(**finite, kv_lens=torch.tensor([1 << 30, -5]))
    call, want = (call._replace(cu_seqlens_q=torch.tensor(x).int()) for x in (given_starts, read))
    with fresh_memory_is_poison():
        state = plan_ragged(call, tiles=small_tiles())(call)
    for x, y in zip(state, mixed_reference(want), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 20])
def test_bits_of_a_sequence_do_not_depend_on_the_others(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from tatten.ops.cuda import ragged

    monkeypatch.setattr(ragged, "LEAST_CHUNK", 32)
    inputs, _ = MixedBatch(((1, 100), (40, 30), (5, 70)), window=window, sinks="random").inputs()
    call = MixedCall(**inputs, batch_invariant=True)
    together = ragged.plan_ragged(call, tiles=small_tiles(), programs=3)(call)
    starts = call.cu_seqlens_q.tolist()
    for b, (start, stop) in enumerate(itertools.pairwise(starts)):
        own = call._replace(
            query=call.query[start:stop],
            block_table=call.block_table[b : b + 1],
            kv_lens=call.kv_lens[b : b + 1],
            cu_seqlens_q=torch.tensor([0, stop - start]).int(),
        )
        alone = ragged.plan_ragged(own, tiles=small_tiles(), programs=7)(own)
        assert all(torch.equal(x[start:stop], y) for x, y in zip(together, alone, strict=True))


def test_tiles_do_not_depend_on_the_batch_where_bits_must_not() -> None:
    from tatten.ops.cuda.ragged import ragged_tiles

    def chosen(sequences: int, q_len: int) -> Any:
        drawn = MixedBatch(((q_len, 30),) * sequences, dtype=torch.bfloat16)
        return ragged_tiles(MixedCall(**drawn.inputs()[0], batch_invariant=True))

    assert chosen(1, 1) == chosen(3, 70) == chosen(1, 300)
