"""Pages that are dealt out to ranks: each attends to its own, by its own lengths, and the states merge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

import tatten
from tatten.ops.reference import decode_attention_reference, latent_attention_reference

H, KV, L, D, RANK, WIDTH, PAGE = 4, 2, 2, 16, 24, 5, 4
LENS = [0, 1, 3, 4, 5, 8, 13, 24, 37, 47, 48]  # of up to 12 pages
ROOM = 48


def places_of(rank: int, ranks: int, interleave: int, n: int) -> Tensor:
    """The tokens among n that a rank holds, in order, one by one."""
    return torch.tensor([t for t in range(n) if t // interleave % ranks == rank], dtype=torch.int64)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("interleave", [1, 2, 3, 16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_local_lens(ranks: int, interleave: int, dtype: torch.dtype) -> None:
    lens = torch.arange(4 * ranks * interleave + 2, dtype=dtype)
    local = [tatten.local_lens(lens, interleave, rank, ranks) for rank in range(ranks)]
    for rank, rank_lens in enumerate(local):
        assert rank_lens.dtype == dtype
        assert rank_lens.tolist() == [len(places_of(rank, ranks, interleave, n)) for n in lens.tolist()]
    assert torch.equal(torch.stack(local).sum(0).to(dtype), lens)


def test_local_lens_reads_no_data() -> None:
    compiled = torch.compile(tatten.local_lens, backend="eager", fullgraph=True, dynamic=True)
    lens = torch.tensor([0, 5, 17, 48], dtype=torch.int32)
    assert torch.equal(compiled(lens, 4, 1, 3), tatten.local_lens(lens, 4, 1, 3))
    assert tatten.local_lens(lens.to("meta"), 4, 1, 3).shape == (4,)


BAD: list[tuple[tuple[Any, ...], type[Exception], str]] = [
    (([3], 4, 0, 2), TypeError, "`kv_lens` must be a Tensor, got list"),
    ((torch.ones(2), 4, 0, 2), TypeError, "`kv_lens` must be int32 or int64, got torch.float32"),
    ((torch.tensor([3]), 0, 0, 2), ValueError, "`interleave` must be at least 1, got 0"),
    ((torch.tensor([3]), 4, 2, 2), ValueError, "`rank` must lie between 0 and 1, as there are 2 ranks, got 2"),
    ((torch.tensor([3]), 2.5, 0, 2), TypeError, "`interleave` must be an int, got 2.5"),
    ((torch.tensor([3]), 4, 0.5, 2), TypeError, "`rank` must be an int, got 0.5"),
    ((torch.tensor([3]), 4, None, 2), TypeError, "`rank` must be an int, got None"),
    ((torch.tensor([3]), "16", 0, 2), TypeError, "`interleave` must be an int, got '16'"),
    ((torch.tensor([3]), 4, -1, 2), ValueError, "`rank` must lie between 0 and 1, as there are 2 ranks, got -1"),
    ((torch.tensor([3]), 4, 0, 0), ValueError, "`ranks` must be at least 1, got 0"),
]


@pytest.mark.parametrize(("given", "error", "says"), BAD)
def test_bad_input(given: tuple[Any, ...], error: type[Exception], says: str) -> None:
    with pytest.raises(error) as raised:
        tatten.local_lens(*given)
    assert str(raised.value) == says


def inputs(op: str) -> dict[str, Tensor]:
    """Keys in order; the same on all ranks. NaN where no length reaches."""
    rng = torch.Generator().manual_seed(5)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    batch = len(LENS)
    beyond = (torch.arange(ROOM) >= torch.tensor(LENS)[:, None])[:, None, :, None]
    if op == "decode_attention":
        keys = {name: randn(batch, KV, ROOM, D) for name in ("key", "value")}
        queries = {"query": randn(batch, H, L, D)}
    else:
        keys = {"latent": randn(batch, 1, ROOM, RANK), "key_rope": randn(batch, 1, ROOM, WIDTH)}
        queries = {"query": randn(batch, H, L, RANK), "query_rope": randn(batch, H, L, WIDTH)}
    return queries | {name: x.masked_fill(beyond, torch.nan) for name, x in keys.items()}


def in_local_pages(keys: Tensor, places: Tensor, table: Tensor, n_pages: int) -> Tensor:
    """A rank's pool: the keys at `places`, in order, on the pages that the table names. The rest is NaN."""
    pool = keys.new_full((n_pages, PAGE, keys.shape[1], keys.shape[3]), torch.nan)
    for i, place in enumerate(places.tolist()):
        pool[table[:, i // PAGE].long(), i % PAGE] = keys[:, :, place]
    return pool


def merged(op: str, interleave: int, variant: str) -> float:
    given, lens = inputs(op), torch.tensor(LENS, dtype=torch.int32)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    places = places_of(rank, ranks, interleave, ROOM)
    columns = -(-len(places) // PAGE)
    n_pages = len(LENS) * columns + 2
    rng = torch.Generator().manual_seed(rank)
    table = torch.randperm(n_pages, generator=rng)[: len(LENS) * columns].view(-1, columns).int()
    local = {name: in_local_pages(x, places, table, n_pages) for name, x in given.items() if "query" not in name}
    rank_lens = tatten.local_lens(lens, interleave, rank, ranks)
    for b, n in enumerate(rank_lens.tolist()):
        table[b, -(-n // PAGE) :] = -1
    assert (rank_lens == 0).sum() > (rank > 0)

    options: dict[str, Any] = {} if op == "decode_attention" else {"scale": 0.2}
    own: dict[str, Any] = {}
    if variant == "mask":  # among others a window, as one over local keys would count other ones
        keys = torch.arange(columns * PAGE)
        positions = (keys // interleave * ranks + rank) * interleave + keys % interleave  # as docs/paged.md has it
        assert torch.equal(positions[: len(places)], places)
        mask = torch.rand(len(LENS), H, L, ROOM, generator=torch.Generator().manual_seed(3)) < 0.8
        mask &= torch.arange(ROOM) > lens[:, None, None, None] - 20
        options["attn_mask"], own["attn_mask"] = mask, mask[..., positions.clamp(max=ROOM - 1)]
    if variant == "sinks":
        options["sinks"] = torch.randn(H, generator=rng.manual_seed(1), dtype=torch.float64)
        own["sinks"] = options["sinks"] if rank == 0 else None
    invariant = variant == "batch_invariant"
    queries = {name: x for name, x in given.items() if "query" in name}
    attend = getattr(tatten, op)
    state = attend(
        **queries, **local, kv_lens=rank_lens, block_table=table, batch_invariant=invariant, return_lse=True,
        **options | own,
    )  # fmt: skip
    assert (state[1][:2, :, 0] == -torch.inf).all() == (rank > 0)  # it has none of their keys
    out, lse = tatten.tree_merge(*state, dist.group.WORLD, batch_invariant=invariant)
    reference = decode_attention_reference if op == "decode_attention" else latent_attention_reference
    want, want_lse = reference(**given, kv_lens=lens, **options)
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    return max((out - want).abs().max().item(), (lse - want_lse).nan_to_num().abs().max().item())


@pytest.mark.parametrize("variant", ["plain", "mask", "sinks", "batch_invariant"])
@pytest.mark.parametrize("interleave", [PAGE, 1], ids=["pages", "tokens"])
@pytest.mark.parametrize("op", ["decode_attention", "latent_attention"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_attends_to_its_own_pages(ranks: int, op: str, interleave: int, variant: str) -> None:
    assert max(run_ranks(ranks, merged, op, interleave, variant)) < 1e-12
