"""`F.scaled_dot_product_attention` over DTensors whose keys and values are sharded over the sequence.

PyTorch has no rule for that placement and gathers the whole cache. Here it becomes local attention and one merge, in
eager mode, and quickly while Dynamo traces. This is done by handlers in the table of DTensor's dispatcher where
PyTorch's context parallelism puts its own. All use of that table is in this file. Importing DTensor takes seconds, so
that is left to who uses it.

PyTorch's math is no op: unless in inference mode, SDPA is a product of query and keys, a softmax and another product
before any handler sees it. Nothing there can be merged, but the softmax is seen, and has a name that only SDPA uses.
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

_INSTEAD = "SDPA over DTensors is PyTorch's own"


def _find(*names: str) -> tuple[OpOverload, ...]:
    for name in names:
        if not hasattr(torch.ops.aten, name):
            moved(f"torch.ops.aten.{name}", "it is missing", f"where it is called, {_INSTEAD}")
    return tuple(getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name))


# What SDPA dispatches to; it is an op of its own in inference mode only.
_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_OPS = (_SDPA, *_find(*(f"_scaled_dot_product_{kernel}" for kernel in _KERNELS)))
_SOFTMAX_OF_MATH = _find("_safe_softmax")


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

    From then on `F.scaled_dot_product_attention(query, key, value, attn_mask)` computes local attention and one
    `tatten.tree_merge` for each such mesh dim, if `query` is replicated over it, there is neither dropout nor
    `is_causal`, and no gradient is wanted; other mesh dims may shard the batch or the heads of all three. The result is
    placed as `query` is. All other placements are PyTorch's affair, as before: while one thread is at one of them, the
    others get PyTorch's rules, too.

    Calls that PyTorch has no fused kernel for, such as those on a CPU with a mask of 3 dims or another head_dim of
    `value`, and all under `sdpa_kernel(SDPBackend.MATH)`, are merged in inference mode and where `backend="tatten"`
    rewrites them. Elsewhere, graphs of other backends included, they come here in pieces, and would end as
    `Partial(sum)`, of which each rank holds a part: if keys are sharded over the sequence and no gradient is wanted,
    NotImplementedError is raised instead. While it traces, Dynamo asks PyTorch's rules for the pieces, which know no
    answer on some meshes of several dims: that is an error, too.

    For the whole process, unless called within `context_parallel`, which ends with what was before it; calling it twice
    does nothing.

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
    """Undo `enable_dtensor_sdpa`; without it, do nothing.

    Examples:
        >>> import tatten
        >>> tatten.enable_dtensor_sdpa()
        >>> tatten.disable_dtensor_sdpa()  # SDPA over DTensors is PyTorch's own again
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
    """The table of DTensor's dispatcher; None if it isn't a table of functions of an op and its arguments."""
    from torch.distributed.tensor import DTensor

    try:
        table = DTensor._op_dispatcher._custom_op_handlers
        if not isinstance(table, dict) or not has_schemas():
            raise TypeError(f"it is a {type(table).__name__}")
        for op, handler in table.items():
            inspect.signature(handler).bind(op, (), {})
    except Exception as error:
        moved("torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers", error, _INSTEAD)
        return None
    return table


@dataclass(frozen=True)
class _Handler:
    """A handler that DTensor's dispatcher calls for an op; `before` is the handler without us, if any."""

    before: Callable[..., object] | None

    @_untraced
    def __call__(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        arguments = _named(op, args, kwargs)
        if op in _SOFTMAX_OF_MATH:
            _check_softmax(arguments["self"], arguments["dim"])
            return self._pytorchs_own(op, args, kwargs)
        sharding = _sharding_of(op, arguments)
        if sharding is None:
            return self._pytorchs_own(op, args, kwargs)
        out, lse = sharded_attention(sharding, *_tensors(arguments), arguments.get("scale"))
        if len(op._schema.returns) == 1:
            return out
        # Sizes and random states of its kernels, which only a backward asks for.
        rest = (0 if isinstance(r.type, torch.IntType) else torch.empty(0) for r in op._schema.returns[2:])
        return (out, lse, *rest)

    def _pytorchs_own(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Make the call as if we weren't there. The dispatcher can't be told to go on, so it is asked again."""
        if self.before is not None:
            return self.before(op, args, kwargs)
        from torch.distributed.tensor import DTensor

        handlers = DTensor._op_dispatcher._custom_op_handlers  # `_handlers` checked it, which takes longer than a call
        handlers.pop(op, None)
        try:
            return op(*args, **kwargs)
        finally:
            handlers[op] = self


def _sharding_of(op: OpOverload, arguments: dict[str, Any]) -> Sharding | None:
    """Plan a call on local tensors, or return None if it is PyTorch's."""
    from tatten.ops.distributed.placement import find_sharding

    tensors = _tensors(arguments)
    if arguments.get("dropout_p") or arguments.get("is_causal"):
        return None
    if op is _SDPA and not arguments.get("enable_gqa") and arguments["query"].shape[1] != arguments["key"].shape[1]:
        return None  # SDPA has not checked that yet
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return None
    return find_sharding(*tensors)


def _check_softmax(scores: DTensor, dim: int) -> None:
    """Raise NotImplementedError for SDPA's math over sharded keys, unless a gradient is wanted.

    Dynamo's fake tensors are let through: the graph may still be one where the call is merged.
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
    return {**dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)), **kwargs}


def _tensors(args: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Query, key, value and mask, however this op calls the last one."""
    return args["query"], args["key"], args["value"], args.get("attn_mask", args.get("attn_bias"))


def merged_attention(
    query: DTensor, key: DTensor, value: DTensor, mask: DTensor, dropout_p: float, scale: float | None
) -> DTensor | None:
    """Return the output of SDPA with `enable_gqa`, or None if PyTorch has to compute it.

    It does not depend on whether PyTorch has a fused kernel for the call.
    """
    args = {"query": query, "key": key, "value": value, "attn_mask": mask, "dropout_p": dropout_p, "enable_gqa": True}
    sharding = _sharding_of(_SDPA, args)
    return None if sharding is None else sharded_attention(sharding, query, key, value, mask, scale)[0]


def sharded_attention(
    sharding: Sharding, query: DTensor, key: DTensor, value: DTensor, mask: DTensor | None, scale: float | None
) -> tuple[DTensor, DTensor]:
    """Local attention, merged over the mesh dims that shard the sequence; the state is placed as `query` is."""
    if mask is not None:
        mask = mask.redistribute(placements=sharding.mask)
    local = [None if x is None else x.to_local() for x in (query, key, value, mask)]
    out, lse = torch.ops.tatten.decode_attention.default(*local, None, scale)
    for group in sharding.groups:
        out, lse = tree_merge(out, lse, group)
    if out.shape[2] > 1:  # as SDPA lays it out: `out.transpose(1, 2).flatten(2)` is then a view
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return _placed(out, sharding), _placed(lse, sharding)


def _placed(local: Tensor, sharding: Sharding) -> DTensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, sharding.mesh, sharding.out, run_check=False)
