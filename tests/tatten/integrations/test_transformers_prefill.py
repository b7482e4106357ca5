"""A prefill of which each gloo rank runs its share leaves what one process leaves: cache, logits and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed as dist
import transformers
from ranks import run_ranks
from slow import slow_but
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CompileConfig

from tatten.integrations.transformers import ShardedKVCache, SharedPrefixCache, cache_kwargs

pytestmark = pytest.mark.drawn(3)

NEW = 5
MODELS = ["llama", "mixtral", "qwen3", "gpt2", "gpt_neox", "phi", "opt", "gpt_bigcode"]


def build(name: str) -> transformers.PreTrainedModel:
    model = tiny_models.build(name, "tatten").double()
    if name == "mixtral":
        model.set_experts_implementation("eager")  # others take no float64
    return model


def prompts(length: int, batch: int = 2) -> Tensor:
    return torch.randint(1, 99, (batch, length), generator=torch.Generator().manual_seed(1))


def one_dim() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("kv",))


def generate(model: transformers.PreTrainedModel, ids: Tensor, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    more = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": NEW, "do_sample": False}
    return model.generate(ids, **(more | kwargs))


def assert_same(got: Any, want: Any) -> None:
    assert torch.equal(got.sequences, want.sequences)
    for x, y in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


def check_sharded(name: str, cases: list[tuple[int, int | None]], mesh: DeviceMesh | None = None, **names: Any) -> None:
    model, whole = build(name), build(name)
    mesh = mesh or one_dim()
    if "heads" in names:
        split(model, mesh["tp"])
    for length, chunk in cases:
        ids = prompts(length)
        first, again = (ShardedKVCache(model.config, mesh, length + NEW, **names) for _ in range(2))
        logits = first.prefill(model, ids[:, :-1], chunk)
        torch.testing.assert_close(logits, whole(ids[:, :-1]).logits[:, -1], rtol=0, atol=1e-10)
        model(ids[:, :-1], **cache_kwargs(again))
        for mine, theirs in zip(first.layers, again.layers, strict=True):
            assert int(mine.kv.length) == int(theirs.kv.length) == length - 1
            for x, y in zip(mine.kv.tensors, theirs.kv.tensors, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=1e-10)
        assert_same(generate(model, ids, **cache_kwargs(first)), generate(whole, ids))


def check_reset() -> None:
    """Another prompt in the same memory, after one that failed there."""
    model, ids = build("llama"), prompts(21)
    cache = ShardedKVCache(model.config, one_dim(), 40)
    cache.prefill(model, prompts(30), chunk=8)
    held = [x for layer in cache.layers for x in layer.kv.tensors]
    cache.reset()
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(NotImplementedError, match="is_causal"):
        cache.prefill(model, prompts(30))
    assert not any(x.any() for x in held)
    model.model.layers[1].self_attn.is_causal = True
    cache.prefill(model, ids[:, :-1])
    assert all(x is y for x, y in zip(held, (x for layer in cache.layers for x in layer.kv.tensors), strict=True))
    assert_same(generate(model, ids, **cache_kwargs(cache)), generate(model, ids))


def test_reset() -> None:
    run_ranks(2, check_reset)


def split(model: transformers.PreTrainedModel, mesh: DeviceMesh) -> None:
    """Tensor-parallel attention."""
    for layer in model.model.layers:
        plan = {f"{name}_proj": ColwiseParallel() for name in "qkv"} | {"o_proj": RowwiseParallel()}
        parallelize_module(layer.self_attn, mesh, plan)


@pytest.mark.parametrize("n", slow_but([2], [1, 2, 3, 4]))
def test_sharded_cache(n: int) -> None:
    """Prompts that the ranks divide and do not, of fewer tokens than ranks, at once and in chunks."""
    cases = [(2, None), (3, n), (30, None), (31, 2 * n), (32, 4 * n), (33, 64 * n), (34, 3 * n)]
    run_ranks(n, check_sharded, "llama", cases)


@pytest.mark.parametrize("name", slow_but(["gpt2"], MODELS[1:]))
def test_models(name: str) -> None:
    run_ranks(2, check_sharded, name, [(17, 6)])


def check_meshes() -> None:
    names = ("tp", "kv")
    check_sharded("llama", [(18, 6)], init_device_mesh("cpu", (2, 2), mesh_dim_names=names), heads="tp")
    names = ("node", "gpu")
    check_sharded("llama", [(19, 8)], init_device_mesh("cpu", (2, 2), mesh_dim_names=names), sequence=names)


@pytest.mark.slow
def test_meshes_of_two_dims() -> None:
    run_ranks(4, check_meshes)


def check_order() -> None:
    """Ranks in another order than their numbers, in which PyTorch has its groups."""
    for order in ([3, 1, 0, 2], [2, 0]):
        mesh = DeviceMesh("cpu", order, mesh_dim_names=("kv",))
        if dist.get_rank() in order:
            check_sharded("llama", [(17, 8)], mesh)
    mesh = DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("node", "gpu"))
    check_sharded("llama", [(17, 8)], mesh, sequence=("node", "gpu"))
    twisted = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("node", "gpu"))
    with pytest.raises(
        ValueError, match=r"`mesh` must have ranks in one order along each dim, got \[\[3, 1\], \[0, 2\]\]"
    ):
        ShardedKVCache(2, twisted, 8, sequence=("node", "gpu"))


def test_the_order_of_ranks() -> None:
    run_ranks(4, check_order)


def check_last_position() -> None:
    """A prompt that fills the table of positions, which padding would not find a place in."""
    model, ids = build("gpt2"), prompts(31)
    model.transformer.wpe.weight.data = model.transformer.wpe.weight[:31].clone()
    cache = ShardedKVCache(model.config, one_dim(), 31)
    torch.testing.assert_close(cache.prefill(model, ids), model(ids).logits[:, -1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("n", [2, 3])
def test_the_last_position(n: int) -> None:
    run_ranks(n, check_last_position)


def check_shared_prefix(cases: list[tuple[int, int | None]]) -> None:
    model, mesh = build("llama"), one_dim()
    for length, chunk in cases:
        ids, fan = prompts(length), {"num_return_sequences": 3, "do_sample": True}
        first, again = (SharedPrefixCache(model.config, mesh=mesh) for _ in range(2))
        logits = first.prefill(model, ids[:, :-1], chunk=chunk)
        out = model(ids[:, :-1], **cache_kwargs(again))
        torch.testing.assert_close(logits, out.logits[:, -1], rtol=0, atol=1e-10)
        for mine, theirs in zip(first.layers, again.layers, strict=True):
            assert mine.kv.lengths == theirs.kv.lengths == (length - 1,)
            for x, y in zip(mine.kv.tensors, theirs.kv.tensors, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=1e-10)
        fork = first.fork(3, NEW)
        assert_same(generate(model, ids, **cache_kwargs(fork), **fan), generate(model, ids, **fan))
        more = prompts(4)  # the prompts go on
        for cache in (first, again):
            model(more, **cache_kwargs(cache))
        assert_same(generate(model, torch.cat([ids[:, :-1], more, ids[:, :1]], 1), **cache_kwargs(first.fork(1, NEW))),
                    generate(model, torch.cat([ids[:, :-1], more, ids[:, :1]], 1)))  # fmt: skip


@pytest.mark.parametrize("n", slow_but([2], [2, 4]))
def test_shared_prefix(n: int) -> None:
    run_ranks(n, check_shared_prefix, [(30, None), (31, 4 * n), (3, None)])


class Shapes(TorchDispatchMode):
    """The shapes of all tensors that are made, but for integers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(x, Tensor) and (x.is_floating_point() or x.dtype == torch.bool):
                self.found.add(tuple(x.shape))
        return out


