"""`F.scaled_dot_product_attention` over DTensors whose keys and values are sharded over the sequence.

PyTorch has no sharding rule for that placement and gathers the whole cache. With tatten each rank computes local
attention, and one merge combines the states, both in eager mode and while Dynamo traces. Handlers in the table of
DTensor's dispatcher do this, as PyTorch's context parallelism does. All use of that table is in this file. Importing
DTensor takes seconds, so each function that needs it imports it.

PyTorch's math implementation is not an op. Outside inference mode, SDPA has become a product of queries and keys, a
softmax and a second product before any handler sees it. These can't be merged. The softmax does reach a handler, as an
op that only SDPA calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tatten.ops import tree_merge
from tatten.ops.moved import moved
from tatten.passes.calls import OpOverload, has_schemas
from tatten.passes.symbolic import FakeTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from tatten.ops.distributed.placement import Sharding

_FALLBACK = "SDPA over DTensors is PyTorch's own"


def _existing_ops(*names: str) -> tuple[OpOverload, ...]:
    for name in names:
        if not hasattr(torch.ops.aten, name):
            moved(f"torch.ops.aten.{name}", "it is missing", f"where it is called, {_FALLBACK}")
    return tuple(getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name))


# The ops that reach DTensor's dispatcher: SDPA itself in inference mode, and one of its kernels elsewhere.
_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_OPS = (_SDPA, *_existing_ops(*(f"_scaled_dot_product_{kernel}" for kernel in _KERNELS)))
_SOFTMAX_OF_MATH = _existing_ops("_safe_softmax")


def _untraced(function: Callable[..., object]) -> Callable[..., object]:
    """Keep Dynamo from compiling a function that DTensor's dispatcher calls from C++."""
    try:
        untraced: Callable[..., object] = torch._disable_dynamo(function)
    except Exception as error:
        moved("torch._disable_dynamo", error, "tatten imports Dynamo, which takes seconds")
        untraced = torch.compiler.disable(function)
    return untraced


def enable_dtensor_sdpa() -> None:
    """Let SDPA merge over ranks where keys and values are DTensors sharded over the sequence.

    `F.scaled_dot_product_attention(query, key, value, attn_mask)` then computes local attention and one
    `tatten.tree_merge` for each mesh dim that shards the sequence. `query` must be replicated over these dims, and the
    call must have no dropout, no `is_causal` and no gradient. Other mesh dims may shard the batch or the heads of all
    three. The result is placed as `query` is. PyTorch handles calls with other placements, as before. While one thread
    runs such a call, other threads get PyTorch's rules, too.

    PyTorch has no fused kernel for some calls: on a CPU, those with a mask of 3 dims or with another head_dim of
    `value`; and all calls under `sdpa_kernel(SDPBackend.MATH)`. They are merged in inference mode and where
    `backend="tatten"` rewrites them. Elsewhere, including graphs of other backends, SDPA is decomposed before it gets
    here, and would return `Partial(sum)`, of which each rank holds a part. NotImplementedError is raised instead if
    keys are sharded over the sequence and no gradient is wanted. While Dynamo traces, it asks PyTorch's sharding rules
    for the decomposed ops. They fail on some meshes of several dims.

    The setting holds for the whole process, or until the end of a surrounding `context_parallel`, which restores the
    handlers that it found. A second call has no effect.

    Examples:
        >>> import torch, tatten, torch.distributed as dist
        >>> import torch.nn.functional as F
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        >>> mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # under torchrun
        >>> query = distribute_tensor(torch.randn(1, 8, 1, 64), mesh, [Replicate()])
        >>> key, value = (distribute_tensor(torch.randn(1, 8, 4096, 64), mesh, [Shard(2)]) for _ in "kv")
        >>> tatten.enable_dtensor_sdpa()
        >>> with torch.inference_mode():
        ...     F.scaled_dot_product_attention(query, key, value).placements
        (Replicate(),)
    """
    handlers = _handlers()
    if handlers is None:
        return
    for op in (*_OPS, *_SOFTMAX_OF_MATH):
        if not isinstance(handlers.get(op), _Handler):
            handlers[op] = _Handler(handlers.get(op))


def disable_dtensor_sdpa() -> None:
    """Undo `enable_dtensor_sdpa`. Do nothing if it was not called.

    Examples:
        >>> import tatten
        >>> tatten.enable_dtensor_sdpa()
        >>> tatten.disable_dtensor_sdpa()  # PyTorch computes SDPA over DTensors again
    """
    handlers = _handlers()
    if handlers is None:
        return
    for op in (*_OPS, *_SOFTMAX_OF_MATH):
        ours = handlers.get(op)
        if isinstance(ours, _Handler):
            del handlers[op]
            if ours.before is not None:
                handlers[op] = ours.before


def _handlers() -> dict[OpOverload, Any] | None:
    """Return the handlers of DTensor's dispatcher, by op, or None if the private table has changed."""
    from torch.distributed.tensor import DTensor

    try:
        table = DTensor._op_dispatcher._custom_op_handlers
        if not isinstance(table, dict) or not has_schemas():
            raise TypeError(f"it is a {type(table).__name__}")
        for op, handler in table.items():
            inspect.signature(handler).bind(op, (), {})
    except Exception as error:
        moved("torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers", error, _FALLBACK)
        return None
    return table


