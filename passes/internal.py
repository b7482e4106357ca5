"""Internal errors of tatten: the graph is restored, and the report names the error."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from tatten.passes.findings import Declined, SourceLocation, source_location
from tatten.passes.reasons import Decline, Reason

PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
RAISES = False  # tests set this: otherwise a test might pass because an error became a decline

T = TypeVar("T")


def decline_internal(error: Exception) -> Decline:
    """Return the reason to leave attention alone after an internal error: its text, and where it was raised.

    Raises:
        Exception: `error`, if `RAISES` is set.
    """
    if RAISES:
        raise error
    text = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
    frames = [x for x in traceback.extract_tb(error.__traceback__) if x.filename.startswith(PACKAGE)]
    place = f" ({frames[-1].filename.removeprefix(PACKAGE)}:{frames[-1].lineno})" if frames else ""
    return Decline(Reason.INTERNAL, text[:300] + place)


def declined_graph(error: Exception) -> Declined:
    """Return the finding for an error that belongs to no call."""
    return Declined(SourceLocation(), "", decline_internal(error))


def or_nothing(find: Callable[[], list[T]], errors: list[Declined]) -> list[T]:
    """Return `find()`. If it raises an error, append the error to `errors` and return an empty list."""
    try:
        return find()
    except Exception as error:
        errors.append(declined_graph(error))
        return []


class CallError(Exception):
    """An error during the edit of a graph for one call, which may have left the graph half edited.

    Attributes:
        name: the name of the node that was about to be replaced.
        location: its place in the user's program.
    """

    def __init__(self, node: Node) -> None:
        super().__init__(node.name)
        self.name, self.location = node.name, source_location(node)

    @property
    def declined(self) -> Declined:
        """The finding for this call."""
        assert isinstance(self.__cause__, Exception)
        return Declined(self.location, "", decline_internal(self.__cause__))


class Snapshot:
    """A copy of the nodes of a graph, to restore them after an error.

    Nodes that are still in the graph are restored in place, so that references to them stay valid. Erased nodes are
    created again under their old names.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._nodes: list[tuple[Any, ...]] = [
            (x, x.name, x.op, x.target, x.args, x.kwargs, x.type, dict(x.meta), tuple(x.users)) for x in graph.nodes
        ]

    def restore(self) -> None:
        """Give the graph the nodes, arguments, users and metadata of the snapshot."""
        graph, restored = self._graph, dict[Node, Node]()
        before = {x[0] for x in self._nodes}
        for node in graph.nodes:
            node.args, node.kwargs = (), {}
        remaining = set(graph.nodes)
        for node in remaining - before:
            graph.erase_node(node)
        previous: Node | None = None
        for old, name, op, target, _, _, type_expr, *_ in self._nodes:
            node = old
            if old not in remaining:
                place = graph.inserting_before() if previous is None else graph.inserting_after(previous)
                with place:
                    node = graph.create_node(op, target, (), {}, name, type_expr)
                node.name = name  # `create_node` changes a name that was used before
            restored[old] = previous = node
        for old, _, _, _, args, kwargs, _, meta, _ in self._nodes:
            node = restored[old]
            node.args, node.kwargs = map_arg(args, restored.__getitem__), map_arg(kwargs, restored.__getitem__)
            node.meta.clear()
            node.meta.update(meta)
        for old, *_, users in self._nodes:
            reordered = {restored[user]: None for user in users}
            restored[old].users.clear()
            restored[old].users.update(reordered)
