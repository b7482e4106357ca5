"""Keys and values as they are stored, before heads were repeated and rows were shared or selected.

Each dim of keys and values has a role: batch, heads, length or head_dim (see `tatten.passes.views`). One dim of the
stored tensor has a role alone if the stretched dims of that role are minor: `x[j] == base[j // n]`. Rows that an index
selects may be repeated in any order: `x[j] == base[rows[j]]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch.fx import Node

from tatten.ops.layout import BATCH, HEAD_DIM, HEADS, LENGTH
from tatten.passes.block_table import BlockTable
from tatten.passes.drafts import without_drafts
from tatten.passes.mutation import written_between
from tatten.passes.rows import SelectedRows
from tatten.passes.symbolic import constant, known_equal, known_tensor, tensor_of
from tatten.passes.views import ROLES, Part, Size, Walk, begin_walk, walks_back


@dataclass(frozen=True)
class Stored:
    """The stored tensor of keys or values `x`: `x[b, h, s, d] == base[row, h // repeats, s, d]`, permuted by `dims`.

    Attributes:
        base: the stored tensor.
        dims: the dim of `base` for each of the roles batch, heads, length and head_dim. None for a role of size 1
            without a dim in `base`.
        repeats: the number of neighbouring heads of `x` that are one head of `base`.
        shared: whether several sequences may read one row of `base`.
        rows: the row that each sequence reads. If None, each row is read by the next n sequences, the same n for all.
        overlaid: whether all rows of `base` are one row in memory, with stride 0.
        table: the pages of each sequence. `base` is then a pool: its `dims` for batch and length count pages, and keys
            in a page. None for keys in order.
        path: the nodes from SDPA's key or value to the one that reads `base`.
    """

    base: Node
    dims: tuple[int | None, ...] = (BATCH, HEADS, LENGTH, HEAD_DIM)
    repeats: int = 1
    shared: bool = False
    rows: SelectedRows | None = None
    overlaid: bool = False
    table: BlockTable | None = None
    path: tuple[Node, ...] = ()

    def size(self, role: int) -> Size:
        """Return the size of keys or values as attention takes them, including all pages in a table."""
        if self.table is not None and role in (BATCH, LENGTH):
            batch, columns = self.table.shape
            return batch if role == BATCH else columns * self.size_in_base(LENGTH)
        return 1 if role == BATCH and self.overlaid else self.size_in_base(role)

    def size_in_base(self, role: int) -> Size:
        """Return the size of the dim of `base` with this role."""
        tensor, dim = known_tensor(self.base), self.dims[role]
        return 1 if dim is None else tensor.shape[dim]

    def as_operand(self, insert: Callable[..., Node]) -> Node:
        """Insert the views of `base` as `[batch, heads, length, head_dim]`. Return `base` itself if none is needed.

        Pools become `[pages, page, heads, head_dim]`.

        Args:
            insert: inserts or drafts a call of a method, given its name, the node that it is called on, and arguments.
        """
        node, dims, tensor = self.base, list(self.dims), known_tensor(self.base)
        if tensor.requires_grad:  # SDPA's result doesn't, as the program ran under no_grad
            node = insert("detach", node)
        rank = tensor.dim()
        for dim in reversed([d for d in range(rank) if d not in dims]):
            node, rank = insert("squeeze", node, dim), rank - 1
            dims = [d if d is None or d < dim else d - 1 for d in dims]
        if self.overlaid:
            node = insert("narrow", node, dims[BATCH], 0, 1)
        dims = dims if self.table is None else [dims[role] for role in (BATCH, LENGTH, HEADS, HEAD_DIM)]
        order = [d for d in dims if d is not None]
        if order != list(range(len(order))):
            node = insert("permute", node, *order)
        for place, base_dim in enumerate(dims):
            if base_dim is None:
                node = insert("unsqueeze", node, place)
        return node

    def written_before(self, call: Node) -> Node | None:
        """Return the first node before `call` that may write to a tensor after the program reads it, or None.

        The tensors are `base`, copies of it, and the indices of rows and pages.
        """
        if not self.path:
            return None
        read = {*self.path, *(self.rows.read if self.rows is not None else ())}
        if self.table is not None:  # the program may read it long before the pages
            writer = _written_since(self.table.read, {*self.path, *self.table.read}, call)
            if writer is not None:
                return writer
        return _written_since({self.base, *read}, read, call)


def _written_since(nodes: Iterable[Node], readers: Iterable[Node], call: Node) -> Node | None:
    """Return the first node between `readers` and `call` that may write to a tensor of `nodes`, or None."""
    tensors = [tensor for tensor in map(tensor_of, nodes) if tensor is not None]
    first = min(node for node in without_drafts(readers) if node.op != "placeholder")
    return written_between(tensors, first, call)


def stored_at(walk: Walk) -> Stored | None:
    """Return the tensor at the end of a walk as a stored tensor, or None if a role has several dims."""
    tensor = tensor_of(walk.node)
    if tensor is None:
        return None
    dim_of: dict[int, int] = {}
    ones = []
    for dim, (part, size) in enumerate(zip(walk.parts, tensor.shape, strict=True)):
        if known_equal(size, 1):
            ones.append(dim)
        elif part is None or part[0] in dim_of:
            return None
        else:
            dim_of[part[0]] = dim
    factors: dict[int, Size] = dict.fromkeys(ROLES, 1)
    for part, times in walk.stretched:
        factors[part[0]] *= times
        if part[0] == BATCH and walk.rows:
            continue
        if part[0] in dim_of and (walk.parts[dim_of[part[0]]] or ()) > part:
            return None  # `x.repeat(n, 1, 1, 1)`: index j reads row j % rows, not a block
    spare = iter(ones)
    dims = tuple(dim_of[role] if role in dim_of else next(spare, None) for role in ROLES)
    repeats = constant(factors[HEADS])
    if repeats is None or not known_equal(factors[LENGTH], 1) or not known_equal(factors[HEAD_DIM], 1):
        return None
    if not walk.rows or BATCH not in dim_of:  # any index selects the one row
        return Stored(walk.node, dims, repeats, bool(walk.rows) or not known_equal(factors[BATCH], 1), path=walk.path)
    repeated = walk.repeated_rows(dim_of[BATCH])
    if repeated is None:
        return None
    return Stored(walk.node, dims, repeats, True, SelectedRows((*repeated, *walk.rows)), path=walk.path)


def walk_on(stored: Stored, node: Node, path: tuple[Node, ...]) -> Walk:
    """Return the walk that found `stored`, without the selection of its rows, continued at `node`.

    Args:
        stored: the stored tensor that the walk has reached.
        node: its base, or another node for the same tensor.
        path: the nodes from where the walk began to the one that reads `node`.
    """
    tensor = known_tensor(node)
    parts: list[Part | None] = [None] * tensor.dim()
    repeated = stored.repeats > 1
    for role, dim in enumerate(stored.dims):
        if dim is not None:
            parts[dim] = (role, 0) if role == HEADS and repeated else (role,)
    stretched = (((HEADS, 1), stored.repeats),) if repeated else ()
    return Walk(node, tuple(parts), stretched, path)


def stored_among(walks: Iterable[Walk]) -> Iterator[Stored]:
    """Yield the tensors of walks that can be read as stored tensors, best first.

    They are ordered by `Walk.undone`. Among equals, the nearest to the start comes first.
    """
    for walk in sorted(walks, key=lambda walk: walk.undone, reverse=True):
        stored = stored_at(walk)
        if stored is not None:
            yield stored


def peel_heads(start: Node | Walk) -> Stored:
    """Walk back from SDPA's key or value to the tensor before its heads were repeated, or stay at the start.

    Tensors whose rows are shared or selected are skipped.
    """
    walk = start if isinstance(start, Walk) else begin_walk(start)
    return next(stored for stored in stored_among(walks_back(walk)) if not stored.shared)
