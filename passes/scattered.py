"""Tensors into which numbers are scattered: the indices that name where, and what is there and elsewhere."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch.fx import Node

from tatten.passes.calls import argument, op_name
from tatten.passes.literals import rounded
from tatten.passes.marked import Marked, Reading, on_one_device, written
from tatten.passes.op_names import CASTS
from tatten.passes.symbolic import known_shape, known_tensor, tensor_of

IN_PLACE = {"scatter_", "scatter_add_"}
SCATTERS = {"scatter", "scatter_add"} | IN_PLACE
INTEGER_CASTS = {"bool", "long", "int"}  # these have no schema
WIDE_ENOUGH = (torch.int32, torch.int64, torch.float32, torch.float64)  # no count of keys becomes 0 again


def read_scatter(reading: Reading, node: Node) -> Marked | None:
    """One number scattered into another, or the number of times that each key is named."""
    into, index, source = argument(node, 0, "input"), argument(node, 2, "index"), argument(node, 3, "src")
    source = node.kwargs.get("value", source)
    filled, at = tensor_of(into), tensor_of(index)
    if filled is None or at is None or at.dim() != filled.dim() or node.kwargs.get("reduce") is not None:
        return None
    # Rows beyond those of the index would stay as they are.
    if argument(node, 1, "dim") not in (-1, filled.dim() - 1) or not known_shape(at.shape[:-1], filled.shape[:-1]):
        return None
    outside, number = reading.number(into, node), reading.number(source, node)
    if outside is None or (number is not None and not math.isfinite(number) and not filled.is_floating_point()):
        return None
    number = None if number is None or math.isnan(number) else rounded(number, filled.dtype)
    indices, casts = _before_casts(index, node)
    read = ((indices, casts[-1] if casts else node),)
    if op_name(node).endswith("_"):
        marked = Marked(indices, outside, number, path=casts, written=((into, node),), reads=read)
    else:
        marked = Marked(indices, outside, number, path=(*casts, into, node), reads=read)
    if "add" not in op_name(node):
        return marked if number is not None else None
    return _counted(reading, marked, source, node) if outside == 0 and filled.dtype in WIDE_ENOUGH else None


def _counted(reading: Reading, marked: Marked, source: Any, node: Node) -> Marked | None:
    """Indices of which those count whose `source`, a bool in numbers, is True; or all of them."""
    if isinstance(marked.inside, float):
        return dataclasses.replace(marked, inside=1.0, counts=True) if marked.inside == 1 else None
    casts = isinstance(source, Node) and op_name(source) in CASTS | INTEGER_CASTS
    counts = argument(source, 0, "self") if casts else None
    ones, at = tensor_of(counts), known_tensor(marked.indices)
    if not isinstance(counts, Node) or ones is None or ones.dtype != torch.bool or written(source, source, node):
        return None
    if not known_shape(ones.shape, at.shape) or written(counts, counts, source):
        return None
    indices = reading.draft(torch.where, counts, marked.indices, reading.draft(torch.full_like, marked.indices, -1))
    reads = (*marked.reads, (counts, source))
    return dataclasses.replace(marked, indices=indices, inside=1.0, counts=True, in_range=False, reads=reads)


def _before_casts(index: Node, reader: Node) -> tuple[Node, tuple[Node, ...]]:
    """The indices before casts to other integers, in int32 if they ever are, and these casts, the last one first."""
    found, casts, here = index, list[Node](), index
    while op_name(here) in CASTS | INTEGER_CASTS:
        source = argument(here, 0, "input", here.kwargs.get("self"))
        tensor = tensor_of(source)
        if tensor is None or tensor.dtype not in (torch.int32, torch.int64) or not on_one_device(source, here):
            break
        if written(source, source, here):
            break
        casts.append(here)
        here = source
        if tensor.dtype == torch.int32 or known_tensor(found).dtype != torch.int32:
            found = here
    return found, tuple(casts[: casts.index(found)] if found in casts else casts)