@contextmanager
def count_sent() -> Iterator[list[int]]:
    """The sizes of what is sent point to point, in bytes."""
    send, sizes = dist.batch_isend_irecv, []

    def counting(ops: list[dist.P2POp]) -> list[dist.Work]:
        sizes.extend(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return send(ops)

    dist.batch_isend_irecv = counting
    try:
        yield sizes
    finally:
        dist.batch_isend_irecv = send


def check_activations(length: int, chunk: int | None) -> tuple[list[int], int]:
    """The sizes of dims beyond those of the model, and the bytes sent."""
    model, shapes = build("llama"), Shapes()
    cache = SharedPrefixCache(model.config, mesh=one_dim())
    with count_sent() as sizes, shapes:
        cache.prefill(model, prompts(length, batch=1), chunk)
    return sorted({size for shape in shapes.found for size in shape if size > 99}), sum(sizes)


@pytest.mark.parametrize("n", slow_but([2], [2, 4]))
def test_activations_and_bytes(n: int) -> None:
    """No tensor has more than ceil(P / n) tokens, and in chunks no activation has more than those of one."""
    length, layers, kv_heads, dim = 997, 2, 2, 16
    each = -(-length // n)
    token = layers * 2 * kv_heads * dim * 8
    for sizes, total in run_ranks(n, check_activations, length, None):
        assert max(sizes) == each
        assert total == (n - 1) * each * token
    keys = [min(end, each) for end in range(120, each + 120, 120)]  # that a rank has after each chunk
    for sizes, total in run_ranks(n, check_activations, length, 120 * n):
        assert set(sizes) <= {119, 120, *keys, *(x - 1 for x in keys)}  # keys, and activations of a chunk
        assert total == (n - 1) * sum(keys) * token


def check_compiled() -> list[int]:
    """Graphs of a decode step after a prefill, and of another such step."""
    model, graphs = build("llama"), []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(gm)
        return gm

    config = CompileConfig(backend=backend, mode=None, fullgraph=True)
    config._compile_all_devices = True  # transformers compiles on accelerators only, unless told
    model.forward = torch.compile(model.forward, backend=backend)
    compiled = torch.compile(model, backend=backend)  # the prefill makes no graph of either
    ids, found = prompts(20), []
    for _ in range(2):
        cache = ShardedKVCache(model.config, one_dim(), 32)
        cache.prefill(compiled, ids[:, :-1], chunk=8)
        assert len(graphs) == sum(found)
        got = generate(model, ids, **cache_kwargs(cache), compile_config=config)
        assert torch.equal(got.sequences, generate(build("llama"), ids).sequences)
        found.append(len(graphs) - sum(found))
    return found


@pytest.mark.drawn(2, "compiled decoding with transformers")
def test_compiled() -> None:
    assert run_ranks(2, check_compiled) == [[1, 0]] * 2
