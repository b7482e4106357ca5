"""Descriptions of calls for the report: their operands, and the kernel library that computes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from tatten.ops.cuda.providers import choose_provider, replaced_flash, table_note
from tatten.ops.cuda.workload import Workload, needs_of
from tatten.ops.kernel_signatures import decode_call
from tatten.passes.cost import Cost
from tatten.passes.drafts import dtensor_behind
from tatten.passes.findings import Declined, source_location
from tatten.passes.latent_cost import LatentCost
from tatten.passes.reasons import Decline
from tatten.passes.sdpa import SdpaCall
from tatten.passes.stored import Stored
from tatten.passes.symbolic import constant, hint, known_tensor, tensor_of


def declined(call: SdpaCall, decline: Decline) -> Declined:
    """Return the finding for a declined call."""
    return Declined(source_location(call.source_node), shapes_of(call, [call.key], [call.value]), decline)


def bases(stored: Iterable[Stored]) -> list[Node]:
    """Return the nodes of the user's program that hold the stored tensors."""
    return [dtensor_behind(x.base) or x.base for x in stored]


def shapes_of(call: SdpaCall, keys: Iterable[Node], values: Iterable[Node]) -> str:
    """Return dtypes and shapes of a call's operands, keys and values as they are stored."""
    return show([("q", call.query), *(("k", x) for x in keys), *(("v", x) for x in values), ("mask", call.attn_mask)])


def show(named: Iterable[tuple[str, object]]) -> str:
    """Return the dtype and shape of each tensor after its name."""
    tensors = [(name, tensor) for name, node in named if (tensor := tensor_of(node)) is not None]
    return " ".join(f"{name} {str(tensor.dtype)[6:]}{list(tensor.shape)}" for name, tensor in tensors)


def assumptions_of(cost: Cost | LatentCost | None) -> str:
    """Return a remark on the numbers that stand for dynamic sizes."""
    return "" if cost is None else cost.assumed


def provider_of(op: Node) -> str:
    """Return the provider that the op chooses for the sizes of the example inputs; empty on a CPU."""
    first = [x[0] if isinstance(x, (list, tuple)) else x for x in op.args[:3]]
    query, key, value = (known_tensor(x) for x in first)
    if query.device.type != "cuda":
        return ""
    is_decode = op.target is torch.ops.tatten.decode_attention.default
    if op.kwargs.get("batch_invariant") or op.kwargs.get("block_table") is not None:
        return "triton"
    arguments: Any = op.args, op.kwargs
    needs = needs_of(decode_call(*arguments[0], **arguments[1])) if is_decode else ("segments",)
    sizes = [n for x in (query, key, value) for n in x.shape]
    if not needs and not all(map(hint, sizes)):
        return "auto"
    work = Workload.of(query, key, value, needs, lambda n: hint(n) or 0)
    dynamic = not needs and any(constant(n) is None for n in sizes)
    caveat = "for the example: sizes are dynamic, and each call chooses by its own" if dynamic else ""
    notes = "; ".join(filter(None, (table_note(work), replaced_flash(work), caveat)))
    return choose_provider(work) + (f" ({notes})" if notes else "")
