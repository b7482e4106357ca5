"""Ranks that are given different prompts, forks or selections: all of them say so, and which ones they are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, try_ranks
from torch.distributed.device_mesh import init_device_mesh

from tatten.caches.agreement import fingerprint
from tatten.caches.selection import Selection
from tatten.caches.shared_prefix import SharedPrefixCache

KV_HEADS, HEAD_DIM = 2, 8


def disagree(what: str, names: tuple[str, ...] = ("kv",)) -> str:
    """Return the error on a rank when the last one does something else."""
    rank, n = dist.get_rank(), dist.get_world_size()
    odd = rank == n - 1
    shape = (n,) if len(names) == 1 else (2, n // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    lens = torch.tensor([3, 2 if what == "lengths" and odd else 3])
    cache = SharedPrefixCache(1, mesh=mesh, sequence=names, prompt_lens=lens if what == "lengths" else None)
    torch.manual_seed(0)
    key = torch.randn(2, KV_HEADS, 5, HEAD_DIM)
    if what == "token" and odd:
        key[1, :, 3] = torch.randn(KV_HEADS, HEAD_DIM)
    if what == "length" and odd:
        key = key[:, :, :4]
    if what == "rounding":
        key = key * (1 + 0.003 * rank)
    try:
        cache.update(0, key, key)
        fork = cache.fork(3 if what == "n" and odd else 2, 4)
        if what == "indices":
            fork.select([0, 1, 2, 2 if odd else 3, 1])
        if what == "count":
            fork.select(torch.arange(3 if odd else 4))
        if what == "bad indices":
            fork.select([0, 4 if odd else 3])
        if what == "other call":
            fork.fork(2, 4) if odd else fork.select([0, 1])
    except (ValueError, IndexError) as error:
        return str(error)
    return "fine"


def check_deferred(names: tuple[str, ...]) -> None:
    """Selections that the host does not know are compared when the cache reads the host anyway; memory stays."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=names)
    cache = SharedPrefixCache(1, mesh=mesh)
    key = torch.ones(2, KV_HEADS, 5, HEAD_DIM)
    cache.update(0, key, key)
    for odd_step in range(3):
        fork = cache.fork(2, 4)
        for step in range(4):
            picked = [1, 0, 3, 2 if dist.get_rank() or step != odd_step else 0]
            selection = Selection(picked, 4)
            selection.on(torch.device("cpu"))
            selection.host_indices = None
            fork.agreement.check_selection(selection, 4)
        with pytest.raises(ValueError, match=r"\[1, 0, 3, 0\] on ranks \[0\] and \[1, 0, 3, 2\] on ranks \[1\]"):
            fork.update(0, key.repeat(2, 1, 1, 1)[:, :, :1], key.repeat(2, 1, 1, 1)[:, :, :1])
        assert int(fork.layers[0].length) == 0


def test_selections_on_the_device() -> None:
    run_ranks(2, check_deferred, ("kv",))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("names", [("kv",), ("node", "gpu")], ids=str)
@pytest.mark.parametrize(
    "what, messages",
    [
        ("rounding", ["fine"]),
        ("token", ["others on ranks [{last}] from token 3 of prompt 1 on"]),
        (
            "length",
            ["shape (2, 2, 5, 8) from token 0 on", "on ranks {most}", "shape (2, 2, 4, 8)", "on ranks [{last}]"],
        ),
        ("lengths", ["`key`, `prompt_mask` and `prompt_lens` must be the same", "on ranks [{last}]"]),
        ("n", ["`n` and `capacity` must be the same", "fork(2, 4) of 2", "fork(3, 4) of 2", "ranks [{last}]"]),
        ("indices", ["`indices` must be the same", "[0, 1, 2, 3, ...] (5 indices", "[0, 1, 2, 2, ...] (5 indices"]),
        ("count", ["[0, 1, 2, 3] on ranks {most} and [0, 1, 2] on ranks [{last}]"]),
        ("bad indices", ["`indices` must be"]),
        ("other call", ["calls must be the same", "[0, 1] on ranks {most} and fork(2, 4)"]),
    ],
)
def test_ranks_that_disagree(what: str, messages: list[str], names: tuple[str, ...]) -> None:
    """All ranks say the same, and in time, wherever the one is that differs."""
    n = 2 * len(names)
    results = try_ranks(n, disagree, what, names, timeout=60.0)
    if what != "bad indices":
        assert len(set(results)) == 1
    for message in messages:
        for result in results:
            assert message.format(last=n - 1, most=list(range(n - 1))) in str(result)


def test_fingerprints() -> None:
    """Order, values and length count; the dtype of integers does not."""
    values = [[0], [0, 0], [1], [0, 1], [1, 0], [2, 0], [1, 1], [0, 0, 1], [255], [2**40]]
    assert len({int(fingerprint(torch.tensor(x))) for x in values}) == len(values)
    assert torch.equal(fingerprint(torch.tensor([3, 4])), fingerprint(torch.tensor([3, 4], dtype=torch.int32)))
    masks = torch.eye(21, dtype=torch.bool).view(21, 3, 7)
    assert len({int(fingerprint(mask)) for mask in masks}) == 21
