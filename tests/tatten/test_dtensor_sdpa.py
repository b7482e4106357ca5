"""SDPA over DTensors that are sharded over the sequence: exact, merged and never gathered; all else is PyTorch's."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pairs import pairs
from ranks import run_ranks
from slow import slow_after
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import tatten
from tatten import dtensor_sdpa
from tatten.ops.distributed.placement import find_sharding

pytestmark = pytest.mark.drawn(2, "DTensors")

R, S0, S1, S2, S3 = Replicate(), Shard(0), Shard(1), Shard(2), Shard(3)
B, HQ, HKV, L, S, D = 2, 8, 4, 3, 21, 16


def tensors(dtype: torch.dtype = torch.float32, batch: int = B, kv_heads: int = HKV, length: int = S) -> list[Tensor]:
    """query, key, value and a float mask, the same on all ranks."""
    rng = torch.Generator().manual_seed(3)
    shapes = (batch, HQ, L, D), (batch, kv_heads, length, D), (batch, kv_heads, length, D), (batch, 1, L, length)
    return [torch.randn(shape, generator=rng).to(dtype) for shape in shapes]


def place(x: Tensor, mesh: DeviceMesh, *placements: Any) -> DTensor:
    return distribute_tensor(x, mesh, placements)


def sdpa(*args: Any, **kwargs: Any) -> Tensor:
    return F.scaled_dot_product_attention(*args, enable_gqa=True, **kwargs)


def counted(*args: Any, **kwargs: Any) -> tuple[DTensor, list[str]]:
    with CommDebugMode() as comm:
        out = sdpa(*args, **kwargs)
    assert isinstance(out, DTensor)
    return out, sorted(str(op).split(".")[-1] for op, n in comm.get_comm_counts().items() for _ in range(n))


def on_one_mesh(dtype: torch.dtype, kv_heads: int, length: int, mode: str) -> list[tuple[float, list[str], bool]]:
    tatten.enable_dtensor_sdpa()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("kv",))
    q, k, v, mask = tensors(dtype, kv_heads=kv_heads, length=length)
    shards = place(q, mesh, R), place(k, mesh, S2), place(v, mesh, S2)
    masks: list[tuple[Tensor | None, Any]] = [
        (None, None),
        (mask, S3),
        (mask, R),
        (mask > 0, S3),
        (mask[:1, :, :1], S3),
        (mask[0, 0], Shard(1)),
        (mask[..., :1], R),
    ]
    results = []
    with torch.inference_mode(mode == "inference"):
        for plain, placement in masks:
            placed = None if plain is None else place(plain, mesh, placement)
            out, collectives = counted(*shards, attn_mask=placed, scale=0.3)
            want = sdpa(*(x.double() for x in (q, k, v)), attn_mask=_double(plain), scale=0.3)
            error = (out.full_tensor().double() - want).abs().max().item()
            results.append((error, collectives, out.placements == (R,)))
    return results


def _double(mask: Tensor | None) -> Tensor | None:
    return mask if mask is None or mask.dtype == torch.bool else mask.double()


SHAPES = [(torch.float32, HKV, S), (torch.bfloat16, 1, 24), (torch.float32, HQ, 2), (torch.float64, HKV, 1)]


@pytest.mark.parametrize(
    "n, shape, mode", slow_after(3, pairs([1, 2, 3, 4], SHAPES, ["no_grad", "inference"])), ids=str
)
def test_one_merge_and_no_gather(n: int, shape: tuple[torch.dtype, int, int], mode: str) -> None:
    """Lengths that do not divide, GQA, MQA and MHA, ranks without keys."""
    dtype, _, _ = shape
    for results in run_ranks(n, on_one_mesh, *shape, mode):
        for error, collectives, replicated in results:
            assert error < {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}[dtype]
            assert collectives == (["all_gather_into_tensor"] if n > 1 else [])
            assert replicated


def on_two_dims(q_placed: Sequence[Any], kv_placed: Sequence[Any], mask_placed: Sequence[Any]) -> tuple[Any, ...]:
    tatten.enable_dtensor_sdpa()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    q, k, v, mask = tensors(length=22)
    placed = place(q, mesh, *q_placed), place(k, mesh, *kv_placed), place(v, mesh, *kv_placed)
    out, collectives = counted(*placed, attn_mask=place(mask, mesh, *mask_placed))
    error = (out.full_tensor() - sdpa(q, k, v, attn_mask=mask)).abs().max().item()
    return error, collectives, out.placements == tuple(q_placed)


@pytest.mark.parametrize(
    "q_placed, kv_placed, mask_placed, merges",
    slow_after(
        2,
        [
            ((R, R), (S2, S2), (S3, R), 2),
            ((S1, R), (S1, S2), (R, S3), 1),
            ((R, R), (S2, S2), (S3, S3), 2),
            ((R, R), (S2, S2), (R, R), 2),
            ((R, S1), (S2, S1), (S3, R), 1),
            ((S0, R), (S0, S2), (S0, S3), 1),
            ((S0, R), (S0, S2), (R, R), 1),
            ((R, R), (R, S2), (R, S3), 1),
        ],
    ),
)
def test_meshes_of_two_dims(q_placed: Any, kv_placed: Any, mask_placed: Any, merges: int) -> None:
    for error, collectives, placed in run_ranks(4, on_two_dims, q_placed, kv_placed, mask_placed):
        assert error < 1e-5
        assert collectives == ["all_gather_into_tensor"] * merges
        assert placed


def as_pytorch_does() -> list[str]:
    """List the calls of PyTorch's own whose result, placement or collectives differ without and with our handler."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("kv",))
    q, k, v, mask = tensors(kv_heads=HQ, length=L)
    calls: list[tuple[list[Any], dict[str, Any]]] = [
        ([place(x, mesh, R) for x in (q, k, v)], {}),
        ([place(x, mesh, R) for x in (q, k, v)], {"is_causal": True}),
        ([place(x, mesh, R) for x in (q, k, v)], {"attn_mask": place(mask, mesh, R)}),
        ([q, k, v], {}),
    ]
    table = dict(DTensor._op_dispatcher._custom_op_handlers)
    before = [observe(args, kwargs) for args, kwargs in calls]
    tatten.enable_dtensor_sdpa()
    tatten.enable_dtensor_sdpa()
    during = [observe(args, kwargs) for args, kwargs in calls]
    tatten.disable_dtensor_sdpa()
    tatten.disable_dtensor_sdpa()
    both = enumerate(zip(before, during, strict=True))
    differing = [f"call {i}: {b[1:]} became {d[1:]}" for i, (b, d) in both if not same(b, d)]
    if DTensor._op_dispatcher._custom_op_handlers != table:
        differing.append("the table of handlers")
    return differing


