"""The sharded cache on several gloo ranks: its layout, attention as in one process, checkpoints and errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from pairs import pairs
from ranks import RankError, run_ranks, try_ranks
from slow import slow_after, slow_but
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import zeros as dtensor_zeros

import tatten.backend
from tatten.caches.sharded import ShardedKVCache

pytestmark = pytest.mark.drawn(5)

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 8

# name: (ranks of each dim, names, sequence, heads)
MESHES = {
    "1": ((1,), ("kv",), "kv", None),
    "2": ((2,), ("kv",), "kv", None),
    "3": ((3,), ("kv",), "kv", None),
    "4": ((4,), ("kv",), "kv", None),
    "2 nodes": ((2, 2), ("node", "gpu"), ("node", "gpu"), None),
    "heads outside": ((2, 2), ("tp", "kv"), "kv", "tp"),
    "heads inside": ((2, 2), ("kv", "tp"), "kv", "tp"),
    "replicas": ((2, 2), ("dp", "kv"), "kv", None),
    "heads amid a sequence": ((2, 1, 2), ("node", "tp", "gpu"), ("node", "gpu"), "tp"),
}


def ranks(mesh: str) -> int:
    return torch.Size(MESHES[mesh][0]).numel()


def run_meshes(n: int, check: Callable[..., object], *args: object) -> None:
    """Run `check(mesh, *args)` on each mesh of n ranks."""
    run_ranks(n, each_mesh, check, *args)


def each_mesh(check: Callable[..., object], *args: object) -> None:
    for mesh in MESHES:
        if ranks(mesh) == dist.get_world_size():
            try:
                check(mesh, *args)
            except Exception as error:
                raise AssertionError(f"mesh {mesh!r}") from error


sizes = pytest.mark.parametrize("n", slow_but([2], [1, 2, 3, 4]))


def make(mesh: str, capacity: int, layers: int = LAYERS, prompt_mask: Tensor | None = None) -> ShardedKVCache:
    shape, names, sequence, heads = MESHES[mesh]
    device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return ShardedKVCache(layers, device_mesh, capacity, sequence=sequence, heads=heads, prompt_mask=prompt_mask)


def own_heads(cache: ShardedKVCache, tensor: Tensor) -> Tensor:
    for dim, placement in enumerate(cache.layout.placements):
        if placement.is_shard(1):
            tensor = tensor.chunk(cache.layout.mesh.size(dim), 1)[cache.layout.mesh.get_local_rank(dim)]
    return tensor


def random(batch: int, tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of all heads, the same on every rank."""
    dims = (HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM)
    q, k, v = (torch.randn(batch, heads, tokens, dim).to(dtype) for heads, dim in dims)
    return q, k, v


def filled(mesh: str, steps: list[int], capacity: int, batch: int = 2) -> tuple[ShardedKVCache, list[Tensor]]:
    """A cache filled with `steps` tokens at a time, the first as a prefill, and all keys and values of each layer."""
    torch.manual_seed(0)
    cache, held = make(mesh, capacity), []
    for layer in range(LAYERS):
        _, k, v = random(batch, sum(steps))
        for index, (key, value) in enumerate(zip(k.split(steps, 2), v.split(steps, 2), strict=True)):
            put = cache.append if index else cache.prefill
            put(layer, own_heads(cache, key), own_heads(cache, value))
        held += [k, v]
    return cache, held


