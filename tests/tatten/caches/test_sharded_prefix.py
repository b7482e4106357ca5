"""The shared-prefix cache over a mesh, on several gloo ranks: what one process computes, without a gather."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from slow import slow_but
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import tatten
from tatten.caches.shared_prefix import SharedPrefixCache

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 4, 2, 8, 23

# name: (ranks of each dim, names, sequence, heads)
MESHES = {
    "2": ((2,), ("kv",), "kv", None),
    "3": ((3,), ("kv",), "kv", None),
    "4": ((4,), ("kv",), "kv", None),
    "2 nodes": ((2, 2), ("node", "gpu"), ("node", "gpu"), None),
    "heads outside": ((2, 2), ("tp", "kv"), "kv", "tp"),
    "heads inside": ((2, 2), ("kv", "tp"), "kv", "tp"),
    "replicas": ((2, 2), ("dp", "kv"), "kv", None),
}
meshes = pytest.mark.parametrize("n", slow_but([2, 4], [2, 3, 4]))


def run_meshes(n: int, check: Callable[..., object], *args: object) -> None:
    """Run `check(mesh, *args)` on each mesh of n ranks."""
    run_ranks(n, each_mesh, check, *args)


def each_mesh(check: Callable[..., object], *args: object) -> None:
    for mesh, (shape, *_) in MESHES.items():
        if torch.Size(shape).numel() == dist.get_world_size():
            try:
                check(mesh, *args)
            except Exception as error:
                raise AssertionError(f"mesh {mesh!r}") from error


class Both:
    """One cache over a mesh, and the same on one device; both get the same tokens."""

    def __init__(self, mesh: str, pair: tuple[SharedPrefixCache, SharedPrefixCache] | None = None, **prompts: Tensor):
        shape, names, sequence, heads = MESHES[mesh]
        self.mesh = mesh
        if pair is None:
            over = init_device_mesh("cpu", shape, mesh_dim_names=names)
            pair = (
                SharedPrefixCache(LAYERS, mesh=over, sequence=sequence, heads=heads, **prompts),
                SharedPrefixCache(LAYERS, **prompts),
            )
        self.sharded, self.whole = pair

    def own_heads(self, tensor: Tensor) -> Tensor:
        layout = self.sharded.layout
        for dim, placement in enumerate(layout.placements):
            if placement.is_shard(1):
                tensor = tensor.chunk(layout.mesh.size(dim), 1)[layout.mesh.get_local_rank(dim)]
        return tensor

    def each(self, call: Callable[[SharedPrefixCache], SharedPrefixCache]) -> Both:
        return Both(self.mesh, (call(self.sharded), call(self.whole)))

    def step(self, q_len: int = 1, batch: int | None = None) -> None:
        """Add tokens, and compare attention over all of them."""
        batch = batch or self.whole.batch_size
        assert torch.equal(self.sharded.positions(q_len), self.whole.positions(q_len))
        masks = self.sharded.mask(q_len), self.whole.mask(q_len)
        for layer in range(LAYERS):
            q, k, v = (torch.randn(batch, heads, q_len, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
            held = self.whole.update(layer, k, v)
            want = self.own_heads(F.scaled_dot_product_attention(q, *held, masks[1], enable_gqa=True))
            q, k, v = map(self.own_heads, (q, k, v))
            keys, values = self.sharded.update(layer, k, v)
            if isinstance(keys, DTensor):
                q = self.sharded.layout.queries(q)
            with torch.inference_mode():
                got = F.scaled_dot_product_attention(q, keys, values, masks[0], enable_gqa=True)
            got = got.to_local() if isinstance(got, DTensor) else got
            torch.testing.assert_close(got, want, atol=1e-6, rtol=0)

    def check_shares(self) -> None:
        """Each rank holds its share of every level, in order of position."""
        n, r = self.sharded.layout.ranks, self.sharded.layout.rank
        for local, whole in zip(self.sharded.layers, self.whole.layers, strict=True):
            start = 0
            assert local.lengths == whole.lengths
            for got, want, length in zip(local.segments, whole.segments, whole.lengths, strict=True):
                for a, b in zip(got, want, strict=True):
                    assert torch.equal(a, self.own_heads(b)[:, :, (r - start) % n :: n])
                start += length
            if local.static:
                assert local.keys.shape[2] == -(-whole.capacity // n)


def check_levels(mesh: str, length: int, prompts: dict[str, Tensor]) -> None:
    torch.manual_seed(0)
    both = Both(mesh, **prompts)
    for q_len in (length - 2, 2):
        both.step(q_len, 2)
    both.check_shares()
    for n, capacity in ((3, 5), (1, 4), (2, 7)):
        both = both.each(lambda cache, n=n, capacity=capacity: cache.fork(n, capacity))
        assert both.sharded.capacity == -(-capacity // both.sharded.layout.ranks) * both.sharded.layout.ranks
        for q_len in (1, 3):
            both.step(q_len)
        both.check_shares()
    both = both.each(lambda cache: cache.select([11, 3, 0, 0, 7]))
    both.step()
    both = both.each(lambda cache: cache.select(torch.tensor([4, 1, 0])))
    both.step()
    for cache in (both.sharded, both.whole):
        cache.select_([2, 2, 1])
        cache.crop(3)
    both.step(2)
    both.check_shares()


PROMPTS = {
    "whole": {},
    "mask": {"prompt_mask": torch.tensor([[False, True, True, True], [True] * 4])},
    "lengths": {"prompt_lens": torch.tensor([2, 4])},
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("prompts", PROMPTS)
@meshes
def test_levels(n: int, prompts: str) -> None:
    """Three levels of any lengths modulo the ranks, selections and crops."""
    lengths = (4,) if prompts != "whole" else (5, 6, 7, 8)
    for length in lengths:
        run_meshes(n, check_levels, length, PROMPTS[prompts])


def check_history(mesh: str, seed: int) -> None:
    torch.manual_seed(seed)
    choose = random.Random(seed)
    both = Both(mesh)
    both.step(choose.randint(1, 7), 2)
    both = both.each(lambda cache: cache.fork(2, 6))
    old = None
    for _ in range(24):
        first = both.whole.layers[0]
        batch, room = both.whole.batch_size, first.capacity - int(first.length)
        action = choose.choice(["step", "step", "step", "fork", "into", "select", "select_", "crop"])
        if action == "step" and room:
            both.step(choose.randint(1, min(3, room)))
        elif action == "fork" and batch <= 4 and len(first.lengths) < 5:
            n, capacity = choose.randint(1, 3), choose.randint(1, 6)
            both = both.each(lambda cache, n=n, capacity=capacity: cache.fork(n, capacity))
        elif action == "into" and batch <= 4 and len(first.lengths) < 5:
            old = both.each(lambda cache: cache.fork(1, 3))
            for cache in (old.sharded, old.whole):
                for layer in cache.layers:
                    layer.segments = tuple((key.clone(), value.clone()) for key, value in layer.segments)
            both = Both(mesh, (both.sharded.fork(1, 3, into=old.sharded), both.whole.fork(1, 3, into=old.whole)))
        elif action.startswith("select"):
            picked = [choose.randrange(batch) for _ in range(choose.randint(1, 6))]
            before = sum(tensor.nbytes for segment in both.sharded.layers[0].segments for tensor in segment)
            if action == "select":
                both = both.each(lambda cache, picked=picked: cache.select(picked))
            else:
                both.sharded.select_(picked)
                both.whole.select_(picked)
            assert sum(tensor.nbytes for segment in both.sharded.layers[0].segments for tensor in segment) <= before
        elif action == "crop":
            tokens = choose.randint(0, int(first.length) - first.frozen)
            both.sharded.crop(tokens)
            both.whole.crop(tokens)
        both.check_shares()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("seed", slow_but([0], range(6)))
@meshes
def test_any_order_of_calls(n: int, seed: int) -> None:
    run_meshes(n, check_history, seed)


def check_compiles_once() -> None:
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(gm)
        return gm

    def step(cache: SharedPrefixCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = cache.mask()
        for layer in range(LAYERS):
            keys, values = cache.update(layer, k, v)
            q = F.scaled_dot_product_attention(cache.layout.queries(q), keys, values, mask, enable_gqa=True).to_local()
        return q

    torch.manual_seed(0)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    q, k, v = (torch.randn(4, heads, 1, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    with torch.inference_mode():
        for _ in range(2):
            both = Both("2")
            both.step(5, 2)
            cache, twin = both.sharded.fork(2, 6), both.sharded.fork(2, 6)
            for _ in range(3):
                torch.testing.assert_close(compiled(cache, q, k, v), step(twin, q, k, v))
    assert len(graphs) == 1


@pytest.mark.drawn(2, "compiled decoding with transformers")
def test_compiles_once() -> None:
    run_ranks(2, check_compiles_once)


def check_rewritten() -> str:
    """Return the report on aligned blocks and on rows, of a prefix that is worth it."""

    def step(cache: SharedPrefixCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = cache.update(0, k, v)
        queries = q if cache.layout.mesh is None else cache.layout.queries(q)
        out = F.scaled_dot_product_attention(queries, keys, values, cache.mask(), enable_gqa=True)
        return out if cache.layout.mesh is None else out.to_local()

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("kv",))
    compiled = torch.compile(step, fullgraph=True, backend="tatten", options={"inner": "aot_eager"})
    caches = [SharedPrefixCache(1, mesh=mesh), SharedPrefixCache(1)]
    prompts = torch.randn(2, 2, KV_HEADS, 16387, HEAD_DIM)
    for cache in caches:
        cache.update(0, *prompts)
    caches = [cache.fork(8, 8) for cache in caches]
    with torch.inference_mode(), tatten.recording() as report:
        for picked in (range(16), [0, 1, 2, 3, 9, 10, 11]):
            caches = [cache.select(picked) for cache in caches]
            for _ in range(2):
                q, k, v = (torch.randn(len(picked), heads, 1, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
                torch.testing.assert_close(compiled(caches[0], q, k, v), step(caches[1], q, k, v), atol=1e-6, rtol=0)
    return str(report)


@pytest.mark.drawn(2, "compiled decoding with transformers")
def test_the_backend_reads_each_share_once() -> None:
    for rank, report in enumerate(run_ranks(2, check_rewritten)):
        assert "total: 2 of 2 attention calls rewritten in 2 graphs" in report
        assert report.count("tatten.bifurcated_attention.default") == 2
        assert report.count(f"k float32[2, 2, {8194 - rank}, 8]") == 2
        assert report.count("local, then merged over mesh dim 'kv'") == 2


def check_no_rank_holds_more(mesh: str) -> None:
    both = Both(mesh)
    both.step(40, 2)
    n = both.sharded.layout.ranks
    heads = both.sharded.layers[0].segments[0][0].shape[1] / KV_HEADS
    token = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4 * heads
    assert both.sharded.nbytes <= 2 * token * -(-40 // n)
    fork = both.sharded.fork(8, 9)
    assert fork.nbytes <= 2 * token * -(-40 // n) + 16 * token * -(-9 // n)
    for layer in fork.layers:
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in layer.tensors)


@meshes
def test_no_rank_holds_more_than_its_share(n: int) -> None:
    run_meshes(n, check_no_rank_holds_more)


def said_by(call: Callable[[], object]) -> str:
    try:
        call()
    except (ValueError, TypeError) as error:
        return str(error)
    return "fine"


def bad_meshes() -> list[str]:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("kv",))
    arguments = (
        {"mesh": init_device_mesh("cpu", (1,))},
        {"mesh": mesh, "sequence": "seq"},
        {"mesh": mesh, "heads": "tp"},
        {"mesh": mesh, "sequence": ()},
        {"mesh": 2},
    )
    said = [said_by(lambda kwargs=kwargs: SharedPrefixCache(1, **kwargs)) for kwargs in arguments]
    cache, key = SharedPrefixCache(1, mesh=mesh), torch.zeros(1, 1, 3, 4)
    said.append(said_by(lambda: cache.update(0, cache.layout.keys(key), key)))
    cache.update(0, key, key)
    whole = SharedPrefixCache(1)
    whole.update(0, key, key)
    return [*said, said_by(lambda: cache.fork(1, 2, into=cache)), said_by(lambda: whole.fork(1, 2, into=cache))]


def test_bad_input() -> None:
    (said,) = run_ranks(1, bad_meshes)
    for message, got in zip(
        [
            "`mesh` must have named dims, got none",
            "`sequence` must name dims of the mesh, ('kv',), in their order, got 'seq'",
            "`heads` must name a dim of the mesh, ('kv',), other than ['kv'], got 'tp'",
            "`sequence` must name dims of the mesh",
            "`mesh` must be a DeviceMesh, got int",
            "`key` must be a plain tensor with this rank's heads, got a DTensor",
            "`into` must be a fork with the same batch and capacity, (1, 2), got (1, 0)",
            "`into` must be sharded as None, got (DeviceMesh",
        ],
        said,
        strict=True,
    ):
        assert message in got
