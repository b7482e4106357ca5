"""Uses of a tensor that read its shape, dtype and device, and none of its values."""

from __future__ import annotations

from collections.abc import Container, Iterator

from torch.fx import Node

from tatten.ops.storage import all_of
from tatten.passes.calls import op_name
from tatten.passes.mutation import writes
from tatten.passes.op_names import RESHAPES

# Ops that read no values of their first argument, or of their second.
FIRST = {
    *("full_like", "zeros_like", "ones_like", "empty_like", "new_full", "new_zeros", "new_ones", "new_empty"),
    *("size", "stride", "dim", "numel", "sym_size", "sym_stride", "sym_numel"),
    "_assert_tensor_metadata",  # of dtypes, by torch.export, about tensors that casts make
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
    """Yield `user`, which reads no values of `node`, and if it is a view those that read none of that."""
    yield user
    for x in user.users if op_name(user) in PARTS and user.args[0] is node else ():
        yield from readers(x, user)


def depends(node: Node, source: Node, among: Container[Node]) -> bool:
    """Return True if values of `node` are computed from those of `source`. All paths lead through nodes in `among`."""
    visited, frontier = {node}, [node]
    while frontier:
        here = frontier.pop()
        if here is source:
            return True
        new = [x for x in here.all_input_nodes if x in among and x not in visited and reads_values(here, x)]
        visited.update(new)
        frontier += new
    return False
