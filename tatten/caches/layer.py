"""One layer of a cache: segments that sequences share, and slots for the tokens of each sequence.

Attention gets a plain PyTorch expression, `cat([prefix expanded over the batch or indexed by rows, ..., slots])`. Eager
PyTorch materializes it; `torch.compile(backend="tatten")` reads each prefix once instead. Over a mesh each rank has the
same expression of its own tokens, and attention gets it as the local part of a DTensor.
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

if TYPE_CHECKING:
    from tatten.caches.agreement import Agreement

KeyValue = tuple[Tensor, Tensor]
SegmentRows = tuple[Tensor | None, ...]
Kept = list[tuple[slice, Tensor | None]]  # for each segment what `Selection.rows` says


class Layer:
    """Keys and values of one layer: read-only segments that sequences share, and slots that are written in place.

    Lengths, positions and capacity are those of all ranks of the layout together.

    Attributes:
        layout: which tokens this rank stores.
        agreement: asks whether ranks have been given the same; None for one that does not ask.
        leads: whether this is the first layer, whose keys tell one prompt from another.
        batch_size: number of sequences; 0 before the first tokens.
        segments: pairs `(key, value)`, root first, each `[B_i, kv_heads, len_i, head_dim]`. Before the first fork there
            is only the root, which grows.
        lengths: the number of tokens of each segment.
        rows: for each segment int32 `[batch]`, the row of it that each sequence reads; or None for aligned blocks,
            where row j is read by the sequences `j * batch / B_i ... (j + 1) * batch / B_i - 1`. The layers on one
            device have the same tensors.
        slots: slots of each sequence on this rank; None while the root grows.
        keys, values: `[batch, kv_heads, slots, head_dim]`, the tokens behind the segments; unused slots are finite.
            None before the first tokens.
        length: int64 tensor without dimensions, the number of tokens in the slots of all ranks, on the device of
            `keys`.
        frozen: number of tokens in the slots that children read, so that they must not change.
    """

    length: Tensor

    def __init__(
        self,
        layout: OneDevice = ONE_DEVICE,
        slots: int | None = None,
        agreement: Agreement | None = None,
        leads: bool = False,
    ):
        self.layout, self.slots, self.agreement, self.leads = layout, slots, agreement, leads
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
        """The device of keys and values; there have to be some."""
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
        `[batch, kv_heads, prefix_length + capacity, head_dim]`: a mask has to exclude the unused ones. Over a mesh
        the tokens have to be the same on all ranks that share the sequence, as plain tensors of this rank's heads.

        Returns:
            The first tokens of a root as they are, for ordinary attention; then all, over a mesh as DTensors.

        Raises:
            ValueError, TypeError: the tensors do not match those of the cache, there is no room for them (see
                `check_room`), or ranks were given different prompts. Nothing has been written.
        """
        first = not self.static and self.batch_size == 0
        keys, values = self.append_to_own(key, value)
        return (key, value) if first else (self.layout.keys(keys), self.layout.keys(values))

    def append_to_own(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens, as `append`, and return all that this rank holds as plain tensors."""
        self.layout.check_plain(key, value)
        if self.agreement is not None and self.leads and not self.static and not torch.compiler.is_compiling():
            self.agreement.check_prompt(key, self.prefix_length)
        self._check_fit(key, value)
        if not self.static:
            # The first pair is copied, too: it may be a view of something larger.
            past_key, past_value = self.segments[0] if self.segments else (key[:, :, :0], value[:, :, :0])
            local = self.layout.own_from(self.prefix_length)
            root = torch.cat([past_key, key[:, :, local]], dim=2), torch.cat([past_value, value[:, :, local]], dim=2)
            self._grow(root, self.prefix_length + key.shape[2])
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
        keys, values = (self._shared(i) for i in (0, 1))
        return torch.cat([*keys, storage[0]], dim=2), torch.cat([*values, storage[1]], dim=2)

    def check_room(self, q_len: int) -> None:
        """Raise ValueError for fewer than `q_len` free slots, or ranks that have selected different sequences.

        Reads `length` on the host. Checks nothing while a graph is traced or captured, when there is no length to read.
        """
        if is_captured(self.length):
            return
        used = int(self.length)
        if used + q_len > self.capacity:
            how = ": fork with a larger one" if self.segments else ""
            raise ValueError(f"`capacity` must hold {used} used and {q_len} new slots, got {self.capacity}{how}")
        if self.agreement is not None:
            self.agreement.settle()

    def storage_for(self, key: Tensor, value: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Memory for this rank's share of the first `tokens` tokens, of keys and values like these; see `adopt`.

        Raises:
            ValueError, TypeError: as for `append`.
        """
        self.layout.check_plain(key, value)
        self._check_fit(key, value)
        if not self.static:
            slots = -(-tokens // self.layout.ranks)
            keys, values = (new.new_empty(*new.shape[:2], slots, new.shape[3]) for new in (key, value))
            return keys, values
        self.check_room(tokens)
        return self._storage(key, value)

    def adopt(self, storage: tuple[Tensor, Tensor], tokens: int) -> None:
        """Begin with what was written into `storage_for`; clears the slot behind this rank's last token."""
        used_slots = self.layout.slots(0, tokens)
        self.batch_size = storage[0].shape[0]
        if not self.static:
            self._grow((storage[0][:, :, :used_slots], storage[1][:, :, :used_slots]), tokens)
            return
        for tensor in storage:
            tensor[:, :, used_slots : used_slots + 1].zero_()
        self.keys, self.values = storage
        self.length.fill_(tokens)

    def crop(self, tokens: int) -> None:
        """Forget the last `tokens` tokens, of the slots, which are not cleared, or of the root before a fork."""
        if self.static:
            self.length.sub_(tokens)
        else:
            kept = self.prefix_length - tokens
            (key, value), slots = self.segments[0], self.layout.slots(0, kept)
            self._grow((key[:, :, :slots], value[:, :, :slots]), kept)

    def clear(self) -> None:
        """Forget all tokens in the slots; their memory stays allocated."""
        for tensor in (self.keys, self.values, self.length):
            if tensor is not None:
                tensor.zero_()

    def inherited_rows(self, n: int, used: int) -> SegmentRows:
        """The rows of the segments of a fork, for `n` children of each sequence."""
        rows = tuple(None if row is None else row.repeat_interleave(n) for row in self.rows)
        return (*rows, None) if used else rows

    def fork(self, n: int, capacity: int, used: int, rows: SegmentRows) -> Layer:
        """Make a layer of `n` children of each sequence, whose slots `allocate` makes.

        The `used` tokens in the slots become a segment, as a view.
        """
        child = self._copy()
        if used and self.keys is not None and self.values is not None:
            slots = self.layout.slots(self.prefix_length, used)
            child.segments = (*self.segments, (self.keys[:, :, :slots], self.values[:, :, :slots]))
            child.lengths = (*self.lengths, used)
        child.rows, child.batch_size, child.slots = rows, self.batch_size * n, -(-capacity // self.layout.ranks)
        child.keys = child.values = None
        return child

    def allocate(self) -> None:
        """Give a fork memory for its tokens."""
        self.length = torch.zeros((), dtype=torch.int64, device=self.device)
        self.keys, self.values = self._new_slots(self.batch_size, *self.segments[0])
        self._mark_static()

    def selected_rows(self, selection: Selection, narrow: bool) -> Kept:
        """Return the rows to keep of each segment; see `Selection.rows`."""
        segments = zip(self.segments, self.rows, strict=True)
        return [selection.rows(rows, key.shape[0], key.device, narrow) for (key, _), rows in segments]

    def select(self, selection: Selection, kept: Kept) -> Layer:
        """Make a layer of the chosen sequences, which read the rows `kept` of the segments. Copies the slots."""
        chosen = self._copy()
        if self.static:
            chosen.length = self.length.clone()
        chosen._choose(selection, kept, in_place=False)
        return chosen

    def select_(self, selection: Selection, kept: Kept) -> None:
        """Select in place. Slots keep their memory unless the batch changes or children read them."""
        self._choose(selection, kept, in_place=len(selection) == self.batch_size and not self.frozen)
        self.frozen = 0

    def _choose(self, selection: Selection, kept: Kept, in_place: bool) -> None:
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
            for tensor in (self.keys, self.values):  # one after the other: each needs a copy of its size
                tensor.copy_(tensor.index_select(0, index))
        else:
            self.keys, self.values = self.keys.index_select(0, index), self.values.index_select(0, index)
        self._mark_static()

    def _copy(self) -> Layer:
        """Return a layer of the same tensors, of which no child reads slots."""
        new = copy.copy(self)
        new.frozen = 0
        return new

    def _grow(self, root: KeyValue, tokens: int) -> None:
        self.batch_size = root[0].shape[0]
        self.segments, self.lengths, self.rows = (root,), (tokens,), (None,)

    def _shared(self, which: int) -> list[Tensor]:
        """Keys (0) or values (1) of the segments, as each sequence reads them."""
        segments = zip(self.segments, self.rows, strict=True)
        return [expand_to_batch(segment[which], self.batch_size, rows) for segment, rows in segments]

    def _storage(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            keys, values = self._new_slots(key.shape[0], key, value)
            return keys, values
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
        stored, over = self.tensors[:2] or (key, value), "cache" if self.layout.mesh is None else "mesh"
        for name, tensor, like in (("key", key, stored[0]), ("value", value, stored[1])):
            device = self.length.device if self.static else like.device
            if self.static and torch.is_grad_enabled() and tensor.requires_grad:
                raise ValueError(f"`{name}` must not require grad to be written into the cache: use torch.no_grad()")
            if tensor.device != device:
                raise ValueError(f"`{name}` must be on {device}, the device of the {over}, got {tensor.device}")
            if tensor.dtype != like.dtype:
                raise TypeError(f"`{name}` must be {like.dtype}, the dtype of the cache, got {tensor.dtype}")
            want = (self.batch_size or like.shape[0], like.shape[1], tensor.shape[2], like.shape[3])
            if tensor.shape != want:
                raise ValueError(f"`{name}` must have shape {want} to join the cache, got {tuple(tensor.shape)}")


def is_captured(length: Tensor) -> bool:
    """Return True if a graph is traced or captured, so that the length cannot be read."""
    return torch.compiler.is_compiling() or (length.is_cuda and torch.cuda.is_current_stream_capturing())
