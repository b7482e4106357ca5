"""One layer of a shared-prefix cache: segments that sequences share, and a suffix for each sequence.

Attention gets a plain PyTorch expression, `cat([prefix expanded over the batch, ..., suffix])`. Eager PyTorch
materializes it; `torch.compile(backend="tatten")` reads each prefix once instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tatten.caches.static_address import mark_static


class SharedPrefixLayer:
    """Keys and values of one layer: read-only segments that sequences share, and a suffix for each sequence.

    Attributes:
        segments: pairs `(key, value)`, root first, each `[B_i, kv_heads, len_i, head_dim]`. B_i divides the batch, and
            entry j is shared by the sequences `j * batch / B_i ... (j + 1) * batch / B_i - 1`. Before the first fork
            there is only the root, which grows.
        forked: whether there is a suffix, which the following attributes describe.
        keys, values: the suffix, `[batch, kv_heads, capacity, head_dim]`; unused slots are zero.
        length: int64 tensor without dimensions, the number of used slots, on the device of `keys`.
    """

    keys: Tensor
    values: Tensor
    length: Tensor

    def __init__(
        self, segments: tuple[tuple[Tensor, Tensor], ...] = (), suffix: tuple[Tensor, Tensor, Tensor] | None = None
    ):
        self.segments = segments
        self.forked = suffix is not None
        self._read_by_children = False
        if suffix is not None:
            self.keys, self.values, self.length = suffix
            mark_static(*self.tensors, self.length)

    @property
    def batch_size(self) -> int:
        """Number of sequences; 0 before the prefill."""
        if self.forked:
            return self.keys.shape[0]
        return self.segments[0][0].shape[0] if self.segments else 0

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
            return self.segments[0]

        batch, q_len = key.shape[0], key.shape[2]
        self.check_room(q_len)
        slots = self.length + torch.arange(q_len, device=key.device)
        self.keys.index_copy_(2, slots, key)
        self.values.index_copy_(2, slots, value)
        self.length.add_(q_len)
        prefix_keys = [expand_to_batch(segment_key, batch) for segment_key, _ in self.segments]
        prefix_values = [expand_to_batch(segment_value, batch) for _, segment_value in self.segments]
        return torch.cat([*prefix_keys, self.keys], dim=2), torch.cat([*prefix_values, self.values], dim=2)

    def check_room(self, q_len: int) -> None:
        """Raise ValueError if the suffix has fewer than `q_len` free slots. Reads `length` on the host.

        Checks nothing while a graph is traced or captured, when there is no length to read.
        """
        if torch.compiler.is_compiling() or (self.length.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        used = int(self.length)
        if used + q_len > self.capacity:
            raise ValueError(
                f"`capacity` must hold {used} used and {q_len} new slots, got {self.capacity}: fork with a larger one"
            )

    def fork(self, n: int, capacity: int, used: int) -> SharedPrefixLayer:
        """A layer with `n` children of each sequence. The `used` slots of the suffix become a segment, as a view."""
        segments = self.segments
        if used:
            segments = (*segments, (self.keys[:, :, :used], self.values[:, :, :used]))
            self._read_by_children = True
        key, value = segments[0]
        shape = self.batch_size * n, key.shape[1], capacity
        length = torch.zeros((), dtype=torch.int64, device=key.device)
        return SharedPrefixLayer(
            segments, (key.new_zeros(*shape, key.shape[3]), value.new_zeros(*shape, value.shape[3]), length)
        )

    def select(self, indices: Sequence[int]) -> SharedPrefixLayer:
        """A layer of the sequences `indices`. Shares segments where the indices allow it, and copies the suffix."""
        if not self.forked:
            return SharedPrefixLayer(
                tuple((select_rows(key, indices), select_rows(value, indices)) for key, value in self.segments)
            )
        segments = []
        for key, value in self.segments:
            rows = prefix_rows(indices, seqs_per_kv=self.batch_size // key.shape[0])
            segments.append((select_rows(key, rows), select_rows(value, rows)))
        index = torch.tensor(indices, device=self.keys.device)
        suffix = self.keys.index_select(0, index), self.values.index_select(0, index), self.length.clone()
        return SharedPrefixLayer(tuple(segments), suffix)

    def select_(self, indices: Sequence[int]) -> None:
        """Select in place. The suffix keeps its memory unless the batch changes or children read it."""
        selected = self.select(indices)
        if self.forked and len(indices) == self.batch_size and not self._read_by_children:
            self.keys.copy_(selected.keys)
            self.values.copy_(selected.values)
        elif self.forked:
            self.keys, self.values = selected.keys, selected.values
            self._read_by_children = False
        self.segments = selected.segments

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


def expand_to_batch(shared: Tensor, batch: int) -> Tensor:
    """Repeat each entry of `[B_i, ...]` for the sequences that share it, as a view if possible: `[batch, ...]`."""
    return shared.unsqueeze(1).expand(-1, batch // shared.shape[0], *[-1] * (shared.dim() - 1)).flatten(0, 1)


def prefix_rows(indices: Sequence[int], seqs_per_kv: int) -> list[int]:
    """The rows of a prefix for the sequences `indices`, where `seqs_per_kv` consecutive sequences shared each row.

    There are as few as possible, each for a block of equally many consecutive indices.
    """
    rows = [index // seqs_per_kv for index in indices]
    changes = [i for i in range(1, len(rows)) if rows[i] != rows[i - 1]]
    return rows[:: math.gcd(len(rows), *changes)]


def select_rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Return `tensor[rows]`, as a view if the rows are consecutive."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return tensor[rows[0] : rows[0] + len(rows)]
    return tensor.index_select(0, torch.tensor(rows, device=tensor.device))
