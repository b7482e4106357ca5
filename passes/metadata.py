"""Uses of a node that read none of its values, and nodes whose values have no effect."""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch
from torch import Tensor
from torch.fx import Node

from tatten.ops.storage import all_of
from tatten.passes.calls import op_name, reached, schemas
from tatten.passes.mutation import writes
from tatten.passes.op_names import CASTS, RESHAPES
from tatten.passes.symbolic import value_of

# Ops that read no values of their first argument, or of their second.
FIRST = {
    *("full_like", "zeros_like", "ones_like", "empty_like", "new_full", "new_zeros", "new_ones", "new_empty"),
    *("size", "stride", "dim", "numel", "sym_size", "sym_stride", "sym_numel"),
    "_assert_tensor_metadata",  # torch.export asserts the dtypes of cast tensors
}
SECOND = {"to", "type_as", "expand_as", "view_as", "reshape_as"}
PARTS = RESHAPES | {"getitem", "slice", "narrow", "select", "detach"}
ATTRIBUTES = {"shape", "dtype", "device", "ndim", "layout"}


def reads_values(user: Node, node: Node) -> bool:
    """Return True if `user`, or its result, may read values of its input `node`."""
    name = op_name(user)
    if name == "getattr":
        return user.args[1] not in ATTRIBUTES
    if sum(x is node for x in all_of(Node, [user.args, list(user.kwargs.values())])) > 1:
        return True
    if name in PARTS and user.args and user.args[0] is node:
        return any(reads_values(x, user) for x in user.users)
    position = 0 if name in FIRST else 1 if name in SECOND else None
    return position is None or len(user.args) <= position or user.args[position] is not node or writes(user)


def readers(user: Node, node: Node) -> Iterator[Node]:
    """Yield `user`, which reads no values of `node`, and if it is a view, the readers of the view."""
    yield user
    for x in user.users if op_name(user) in PARTS and user.args[0] is node else ():
        yield from readers(x, user)


def depends(node: Node, source: Node, among: Container[Node]) -> bool:
    """Return True if values of `node` are computed from values of `source`, through nodes in `among`."""
    return source in reached(node, lambda x: [y for y in x.all_input_nodes if y in among and reads_values(x, y)])


MOST = 64  # nodes that are followed; a longer computation counts as used
WITHOUT_SCHEMA = {"getitem", "getattr"} | CASTS
EFFECTS = {torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def dead_from(node: Node) -> frozenset[Node] | None:
    """Return a node and all nodes that are computed from it if none of them has an effect, else None.

    Effects are outputs, writes, random numbers, assertions, values that the host reads, and ops that aren't PyTorch's.
    """
    dead, frontier = {node}, [node]
    while frontier:
        current = frontier.pop()
        if not _has_no_effect(current) or len(dead) > MOST:
            return None
        new = [user for user in current.users if user not in dead]
        dead.update(new)
        frontier += new
    return frozenset(dead)


def _has_no_effect(node: Node) -> bool:
    """Return True if a node only computes tensors from its arguments."""
    name, value = op_name(node), value_of(node)
    values = value if isinstance(value, tuple | list) else (value,)
    if not name or "assert" in name or not values or not all(isinstance(x, Tensor) for x in values) or writes(node):
        return False
    if name in WITHOUT_SCHEMA:
        return True
    known = schemas(node)
    return bool(known) and not any(EFFECTS & {*overload.tags} for overload in known)
