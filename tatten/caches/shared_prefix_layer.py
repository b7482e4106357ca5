"""One layer of a shared-prefix cache: segments that sequences share, and a suffix for each sequence.

Attention gets a plain PyTorch expression, `cat([prefix expanded over the batch or indexed by rows, ..., suffix])`.
Eager PyTorch materializes it; `torch.compile(backend="tatten")` reads each prefix once instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.caches.selection import Selection, expand_to_batch
from tatten.caches.static_address import mark_static

Segment = tuple[Tensor, Tensor]
Rows = tuple[Tensor | None, ...]
Kept = list[tuple[slice, Tensor | None]]  # for each segment what `Selection.rows` says


class SharedPrefixLayer:
    """Keys and values of one layer: read-only segments that sequences share, and a suffix for each sequence.

    Attributes:
        segments: pairs `(key, value)`, root first, each `[B_i, kv_heads, len_i, head_dim]`. Before the first fork there
            is only the root, which grows.
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
        self, segments: tuple[Segment, ...] = (), rows: Rows = (), suffix: tuple[Tensor, Tensor, Tensor] | None = None
    ):
        self.segments = segments
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
        return sum(key.shape[2] for key, _ in self.segments)

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
            self.segments = ((torch.cat([past_key, key], dim=2), torch.cat([past_value, value], dim=2)),)
            self.rows = (None,)
            return self.segments[0]

        q_len = key.shape[2]
        self.check_room(q_len)
        slots = self.length + torch.arange(q_len, device=key.device)
        self.keys.index_copy_(2, slots, key)
        self.values.index_copy_(2, slots, value)
        self.length.add_(q_len)
        keys, values = (self._shared(i) for i in (0, 1))
        return torch.cat([*keys, self.keys], dim=2), torch.cat([*values, self.values], dim=2)

    def check_room(self, q_len: int) -> None:
        """Raise ValueError if the suffix has fewer than `q_len` free slots. Reads `length` on the host.

        Checks nothing while a graph is traced or captured, when there is no length to read.
        """
        if is_recorded(self.length):
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
            self.segments = tuple((key[:, :, :kept], value[:, :, :kept]) for key, value in self.segments)

    def inherited(self, used: int) -> tuple[Segment, ...]:
        """The segments of children: those of this layer, and the `used` slots of its suffix as a view."""
        if not used:
            return self.segments
        return (*self.segments, (self.keys[:, :, :used], self.values[:, :, :used]))

    def inherited_rows(self, n: int, used: int) -> Rows:
        """The rows of `inherited`, for `n` children of each sequence."""
        rows = tuple(None if row is None else row.repeat_interleave(n) for row in self.rows)
        return (*rows, None) if used else rows

    def fork(self, n: int, capacity: int, used: int, rows: Rows) -> SharedPrefixLayer:
        """A layer with `n` children of each sequence, which read `rows`. Copies nothing."""
        self.frozen = max(self.frozen, used)
        key, value = self.segments[0]
        shape = self.batch_size * n, key.shape[1], capacity
        length = torch.zeros((), dtype=torch.int64, device=key.device)
        suffix = key.new_zeros(*shape, key.shape[3]), value.new_zeros(*shape, value.shape[3]), length
        return SharedPrefixLayer(self.inherited(used), rows, suffix)

    def selected_rows(self, selection: Selection, narrow: bool) -> Kept:
        """What to keep of each segment, see `Selection.rows`."""
        segments = zip(self.segments, self.rows, strict=True)
        return [selection.rows(rows, key.shape[0], key.device, narrow) for (key, _), rows in segments]

    def select(self, selection: Selection, kept: Kept) -> SharedPrefixLayer:
        """A layer of the chosen sequences, which read the rows `kept` of the segments. Copies the suffix."""
        if not self.forked:
            return SharedPrefixLayer(
                tuple((selection.take(key), selection.take(value)) for key, value in self.segments), self.rows
            )
        segments = tuple(
            (key, value) if stored == slice(0, key.shape[0]) else (key[stored], value[stored])
            for (key, value), (stored, _) in zip(self.segments, kept, strict=True)
        )
        index = selection.on(self.keys.device)
        suffix = self.keys.index_select(0, index), self.values.index_select(0, index), self.length.clone()
        return SharedPrefixLayer(segments, tuple(rows for _, rows in kept), suffix)

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

    def _check_fit(self, key: Tensor, value: Tensor) -> None:
        if key.dim() != 4:
            raise ValueError(f"`key` must be [batch, kv_heads, q_len, head_dim], got shape {tuple(key.shape)}")
        if value.dim() != 4 or value.shape[:3] != key.shape[:3]:
            raise ValueError(
                f"`value` must have the batch, heads and length of `key`, {tuple(key.shape[:3])}, "
                f"got shape {tuple(value.shape)}"
            )
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


def is_recorded(length: Tensor) -> bool:
    """Whether a graph is traced or captured, so that there is no length to read."""
    return torch.compiler.is_compiling() or (length.is_cuda and torch.cuda.is_current_stream_capturing())