def check_layout(mesh: str, steps: list[int]) -> None:
    total = sum(steps)
    cache, held = filled(mesh, steps, total + 2)
    n, r = cache.layout.ranks, cache.layout.rank
    local = cache.layers[0].tensors
    assert local[0].shape[2] == -(-(total + 2) // n)
    for tensor, whole in zip(local, held, strict=False):
        own = own_heads(cache, whole)[:, :, r::n]
        assert torch.equal(tensor[:, :, : own.shape[2]], own)
        assert not tensor[:, :, own.shape[2] :].any()
    for layer in range(LAYERS):
        for got, whole in zip(cache.to_global(layer), held[2 * layer :], strict=False):
            assert torch.equal(got, whole)
    assert int(cache.length) == total
    assert cache.nbytes == sum(tensor.nbytes for layer in cache.layers for tensor in layer.tensors)
    assert cache.nbytes * ranks(mesh) == LAYERS * 2 * KV_HEADS * 2 * HEAD_DIM * cache.capacity * 4 * (
        2 if mesh == "replicas" else 1
    )


@sizes
@pytest.mark.parametrize("steps", [[7, 1, 1, 2, 1, 3, 5, 1, 9, 1], [1, 1]], ids=["many", "few"])
def test_layout(n: int, steps: list[int]) -> None:
    """Token p is in slot p // n of rank p % n after a prefill, single tokens, and more tokens at once than ranks."""
    run_meshes(n, check_layout, steps)


def check_one_token(mesh: str) -> int:
    torch.manual_seed(0)
    cache, (_, k, v) = make(mesh, 1, layers=1), random(1, 1)
    keys, values = cache.append(0, k, v)
    assert isinstance(keys, DTensor)
    assert keys.shape == (1, KV_HEADS, ranks(mesh), HEAD_DIM)
    assert torch.equal(keys.full_tensor()[:, :, :1], k)
    assert torch.equal(values.full_tensor()[:, :, :1], v)
    return int(keys.to_local().any())


@pytest.mark.parametrize("mesh", ["1", "4"])
def test_one_token_in_total(mesh: str) -> None:
    assert run_ranks(ranks(mesh), check_one_token, mesh) == [1, 0, 0, 0][: ranks(mesh)]


def check_mask(mesh: str, q_len: int) -> None:
    real = torch.tensor([[False, False, True, True, True], [True, True, True, False, True]])
    for prompt_mask in (None, real):
        cache = make(mesh, 11, layers=1, prompt_mask=prompt_mask)
        n = cache.layout.ranks
        columns = [position for rank in range(n) for position in range(rank, cache.capacity, n)]
        padded = torch.ones(1, 40).bool() if prompt_mask is None else F.pad(real, (0, 35), value=True)
        for length in (0, 1, 6):
            cache.length.fill_(length)
            mask, positions = cache.mask(q_len), cache.positions(q_len)
            assert mask.placements == tuple(Shard(3) if p.is_shard(2) else Replicate() for p in cache.layout.placements)
            tokens = torch.arange(length, length + q_len)
            want = (torch.tensor(columns) <= tokens[:, None]) & padded[:, None, None, columns]
            assert torch.equal(mask.full_tensor(), want)
            assert torch.equal(positions, (padded.cumsum(1) - 1).clamp(min=0)[:, tokens])


@sizes
@pytest.mark.parametrize("q_len", [1, 5])
def test_mask_and_positions(n: int, q_len: int) -> None:
    run_meshes(n, check_mask, q_len)


def decode(cache: ShardedKVCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One step of layer 0."""
    mask = cache.mask(q.shape[2])
    keys, values = cache.append(0, own_heads(cache, k), own_heads(cache, v))
    queries = cache.layout.queries(own_heads(cache, q))
    out = F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True)
    assert isinstance(out, DTensor)
    assert out.placements == queries.placements
    return out.full_tensor()


def reference(q: Tensor, k: Tensor, v: Tensor, start: int, real: Tensor | None = None) -> Tensor:
    """Attention of the tokens from `start` on, in float64 in one process."""
    length = k.shape[2]
    mask = torch.ones(length, length).bool().tril()[start:]
    if real is not None:
        mask = mask & F.pad(real, (0, length - real.shape[1]), value=True)[:, None, None]
    out = F.scaled_dot_product_attention(q[:, :, start:].double(), k.double(), v.double(), mask, enable_gqa=True)
    return out.to(q.dtype)


def check_attention(mesh: str, batch: int, dtype: torch.dtype, steps: list[int], padded: bool) -> None:
    torch.manual_seed(0)
    prompt, total = steps[0], sum(steps)
    real = None
    if padded:
        real = torch.ones(batch, prompt, dtype=torch.bool)
        real[0, :2] = real[-1, 1:2] = False
    cache = make(mesh, total + 3, layers=1, prompt_mask=real)
    q, k, v = random(batch, total, dtype)
    cache.prefill(0, own_heads(cache, k[:, :, :prompt]), own_heads(cache, v[:, :, :prompt]))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for start, end in itertools.pairwise(itertools.accumulate(steps)):
        got = decode(cache, *(tensor[:, :, start:end] for tensor in (q, k, v)))
        want = reference(*(tensor[:, :, :end] for tensor in (q, k, v)), start, real)
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "n, batch, dtype, padded",
    slow_after(2, pairs([2, 1, 3, 4], [1, 5], [torch.float32, torch.bfloat16], [False, True])),
)
def test_attention(n: int, batch: int, dtype: torch.dtype, padded: bool) -> None:
    run_meshes(n, check_attention, batch, dtype, [5, 1, 1, 5, 1, 7, 1], padded)


def check_without_prefill(mesh: str) -> None:
    """Append to an empty cache: one token on one rank, nothing on the others."""
    torch.manual_seed(0)
    cache, (q, k, v) = make(mesh, 9, layers=1), random(2, 6)
    for start, end in ((0, 1), (1, 2), (2, 6)):
        got = decode(cache, *(tensor[:, :, start:end] for tensor in (q, k, v)))
        torch.testing.assert_close(got, reference(*(tensor[:, :, :end] for tensor in (q, k, v)), start))


@sizes
def test_attention_without_a_prefill(n: int) -> None:
    run_meshes(n, check_without_prefill)


def check_unused_slots(mesh: str) -> None:
    torch.manual_seed(0)
    cache, (q, k, v) = make(mesh, 64, layers=1), random(2, 6)
    cache.prefill(0, k[:, :, :5], v[:, :, :5])
    used = -(-(5 - cache.layout.rank) // cache.layout.ranks)
    for tensor in cache.layers[0].tensors:
        tensor[:, :, used:] = torch.nan
    got = decode(cache, *(tensor[:, :, 5:] for tensor in (q, k, v)))
    torch.testing.assert_close(got, reference(q, k, v, 5))
    assert all(tensor[:, :, used + 1 :].isnan().all() for tensor in cache.layers[0].tensors)


def test_unused_slots_are_not_read() -> None:
    run_ranks(4, check_unused_slots, "4")


def check_two_caches() -> None:
    torch.manual_seed(0)
    caches = [make(mesh, 12, layers=1) for mesh in ("4", "heads outside", "4")]
    data = [random(2, 9) for _ in caches]
    for cache, (_, k, v) in zip(caches, data, strict=True):
        cache.prefill(0, own_heads(cache, k[:, :, :5]), own_heads(cache, v[:, :, :5]))
    for start in range(5, 9):
        for cache, tensors in zip(caches, data, strict=True):
            got = decode(cache, *(tensor[:, :, start : start + 1] for tensor in tensors))
            torch.testing.assert_close(got, reference(*(tensor[:, :, : start + 1] for tensor in tensors), start))


def test_caches_on_several_meshes() -> None:
    run_ranks(4, check_two_caches)


def check_compiles_once(mesh: str, inner: str | None) -> int:
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(gm)
        return tatten.backend.tatten(gm, inputs, options={"inner": inner}) if inner else gm

    compiled = torch.compile(decode, fullgraph=True, backend=backend)
    for _ in range(2):
        torch.manual_seed(0)
        cache, (q, k, v) = make(mesh, 12, layers=1), random(2, 11)
        cache.prefill(0, own_heads(cache, k[:, :, :5]), own_heads(cache, v[:, :, :5]))
        for start in range(5, 11):
            got = compiled(cache, *(tensor[:, :, start : start + 1] for tensor in (q, k, v)))
            torch.testing.assert_close(got, reference(*(tensor[:, :, : start + 1] for tensor in (q, k, v)), start))
    return len(graphs)


@pytest.mark.drawn(2, "compiled decoding with transformers")
@pytest.mark.parametrize("inner", slow_but(["aot_eager"], [None, "eager", "aot_eager"]))
@pytest.mark.parametrize("mesh", slow_but(["2"], ["2", "heads outside"]))
def test_compiles_once(mesh: str, inner: str | None) -> None:
    """Dynamo alone, and tatten's backend."""
    assert set(run_ranks(ranks(mesh), check_compiles_once, mesh, inner)) == {1}


def save(mesh: str, folder: str) -> list[Tensor]:
    cache, held = filled(mesh, [5, 1, 3], 16)
    state = cache.state_dict()
    tokens = [tuple(shard.shape) for shard in torch.arange(9).chunk(cache.layout.ranks)]  # none for the last of four
    for name, tensor in state.items():
        if name != "length":
            mine = tensor.to_local()
            assert mine.untyped_storage().nbytes() == mine.nbytes
            assert tuple(mine.shape[2:3]) == (*tokens, *[(0,)] * 4)[cache.layout.rank]
            layer = int(name.split(".")[1])
            assert torch.equal(tensor.full_tensor(), held[2 * layer + name.startswith("values")])
    dcp.save(state, checkpoint_id=folder)
    return held


def load(mesh: str, folder: str, held: list[Tensor]) -> None:
    """Load the state into a cache with other tokens, which continues from it."""
    cache, _ = filled(mesh, [3, 2], 17)
    addresses = [tensor.data_ptr() for tensor in cache.layers[0].tensors]
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state: dict[str, Tensor] = {"length": torch.zeros((), dtype=torch.int64)}
    for name in metadata.keys() - {"length"}:
        size, layout = metadata[name].size, cache.layout
        state[name] = dtensor_zeros(size, device_mesh=layout.mesh, placements=layout.placements)
    dcp.load(state, checkpoint_id=folder)
    cache.load_state_dict(state)
    assert addresses == [tensor.data_ptr() for tensor in cache.layers[0].tensors]
    check_loaded(cache, held)


def check_loaded(cache: ShardedKVCache, held: list[Tensor]) -> None:
    assert int(cache.length) == 9
    _, k, v = random(2, 1)
    for layer in range(LAYERS):
        cache.append(layer, own_heads(cache, k), own_heads(cache, v))
        for got, old, new in zip(cache.to_global(layer), held[2 * layer :], (k, v), strict=False):
            assert torch.equal(got, torch.cat([old, new], dim=2))


@pytest.mark.parametrize(
    "before, after",
    slow_after(1, [("2", "heads inside"), ("4", "3"), ("3", "4"), ("heads outside", "2 nodes"), ("4", "1")]),
)
def test_checkpoint_on_another_number_of_ranks(before: str, after: str, tmp_path: Path) -> None:
    held = run_ranks(ranks(before), save, before, str(tmp_path))[0]
    run_ranks(ranks(after), load, after, str(tmp_path), held)


def plain_state(mesh: str) -> dict[str, Tensor]:
    cache, _ = filled(mesh, [5, 1, 3], 16)
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in cache.state_dict().items()
    }


def load_plain(mesh: str, state: dict[str, Tensor]) -> None:
    cache = make(mesh, 12)
    cache.load_state_dict(state)
    check_loaded(cache, [state[f"{name}.{layer}"] for layer in range(LAYERS) for name in ("keys", "values")])


@pytest.mark.parametrize("before, after", [("2", "1"), ("1", "heads outside")])
def test_state_of_plain_tensors(before: str, after: str) -> None:
    state = run_ranks(ranks(before), plain_state, before)[0]
    run_ranks(ranks(after), load_plain, after, state)


def tensors(*shape: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
    key, value = torch.zeros(2, *shape, **kwargs).unbind()
    return key, value


FITTING = (2, KV_HEADS, 1, HEAD_DIM)


def bad_calls() -> None:
    """Errors on two ranks, with a cache for 8 tokens that holds 5."""
    cache = make("2", 7)
    assert cache.capacity == 8
    with pytest.raises(ValueError, match="layer 0 must have tokens, got none yet"):
        cache.to_global(0)
    for layer in range(LAYERS):
        cache.prefill(layer, *tensors(2, KV_HEADS, 5, HEAD_DIM))
    wanting = torch.zeros(FITTING, requires_grad=True)
    wide = DTensor.from_local(torch.zeros(FITTING), cache.layout.mesh, [Replicate()])
    state = cache.state_dict()
    short = state | {"keys.1": torch.zeros(2, KV_HEADS, 4, HEAD_DIM)}
    long = {name: torch.zeros(2, KV_HEADS, 9, HEAD_DIM) if name != "length" else torch.tensor(9) for name in state}
    calls: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: cache.append(2, *tensors(*FITTING)), IndexError, "`layer` must be 0 to 1, got 2"),
        (lambda: cache.append(-1, *tensors(*FITTING)), IndexError, "got -1"),
        (lambda: cache.to_global(2), IndexError, "`layer` must be 0 to 1, got 2"),
        (lambda: cache.append(0, *tensors(3, *FITTING[1:])), ValueError, "`key` must have batch 2, as layer 0, got 3"),
        (
            lambda: cache.append(0, *tensors(2, 4, 1, 8)),
            ValueError,
            r"`key` must have shape \(2, 2, 1, 8\) .* got \(2, 4",
        ),
        (lambda: cache.append(0, *tensors(2, 2, 1, 4)), ValueError, r"got \(2, 2, 1, 4\)"),
        (lambda: cache.append(0, *tensors(2, 2, 8)), ValueError, r"`key` must be \[batch.*got shape \(2, 2, 8\)"),
        (lambda: cache.append(0, *tensors(2, 2, 0, 8)), ValueError, r"`key` must be \[batch.*got shape \(2, 2, 0, 8\)"),
        (
            lambda: cache.append(0, tensors(*FITTING)[0], tensors(2, 2, 2, 8)[0]),
            ValueError,
            "`value` must have the batch",
        ),
        (
            lambda: cache.append(0, *tensors(*FITTING, dtype=torch.float64)),
            TypeError,
            "must be torch.float32.*got torch.f",
        ),
        (
            lambda: cache.append(0, *tensors(*FITTING, device="meta")),
            ValueError,
            "must be on cpu, the device of the mesh, got meta",
        ),
        (lambda: cache.append(0, wide, wide), TypeError, "`key` must be a plain tensor .* got a DTensor"),
        (lambda: cache.prefill(0, *tensors(*FITTING)), ValueError, "needs an empty cache, got one with 5 tokens"),
        (lambda: cache.append(0, *tensors(2, 2, 4, 8)), ValueError, "must hold 5 used and 4 new slots, got 8"),
        (lambda: cache.mask(4), ValueError, "`capacity` must hold 5 used and 4 new slots, got 8"),
        (lambda: cache.mask(0), ValueError, "`q_len` must be at least 1, got 0"),
        (lambda: cache.positions(4), ValueError, "`capacity` must hold 5 used and 4 new slots, got 8"),
        (lambda: cache.load_state_dict({}), ValueError, r"`state` must have the names .* got \[\]"),
        (lambda: cache.load_state_dict(short), ValueError, "`state.*keys.1.*` must have 5 tokens, got shape"),
        (lambda: cache.load_state_dict(long), ValueError, "`capacity` must hold the 9 tokens of `state`, got 8"),
    ]
    before = [tensor.clone() for layer in cache.layers for tensor in (*layer.tensors, layer.length)]
    for call, error, message in calls:
        with pytest.raises(error, match=message):
            call()
    with torch.enable_grad(), pytest.raises(ValueError, match="`key` must not require grad"):
        cache.append(0, wanting, wanting)
    after = [tensor for layer in cache.layers for tensor in (*layer.tensors, layer.length)]
    assert all(map(torch.equal, before, after))
    cache.append(0, *tensors(2, 2, 3, 8))
    with pytest.raises(ValueError, match=r"`state_dict` must come between steps.*got \[8, 5\]"):
        cache.state_dict()