@dataclass(frozen=True)
class _Handler:
    """A handler that DTensor's dispatcher calls for an op.

    Attributes:
        before: the handler that this one replaces, or None.
    """

    before: Callable[..., object] | None

    @_untraced
    def __call__(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        arguments = _named(op, args, kwargs)
        if op in _SOFTMAX_OF_MATH:
            _check_softmax(arguments["self"], arguments["dim"])
            return self._call_pytorch(op, args, kwargs)
        sharding = _sharding_of(op, arguments)
        if sharding is None:
            return self._call_pytorch(op, args, kwargs)
        out, lse = sharded_attention(sharding, *_tensors(arguments), arguments.get("scale"))
        if len(op._schema.returns) == 1:
            return out
        # The kernels also return sizes and random states, which only a backward reads.
        unread = (0 if isinstance(r.type, torch.IntType) else torch.empty(0) for r in op._schema.returns[2:])
        return (out, lse, *unread)

    def _call_pytorch(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Call the op as if this handler were not registered.

        A handler can't hand a call back to the dispatcher, so this one is removed while the op is called again.
        """
        if self.before is not None:
            return self.before(op, args, kwargs)
        from torch.distributed.tensor import DTensor

        handlers = DTensor._op_dispatcher._custom_op_handlers  # `_handlers` checks it, too slowly for each call
        handlers.pop(op, None)
        try:
            return op(*args, **kwargs)
        finally:
            handlers[op] = self


def _sharding_of(op: OpOverload, arguments: dict[str, Any]) -> Sharding | None:
    """Return the sharding of a call that is merged over ranks, or None if PyTorch has to compute it."""
    from tatten.ops.distributed.placement import find_sharding

    tensors = _tensors(arguments)
    if arguments.get("dropout_p") or arguments.get("is_causal"):
        return None
    if op is _SDPA and not arguments.get("enable_gqa") and arguments["query"].shape[1] != arguments["key"].shape[1]:
        return None  # PyTorch raises: SDPA has not compared the heads yet
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return None
    return find_sharding(*tensors)


def _check_softmax(scores: DTensor, dim: int) -> None:
    """Raise NotImplementedError for SDPA's math implementation over sharded keys, unless a gradient is wanted.

    Dynamo's fake tensors pass: the backend may still rewrite the graph to merge the call.
    """
    sharded = any(placement.is_shard(dim % scores.dim()) for placement in scores.placements)
    if not sharded or (torch.is_grad_enabled() and scores.requires_grad) or isinstance(scores.to_local(), FakeTensor):
        return
    raise NotImplementedError(
        "scaled_dot_product_attention over keys sharded over the sequence needs a fused kernel, and PyTorch has none "
        'here: use torch.inference_mode() or torch.compile(backend="tatten"); or give `value` the head_dim of `key` '
        "and `attn_mask` 2 or 4 dims, and do not ask for SDPBackend.MATH; "
        f"got scores of shape {tuple(scores.shape)} placed as {scores.placements}"
    )


def _named(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name."""
    return {**dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)), **kwargs}


def _tensors(args: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Return query, key, value and mask, under either name that SDPA's ops give the mask."""
    return args["query"], args["key"], args["value"], args.get("attn_mask", args.get("attn_bias"))


def merged_attention(
    query: DTensor, key: DTensor, value: DTensor, mask: DTensor, dropout_p: float, scale: float | None
) -> DTensor | None:
    """Return the output of SDPA with `enable_gqa`, or None if PyTorch has to compute it.

    The call needs no fused kernel of PyTorch.
    """
    args = {"query": query, "key": key, "value": value, "attn_mask": mask, "dropout_p": dropout_p, "enable_gqa": True}
    sharding = _sharding_of(_SDPA, args)
    return None if sharding is None else sharded_attention(sharding, query, key, value, mask, scale)[0]


def sharded_attention(
    sharding: Sharding, query: DTensor, key: DTensor, value: DTensor, mask: DTensor | None, scale: float | None
) -> tuple[DTensor, DTensor]:
    """Compute local attention and merge it over the mesh dims that shard the sequence.

    Returns:
        The state `(out, lse)`, placed as `query` is.
    """
    if mask is not None:
        mask = mask.redistribute(placements=sharding.mask)
    local = [None if x is None else x.to_local() for x in (query, key, value, mask)]
    out, lse = torch.ops.tatten.decode_attention.default(*local, None, scale)
    for group in sharding.groups:
        out, lse = tree_merge(out, lse, group)
    if out.shape[2] > 1:  # SDPA's layout, with which `out.transpose(1, 2).flatten(2)` is a view
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return _placed(out, sharding), _placed(lse, sharding)


def _placed(local: Tensor, sharding: Sharding) -> DTensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, sharding.mesh, sharding.out, run_check=False)
