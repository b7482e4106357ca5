"""Nodes whose values reach nothing: Dynamo leaves them in a graph, and whoever runs it may leave them out."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from tatten.passes.calls import op_name, schemas
from tatten.passes.mutation import writes
from tatten.passes.op_names import CASTS
from tatten.passes.symbolic import value_of

MOST = 64  # nodes that are followed from one; a longer computation counts as used
WITHOUT_SCHEMA = {"getitem", "getattr"} | CASTS
EFFECTS = {torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def dead_from(node: Node) -> frozenset[Node] | None:
    """Return a node and all that is computed from it if none of that has an effect, else None.

    An output, a write, a random number, an assertion, a value that the host reads and an op that isn't PyTorch's are
    effects.
    """
    dead, frontier = {node}, [node]
    while frontier:
        here = frontier.pop()
        if not _has_no_effect(here) or len(dead) > MOST:
            return None
        new = [user for user in here.users if user not in dead]
        dead.update(new)
        frontier += new
    return frozenset(dead)


def _has_no_effect(node: Node) -> bool:
    """Tell whether all that a node does is to compute tensors from its arguments."""
    name, value = op_name(node), value_of(node)
    values = value if isinstance(value, tuple | list) else (value,)
    if not name or "assert" in name or not values or not all(isinstance(x, Tensor) for x in values) or writes(node):
        return False
    if name in WITHOUT_SCHEMA:
        return True
    known = schemas(node)
    return bool(known) and not any(EFFECTS & {*overload.tags} for overload in known)
