"""Read tensors into which numbers are scattered: their indices, and their contents at the indices and elsewhere."""

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
WIDE_ENOUGH = (torch.int32, torch.int64, torch.float32, torch.float64)  # a count of keys can't overflow to 0


def read_scatter(reading: Reading, node: Node) -> Marked | None:
    """Read a scatter of one number into another, or a count of how often each key is named."""
    into, index, source = argument(node, 0, "input"), argument(node, 2, "index"), argument(node, 3, "src")
    source = node.kwargs.get("value", source)
    filled, numbers = tensor_of(into), tensor_of(index)
    if filled is None or numbers is None or numbers.dim() != filled.dim() or node.kwargs.get("reduce") is not None:
        return None
    # Rows beyond those of the index would stay unchanged.
    if argument(node, 1, "dim") not in (-1, filled.dim() - 1) or not known_shape(numbers.shape[:-1], filled.shape[:-1]):
        return None
    outside, number = reading.number(into, node), reading.number(source, node)
    if outside is None or (number is not None and not math.isfinite(number) and not filled.is_floating_point()):
        return None
    number = None if number is None or math.isnan(number) else rounded(number, filled.dtype)
    indices, casts = _before_casts(index)
    read = ((indices, casts[-1] if casts else node),)
    if op_name(node).endswith("_"):
        marked = Marked(indices, outside, number, path=casts, written=((into, node),), reads=read)
    else:
        marked = Marked(indices, outside, number, path=(*casts, into, node), reads=read)
    if "add" not in op_name(node):
        return marked if number is not None else None
    return _counted(reading, marked, source, node) if outside == 0 and filled.dtype in WIDE_ENOUGH else None


def _counted(reading: Reading, marked: Marked, source: Any, node: Node) -> Marked | None:
    """Read a `scatter_add` of ones, or of a bool `source` cast to numbers: only indices where it is True count."""
    if isinstance(marked.inside, float):
        return dataclasses.replace(marked, inside=1.0, counts=True) if marked.inside == 1 else None
    casts = isinstance(source, Node) and op_name(source) in CASTS | INTEGER_CASTS
    counts = argument(source, 0, "self") if casts else None
    bools, indices = tensor_of(counts), known_tensor(marked.indices)
    if not isinstance(counts, Node) or bools is None or bools.dtype != torch.bool or written(source, source, node):
        return None
    if not known_shape(bools.shape, indices.shape) or written(counts, counts, source):
        return None
    counted = reading.draft(torch.where, counts, marked.indices, reading.draft(torch.full_like, marked.indices, -1))
    reads = (*marked.reads, (counts, source))
    return dataclasses.replace(marked, indices=counted, inside=1.0, counts=True, in_range=False, reads=reads)


def _before_casts(index: Node) -> tuple[Node, tuple[Node, ...]]:
    """Return the indices before casts to other integers, in int32 if possible, and the casts, last first."""
    indices, casts, node = index, list[Node](), index
    while op_name(node) in CASTS | INTEGER_CASTS:
        source = argument(node, 0, "input", node.kwargs.get("self"))
        tensor = tensor_of(source)
        if tensor is None or tensor.dtype not in (torch.int32, torch.int64) or not on_one_device(source, node):
            break
        if written(source, source, node):
            break
        casts.append(node)
        node = source
        if tensor.dtype == torch.int32 or known_tensor(indices).dtype != torch.int32:
            indices = node
    return indices, tuple(casts[: casts.index(indices)] if indices in casts else casts)
