"""Segments of which each sequence reads any row: equal to float64 attention over a copy of its rows for each."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import pytest
import torch
from attention_cases import NEG_INF, assert_state
from devices import DEVICES
from poison import fresh_memory_is_poison
from slow import slow_after
from torch import Tensor
from torch.library import opcheck

import tatten
from tatten.ops.call import KeyValue
from tatten.ops.kernel_signatures import bifurcated_call
from tatten.ops.masks import block_list, mask_of_rows
from tatten.ops.row_groups import group_size, most_groups, row_groups_reference, rows_of

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

DRAWS = {
    "aligned": lambda batch, rows: torch.arange(batch) * rows // batch,
    "random": lambda batch, rows: torch.randint(rows, (batch,)),
    "skewed": lambda batch, rows: (torch.rand(batch) ** 4 * rows).long(),
    "all one": lambda batch, rows: torch.full((batch,), rows - 1),
    "each its own": lambda batch, rows: torch.randperm(max(batch, rows))[:batch] % rows,
}


@dataclass(frozen=True)
class Ragged:
    """Segments as `(rows stored, length, draw)`; a draw of None is aligned blocks."""

    segments: tuple[tuple[int, int, str | None], ...]
    batch: int = 6
    q_heads: int = 4
    kv_heads: int = 2
    q_len: int = 1
    head_dim: int = 32
    value_dim: int | None = None
    dtype: torch.dtype = torch.float32
    mask: str = "none"
    seed: int = 0

    def __str__(self) -> str:
        segments = ",".join(
            f"{rows}x{length}{'' if draw is None else ' ' + draw}" for rows, length, draw in self.segments
        )
        heads = f"H{self.q_heads}x{self.kv_heads}-L{self.q_len}-D{self.head_dim}x{self.value_dim or self.head_dim}"
        return f"B{self.batch}-{segments}-{heads}-{str(self.dtype)[6:]}-{self.mask}-{self.seed}"

    def inputs(self, device: str = "cpu") -> dict[str, list]:
        """Query, keys, values, masks and rows; rows that nothing reads and keys that masks leave out are NaN."""
        torch.manual_seed(self.seed)
        query = torch.randn(self.batch, self.q_heads, self.q_len, self.head_dim, dtype=self.dtype)
        given: dict[str, list] = {"keys": [], "values": [], "attn_masks": [], "rows": []}
        for stored, length, draw in self.segments:
            rows = None if draw is None else DRAWS[draw](self.batch, stored)
            read = rows if rows is not None else torch.arange(self.batch) * stored // self.batch
            mask = self.make_mask(stored, length)
            used = torch.zeros(stored, length, dtype=torch.bool)
            for b, row in enumerate(read.tolist()):
                own = torch.ones(1, 1, length, dtype=torch.bool)
                if mask is not None:
                    at = 0 if mask.shape[0] == 1 else b if mask.shape[0] == self.batch else row
                    own = mask[at] if mask.dtype == torch.bool else mask[at] != NEG_INF
                used[row] |= own.flatten(0, 1).any(0)
            inside = (used.cumsum(1) > 0) & (used.flip(1).cumsum(1).flip(1) > 0)
            for name, dim in (("keys", self.head_dim), ("values", self.value_dim or self.head_dim)):
                x = torch.randn(stored, self.kv_heads, length, dim, dtype=self.dtype)
                given[name].append(x.masked_fill(~inside[:, None, :, None], float("nan")).to(device))
            given["attn_masks"].append(None if mask is None else mask.to(device))
            given["rows"].append(None if rows is None else rows.to(device, torch.int32))
        return {"query": query.to(device), **given}

    def make_mask(self, stored: int, length: int) -> Tensor | None:
        match self.mask:
            case "none":
                return None
            case "one":
                return (torch.arange(length) < length - 2)[None, None, None]
            case "stored":
                return (torch.arange(length) >= torch.arange(stored)[:, None])[:, None, None]
            case "sequences":  # the first has nothing at all
                return (torch.arange(length) < torch.arange(self.batch)[:, None] * 3)[:, None, None]
            case "holes":
                return torch.rand(self.batch, self.q_heads, self.q_len, length) > 0.6
            case "additive":
                noise = torch.randn(self.batch, 1, self.q_len, length)
                return torch.where(noise > -1, noise, NEG_INF)
        raise ValueError(self.mask)


def expanded(given: dict) -> dict:
    """The same question with a copy of everything for each sequence: inputs of decode attention."""
    batch, q_heads, q_len, _ = given["query"].shape
    keys, values, biases = [], [], []
    for key, value, mask, rows in zip(given["keys"], given["values"], given["attn_masks"], given["rows"], strict=True):
        rows = torch.arange(batch, device=key.device) * key.shape[0] // batch if rows is None else rows.long()
        keys.append(key[rows])
        values.append(value[rows])
        bias = torch.zeros(1, 1, 1, 1, device=key.device)
        if mask is not None:
            bias = torch.where(mask, 0.0, NEG_INF) if mask.dtype == torch.bool else mask
            bias = bias if bias.shape[0] in (1, batch) else bias[rows]
        biases.append(bias.expand(batch, q_heads, q_len, key.shape[2]))
    attn_mask = torch.cat(biases, dim=3)
    return {
        "query": given["query"],
        "key": torch.cat(keys, 2),
        "value": torch.cat(values, 2),
        "attn_mask": attn_mask,
        "scale": None,
    }


CASES = [
    *(Ragged(((3, 33, draw), (6, 5, None))) for draw in DRAWS),
    Ragged(((4, 33, "random"),), q_len=3),
    Ragged(((9, 20, "each its own"), (2, 17, "skewed"), (6, 5, None)), seed=1),
    Ragged(((1, 40, "all one"), (3, 9, "random"), (3, 7, None), (6, 3, None)), q_heads=6, kv_heads=3),
    Ragged(((3, 0, "random"), (6, 5, None))),
    Ragged(((5, 70, "random"),), batch=7, q_heads=7, kv_heads=1, head_dim=24, value_dim=40, q_len=2),
    Ragged(((2, 30, "skewed"), (40, 4, None)), batch=40, seed=2),
    Ragged(((3, 33, "random"), (4, 9, None)), batch=4, dtype=torch.bfloat16),
    Ragged(((3, 33, "random"), (4, 9, None)), batch=4, dtype=torch.float64),
    *(
        Ragged(((3, 70, draw), (6, 5, None)), mask=mask, q_len=n)
        for mask in ("one", "stored", "sequences", "holes", "additive")
        for draw, n in (("random", 1), ("skewed", 3))
    ),
    Ragged(((6, 70, "random"), (6, 70, "each its own")), mask="sequences"),
    Ragged(((6, 130, "random"),), mask="additive"),
    *(Ragged(((3, 70, "all one"), (1, 5, None)), batch=1, mask=mask) for mask in ("one", "additive", "stored")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_a_copy_for_each_sequence(case: Ragged, device: str) -> None:
    given = case.inputs(device)
    out, lse = tatten.bifurcated_attention(**given, return_lse=True)
    assert out.is_contiguous()
    assert_state(out, lse, expanded(given))


@pytest.mark.parametrize("device", DEVICES)
def test_aligned_rows_give_what_blocks_give(device: str) -> None:
    given = Ragged(((3, 70, "aligned"), (6, 9, None)), mask="sequences").inputs(device)
    blocks = {**given, "rows": [None, None]}
    got, want = (tatten.bifurcated_attention(**x) for x in (given, blocks))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", ["one", "stored", "sequences", "holes", "additive"])
@pytest.mark.parametrize("batch", [6, 1])
def test_a_block_mask_found_before(batch: int, mask: str, device: str) -> None:
    given = Ragged(((3, 140, "random"), (batch, 5, None)), batch=batch, mask=mask).inputs(device)
    found = [
        tatten.block_mask(m, kv_batch=k.shape[0], rows=rows)
        for m, k, rows in zip(given["attn_masks"], given["keys"], given["rows"], strict=True)
    ]
    got, want = tatten.bifurcated_attention(**given, block_masks=found), tatten.bifurcated_attention(**given)
    assert torch.equal(got, want)


@pytest.mark.drawn(1)
@pytest.mark.skipif(not INTERPRETED, reason="runs where no GPU is")
@pytest.mark.parametrize(
    "case",
    slow_after(
        4,
        [
            Ragged(((3, 70, "random"), (6, 9, None)), head_dim=16, batch=6),
            Ragged(((2, 70, "skewed"), (9, 9, None)), head_dim=16, batch=9, mask="sequences"),
            Ragged(((3, 130, "random"), (4, 20, "each its own")), head_dim=16, batch=4, mask="additive"),
            Ragged(((3, 70, "skewed"),), head_dim=16, batch=7, q_len=2, mask="one"),
            Ragged(((4, 70, "random"), (5, 9, None)), head_dim=16, batch=5, mask="stored"),
            Ragged(((1, 70, "all one"), (9, 9, None)), head_dim=16, batch=9, mask="holes"),
            Ragged(((1, 70, "all one"), (40, 3, None)), head_dim=16, batch=40),
            Ragged(((5, 40, "random"), (2, 20, "random"), (6, 5, None)), head_dim=16, value_dim=24, mask="sequences"),
            Ragged(((3, 0, "random"), (4, 9, None)), head_dim=16, batch=4),
            Ragged(((3, 70, "each its own"),), head_dim=16, batch=1),
            Ragged(((3, 70, "all one"),), head_dim=16, batch=1, mask="stored"),
        ],
    ),
    ids=str,
)
def test_kernels(case: Ragged) -> None:
    from tatten.ops.cuda.segments import plan_segments

    query, keys, values, masks, rows = case.inputs().values()
    with fresh_memory_is_poison():
        groups, lists = [], []
        for key, mask, own in zip(keys, masks, rows, strict=True):
            queries = query.shape[1] // key.shape[1] * case.q_len
            groups.append(None if own is None else row_groups_by_kernel(own, key.shape[0], queries))
            if mask is not None and own is not None and mask.shape[0] == case.batch:
                mask = mask_of_rows(mask, key.shape[0], own)
            lists.append(None if mask is None else block_list(mask, key.shape[0]))
        call = bifurcated_call(query, keys, values, masks, lists, row_groups=groups)
        out, lse = plan_segments(call)(call)
    assert_state(out, lse, expanded(case.inputs()))


def row_groups_by_kernel(rows: Tensor, kv_batch: int, queries: int) -> Tensor:
    from tatten.ops.cuda.row_groups import plan_row_groups

    return plan_row_groups(rows, kv_batch, queries)(rows)


@pytest.mark.parametrize("size", [1, 2, 5, 64])
@pytest.mark.parametrize("draw", DRAWS)
def test_groups_hold_each_sequence_once_beside_others_of_its_row(draw: str, size: int) -> None:
    for batch, stored in ((1, 1), (7, 3), (16, 16), (5, 9), (130, 4)):
        rows = DRAWS[draw](batch, stored)
        kv_rows, starts, order, places = row_groups_reference(rows, stored, size).tolist()
        n_groups = kv_rows[batch]
        assert 1 <= n_groups <= most_groups(batch, stored, size)
        seen = []
        for group in range(n_groups):
            members = order[starts[group] : starts[group + 1]]
            assert 1 <= len(members) <= size
            assert all(rows[b] == kv_rows[group] for b in members)
            assert [places[b] for b in members] == [group * size + i for i in range(len(members))]
            seen += members
        assert sorted(seen) == list(range(batch))
        full = sum(starts[g + 1] - starts[g] == size for g in range(n_groups))
        assert n_groups - full <= len(set(rows.tolist()))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch, stored", [(1, 1), (7, 3), (16, 16), (15, 4), (64, 5), (100, 7), (128, 1)])
def test_the_kernel_makes_the_same_groups(batch: int, stored: int, device: str) -> None:
    if device == "cpu" and not INTERPRETED:
        pytest.skip("runs in the interpreter where no GPU is")
    for draw in DRAWS.values():
        rows = draw(batch, stored).int()
        with fresh_memory_is_poison():
            got = row_groups_by_kernel(rows.to(device), stored, 4)
        assert torch.equal(got.cpu(), row_groups_reference(rows, stored, group_size(batch, stored, 4)))


def test_the_kernel_clamps_rows() -> None:
    if not INTERPRETED:
        pytest.skip("runs where no GPU is")
    rows = torch.tensor([-1, 7, 2, 3], dtype=torch.int64)
    assert torch.equal(row_groups_by_kernel(rows, 3, 4), row_groups_reference(rows.clamp(0, 2), 3, 4))


def test_rows_can_be_read_back() -> None:
    query, key = torch.randn(20, 8, 2, 16), torch.randn(5, 2, 9, 16)
    rows = torch.randint(5, (20,))
    assert torch.equal(rows_of(query, KeyValue(key, key, row_groups=torch.ops.tatten.row_groups(rows, 5, 8))), rows)


def test_opcheck() -> None:
    given = Ragged(((3, 33, "random"), (6, 5, None))).inputs()
    rows = given["rows"][0]
    opcheck(torch.ops.tatten.row_groups.default, (rows, 3, 2))
    groups = [torch.ops.tatten.row_groups(rows, 3, 2), None]
    none = [None, None]
    args = given["query"], given["keys"], given["values"], none, none, None, groups
    opcheck(torch.ops.tatten.bifurcated_attention.default, args)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "rows, error, message",
    [
        ([torch.tensor([0.0] * 6), None], TypeError, r"`rows\[0\]` must be int32 or int64, got torch.float32"),
        ([torch.tensor([True] * 6), None], TypeError, r"`rows\[0\]` must be int32 or int64, got torch.bool"),
        ([torch.tensor([0] * 5), None], ValueError, r"`rows\[0\]` must have shape \[6\].* got \(5,\)"),
        ([torch.tensor([[0] * 6]), None], ValueError, r"`rows\[0\]` must have shape \[6\].* got \(1, 6\)"),
        ([None], ValueError, "`rows` must have one entry for each of the 2 `keys`, got 1"),
        (torch.tensor([0] * 6), TypeError, "`rows` must be a sequence of Tensors, got Tensor"),
        ([[0] * 6, None], TypeError, r"`rows\[0\]` must be a Tensor, got list"),
    ],
)
def test_bad_rows(rows: object, error: type[Exception], message: str, device: str) -> None:
    given = Ragged(((3, 33, None), (6, 5, None))).inputs(device)
    if isinstance(rows, list):
        rows = [x.to(device) if isinstance(x, Tensor) else x for x in rows]
    with pytest.raises(error, match=message):
        tatten.bifurcated_attention(**{**given, "rows": rows})


@pytest.mark.parametrize(
    "query, key, message",
    [
        ((6, 2, 1, 16), (3, 4, 8, 16), r"`keys\[1\]` must have a number of heads that divides `query`'s 2, got 4"),
        ((6, 2, 0, 16), (3, 2, 8, 16), r"`query` must have no dimension of size 0, got shape \(6, 2, 0, 16\)"),
        ((6, 2, 1, 16), (0, 2, 8, 16), r"`keys\[1\]` must be .* a batch of at least 1, got shape \(0, 2, 8, 16\)"),
        ((6, 2, 1, 16), (2, 8, 16), r"`keys\[1\]` must be \[batch, heads, .* got shape \(2, 8, 16\)"),
    ],
)
def test_rows_of_bad_keys(query: tuple[int, ...], key: tuple[int, ...], message: str) -> None:
    keys = [torch.randn(6, 1, 8, 16), torch.randn(key)]
    with pytest.raises(ValueError, match=message):
        tatten.bifurcated_attention(torch.randn(query), keys, keys, rows=[None, torch.zeros(6, dtype=torch.int64)])


@pytest.mark.parametrize("rows, seen", [([0, 1, 2, 3, 0, 0], "0 to 3"), ([0, 1, -1, 0, 0, 0], "-1 to 1")])
def test_rows_out_of_range_on_a_cpu(rows: list[int], seen: str) -> None:
    given = Ragged(((3, 33, None), (6, 5, None))).inputs()
    with pytest.raises(ValueError, match=f"`rows` must lie between 0 and 2, as 3 rows are stored, got {seen}"):
        tatten.bifurcated_attention(**{**given, "rows": [torch.tensor(rows), None]})


def test_blocks_that_do_not_divide_the_batch_name_the_way_out() -> None:
    given = Ragged(((3, 33, None), (6, 5, None))).inputs()
    with pytest.raises(
        ValueError, match=r"`keys\[0\]` must have a batch that divides `query`'s 5, got 3.* `rows\[0\]`"
    ):
        tatten.bifurcated_attention(**{**given, "query": given["query"][:5]})


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["none", "sequences", "additive"])
@pytest.mark.parametrize("stored, batch", [(8, 128), (5, 100), (40, 64)])
def test_one_cuda_graph_over_changing_rows(stored: int, batch: int, mask: str) -> None:
    """Wide groups take the prefix kernel, and small ones the decode kernel."""
    case = Ragged(
        ((stored, 700, "random"), (batch, 40, None)),
        batch=batch,
        q_heads=8,
        head_dim=64,
        dtype=torch.bfloat16,
        mask=mask,
    )
    given = case.inputs("cuda")
    given["keys"], given["values"] = ([x.nan_to_num(0.5) for x in given[name]] for name in ("keys", "values"))
    rows = given["rows"][0]
    tatten.bifurcated_attention(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = tatten.bifurcated_attention(**given, return_lse=True)
    for seed in range(8):
        torch.manual_seed(seed)
        rows.copy_(DRAWS[list(DRAWS)[seed % len(DRAWS)]](batch, stored))
        graph.replay()
        assert_state(out, lse, expanded(given))


def random_tree(seed: int) -> Ragged:
    """One to five levels whose groups have 1 to 64 sequences, in any order; what is last may be each sequence's own."""
    rng = random.Random(seed)
    batch = rng.choice((1, 2, 7, 24, 64))
    segments: list[tuple[int, int, str | None]] = []
    for _ in range(rng.randint(1, 5)):
        stored = rng.randint(1, max(1, batch))
        draws = [*DRAWS, None] if batch % stored == 0 else [*DRAWS]
        segments.append((stored, rng.choice((0, 1, 5, 31, 64, 90)), rng.choice(draws)))
    kv_heads = rng.choice((1, 2, 3))
    return Ragged(
        tuple(segments),
        batch=batch,
        q_heads=kv_heads * rng.choice((1, 2, 5)),
        kv_heads=kv_heads,
        q_len=rng.choice((1, 1, 3)),
        head_dim=rng.choice((16, 24)),
        value_dim=rng.choice((None, 40)),
        dtype=rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float64)),
        mask=rng.choice(("none", "none", "one", "stored", "sequences", "holes", "additive")),
        seed=seed,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", slow_after(25, range(200)))
def test_random_trees(seed: int, device: str) -> None:
    case = random_tree(seed)
    given = case.inputs(device)
    assert_state(*tatten.bifurcated_attention(**given, return_lse=True), expanded(given))
