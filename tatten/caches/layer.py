"""One layer of a cache: segments that sequences share, and slots for the tokens of each sequence.

Attention gets a plain PyTorch expression, `cat([prefix expanded over the batch or indexed by rows, ..., slots])`. Eager
PyTorch materializes it; `torch.compile(backend="tatten")` reads each prefix once instead. Over a mesh each rank builds
the same expression over its tokens, as the local part of the DTensor that attention gets.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tatten.caches.arguments import check_alike
from tatten.caches.layout import ONE_DEVICE, OneDevice
from tatten.caches.selection import Selection, expand_to_batch
from tatten.caches.static_address import mark_static
from tatten.ops.sizes import ceil_div

if TYPE_CHECKING:
    from tatten.caches.agreement import Agreement

KeyValue = tuple[Tensor, Tensor]
SegmentRows = tuple[Tensor | None, ...]
SelectedRows = list[tuple[slice, Tensor | None]]  # the result of `Selection.rows` for each segment


class Layer:
    """Keys and values of one layer: read-only segments that sequences share, and slots that are written in place.

    Lengths, positions and capacity are those of all ranks of the layout together.

    Attributes:
        layout: the tokens that this rank stores.
        agreement: checks that all ranks get the same calls; None without this check.
        is_first: whether this is the first layer, whose keys tell one prompt from another.
        batch_size: number of sequences; 0 before the first tokens.
        segments: pairs `(key, value)`, root first, each `[B_i, kv_heads, len_i, head_dim]`. Before the first fork there
            is only the root, which grows.
        lengths: the number of tokens of each segment.
        rows: for each segment int32 `[batch]`, the row of it that each sequence reads; or None for aligned blocks,
            where row j is read by the sequences `j * batch / B_i ... (j + 1) * batch / B_i - 1`. All layers on one
            device share these tensors.
        slots: number of slots of each sequence on this rank; None while the root grows.
        keys, values: `[batch, kv_heads, slots, head_dim]`, the tokens behind the segments; unused slots are finite.
            None before the first tokens.
        length: int64 tensor without dimensions, the number of tokens in the slots of all ranks, on the device of
            `keys`.
        frozen: number of tokens in the slots that children read. These tokens must not change.
    """

    length: Tensor

    def __init__(
        self,
        layout: OneDevice = ONE_DEVICE,
        slots: int | None = None,
        agreement: Agreement | None = None,
        is_first: bool = False,
    ):
        self.layout, self.slots, self.agreement, self.is_first = layout, slots, agreement, is_first
        self.batch_size = self.frozen = 0
        self.segments: tuple[KeyValue, ...] = ()
        self.lengths: tuple[int, ...] = ()
        self.rows: SegmentRows = ()
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        if slots is not None and layout.mesh is not None:
            self.length = torch.zeros((), dtype=torch.int64, device=layout.mesh.device_type)
            mark_static(self.length)

    @property
    def static(self) -> bool:
        """Return True if tokens are written into slots, and False while the root grows."""
        return self.slots is not None

    @property
    def device(self) -> torch.device:
        """The device of keys and values, of which there must be some."""
        return self.tensors[0].device

    @property
    def prefix_length(self) -> int:
        """Number of tokens in the segments."""
        return sum(self.lengths)

    @property
    def capacity(self) -> int:
        """Number of tokens that the slots of all ranks hold; 0 before a fork."""
        return 0 if self.slots is None else self.slots * self.layout.ranks

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All keys and values of this layer on this rank."""
        prefix = tuple(tensor for segment in self.segments for tensor in segment)
        return prefix if self.keys is None or self.values is None else (*prefix, self.keys, self.values)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens, each `[batch, kv_heads, q_len, head_dim]`, and return all of them.

        Before a fork the root grows. Later the slots are written in place, and the result covers all of them,
        `[batch, kv_heads, prefix_length + capacity, head_dim]`: a mask has to exclude the unused slots. Over a mesh,
        `key` and `value` are plain tensors of this rank's heads. All ranks that share the sequence pass the same
        tokens.

        Returns:
            The first tokens of a root unchanged, for ordinary attention; later all keys and values, over a mesh as
            DTensors.

        Raises:
            ValueError, TypeError: the tensors do not match those of the cache, there is no room for them (see
                `check_room`), or ranks passed different prompts. Nothing has been written.
        """
        first = not self.static and self.batch_size == 0
        keys, values = self.append_local(key, value)
        return (key, value) if first else (self.layout.keys(keys), self.layout.keys(values))

    def append_local(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens, as `append` does, and return all keys and values of this rank as plain tensors."""
        self.layout.check_plain(key, value)
        if self.agreement is not None and self.is_first and not self.static and not torch.compiler.is_compiling():
            self.agreement.check_prompt(key, self.prefix_length)
        self._check_fit(key, value)
        if not self.static:
            # `cat` copies the first keys and values, too: they may be views of larger tensors.
            past_key, past_value = self.segments[0] if self.segments else (key[:, :, :0], value[:, :, :0])
            local = self.layout.local_from(self.prefix_length)
            root = torch.cat([past_key, key[:, :, local]], dim=2), torch.cat([past_value, value[:, :, local]], dim=2)
            self._set_root(root, self.prefix_length + key.shape[2])
            return root

        self.check_room(key.shape[2])
        storage = self._storage(key, value)
        if self.keys is None:
            self.keys, self.values = storage
            self.batch_size = key.shape[0]
        self.layout.write(self.prefix_length, self.length, storage, (key, value))
        self.length.add_(key.shape[2])
        if not self.segments:
            return storage
        keys, values = (self._expanded_segments(i) for i in (0, 1))
        return torch.cat([*keys, storage[0]], dim=2), torch.cat([*values, storage[1]], dim=2)

    def check_room(self, q_len: int) -> None:
        """Raise ValueError if fewer than `q_len` slots are free, or ranks have selected different sequences.

        Reads `length` on the host. Checks nothing while a graph is traced or captured, as it can't read the length.
        """
        if is_captured(self.length):
            return
        used = int(self.length)
        if used + q_len > self.capacity:
            advice = ": fork with a larger one" if self.segments else ""
            raise ValueError(f"`capacity` must hold {used} used and {q_len} new slots, got {self.capacity}{advice}")
        if self.agreement is not None:
            self.agreement.settle()

    def storage_for(self, key: Tensor, value: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Allocate keys and values like these for this rank's share of the first `tokens` tokens; see `adopt`.

        Raises:
            ValueError, TypeError: as for `append`.
        """
        self.layout.check_plain(key, value)
        self._check_fit(key, value)
        if not self.static:
            slots = ceil_div(tokens, self.layout.ranks)
            keys, values = (new.new_empty(*new.shape[:2], slots, new.shape[3]) for new in (key, value))
            return keys, values
        self.check_room(tokens)
        return self._storage(key, value)

    def adopt(self, storage: tuple[Tensor, Tensor], tokens: int) -> None:
        """Take over storage from `storage_for`, which holds `tokens` tokens. Clear the slot behind this rank's last."""
        used_slots = self.layout.slots(0, tokens)
        self.batch_size = storage[0].shape[0]
        if not self.static:
            self._set_root((storage[0][:, :, :used_slots], storage[1][:, :, :used_slots]), tokens)
            return
        for tensor in storage:
            tensor[:, :, used_slots : used_slots + 1].zero_()
        self.keys, self.values = storage
        self.length.fill_(tokens)

    def crop(self, tokens: int) -> None:
        """Remove the last `tokens` tokens from the slots, or before a fork from the root. Slots are not cleared."""
        if self.static:
            self.length.sub_(tokens)
        else:
            length = self.prefix_length - tokens
            (key, value), slots = self.segments[0], self.layout.slots(0, length)
            self._set_root((key[:, :, :slots], value[:, :, :slots]), length)

    def clear(self) -> None:
        """Remove all tokens from the slots. Their memory stays allocated."""
        for tensor in (self.keys, self.values, self.length):
            if tensor is not None:
                tensor.zero_()

    def inherited_rows(self, n: int, used: int) -> SegmentRows:
        """Return the rows of the segments of a fork, for `n` children of each sequence."""
        rows = tuple(None if row is None else row.repeat_interleave(n) for row in self.rows)
        return (*rows, None) if used else rows

    def fork(self, n: int, capacity: int, used: int, rows: SegmentRows) -> Layer:
        """Make a layer of `n` children of each sequence. `allocate` then makes its slots.

        The `used` tokens in the slots become a segment, as a view.
        """
        child = self._copy()
        if used and self.keys is not None and self.values is not None:
            slots = self.layout.slots(self.prefix_length, used)
            child.segments = (*self.segments, (self.keys[:, :, :slots], self.values[:, :, :slots]))
            child.lengths = (*self.lengths, used)
        child.rows, child.batch_size, child.slots = rows, self.batch_size * n, ceil_div(capacity, self.layout.ranks)
        child.keys = child.values = None
        return child

    def allocate(self) -> None:
        """Allocate the slots of a fork."""
        self.length = torch.zeros((), dtype=torch.int64, device=self.device)
        self.keys, self.values = self._new_slots(self.batch_size, *self.segments[0])
        self._mark_static()

    def selected_rows(self, selection: Selection, narrow: bool) -> SelectedRows:
        """Return the rows to keep of each segment; see `Selection.rows`."""
        segments = zip(self.segments, self.rows, strict=True)
        return [selection.rows(rows, key.shape[0], key.device, narrow) for (key, _), rows in segments]

    def select(self, selection: Selection, kept: SelectedRows) -> Layer:
        """Make a layer of the selected sequences, which read the rows `kept` of the segments. Copies the slots."""
        selected = self._copy()
        if self.static:
            selected.length = self.length.clone()
        selected._select(selection, kept, in_place=False)
        return selected

    def select_(self, selection: Selection, kept: SelectedRows) -> None:
        """Select in place. Slots keep their memory unless the batch changes or children read them."""
        self._select(selection, kept, in_place=len(selection) == self.batch_size and not self.frozen)
        self.frozen = 0

    def _select(self, selection: Selection, kept: SelectedRows, in_place: bool) -> None:
        self.batch_size = len(selection)
        if not self.static:
            self.segments = tuple((selection.take(key), selection.take(value)) for key, value in self.segments)
            return
        self.segments = tuple(
            (key, value) if stored == slice(0, key.shape[0]) else (key[stored], value[stored])
            for (key, value), (stored, _) in zip(self.segments, kept, strict=True)
        )
        self.rows = tuple(rows for _, rows in kept)
        assert self.keys is not None
        assert self.values is not None
        index = selection.on(self.keys.device)
        if in_place:
            for tensor in (self.keys, self.values):  # in turn: each needs a temporary of its size
                tensor.copy_(tensor.index_select(0, index))
        else:
            self.keys, self.values = self.keys.index_select(0, index), self.values.index_select(0, index)
        self._mark_static()

    def _copy(self) -> Layer:
        """Return a layer of the same tensors, whose slots no child reads."""
        new = copy.copy(self)
        new.frozen = 0
        return new

    def _set_root(self, root: KeyValue, tokens: int) -> None:
        self.batch_size = root[0].shape[0]
        self.segments, self.lengths, self.rows = (root,), (tokens,), (None,)

    def _expanded_segments(self, index: int) -> list[Tensor]:
        """Return the keys (0) or values (1) of the segments, expanded to all sequences."""
        segments = zip(self.segments, self.rows, strict=True)
        return [expand_to_batch(segment[index], self.batch_size, rows) for segment, rows in segments]

    def _storage(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            return self._new_slots(key.shape[0], key, value)
        return self.keys, self.values

    def _new_slots(self, batch: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        from tatten.caches.new_storage import new_storage

        assert self.slots is not None
        return new_storage(key, batch, self.slots), new_storage(value, batch, self.slots)

    def _mark_static(self) -> None:
        mark_static(*self.tensors, self.length, *(rows for rows in self.rows if rows is not None))

    def _check_fit(self, key: Tensor, value: Tensor) -> None:
        if key.dim() != 4:
            raise ValueError(f"`key` must be [batch, kv_heads, q_len, head_dim], got shape {tuple(key.shape)}")
        check_alike(key, value)
        stored, owner = self.tensors[:2] or (key, value), "cache" if self.layout.mesh is None else "mesh"
        for name, tensor, like in (("key", key, stored[0]), ("value", value, stored[1])):
            device = self.length.device if self.static else like.device
            if self.static and torch.is_grad_enabled() and tensor.requires_grad:
                raise ValueError(f"`{name}` must not require grad to be written into the cache: use torch.no_grad()")
            if tensor.device != device:
                raise ValueError(f"`{name}` must be on {device}, the device of the {owner}, got {tensor.device}")
            if tensor.dtype != like.dtype:
                raise TypeError(f"`{name}` must be {like.dtype}, the dtype of the cache, got {tensor.dtype}")
            expected = (self.batch_size or like.shape[0], like.shape[1], tensor.shape[2], like.shape[3])
            if tensor.shape != expected:
                raise ValueError(f"`{name}` must have shape {expected} to join the cache, got {tuple(tensor.shape)}")


def is_captured(length: Tensor) -> bool:
    """Return True if a graph is traced or captured, so that the length cannot be read."""
    return torch.compiler.is_compiling() or (length.is_cuda and torch.cuda.is_current_stream_capturing())