def observe(args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, str, str]:
    with CommDebugMode() as comm:
        try:
            out = F.scaled_dot_product_attention(*args, **kwargs)
        except NotImplementedError as error:  # torch 2.13 has no rule for is_causal on a CPU
            return torch.zeros(()), "error", str(error)
    counts = str(sorted((str(op), n) for op, n in comm.get_comm_counts().items()))
    return (out.to_local(), str(out.placements), counts) if isinstance(out, DTensor) else (out, "plain", counts)


def same(a: tuple[Any, str, str], b: tuple[Any, str, str]) -> bool:
    return torch.equal(a[0], b[0]) and a[1:] == b[1:]


def test_other_placements_are_left_to_pytorch() -> None:
    assert list(itertools.chain(*run_ranks(2, as_pytorch_does))) == []


def not_ours() -> list[str]:
    """PyTorch's rules for these take minutes (torch 2.13), so that it is only asked whose they are."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("kv",))
    q, k, v, mask = tensors(kv_heads=HQ, length=L)
    query, key, value = place(q, mesh, R), place(k, mesh, S2), place(v, mesh, S2)
    grid = init_device_mesh("cpu", (1, 2))
    inner = place(q, grid, R, R), place(k, grid, S2, S2), place(v, grid, S2, S2)
    other = place(k, init_device_mesh("cpu", (2,)), S2)
    found = {
        "ours": find_sharding(query, key, value, place(mask, mesh, S3)),
        "value": find_sharding(query, key, place(v, mesh, R), None),
        "query": find_sharding(place(q, mesh, S2), key, value, None),
        "partial": find_sharding(DTensor.from_local(q, mesh, [Partial()]), key, value, None),
        "mask over queries": find_sharding(query, key, value, place(mask, mesh, S2)),
        "mask over inner": find_sharding(*inner, place(mask, grid, R, S3)),
        "plain mask": find_sharding(query, key, value, mask),
        "plain query": find_sharding(q, key, value, None),
        "rank": find_sharding(query[0], key[0], value[0], None),
        "replicated": find_sharding(query, place(k, mesh, R), place(v, mesh, R), None),
        "odd heads": find_sharding(*(place(x[:, :3], mesh, S1) for x in (q, k, v)), None),
        "batch": find_sharding(query, *(place(x[:1], mesh, S2) for x in (k, v)), None),
        "another mesh": find_sharding(query, other, value, None) if other.device_mesh != mesh else None,
    }
    return [name for name, sharding in found.items() if sharding is not None]


def test_what_is_not_ours() -> None:
    assert run_ranks(2, not_ours) == [["ours"], ["ours"]]


def odd_over_two_dims() -> tuple[bool, bool]:
    """6 kv heads over 2 x 2 ranks, where each dim alone would do; and the last mesh dim cutting first."""
    mesh = init_device_mesh("cpu", (2, 2, 1))
    q, k = torch.zeros(1, 24, 1, D), torch.zeros(1, 6, 4, D)
    heads = find_sharding(place(q, mesh, S1, S1, R), *(place(k, mesh, S1, S1, S2) for _ in range(2)), None)
    grid = init_device_mesh("cpu", (2, 2))
    key = place(torch.zeros(1, 4, 8, D), grid, S2, S2)
    (entry,) = key._spec.shard_order
    turned = DTensor.from_local(key.to_local(), grid, [S2, S2], run_check=False)
    turned._spec = dataclasses.replace(key._spec, shard_order=(entry._replace(mesh_dims=(1, 0)),))
    return heads is None, find_sharding(place(q, grid, R, R), turned, turned, None) is None


def test_heads_and_shards_over_two_dims() -> None:
    assert run_ranks(4, odd_over_two_dims) == [(True, True)] * 4


def flags() -> list[bool]:
    """Return for each call whether the handler takes it, by its flags."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("kv",))
    q, k, v, _ = tensors(kv_heads=HQ, length=L)
    shards = place(q, mesh, R), place(k, mesh, S2), place(v, mesh, S2)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    taken = []
    with torch.enable_grad():
        for args, kwargs in (
            (shards, {}),
            (shards, {"is_causal": True}),
            ((*shards, 0.5), {}),
            ((*shards, 0.0, False), {"scale": 0.1}),
            ((shards[0].detach().requires_grad_(), *shards[1:]), {}),
        ):
            taken.append(dtensor_sdpa._sharding_of(op, dtensor_sdpa._named(op, args, kwargs)) is not None)
    return taken


