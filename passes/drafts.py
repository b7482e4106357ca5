"""Nodes that a graph doesn't have yet: matchers read them as they read others, and an edit inserts those it needs.

Drafts live in a graph of their own. They take nodes of the user's graph as arguments, but are not among their users.
Equal drafts are one node, so that layers that share a mask share what is computed from it.
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
    """The DTensor whose local part is drafted by `node`; None if it is another node."""
    source = node.args[0] if is_draft(node) and node.target == "to_local" else None
    return source if isinstance(source, Node) else None


def dtensor_behind(node: Node) -> Node | None:
    """The DTensor from whose local part `node` is drafted; None if it is another node."""
    while is_draft(node) and dtensor_of(node) is None:
        if not node.all_input_nodes:
            return None
        node = node.all_input_nodes[0]
    return dtensor_of(node)


def local_beside(draft: Node, dtensor: Node) -> Node:
    """Make a draft of the local part of a DTensor, among the drafts to which `draft` belongs."""
    assert isinstance(draft.graph, _Scratch)
    return draft.graph.drafts.local_part(dtensor)


def number_at(x: Any, reader: Node, place: Node) -> float | None:
    """The number that `reader` gets, as `number_of`; a draft that reads a node of the graph is inserted at `place`."""
    return number_of(x, place if is_draft(reader) and isinstance(x, Node) and not is_draft(x) else reader)


def without_drafts(nodes: Iterable[Node]) -> tuple[Node, ...]:
    return tuple(node for node in nodes if not is_draft(node))


class Drafts:
    """The drafts for one graph, and what was inserted for them."""

    def __init__(self) -> None:
        self._scratch = _Scratch(self)
        self._made: dict[str, Node] = {}
        self._bound: dict[Node, Node] = {}
        self._inserted: dict[object, tuple[Node, Node]] = {}
        self._read: dict[Node, list[Tensor]] = {}
        self._fake_mode: AbstractContextManager[Any] = contextlib.nullcontext()

    def result(self, value: Tensor) -> Node:
        """Make a draft that stands for a tensor until `bind` says which node computes it."""
        if isinstance(value, FakeTensor):
            self._fake_mode = value.fake_mode
        node = self._scratch.placeholder("result")
        node.meta["example_value"] = value
        return node

    def bind(self, node: Node, by: Node) -> None:
        """Let what is inserted from now on read `by` in place of `node`, a draft or a node that is replaced."""
        self._bound[node] = by

    def make(self, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Make a draft of a call of a method or function, as of the place in the user's program where `like` is."""

        def value() -> Any:
            values, named = _mapped(args, value_of), _mapped(kwargs, value_of)
            fake = next((x for x in values if isinstance(x, FakeTensor)), None)
            with self._fake_mode if fake is None else fake.fake_mode:
                if isinstance(target, str):
                    return getattr(values[0], target)(*values[1:], **named)
                return target(*values, **named)

        return self._make(like, target, args, kwargs, value)

    def local_part(self, dtensor: Node) -> Node:
        """Make a draft of the local part of a DTensor."""
        return self._make(dtensor, "to_local", (dtensor,), {}, lambda: in_memory(known_tensor(dtensor)))

    def _make(
        self, like: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Callable[[], Any]
    ) -> Node:
        key = repr((target, _mapped((args, kwargs), _Named)))
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
        """Insert a draft, and those it needs, before `place`; reuse a node unless what it read was written since.

        A node of the graph is returned as it is.
        """
        if node in self._bound:
            return self._bound[node]
        if not is_draft(node):
            return node

        def make() -> Node:
            args, kwargs = (_mapped(x, lambda x: self.insert(x, place)) for x in (node.args, node.kwargs))
            made = place.graph.create_node(node.op, node.target, args, kwargs)
            made.meta.update(node.meta)
            return made

        return self.once(node, place, self._read_by(node), make)

    def once(self, key: object, place: Node, read: Sequence[Tensor], make: Callable[[], Node]) -> Node:
        """Return the node that `make` inserts before `place`, or for an equal `key` the one from an earlier place.

        It is made anew if any of `read` was written since.
        """
        node, unwritten = self._inserted.get(key, (None, None))
        if node is None or unwritten is None or written_between(read, unwritten, place) is not None:
            with place.graph.inserting_before(place):
                node = make()
        # The node at `place` is about to be replaced, and what takes its place writes nothing.
        self._inserted[key] = node, place.prev
        return node

    def substitute(self, node: Node, old: Node, new: Node) -> Node:
        """Make a draft again with `new` in place of `old`; `node` itself where it isn't computed from `old`."""
        if node is old or not is_draft(node) or node.op == "placeholder":
            return new if node is old else node
        args, kwargs = (_mapped(x, lambda x: self.substitute(x, old, new)) for x in (node.args, node.kwargs))
        return self.make(node, node.target, *args, **kwargs)

    def _read_by(self, draft: Node) -> list[Tensor]:
        """The tensors of the graph that a draft is computed from."""
        if draft not in self._read:
            above = reached(draft, lambda node: node.all_input_nodes if is_draft(node) else ())
            self._read[draft] = [x for node in without_drafts(above) if (x := tensor_of(node)) is not None]
        return self._read[draft]


class Drafting:
    """Makes drafts for one call, as of the place in the user's program where `like` is."""

    def __init__(self, drafts: Drafts, like: Node) -> None:
        self._drafts, self._like = drafts, like

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self._drafts.make(self._like, target, *args, **kwargs)

    def cast(self, node: Node, dtype: Any) -> Node:
        tensor = tensor_of(node)
        return node if tensor is None or tensor.dtype == dtype else self("to", node, dtype)

    def views(self, node: Node, views: Iterable[tuple[Any, ...]]) -> Node:
        """Draft a node with views applied, each the name of a method and its arguments."""
        for name, *args in views:
            node = self(name, node, *args)
        return node


class _Named:
    """Stands for a node in the key of a draft: nodes of two graphs may have one name."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __repr__(self) -> str:
        return f"<{id(self._node)}>"


def _mapped(args: Any, by: Callable[[Node], Any]) -> Any:
    """Replace each node in arguments by what `by` returns for it."""
    return map_arg(args, by)
