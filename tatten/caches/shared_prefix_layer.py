"""One layer of a shared-prefix cache: segments that sequences share, and a suffix for each sequence.

Attention gets a plain PyTorch expression, `cat([prefix expanded over the batch or indexed by rows, ..., suffix])`.
Eager PyTorch materializes it; `torch.compile(backend="tatten")` reads each prefix once instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tatten.caches.arguments import check_alike
from tatten.caches.capture import is_captured
from tatten.caches.selection import Selection, expand_to_batch
from tatten.caches.static_address import mark_static

KeyValue = tuple[Tensor, Tensor]
SegmentRows = tuple[Tensor | None, ...]
Suffix = tuple[Tensor, Tensor, Tensor]  # keys, values, length
Kept = list[tuple[slice, Tensor | None]]  # for each segment what `Selection.rows` says


@dataclass(frozen=True)
class Inherited:
    """The segments that a fork takes over, with their lengths and rows, for a batch with as many slots each.

    Attributes:
        suffix: the tokens that a selection has in its slots; None for a fork, whose slots are empty.
    """

    segments: tuple[KeyValue, ...]
    lengths: tuple[int, ...]
    rows: SegmentRows
    batch: int
    slots: int
    suffix: Suffix | None = None


class SharedPrefixLayer:
    """Keys and values of one layer: read-only segments that sequences share, and a suffix for each sequence.

    Attributes:
        segments: pairs `(key, value)`, root first, each `[B_i, kv_heads, len_i, head_dim]`. Before the first fork there
            is only the root, which grows.
        lengths: the number of tokens of each segment.
        rows: for each segment int32 `[batch]`, the row of it that each sequence reads; or None for aligned blocks,
            where row j is read by the sequences `j * batch / B_i ... (j + 1) * batch / B_i - 1`. The layers on one
            device have the same tensors.
        forked: whether there is a suffix, which the following attributes describe.
        keys, values: the suffix, `[batch, kv_heads, capacity, head_dim]`; unused slots are finite.
        length: int64 tensor without dimensions, the number of used slots, on the device of `keys`.
        frozen: number of slots that children read, so that they must not change.
    """

    keys: Tensor
    values: Tensor
    length: Tensor

    def __init__(
        self,
        segments: tuple[KeyValue, ...] = (),
        lengths: tuple[int, ...] = (),
        rows: SegmentRows = (),
        suffix: Suffix | None = None,
    ):
        self.segments = segments
        self.lengths = lengths
        self.rows = rows
        self.forked = suffix is not None
        self.frozen = 0
        if suffix is not None:
            self.keys, self.values, self.length = suffix
            mark_static(*self.tensors, self.length, *(row for row in rows if row is not None))

    @property
    def batch_size(self) -> int:
        """Number of sequences; 0 before the prefill."""
        if self.forked:
            return self.keys.shape[0]
        return self.segments[0][0].shape[0] if self.segments else 0

    @property
    def device(self) -> torch.device:
        """The device of keys and values; there have to be some."""
        return self.segments[0][0].device

    @property
    def prefix_length(self) -> int:
        """Number of tokens in the segments."""
        return sum(self.lengths)

    @property
    def capacity(self) -> int:
        """Slots of the suffix; 0 before a fork."""
        return self.keys.shape[2] if self.forked else 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All keys and values of this layer."""
        prefix = tuple(tensor for segment in self.segments for tensor in segment)
        return (*prefix, self.keys, self.values) if self.forked else prefix

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens, each `[batch, kv_heads, q_len, head_dim]`, and return all of them.

        Before a fork the root grows. After it the suffix is written in place, and the result covers all of its slots,
        `[batch, kv_heads, prefix_length + capacity, head_dim]`: a mask has to exclude the unused ones.

        Raises:
            ValueError, TypeError: the tensors do not match those of the cache, or there is no room for them (see
                `check_room`). Nothing has been written.
        """
        self._check_fit(key, value)
        if not self.forked:
            # The first pair is copied, too: it may be a view of something larger.
            past_key, past_value = self.segments[0] if self.segments else (key[:, :, :0], value[:, :, :0])
            new_key, new_value = self._own(key), self._own(value)
            self.segments = ((torch.cat([past_key, new_key], dim=2), torch.cat([past_value, new_value], dim=2)),)
            self.lengths, self.rows = (self.prefix_length + key.shape[2],), (None,)
            return self.segments[0]

        self.check_room(key.shape[2])
        self._write(key, value)
        self.length.add_(key.shape[2])
        keys, values = (self._shared(i) for i in (0, 1))
        return torch.cat([*keys, self.keys], dim=2), torch.cat([*values, self.values], dim=2)

    def check_room(self, q_len: int) -> None:
        """Raise ValueError if the suffix has fewer than `q_len` free slots. Reads `length` on the host.

        Checks nothing while a graph is traced or captured, when there is no length to read.
        """
        if is_captured(self.length):
            return
        used = int(self.length)
        if used + q_len > self.capacity:
            raise ValueError(
                f"`capacity` must hold {used} used and {q_len} new slots, got {self.capacity}: fork with a larger one"
            )

    def crop(self, tokens: int) -> None:
        """Forget the last `tokens` tokens: of the suffix, whose slots are not cleared, or of the root before a fork."""
        if self.forked:
            self.length.sub_(tokens)
        else:
            kept = self.prefix_length - tokens
            slots = self._slots(0, kept)
            self.segments = tuple((key[:, :, :slots], value[:, :, :slots]) for key, value in self.segments)
            self.lengths = (kept,)

    def inherited_rows(self, n: int, used: int) -> SegmentRows:
        """The rows of the segments of a fork, for `n` children of each sequence."""
        rows = tuple(None if row is None else row.repeat_interleave(n) for row in self.rows)
        return (*rows, None) if used else rows

    def inherited(self, n: int, capacity: int, used: int, rows: SegmentRows) -> Inherited:
        """Return the state that `n` children of each sequence inherit.

        The `used` tokens of the suffix become a segment, as a view.
        """
        segments, lengths = self.segments, self.lengths
        if used:
            slots = self._slots(self.prefix_length, used)
            segments = (*segments, (self.keys[:, :, :slots], self.values[:, :, :slots]))
            lengths = (*lengths, used)
        return Inherited(segments, lengths, rows, self.batch_size * n, self._slots_for(capacity))

    def fork(self, inherited: Inherited) -> SharedPrefixLayer:
        """A layer of children, with an empty suffix."""
        key, value = inherited.segments[0]
        shape = inherited.batch, key.shape[1], inherited.slots
        length = torch.zeros((), dtype=torch.int64, device=key.device)
        suffix = key.new_zeros(*shape, key.shape[3]), value.new_zeros(*shape, value.shape[3]), length
        return self._with(inherited.segments, inherited.lengths, inherited.rows, suffix)

    @property
    def held(self) -> Inherited:
        """All that a layer with a suffix holds."""
        suffix = self.keys, self.values, self.length
        return Inherited(self.segments, self.lengths, self.rows, self.batch_size, self.keys.shape[2], suffix)

    def selected_rows(self, selection: Selection, narrow: bool) -> Kept:
        """Return the rows to keep of each segment; see `Selection.rows`."""
        segments = zip(self.segments, self.rows, strict=True)
        return [selection.rows(rows, key.shape[0], key.device, narrow) for (key, _), rows in segments]

    def select(self, selection: Selection, kept: Kept) -> SharedPrefixLayer:
        """A layer of the chosen sequences, which read the rows `kept` of the segments. Copies the suffix."""
        if not self.forked:
            chosen = tuple((selection.take(key), selection.take(value)) for key, value in self.segments)
            return self._with(chosen, self.lengths, self.rows, None)
        segments = tuple(
            (key, value) if stored == slice(0, key.shape[0]) else (key[stored], value[stored])
            for (key, value), (stored, _) in zip(self.segments, kept, strict=True)
        )
        index = selection.on(self.keys.device)
        suffix = self.keys.index_select(0, index), self.values.index_select(0, index), self.length.clone()
        return self._with(segments, self.lengths, tuple(rows for _, rows in kept), suffix)

    def select_(self, selection: Selection, kept: Kept) -> None:
        """Select in place. The suffix keeps its memory unless the batch changes or children read it."""
        selected = self.select(selection, kept)
        if self.forked and len(selection) == self.batch_size and not self.frozen:
            self.keys.copy_(selected.keys)
            self.values.copy_(selected.values)
        elif self.forked:
            self.keys, self.values = selected.keys, selected.values
            self.frozen = 0
        self.segments, self.rows = selected.segments, selected.rows

    def _shared(self, which: int) -> list[Tensor]:
        """Keys (0) or values (1) of the segments, as each sequence reads them."""
        segments = zip(self.segments, self.rows, strict=True)
        return [expand_to_batch(segment[which], self.batch_size, rows) for segment, rows in segments]

    def _own(self, new: Tensor) -> Tensor:
        """Return new tokens of the root as they are stored."""
        return new

    def _slots(self, start: int, tokens: int) -> int:
        """How many of `tokens` tokens from position `start` on are stored."""
        return tokens

    def _slots_for(self, capacity: int) -> int:
        """Number of slots to allocate for `capacity` tokens."""
        return capacity

    def _write(self, key: Tensor, value: Tensor) -> None:
        """Write new tokens into the suffix."""
        slots = self.length + torch.arange(key.shape[2], device=key.device)
        self.keys.index_copy_(2, slots, key)
        self.values.index_copy_(2, slots, value)

    def _with(
        self, segments: tuple[KeyValue, ...], lengths: tuple[int, ...], rows: SegmentRows, suffix: Suffix | None
    ) -> SharedPrefixLayer:
        """A layer of the same kind."""
        return SharedPrefixLayer(segments, lengths, rows, suffix)

    def _check_fit(self, key: Tensor, value: Tensor) -> None:
        if key.dim() != 4:
            raise ValueError(f"`key` must be [batch, kv_heads, q_len, head_dim], got shape {tuple(key.shape)}")
        check_alike(key, value)
        if self.forked and torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            name = "key" if key.requires_grad else "value"
            raise ValueError(f"`{name}` must not require grad to be written into the suffix: use torch.no_grad()")
        held = self.segments[0] if self.segments else (key, value)
        for name, tensor, like in (("key", key, held[0]), ("value", value, held[1])):
            if tensor.dtype != like.dtype:
                raise TypeError(f"`{name}` must be {like.dtype}, the dtype of the cache, got {tensor.dtype}")
            if tensor.device != like.device:
                raise ValueError(f"`{name}` must be on {like.device}, the device of the cache, got {tensor.device}")
            if self.segments:
                want = (self.batch_size, like.shape[1], tensor.shape[2], like.shape[3])
                if tensor.shape != want:
                    raise ValueError(f"`{name}` must have shape {want} to join the cache, got {tuple(tensor.shape)}")