def test_flags() -> None:
    assert run_ranks(2, flags)[0] == [True, False, False, True, False]


MODES = "no_grad", "inference"


def without_a_kernel() -> list[str]:
    """List differences from plain tensors, and missing errors, where PyTorch's math would do the call, in each mode."""
    tatten.enable_dtensor_sdpa()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("kv",))
    q, k, v, mask = tensors()
    calls: dict[str, tuple[Tensor, Tensor | None]] = {
        "3-D mask": (v, mask[0]),
        "3-D mask of heads": (v, mask[0, :, :1].expand(HQ, 1, S) > 0),
        "2-D mask": (v, mask[0, 0]),
        "2-D bool mask": (v, mask[0, 0] > 0),
        "value": (v[..., :5], None),
        "value and mask": (v[..., :5], mask > 0),
    }
    wrong = []
    for (name, (value, plain)), mode in itertools.product(calls.items(), MODES):
        with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
            placed = None if plain is None else place(plain, mesh, Shard(plain.dim() - 1))
            args = place(q, mesh, R), place(k, mesh, S2), place(value, mesh, S2), placed
            want = sdpa(q, k, value, attn_mask=plain)
            for backend in (
                ("none", "eager", "aot_eager", "tatten") if "and" in name or name == "3-D mask" else ("none",)
            ):
                raises = backend == "aot_eager" or (backend != "tatten" and mode == "no_grad" and "2-D" not in name)
                torch._dynamo.reset()
                options = {"inner": "aot_eager"} if backend == "tatten" else None
                call = sdpa if backend == "none" else torch.compile(sdpa, backend=backend, options=options)
                try:
                    out = call(*args)
                except (NotImplementedError, torch._dynamo.exc.BackendCompilerFailed) as error:
                    if not raises or "inference_mode()" not in str(error):
                        wrong.append(f"{name}, {mode}, {backend}: {error}")
                else:
                    same = out.placements == (R,) and (out.to_local() - want).abs().max() < 1e-5
                    if raises or not same:
                        wrong.append(f"{name}, {mode}, {backend}: {out.placements}")
    return wrong


