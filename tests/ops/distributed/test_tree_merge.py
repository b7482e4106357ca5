"""States of several ranks merge to the result of one process, with every strategy."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pairs import pairs
from ranks import RankError, run_ranks, try_ranks
from slow import slow_after, slow_but
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import tatten
from tatten.ops.distributed import tree_merge as tree

pytestmark = pytest.mark.drawn(4)

B, H, L, D = 2, 12, 3, 10


def states(n: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (B, H, L, D)) -> tuple[Tensor, Tensor]:
    """`n` states, the same on every rank, some of which are empty and hold garbage."""
    rng = torch.Generator().manual_seed(7)
    out = torch.randn(n, *shape, generator=rng, dtype=torch.float64)
    lse = torch.randn(n, *shape[:-1], generator=rng, dtype=torch.float64) * 5
    if lse[0].numel() > 8:
        lse[0].view(-1)[::5] = float("-inf")
        lse[:, ..., -1] = float("-inf")  # a query that no rank has a key for
        out[0].view(-1, shape[-1])[::5] = float("nan")
    return out.to(dtype), lse.to(torch.float64 if dtype == torch.float64 else torch.float32)


def reference(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return tatten.merge_states(out.double(), lse.double())


def merge_mine(dtype: torch.dtype, shape: tuple[int, ...], strategy: str, scatter: bool) -> tuple[Tensor, Tensor]:
    out, lse = (x[dist.get_rank()] for x in states(dist.get_world_size(), dtype, shape))
    return tatten.tree_merge(out, lse, dist.group.WORLD, strategy=strategy, scatter_heads=scatter)


def check(n: int, dtype: torch.dtype, shape: tuple[int, ...], strategy: str, scatter: bool = False) -> None:
    results = run_ranks(n, merge_mine, dtype, shape, strategy, scatter)
    want_out, want_lse = reference(*states(n, dtype, shape))
    for rank, (out, lse) in enumerate(results):
        wanted = (x.chunk(n, dim=1)[rank] if scatter else x for x in (want_out, want_lse))
        assert out.dtype == dtype
        eps = torch.finfo(dtype).eps
        for have, want in zip((out, lse), wanted, strict=True):
            torch.testing.assert_close(have.double(), want, atol=8 * eps, rtol=4 * eps)
    if strategy == "all_gather" and not scatter:
        assert all(torch.equal(x, y) for result in results for x, y in zip(result, results[0], strict=True))


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "n, dtype, strategy",
    slow_after(
        3, pairs([1, 2, 3, 4], [torch.float32, torch.bfloat16, torch.float64], ["all_gather", "all_reduce", "auto"])
    ),
)
def test_merge(n: int, dtype: torch.dtype, strategy: str) -> None:
    check(n, dtype, (B, H, L, D), strategy)


@pytest.mark.parametrize(
    "n, dtype, strategy",
    slow_after(2, pairs([1, 2, 3], [torch.float32, torch.bfloat16], ["all_gather", "all_reduce"])),
)
def test_merge_to_heads(n: int, dtype: torch.dtype, strategy: str) -> None:
    check(n, dtype, (B, H, L, D), strategy, scatter=True)


@pytest.mark.parametrize(
    "shape, dtype, strategy",
    slow_after(
        2,
        pairs(
            [(7,), (3, 5), (1, 1, 1, 1), (0, 4, 1, 8), (5, 4, 3, 2, 33)],
            [torch.float16, torch.float64],
            ["all_gather", "all_reduce"],
        ),
    ),
)
def test_shapes(shape: tuple[int, ...], dtype: torch.dtype, strategy: str) -> None:
    check(2, dtype, shape, strategy)


def merge_strided() -> list[bool]:
    out, lse = (x[dist.get_rank()] for x in states(2))
    odd_out, odd_lse = out.mT.contiguous().mT, lse.transpose(0, 1).contiguous().transpose(0, 1)
    return [
        torch.equal(a, b)
        for strategy in ("all_gather", "all_reduce")
        for scatter in (False, True)
        for a, b in zip(
            tatten.tree_merge(out, lse, dist.group.WORLD, strategy=strategy, scatter_heads=scatter),
            tatten.tree_merge(odd_out, odd_lse, dist.group.WORLD, strategy=strategy, scatter_heads=scatter),
            strict=True,
        )
    ]


def test_strides_do_not_matter() -> None:
    assert all(all(equal) for equal in run_ranks(2, merge_strided))


def merge_on_meshes() -> list[tuple[Tensor, Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "gpu"))
    out, lse = (x[dist.get_rank()] for x in states(4))
    return [
        tatten.tree_merge(out, lse, mesh),
        tatten.tree_merge(out, lse, mesh["gpu"]),
        tatten.tree_merge(out, lse, mesh["node"], strategy="all_reduce"),
        tatten.tree_merge(out, lse, mesh.get_group("gpu").group_name),
    ]


def test_meshes() -> None:
    out, lse = states(4)
    for rank, (whole, inside, across, by_name) in enumerate(run_ranks(4, merge_on_meshes)):
        node, gpu = divmod(rank, 2)
        for have, ranks in ((whole, [0, 1, 2, 3]), (inside, [2 * node, 2 * node + 1]), (across, [gpu, gpu + 2])):
            for x, want in zip(have, reference(out[ranks], lse[ranks]), strict=True):
                torch.testing.assert_close(x.double(), want, atol=1e-6, rtol=1e-6)
        assert all(torch.equal(x, y) for x, y in zip(inside, by_name, strict=True))


def count_collectives() -> dict[str, list[str]]:
    from torch.distributed.tensor.debug import CommDebugMode

    counts = {}
    out, lse = (x[dist.get_rank()] for x in states(2))
    for strategy in ("all_gather", "all_reduce"):
        for scatter in (False, True):
            with CommDebugMode() as comm:
                tatten.tree_merge(out, lse, dist.group.WORLD, strategy=strategy, scatter_heads=scatter)
            found = sorted(str(op).split(".")[-1] for op, n in comm.get_comm_counts().items() for _ in range(n))
            counts[strategy + " scattered" * scatter] = found
    return counts


def test_collectives() -> None:
    assert run_ranks(2, count_collectives)[0] == {
        "all_gather": ["all_gather_into_tensor"],
        "all_gather scattered": ["all_to_all_single"],
        "all_reduce": ["all_reduce"] * 3,
        "all_reduce scattered": ["all_reduce", "reduce_scatter_tensor", "reduce_scatter_tensor"],
    }


def merge_compiled(backend: str, strategies: list[str], cache: str) -> list[Tensor]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    n = dist.get_world_size()
    out, lse = (x[dist.get_rank()] for x in states(n))
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("kv",))

    def fn(out: Tensor, lse: Tensor) -> list[Tensor]:
        merged = [
            tatten.tree_merge(out * 2, lse, group, strategy=strategy, scatter_heads=scatter)
            for strategy, group in zip(strategies, (mesh, dist.group.WORLD.group_name), strict=False)
            for scatter in (False, True)
        ]
        return [x + 1 for state in merged for x in state]

    have = torch.compile(fn, backend=backend, fullgraph=True, dynamic=backend == "aot_eager")(out, lse)
    return [a - b for a, b in zip(have, fn(out, lse), strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend, strategies, ranks",
    [("aot_eager", ["all_gather", "all_reduce"], [2]), ("inductor", ["all_reduce"], [2, 3])],
)
def test_compiled(backend: str, strategies: list[str], ranks: list[int], tmp_path: Path) -> None:
    """Compiled merges match eager ones, and Inductor's cache keeps numbers of ranks apart."""
    for n in ranks:
        for results in run_ranks(n, merge_compiled, backend, strategies, str(tmp_path), seconds=300):
            for x in results:
                assert x[~x.isnan()].abs().max() < 1e-5  # -inf - -inf


