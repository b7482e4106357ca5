"""Nodes that a graph doesn't have yet: matchers read them like other nodes, and an edit inserts the ones it needs.

Drafts live in a separate graph. They take nodes of the user's graph as arguments, but are not among their users. Equal
drafts are one node, so that layers with one mask share all that is computed from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from tatten.passes.calls import reached
from tatten.passes.literals import number_of
from tatten.passes.mutation import written_between
from tatten.passes.symbolic import FakeTensor, in_memory, known_tensor, tensor_of, value_of


class _Scratch(Graph):
    """The graph of drafts."""

    def __init__(self, drafts: Drafts) -> None:
        super().__init__()
        self.drafts = drafts


def is_draft(node: Node) -> bool:
    return isinstance(node.graph, _Scratch)


def dtensor_of(node: Node) -> Node | None:
    """Return the DTensor whose local part the draft `node` is, or None for another node."""
    source = node.args[0] if is_draft(node) and node.target == "to_local" else None
    return source if isinstance(source, Node) else None


def dtensor_behind(node: Node) -> Node | None:
    """Return the DTensor from whose local part the draft `node` is computed, or None for another node."""
    while is_draft(node) and dtensor_of(node) is None:
        if not node.all_input_nodes:
            return None
        node = node.all_input_nodes[0]
    return dtensor_of(node)


def local_beside(draft: Node, dtensor: Node) -> Node:
    """Draft the local part of a DTensor, in the same graph as `draft`."""
    assert isinstance(draft.graph, _Scratch)
    return draft.graph.drafts.local_part(dtensor)


def number_at(x: Any, reader: Node, place: Node) -> float | None:
    """Return `number_of(x, reader)`, where a draft that reads a node of the graph counts as inserted at `place`."""
    return number_of(x, place if is_draft(reader) and isinstance(x, Node) and not is_draft(x) else reader)


def without_drafts(nodes: Iterable[Node]) -> tuple[Node, ...]:
    return tuple(node for node in nodes if not is_draft(node))


class Drafts:
    """The drafts for one graph, and the nodes that were inserted for them."""

    def __init__(self) -> None:
        self._scratch = _Scratch(self)
        self._made: dict[str, Node] = {}
        self._bound: dict[Node, Node] = {}
        self._inserted: dict[object, tuple[Node, Node]] = {}
        self._read: dict[Node, list[Tensor]] = {}
        self._fake_mode: AbstractContextManager[Any] = contextlib.nullcontext()

    def result(self, value: Tensor) -> Node:
        """Make a draft that stands for a tensor until `bind` names the node that computes it."""
        if isinstance(value, FakeTensor):
            self._fake_mode = value.fake_mode
        node = self._scratch.placeholder("result")
        node.meta["example_value"] = value
        return node

    def bind(self, node: Node, by: Node) -> None:
        """Let nodes that are inserted from now on read `by` in place of `node`, a draft or a replaced node."""
        self._bound[node] = by

    def make(self, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Draft a call of a method or function, with the source location of `like`."""

        def value() -> Any:
            values, kwarg_values = _map_nodes(args, value_of), _map_nodes(kwargs, value_of)
            fake = next((x for x in values if isinstance(x, FakeTensor)), None)
            with self._fake_mode if fake is None else fake.fake_mode:
                if isinstance(target, str):
                    return getattr(values[0], target)(*values[1:], **kwarg_values)
                return target(*values, **kwarg_values)

        return self._make(like, target, args, kwargs, value)

    def local_part(self, dtensor: Node) -> Node:
        """Draft the local part of a DTensor."""
        return self._make(dtensor, "to_local", (dtensor,), {}, lambda: in_memory(known_tensor(dtensor)))

    def _make(
        self, like: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Callable[[], Any]
    ) -> Node:
        key = repr((target, _map_nodes((args, kwargs), _NodeKey)))
        if key not in self._made:
            create = self._scratch.call_method if isinstance(target, str) else self._scratch.call_function
            node = create(target, args, kwargs)
            for source in without_drafts(node.all_input_nodes):
                source.users.pop(node, None)
            node.meta.update({k: v for k, v in like.meta.items() if k not in ("example_value", "val")})
            node.meta["example_value"] = value()
            self._made[key] = node
        return self._made[key]

    def insert(self, node: Node, place: Node) -> Node:
        """Insert a draft, and the drafts that it reads, before `place`.

        An earlier node is reused unless its inputs were written since. A node of the graph is returned unchanged.
        """
        if node in self._bound:
            return self._bound[node]
        if not is_draft(node):
            return node

        def make() -> Node:
            args, kwargs = (_map_nodes(x, lambda x: self.insert(x, place)) for x in (node.args, node.kwargs))
            inserted = place.graph.create_node(node.op, node.target, args, kwargs)
            inserted.meta.update(node.meta)
            return inserted

        return self.once(node, place, self._read_by(node), make)

    def once(self, key: object, place: Node, read: Sequence[Tensor], make: Callable[[], Node]) -> Node:
        """Return the node that `make` inserts before `place`, or the node that it inserted earlier for an equal `key`.

        A new node is made if any of `read` was written since.
        """
        node, unwritten = self._inserted.get(key, (None, None))
        if node is None or unwritten is None or written_between(read, unwritten, place) is not None:
            with place.graph.inserting_before(place):
                node = make()
        # The node at `place` is about to be replaced by nodes that write nothing.
        self._inserted[key] = node, place.prev
        return node

    def substitute(self, node: Node, old: Node, new: Node) -> Node:
        """Draft `node` with `new` in place of `old`. Return `node` itself if it isn't computed from `old`."""
        if node is old or not is_draft(node) or node.op == "placeholder":
            return new if node is old else node
        args, kwargs = (_map_nodes(x, lambda x: self.substitute(x, old, new)) for x in (node.args, node.kwargs))
        return self.make(node, node.target, *args, **kwargs)

    def _read_by(self, draft: Node) -> list[Tensor]:
        """Return the tensors of the graph that a draft is computed from."""
        if draft not in self._read:
            above = reached(draft, lambda node: node.all_input_nodes if is_draft(node) else ())
            self._read[draft] = [x for node in without_drafts(above) if (x := tensor_of(node)) is not None]
        return self._read[draft]


class Drafting:
    """A function that makes drafts for one call, with the source location of `like`."""

    def __init__(self, drafts: Drafts, like: Node) -> None:
        self._drafts, self._like = drafts, like

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self._drafts.make(self._like, target, *args, **kwargs)

    def cast(self, node: Node, dtype: Any) -> Node:
        tensor = tensor_of(node)
        return node if tensor is None or tensor.dtype == dtype else self("to", node, dtype)

    def views(self, node: Node, views: Iterable[tuple[Any, ...]]) -> Node:
        """Draft views of a node, each the name of a method and its arguments."""
        for name, *args in views:
            node = self(name, node, *args)
        return node


class _NodeKey:
    """A node in the key of a draft. Its name is no key, as nodes of two graphs may have one name."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __repr__(self) -> str:
        return f"<{id(self._node)}>"


def _map_nodes(args: Any, by: Callable[[Node], Any]) -> Any:
    """Replace each node in arguments by the result of `by`."""
    return map_arg(args, by)
