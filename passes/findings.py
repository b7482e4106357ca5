"""Findings of the passes about one graph, with their source locations, for reports."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import torch
from torch import SymInt
from torch.fx import Node

from tatten.passes.cost import Cost
from tatten.passes.index_cost import IndexCost
from tatten.passes.latent_cost import LatentCost
from tatten.passes.reasons import Decline

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>[^\n]*)')


def counted(n: int | SymInt, one: str, plural: str = "s") -> str:
    """Return a number and a noun, of which `plural` is the ending for all numbers but 1."""
    return f"{n} {one}{'' if n == 1 else plural}"


@dataclass(frozen=True)
class SourceLocation:
    """The place of a call in the user's program: its module and its line."""

    module: str = ""
    file: str = ""
    line: int = 0
    code: str = ""


def source_location(node: Node) -> SourceLocation:
    """Return the innermost module of a node and its innermost line outside torch; empty if the graph has none."""
    stack = node.meta.get("nn_module_stack") or {}
    module = _module_path(str(list(stack.values())[-1][0])) if stack else ""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    if not frames:
        return SourceLocation(module)
    last = next((frame for frame in reversed(frames) if not frame["file"].startswith(_TORCH)), frames[-1])
    return SourceLocation(module, last["file"], int(last["line"]), last["code"].strip())


def _module_path(path: str) -> str:
    """Turn `L['self'].model.__dict__['_modules']['layers'][0]` into `model.layers.0`, the name in `named_modules`.

    A model in any other variable keeps the variable's name, since a function may use several models. Decorators of
    `forward`, as in transformers from 5.24 on, have the model in `args[0]`.
    """
    path = re.sub(r"^[LG](?:\['(?:self|fn|mod|model)'\]|\['args'\]\[0\])", "", path)
    path = re.sub(r"^[LG]\['([^']+)'\]", r"\1", path)
    path = re.sub(r"\.__dict__(?=\[)|\._modules\b|\['_modules'\]|\._orig_mod\b|\['_orig_mod'\]", "", path)
    return re.sub(r"\['?([^'\]]+)'?\]", r".\1", path).strip(".")


@dataclass(frozen=True)
class Rewritten:
    """An SDPA call, or an indexer's scores, that became a tatten op.

    Attributes:
        location: the call in the user's program.
        op: the op that replaced the call.
        shapes: dtypes and shapes of the query, of keys and values as they are stored, and of the mask.
        cost: the estimate of the least that this saves; None if unknown.
        note: remarks, such as the reason why it isn't a better op; empty without any.
        provider: the kernel library that computes it on a GPU, for the sizes of the example inputs; empty on a CPU.
        attention: False for the scores of an indexer.
    """

    location: SourceLocation
    op: str
    shapes: str
    cost: Cost | LatentCost | IndexCost | None
    note: str = ""
    provider: str = ""
    attention: bool = True


@dataclass(frozen=True)
class Declined:
    """An SDPA call or other attention that stayed as it was. With `attention=False`, the scores of an indexer."""

    location: SourceLocation
    shapes: str
    decline: Decline
    attention: bool = True


@dataclass(frozen=True)
class GraphReport:
    """The findings of one graph in order, the time that the passes took, and a note on the graph."""

    findings: tuple[Rewritten | Declined, ...]
    milliseconds: float
    note: str = ""