def merge_badly() -> list[str]:
    out, lse = (x[0] for x in states(1))
    world = dist.group.WORLD
    return [
        error_of(out, lse, 3),
        error_of(out, lse, world, strategy="magic"),
        error_of(out, lse[:1], world),
        error_of(out, lse.double(), world),
        error_of(out[:, :5], lse[:, :5], world, scatter_heads=True),
        error_of(out, lse, init_device_mesh("cpu", (1, 2)), scatter_heads=True),
        error_of(out, lse, world, strategy="push"),
        error_of(out.clone().requires_grad_(), lse, world),
    ]


@torch.enable_grad()
def error_of(*args: object, **kwargs: object) -> str:
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
        tatten.tree_merge(*args, **kwargs)
    return str(error.value)


def test_errors() -> None:
    errors = run_ranks(2, merge_badly)[0]
    names = ["mesh_or_group", "strategy", "lse", "lse", "out", "mesh_or_group", "strategy", "out"]
    assert len(errors) == len(names)
    for error, name in zip(errors, names, strict=True):
        assert f"`{name}`" in error
    assert "push" in errors[6]


def merge_but_one(what: str) -> tuple[Tensor, Tensor]:
    out, lse = (x[dist.get_rank()] for x in states(3))
    if dist.get_rank() == 1:
        if what == "raises":
            raise KeyError("an error of its own")
        if what == "dies":
            os._exit(1)
        time.sleep(20)
    return tatten.tree_merge(out, lse, dist.group.WORLD)


@pytest.mark.parametrize("what", slow_but(["raises"], ["raises", "dies", "hangs"]))
def test_a_missing_rank_is_an_error_on_the_others(what: str) -> None:
    results = try_ranks(3, merge_but_one, what, timeout=3.0, seconds=15.0)
    assert all(isinstance(result, RankError) and "still running" not in str(result) for result in results[::2])


@pytest.mark.parametrize(
    "ranks, rows, can_push, scatter, chosen",
    [
        (8, 4096, True, False, "push"),
        (2, 16384, True, True, "push"),
        (2, 32768, True, False, "all_gather"),  # more than was measured to be faster
        (8, 32768, True, True, "all_gather"),  # its part of the payload only
        (8, 32768, True, False, "all_reduce"),
        (8, 2048, False, False, "all_gather"),
        (8, 4096, False, False, "all_reduce"),
        (5, 1 << 20, False, False, "all_reduce"),
        (4, 1 << 20, False, False, "all_gather"),  # sends no more bytes than three all-reduces
    ],
)
def test_auto(
    ranks: int, rows: int, can_push: bool, scatter: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice depends on the bytes of a state, here of bfloat16 rows of 128."""
    monkeypatch.setattr(tree, "push_unsupported_reason", lambda *args: None if can_push else "for some reason")
    out = torch.empty(1, rows, 1, 128, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(1, rows, 1, device="meta")
    assert tree.fastest(out, lse, "group", ranks, scatter) == chosen
