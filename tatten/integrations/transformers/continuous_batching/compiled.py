"""Attention of a layer in a step that `torch.compile` traces: one op, which writes and reads the pages.

The pools of all layers are views of one tensor. An op that has them as operands would make AOTAutograd copy that tensor
or merge its views, so the op finds the pools by the number of their cache. The number is a tensor, so that the graph
serves the cache of a later manager, too. Layers run in their order, because the query of one depends on the result of
the one before.
"""

from __future__ import annotations

import itertools
import weakref
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tatten.integrations.transformers.continuous_batching.layer_pages import LayerPages, attend
from tatten.integrations.transformers.continuous_batching.tables import StepTables


class HasPages(Protocol):
    """A cache, as compiled steps need it."""

    def pages_of_layer(
        self, layer_idx: int, key_states: Tensor, value_states: Tensor, tables: StepTables
    ) -> LayerPages: ...


_caches: weakref.WeakValueDictionary[int, HasPages] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def number_cache(cache: HasPages) -> Tensor:
    """Return a new number, 0-d on the CPU, by which compiled steps find a cache until it is freed."""
    number = next(_numbers)
    _caches[number] = cache
    return torch.tensor(number)


class TracedPages(NamedTuple):
    """The pages of a layer in a step that is being traced.

    Attributes:
        cache: the number of the cache, int64 0-d on the CPU.
        layer: the index of the layer.
        tables: the tables of the layer's group.
        new_key, new_value: as in `LayerPages`.
    """

    cache: Tensor
    layer: int
    tables: StepTables
    new_key: Tensor
    new_value: Tensor

    def attend(
        self,
        query: Tensor,
        scale: float | None,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Add the op to the graph. The result and the other arguments are those of `layer_pages.attend`."""
        new, softmax = (self.new_key, self.new_value), (scale, sliding_window, softcap, sinks)
        out: Tensor = torch.ops.tatten.attend_pages(query, *new, self.cache, self.layer, *self.tables, *softmax)
        return out


def _attend_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    number: Tensor,
    layer: int,
    rows: Tensor | None,
    reads: Tensor | None,
    slots: Tensor | None,
    starts: Tensor | None,
    key_starts: Tensor | None,
    most_new: int,
    longest: int,
    scale: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    cache = _caches.get(int(number))
    if cache is None:
        raise RuntimeError(f"cache {int(number)} must exist as long as a compiled step runs, but it was freed")
    tables = StepTables(rows, reads, slots, starts, key_starts, most_new, longest)
    pages = cache.pages_of_layer(layer, key, value, tables)
    out: Tensor = attend(query, pages, scale, sliding_window, softcap, sinks)
    return out.contiguous()


_library = torch.library.Library("tatten", "FRAGMENT")
_library.define(
    "attend_pages(Tensor query, Tensor key, Tensor value, Tensor cache, int layer, Tensor? rows, Tensor? reads, "
    "Tensor? slots, Tensor? starts, Tensor? key_starts, SymInt most_new, SymInt longest, float? scale, "
    "SymInt? sliding_window, float? softcap, Tensor? sinks) -> Tensor",
    # A graph of Inductor's would keep the pools of one cache. Graphs of transformers belong to one cache.
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe),
)
_library.impl("attend_pages", _attend_pages, "CompositeExplicitAutograd")
torch.library.register_fake(
    "tatten::attend_pages",
    lambda query, key, value, *args: query.new_empty(
        (1, query.shape[2], query.shape[1], value.shape[3]), dtype=query.dtype
    ),
    lib=_library,
)
