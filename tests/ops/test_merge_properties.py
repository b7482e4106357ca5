"""The algebra of random states: any order and bracketing within a derived bound, rows of finite floors included."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fuzz import settings
from hypothesis import given
from hypothesis import strategies as st
from merge_cases import INF, State, States, assert_merged, counted, draw_states
from op_bounds import assert_within_bound

import tatten
from tatten.ops.distributed.tree_merge import STRATEGIES
from tatten.ops.states import combine_partials, merge

SIZES = (2, 1, 3, 4, 5, 7, 17, 40)


@st.composite
def states(draw: st.DrawFn, sizes: tuple[int, ...] = SIZES, junk: bool = True) -> States:
    return draw_states(lambda options: draw(st.sampled_from(options)), sizes, junk)


def assert_equal(got: State, want: State) -> None:
    """To the bit."""
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@settings(60)
@given(states())
def test_all_at_once(case: States) -> None:
    out, lse = case.make()
    got = tatten.merge_states(out, lse)
    assert_merged(got, (out, lse), merges=1)
    assert_equal(got, merge(out, lse))


@settings(40)
@given(states(sizes=(2,)))
def test_two_commute_to_the_bit(case: States) -> None:
    (a, b), (lse_a, lse_b) = case.make()
    got = tatten.merge_state(a, lse_a, b, lse_b)
    assert_equal(got, tatten.merge_state(b, lse_b, a, lse_a))
    assert_equal(got, tatten.merge_states(torch.stack((a, b)), torch.stack((lse_a, lse_b))))


@settings(100)
@given(states(), st.integers(0, 1 << 30))
def test_any_order_and_bracketing(case: States, seed: int) -> None:
    """Two to four at a time, picked from anywhere, until one is left."""
    out, lse = case.make()
    choose, pool = random.Random(seed), [*zip(out, lse, strict=True)]
    if len(pool) == 1:
        pool = [tatten.merge_states(out, lse)]
    while len(pool) > 1:
        choose.shuffle(pool)
        n = choose.randint(2, min(4, len(pool)))
        taken, pool = pool[:n], pool[n:]
        merged = tatten.merge_state(*taken[0], *taken[1]) if n == 2 else None
        pool.append(merged or tatten.merge_states(*(torch.stack(parts) for parts in zip(*taken, strict=True))))
    assert_merged(pool[0], (out, lse))


@settings(40)
@given(states(sizes=(1,)), st.lists(st.sampled_from([-INF, INF, float("nan")]), min_size=1, max_size=8), st.data())
def test_empty_states_change_no_bit(case: States, marks: list[float], data: st.DataObject) -> None:
    out, lse = replace(case, empty=0.0).make()
    place = data.draw(st.integers(0, len(marks)))
    junk = [torch.full_like(out, float("nan"))] * len(marks)
    empty = [torch.full_like(lse, mark) for mark in marks]
    got = tatten.merge_states(
        torch.cat([*junk[:place], out, *junk[place:]]), torch.cat([*empty[:place], lse, *empty[place:]])
    )
    assert_equal(got, (out[0], lse[0]))
    nothing, lse_of_nothing = tatten.merge_states(torch.cat(junk), torch.cat(empty))
    assert not nothing.any()
    assert (lse_of_nothing == -INF).all()


@settings(60)
@given(states(junk=False), st.booleans())
def test_parts_of_one_op(case: States, undefined: bool) -> None:
    """As `merge_states`, but for NaN, which comes out where a part that is not empty has it, and nowhere else."""
    out, lse = case.make()
    assert_merged(combine_partials(out.unbind(), lse.unbind()), (out, lse))
    if undefined and counted(lse)[0].any():
        row = int(counted(lse)[0].nonzero()[0])
        bad = out.index_put((torch.tensor(0), torch.tensor(row)), torch.tensor(float("nan"), dtype=out.dtype))
        got = combine_partials(bad.unbind(), lse.unbind())[0].isnan()
        assert got[row].all()
        assert got.sum() == case.dim


def _merge_both_ways(out: torch.Tensor, lse: torch.Tensor) -> tuple[State, State]:
    return tatten.merge_states(out, lse), tatten.merge_state(out[0], lse[0], out[1], lse[1])


@pytest.mark.slow
def test_compiled() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(_merge_both_ways, fullgraph=True, dynamic=True)

    @settings(20)
    @given(states(sizes=SIZES[2:]), st.sampled_from([torch.float32, torch.bfloat16]))
    def test(case: States, dtype: torch.dtype) -> None:
        out, lse = replace(case, rows=5, dim=3, dtype=dtype).make()  # sizes of one are compiled apart
        all_of_them, two = compiled(out, lse)
        assert_merged(all_of_them, (out, lse), merges=1)
        assert_merged(two, (out[:2], lse[:2]))

    test()


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_tree_of_one_rank() -> None:
    """One rank gets its own state back by any strategy, with empty states in their one form."""

    @settings(20)
    @given(states(sizes=(1,)), st.sampled_from(STRATEGIES), st.booleans())
    def test(case: States, strategy: str, scatter_heads: bool) -> None:
        out, lse = (x[..., None, :] if x.dim() == 3 else x[..., None] for x in case.make())
        got = tatten.tree_merge(out, lse, dist.group.WORLD, strategy=strategy, scatter_heads=scatter_heads)
        real = counted(lse)
        assert_equal(got, (torch.where(real.unsqueeze(-1), out, 0.0), torch.where(real, lse, -INF)))

    test()


@st.composite
def partitions(draw: st.DrawFn) -> dict[str, Any]:
    one_of: Callable[[list[Any]], Any] = lambda options: draw(st.sampled_from(options))
    return {
        "n": draw(st.integers(1, 40)),
        "kv_len": one_of([1, 7, 64, 129]),
        "dtype": one_of([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
        "bias": one_of([0.0, 1.0, 30.0]),
        "floor": one_of([0.0, -100.0, -1e4]),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(60)
@given(partitions(), st.booleans())
def test_states_of_a_partition_of_keys(case: dict[str, Any], chain: bool) -> None:
    """Whichever keys are in which part, some of which may have none."""
    generator = torch.Generator().manual_seed(case["seed"])
    randn = lambda *shape: torch.randn(*shape, generator=generator).to(case["dtype"])
    kv_len = case["kv_len"]
    query, key, value = randn(2, 4, 2, 8), randn(2, 2, kv_len, 8), randn(2, 2, kv_len, 5)
    mask = case["floor"] + case["bias"] * torch.randn(2, 1, 2, kv_len, generator=generator)
    owner = torch.randint(0, case["n"], (kv_len,), generator=generator)
    parts = [
        tatten.decode_attention(query, key, value, attn_mask=torch.where(owner == i, mask, -INF), return_lse=True)
        for i in range(case["n"])
    ]
    if chain:
        got = parts[0]
        for part in parts[1:]:
            got = tatten.merge_state(*got, *part)
    else:
        got = tatten.merge_states(*(torch.stack(x) for x in zip(*parts, strict=True)))
    inputs = {"query": query, "key": key, "value": value, "attn_mask": mask, "scale": None}
    roundings = case["n"] if chain else 1
    assert_within_bound(*got, inputs, parts=2 + case["n"], roundings=roundings)