def test_bad_calls() -> None:
    run_ranks(2, bad_calls)


def bad_caches() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("kv", "tp"))
    real = torch.ones(2, 3, dtype=torch.bool)
    calls: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"num_layers": 0}, ValueError, "`num_layers` must be at least 1, got 0"),
        ({"capacity": 1.5}, TypeError, "`capacity` must be an int, got 1.5"),
        ({"mesh": 2}, TypeError, "`mesh` must be a DeviceMesh, got int"),
        ({"mesh": init_device_mesh("cpu", (2,))}, ValueError, "`mesh` must have named dims"),
        ({"sequence": "sp"}, ValueError, r"`sequence` must name dims of the mesh, \('kv', 'tp'\).* got 'sp'"),
        ({"sequence": ("tp", "kv")}, ValueError, "in their order, got"),
        ({"sequence": ()}, ValueError, "`sequence` must name dims"),
        ({"heads": "kv"}, ValueError, r"`heads` must name a dim of the mesh, .* other than \['kv'\], got 'kv'"),
        ({"heads": "sp"}, ValueError, "`heads` must name a dim of the mesh"),
        ({"prompt_mask": real.float()}, TypeError, "`prompt_mask` must be bool, got torch.float32"),
        ({"prompt_mask": real[0]}, ValueError, r"must be \[batch, 1 to 8\], got shape \(3,\)"),
        ({"prompt_mask": torch.ones(2, 9).bool()}, ValueError, r"got shape \(2, 9\)"),
        (
            {"prompt_mask": real.to("meta")},
            ValueError,
            "`prompt_mask` must be on cpu, the device of the mesh, got meta",
        ),
    ]
    for changes, error, message in calls:
        arguments: dict[str, Any] = {"num_layers": 1, "mesh": mesh, "capacity": 7} | changes
        with pytest.raises(error, match=message):
            ShardedKVCache(**arguments)
    for batch in (1, 3):
        with pytest.raises(ValueError, match=f"`key` must have batch 2, as `prompt_mask`, got {batch}"):
            ShardedKVCache(1, mesh, 7, prompt_mask=real).prefill(0, *tensors(batch, 2, 3, 8))


def test_bad_caches() -> None:
    run_ranks(2, bad_caches)


def full_in_a_graph() -> None:
    """A graph cannot check the capacity: the device makes sure that no token is overwritten."""
    cache = make("1", 2, layers=1)
    cache.prefill(0, *tensors(1, 1, 2, 8))
    torch.compile(lambda key, value: cache.append(0, key, value), backend="eager")(*tensors(1, 1, 1, 8))


def test_a_full_cache_in_a_graph() -> None:
    (error,) = try_ranks(1, full_in_a_graph)
    assert isinstance(error, RankError)
    assert "index" in str(error)
