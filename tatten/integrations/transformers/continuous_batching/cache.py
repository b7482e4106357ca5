"""The cache of continuous batching, which passes pages to attention instead of copies."""

from __future__ import annotations

import bisect
import sys
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from tatten.integrations.transformers.continuous_batching.attention import PAGES_ARGUMENT
from tatten.integrations.transformers.continuous_batching.compiled import TracedPages, number_cache
from tatten.integrations.transformers.continuous_batching.layer_pages import LayerPages
from tatten.integrations.transformers.continuous_batching.layout import check_layout
from tatten.integrations.transformers.continuous_batching.steps import Step, chunk_step, decode_step, ring_step
from tatten.integrations.transformers.continuous_batching.supported import NAME
from tatten.integrations.transformers.continuous_batching.tables import STATE, LayerGroup, StepTables, group_of
from tatten.ops.moved import log
from tatten.ops.sizes import ceil_div


class PagedCache(PagedAttentionCache):  # type: ignore[misc]
    """The paged cache of transformers, with attention that reads its pages in place.

    transformers assigns tokens to pages. This cache writes numbers of pages into the tables, in place of numbers of
    keys. Layers with a sliding window get decode steps, too. No keys are copied.
    """

    max_blocks_per_request: int
    room: int  # the most tokens that fit if a request is alone, wherever its pages lie

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.groups: dict[str, LayerGroup] = {}
        for name, allocator in self.cache_allocators.items():
            self.groups[name] = group_of(allocator)
            check_layout(allocator, self.groups[name])
        # In a forward pass, by group: the step that its layers share, and the index in the group of the next layer.
        self._steps: dict[int, tuple[Step, int]] = {}
        self._too_long: set[str] = set()  # requests that a warning was logged for, until they end
        self._resets: list[torch.cuda.Stream] = []  # the streams on which inputs were reset, until the next batch
        self._note_reset()
        self.room = self._find_room()
        self.number = number_cache(self)
        self._allow_decode_steps()

    def _allow_decode_steps(self) -> None:
        """Set the attributes by which the scheduler decides which requests may take a decode step."""
        columns = self.max_blocks_per_request
        if columns <= 0:
            self.max_blocks_per_request = 0  # a negative number turns decode steps off, too
            return
        full = [group for group in self.groups.values() if group.window is None]
        rings = [ceil_div(group.window, group.page_size) for group in self.groups.values() if group.window is not None]
        if full:
            columns = min(columns, max(x.num_blocks for x in self.cache_allocators.values()))
            self.max_decode_fast_path_length = columns * full[0].page_size
        else:
            columns = max(rings)
            self.max_decode_fast_path_length = sys.maxsize
        self.max_blocks_per_request = columns + STATE

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        """Store a request as transformers does. Log a warning for a request that is too long for an empty cache."""
        stored: bool = super().can_store_request_tokens(state, request_len, dry_run)
        tokens = state.current_len() + request_len
        if not stored and not dry_run and state.request_id not in self._too_long and not self._has_room(tokens):
            self._too_long.add(state.request_id)
            log.warning(
                "request %s has %d tokens, more than the cache of continuous batching can hold: %d pages of %d tokens",
                *(state.request_id, tokens, self.num_blocks, next(iter(self.groups.values())).page_size),
            )
        return stored

    def _has_room(self, tokens: int, scattered: bool = False) -> bool:
        """Return True if an empty cache has room for a request.

        Args:
            tokens: the number of tokens of the request.
            scattered: count a sector for each page of a ring. Pages that were taken while other requests ran may lie
                in different sectors, and layers of full attention cannot use the rest of a ring's sector. Layers of
                full attention fill their sectors before they take more.
        """
        sectors = 0
        for name, allocator in self.cache_allocators.items():
            sector_per_block = scattered and len(self.groups) > 1 and self.groups[name].window is not None
            blocks = allocator._compute_blocks_needed(0, 0, tokens)
            sectors += blocks if sector_per_block else ceil_div(blocks, allocator.blocks_per_sector)
        return bool(sectors <= self.num_sectors)

    def _find_room(self) -> int:
        slots = max(x.num_blocks * x.tokens_per_page for x in self.cache_allocators.values())
        room = bisect.bisect_left(range(1, slots + 2), True, key=lambda n: not self._has_room(n, scattered=True))
        return room if room <= slots else sys.maxsize  # rings have room for any number of tokens

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        super().free_blocks(request_id, no_cache)
        self._too_long.discard(request_id)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        super().free_all_requests(clear_ledgers)
        self._too_long.clear()
        self._note_reset()  # transformers calls this last when it resets its inputs for another start

    def _note_reset(self) -> None:
        if (stream := stream_of(self.device)) is not None:
            self._resets.append(stream)

    def _wait_for_resets(self) -> None:
        """Wait until the inputs are reset, before the next batch is prepared.

        transformers (5.24) fills its inputs on the current stream, and copies those of a batch on another stream, which
        doesn't wait. On a busy GPU, the fill can come last, and then the first batch has no inputs.
        """
        while self._resets:
            self._resets.pop().synchronize()

    # transformers calls these on the host, for each request of a step.

    def fill_block_table(self, request_id: str, past_length: int, query_length: int, block_table: Tensor) -> None:
        self._wait_for_resets()
        if query_length != 1:
            raise RuntimeError(f"a decode step must have one token of request {request_id}, got {query_length}")
        for name, allocator in self.cache_allocators.items():
            row = block_table[allocator.index]
            self.groups[name].fill_row(row, allocator.block_table[request_id], past_length)

    def extend_read_and_write_indices(
        self,
        request_id: str,
        past_length: int,
        query_length: int,
        read_index: list[list[int]] | None,
        write_index: list[list[int]],
    ) -> None:
        self._wait_for_resets()
        super().extend_read_and_write_indices(request_id, past_length, query_length, None, write_index)
        if read_index is None:
            return
        for (name, allocator), reads in zip(self.cache_allocators.items(), read_index, strict=True):
            self.groups[name].extend_reads(reads, allocator.block_table[request_id], past_length, query_length)

    # transformers calls this in the forward pass, for each layer.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Pass the pages of a layer to its attention, which writes the new keys and values."""
        if (attention := self.config._attn_implementation) != NAME:  # it would attend to the new keys alone
            raise RuntimeError(
                f'a manager of continuous batching must have attention "{NAME}", for which it was made, got '
                f'"{attention}": make a new manager after a switch of attention'
            )
        allocator = self.layer_to_allocator[layer_idx]
        tables = _tables_of_group(kwargs, allocator.layer_type, allocator.index)
        if torch.compiler.is_compiling():
            kwargs[PAGES_ARGUMENT] = TracedPages(self.number, layer_idx, tables, key_states, value_states)
        else:
            kwargs[PAGES_ARGUMENT] = self.pages_of_layer(layer_idx, key_states, value_states, tables)
        return key_states, value_states

    def pages_of_layer(
        self, layer_idx: int, key_states: Tensor, value_states: Tensor, tables: StepTables
    ) -> LayerPages:
        """Return the pages of a layer, which must follow the previous layer of its group."""
        allocator = self.layer_to_allocator[layer_idx]
        key, value = allocator._kv_page_views[layer_idx]
        for name, new, pool in (("key_states", key_states, key), ("value_states", value_states, value)):
            if (new.shape[0], new.shape[1], new.shape[3]) != (1, *pool.shape[2:]):
                raise NotImplementedError(
                    f"`{name}` of layer {layer_idx} must be [1, {pool.shape[2]}, tokens, {pool.shape[3]}], as the "
                    f"cache has one width for all layers, got {tuple(new.shape)}"
                )
        return LayerPages(key, value, self._step(allocator, layer_idx, tables), key_states, value_states)

    def _step(self, allocator: Any, layer_idx: int, tables: StepTables) -> Step:
        """Return the step of a layer's group. The first layer of the group makes it in each forward pass.

        A CUDA graph recomputes it at each replay from tables at the same addresses. So the tensors don't show whether
        it belongs to an earlier forward pass. The order of the layers shows it.
        """
        layers, index = allocator.layer_indices, allocator.index
        if layer_idx == layers[0]:
            self._steps[index] = _make_step(tables, self.groups[allocator.layer_type]), 0
        step, next_layer = self._steps.pop(index, (None, 0))
        if step is None or layers[next_layer] != layer_idx:
            raise RuntimeError(
                f"layer {layer_idx} must follow its predecessors among {layers} in a forward pass of continuous "
                f"batching, got it in the place of layer {layers[next_layer]}"
            )
        if next_layer + 1 < len(layers):
            self._steps[index] = step, next_layer + 1
        return step


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """Return the current stream of a GPU, or None for a CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _tables_of_group(kwargs: dict[str, Any], layer_type: str, index: int) -> StepTables:
    """Return the tables of a layer group from the arguments that transformers passes to a model."""
    if (rows := kwargs.get("block_table")) is not None:
        return StepTables(rows[index])
    return StepTables(
        None,
        kwargs["read_index"][index],
        kwargs["write_index"][index],
        kwargs["cu_seq_lens_q"],
        kwargs["cu_seq_lens_k"][layer_type],
        kwargs["max_length_q"],
        kwargs["max_length_k"][layer_type],
    )


def _make_step(tables: StepTables, group: LayerGroup) -> Step:
    rows, reads, slots, starts, key_starts, most_new, longest = tables
    if rows is not None:
        return decode_step(rows, group)
    assert reads is not None
    assert slots is not None
    assert starts is not None
    assert key_starts is not None
    if group.window is None or longest <= group.window:  # no key leaves the window, so none is overwritten
        return chunk_step(reads, slots, starts, key_starts, longest, group)
    return ring_step(reads, slots, starts, key_starts, most_new, longest, group)