@pytest.mark.slow
def test_what_has_no_kernel_is_merged_or_an_error() -> None:
    assert list(itertools.chain(*run_ranks(2, without_a_kernel))) == []


def math_that_is_not_ours() -> list[str]:
    """Calls of PyTorch's math, and softmax over a sharded dim, that differ with our handlers."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("kv",))
    q, k, v, mask = tensors(kv_heads=HQ, length=20)
    heads = place(q, mesh, S1), place(k, mesh, S1), place(v[..., :5], mesh, S1)
    with torch.enable_grad():
        wanted = place(q, mesh, R).requires_grad_()
    calls: dict[str, Any] = {
        "heads": lambda: F.scaled_dot_product_attention(*heads),
        "replicated": lambda: F.scaled_dot_product_attention(*(place(x, mesh, R) for x in (q, k, v[..., :5]))),
        "softmax": lambda: place(mask, mesh, S3).softmax(-1),
        "log_softmax": lambda: place(mask, mesh, S3).log_softmax(-1),
        "gradient": lambda: F.scaled_dot_product_attention(wanted, place(k, mesh, S2), place(v[..., :5], mesh, S2)),
    }
    wrong = []
    for name, call in calls.items():
        with torch.set_grad_enabled(name == "gradient"):
            tatten.disable_dtensor_sdpa()
            try:
                before = call()
            except RuntimeError as error:  # torch 2.11 has no rule for the views of sharded heads
                if "Sharding propagation failed" not in str(error):
                    raise
                continue
            tatten.enable_dtensor_sdpa()
            after = call()
        if before.placements != after.placements or not torch.equal(before.to_local(), after.to_local()):
            wrong.append(name)
    return wrong


def test_math_of_other_placements_is_left_to_pytorch() -> None:
    assert list(itertools.chain(*run_ranks(2, math_that_is_not_ours))) == []


def merged_outside_of_a_graph(q: DTensor, k: DTensor, v: DTensor, mask: DTensor) -> DTensor:
    torch._dynamo.skip_frame()
    return F.scaled_dot_product_attention(q, k, v, mask)


def under_dynamo() -> list[str]:
    """Calls that Dynamo leaves to Python, and calls that it captures, with every size dynamic."""
    from torch._dynamo.testing import CompileCounter

    tatten.enable_dtensor_sdpa()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("kv",))
    wrong = []
    for fn, mode, dynamic in itertools.product((merged_outside_of_a_graph, sdpa), MODES, (True, None)):
        torch._dynamo.reset()
        graphs = CompileCounter()
        compiled = torch.compile(fn, backend=graphs, dynamic=dynamic)
        with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
            for q_len in (2, 3):
                q, k, v, mask = tensors(kv_heads=HQ)
                q, mask = q[:, :, :q_len], mask[:, :, :q_len]
                out = compiled(place(q, mesh, R), place(k, mesh, S2), place(v, mesh, S2), place(mask, mesh, R))
                if (out.to_local() - sdpa(q, k, v, mask)).abs().max() > 1e-5:
                    wrong.append(f"{fn.__name__}, {mode}, {dynamic}: {q_len} queries")
        if bool(graphs.frame_count) != (fn is sdpa):
            wrong.append(f"{fn.__name__}, {mode}, {dynamic}: {graphs.frame_count} graphs")
    return wrong


@pytest.mark.slow
def test_dynamo_does_not_look_into_the_handler() -> None:
    assert list(itertools.chain(*run_ranks(2, under_dynamo))) == []


def nan_in_what_the_mask_excludes() -> float:
    tatten.enable_dtensor_sdpa()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("kv",))
    q, k, v, _ = tensors(length=40)
    used = torch.arange(40) % 20 < 7
    want = sdpa(q, k[:, :, used], v[:, :, used])
    k[:, :, ~used], v[:, :, ~used] = float("nan"), float("nan")
    out = sdpa(
        place(q, mesh, R), place(k, mesh, S2), place(v, mesh, S2), attn_mask=place(used.view(1, 1, 1, 40), mesh, S3)
    )
    return (out.full_tensor() - want).abs().max().item()


def test_unused_slots_are_not_read() -> None:
    assert max(run_ranks(2, nan_in_what_the_mask_excludes)) < 1e-5


def on_two_meshes() -> list[float]:
    tatten.enable_dtensor_sdpa()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    q, k, v, _ = tensors(length=20)
    errors = []
    for _ in range(3):
        for mesh in (grid["outer"], grid["inner"]):
            out = sdpa(place(q, mesh, R), place(k, mesh, S2), place(v, mesh, S2))
            errors.append((out.full_tensor() - sdpa(q, k, v)).abs().max().item())
    return errors


def test_two_meshes_at_once() -> None:
    assert max(itertools.chain(*run_ranks(4, on_two_meshes))) < 1e-5


def call_each_op() -> list[str]:
    """Every op that SDPA may dispatch to on some device, called as such: what comes back fits its schema."""
    from tatten.dtensor_sdpa import _OPS

    tatten.enable_dtensor_sdpa()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("kv",))
    q, k, v, mask = tensors(kv_heads=HQ, length=20)
    placed = place(q, mesh, R), place(k, mesh, S2), place(v, mesh, S2)
    bias = place(mask.expand(B, HQ, L, 20), mesh, S3)
    want = F.scaled_dot_product_attention(q, k, v)
    wrong = []
    for op in _OPS:
        args = (*placed, None, False) if "efficient" in str(op) or "cudnn" in str(op) else placed
        result = op(*args)
        out = result[0] if isinstance(result, tuple) else result
        if (out.full_tensor() - want).abs().max() > 1e-5:
            wrong.append(str(op))
        if isinstance(result, tuple) and len(result) != len(op._schema.returns):
            wrong.append(f"{op} returned {len(result)}")
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default(*placed, bias, True)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    if (cudnn[0].full_tensor() - want).abs().max() > 1e-5 or cudnn[1].to_local().isnan().any():
        wrong.append("cudnn with a mask")
    return wrong


def test_every_op_that_sdpa_dispatches_to() -> None:
    assert list(itertools.chain(*run_ranks(2, call_each_op))) == []


def beside_context_parallel() -> list[str]:
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    tatten.enable_dtensor_sdpa()
    q, k, v, _ = tensors(kv_heads=HQ, length=20)
    shards = place(q, mesh, R), place(k, mesh, S2), place(v, mesh, S2)
    op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    wrong = []
    with context_parallel(mesh, buffers=[torch.arange(8.0).view(1, 8)], buffer_seq_dims=[1]):
        if "context_parallel" not in DTensor._op_dispatcher._custom_op_handlers[op].__module__:
            wrong.append("context parallelism's handler is not the one that is called inside")
    if DTensor._op_dispatcher._custom_op_handlers[op] != dtensor_sdpa._Handler(None):
        wrong.append("ours is not back")
    out, collectives = counted(*shards)
    want = F.scaled_dot_product_attention(q, k, v)
    if (out.full_tensor() - want).abs().max() > 1e-5 or collectives != ["all_gather_into_tensor"]:
        wrong.append(f"after: {collectives}")
    return wrong


def test_beside_context_parallel() -> None:
    assert list(itertools.chain(*run_ranks(2, beside_context_parallel))) == []


def test_the_private_table_is_where_it_was() -> None:
    """The private things that `tatten.dtensor_sdpa` needs."""
    assert callable(torch._disable_dynamo)
    assert torch.ops.aten._safe_softmax.default._schema.arguments[1].name == "dim"
    table = DTensor._op_dispatcher._custom_op_handlers
    assert isinstance(table, dict), "DTensor's dispatcher keeps its handlers elsewhere: see tatten/dtensor_sdpa.py"
    assert all(isinstance(op, torch._ops.OpOverload) and callable(handler) for op, handler in table.items())
