"""One layer of a shared-prefix cache: segments that sequences share, and a suffix for each sequence.

What it hands to attention is a plain PyTorch expression, `cat([prefix expanded over the batch, ..., suffix])`. Eager
PyTorch writes it out; `torch.compile(backend="tatten")` reads each prefix once instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class PrefixedKV:
    """Keys and values of one layer: segments, which sequences share and nobody writes, and a suffix for each sequence.

    Attributes:
        segments: pairs `(key, value)`, root first, each `[B_i, kv_heads, len_i, head_dim]`. B_i divides the batch, and
            row j serves the sequences `j * batch / B_i ... (j + 1) * batch / B_i - 1`. Before the first fork there is
            only the root, which grows.
        forked: whether there is a suffix. If so:
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
            # A CUDA graph copies its inputs, here the whole prefix, unless their addresses are known to stay.
            for tensor in (*self.tensors, self.length):
                torch._dynamo.mark_static_address(tensor)

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
        """All keys and values that are held."""
        prefix = tuple(tensor for segment in self.segments for tensor in segment)
        return (*prefix, self.keys, self.values) if self.forked else prefix

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens, each `[batch, kv_heads, q_len, head_dim]`, and return all of them.

        Before a fork the root grows. After it the suffix is written in place, and what is returned covers all of its
        slots, `[batch, kv_heads, prefix_length + capacity, head_dim]`: a mask has to exclude the unused ones.

        Raises ValueError or TypeError, with nothing written, if the tensors do not fit those that are held or if the
        suffix is too full (as `check_room`).
        """
        self._check_fit(key, value)
        if not self.forked:
            # The first pair is copied too, as it may be a view of something larger.
            past_key, past_value = self.segments[0] if self.segments else (key[:, :, :0], value[:, :, :0])
            self.segments = ((torch.cat([past_key, key], dim=2), torch.cat([past_value, value], dim=2)),)
            return self.segments[0]

        batch, q_len = key.shape[0], key.shape[2]
        self.check_room(q_len)
        slots = self.length + torch.arange(q_len, device=key.device)
        self.keys.index_copy_(2, slots, key)
        self.values.index_copy_(2, slots, value)
        self.length.add_(q_len)
        prefix_keys = [repeat_rows(segment_key, batch) for segment_key, _ in self.segments]
        prefix_values = [repeat_rows(segment_value, batch) for _, segment_value in self.segments]
        return torch.cat([*prefix_keys, self.keys], dim=2), torch.cat([*prefix_values, self.values], dim=2)

    def check_room(self, q_len: int) -> None:
        """Raise ValueError if the suffix has less than `q_len` free slots. Reads `length` on the host.

        While a graph is traced or captured there is nothing to read, and nothing is checked.
        """
        if torch.compiler.is_compiling() or (self.length.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        used = int(self.length)
        if used + q_len > self.capacity:
            raise ValueError(
                f"`capacity` must hold {used} used and {q_len} new slots, got {self.capacity}: fork with a larger one"
            )

    def fork(self, n: int, capacity: int, used: int) -> PrefixedKV:
        """A cache with `n` children of each sequence; the `used` slots of the suffix become a segment, as a view."""
        segments = self.segments
        if used:
            segments = (*segments, (self.keys[:, :, :used], self.values[:, :, :used]))
            self._read_by_children = True
        key, value = segments[0]
        rows = self.batch_size * n, key.shape[1], capacity
        length = torch.zeros((), dtype=torch.int64, device=key.device)
        return PrefixedKV(
            segments, (key.new_zeros(*rows, key.shape[3]), value.new_zeros(*rows, value.shape[3]), length)
        )

    def select(self, indices: Sequence[int]) -> PrefixedKV:
        """A cache of the sequences `indices`. Segments are shared where their rows allow it; the suffix is copied."""
        if not self.forked:
            return PrefixedKV(tuple((take(key, indices), take(value, indices)) for key, value in self.segments))
        segments = []
        for key, value in self.segments:
            rows = shared_rows(indices, self.batch_size // key.shape[0])
            segments.append((take(key, rows), take(value, rows)))
        index = torch.tensor(indices, device=self.keys.device)
        suffix = self.keys.index_select(0, index), self.values.index_select(0, index), self.length.clone()
        return PrefixedKV(tuple(segments), suffix)

    def select_(self, indices: Sequence[int]) -> None:
        """`select` in place: the suffix stays where it is, unless the batch changes or children read it."""
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
                raise TypeError(f"`{name}` must be {like.dtype}, as what it joins, got {tensor.dtype}")
            if tensor.device != like.device:
                raise ValueError(f"`{name}` must be on {like.device}, as what it joins, got {tensor.device}")
            if self.segments:
                want = (self.batch_size, like.shape[1], tensor.shape[2], like.shape[3])
                if tensor.shape != want:
                    raise ValueError(f"`{name}` must have shape {want} to join the cache, got {tuple(tensor.shape)}")


def repeat_rows(rows: Tensor, batch: int) -> Tensor:
    """Each row for the sequences that it serves, `[batch, ...]`."""
    return rows.unsqueeze(1).expand(-1, batch // rows.shape[0], *[-1] * (rows.dim() - 1)).flatten(0, 1)


def shared_rows(indices: Sequence[int], repeat: int) -> list[int]:
    """The fewest rows, each for an equal block, that serve the sequences `indices` if row j served `repeat` of them."""
    rows = [index // repeat for index in indices]
    changes = [place for place in range(1, len(rows)) if rows[place] != rows[place - 1]]
    return rows[:: math.gcd(len(rows), *changes)]


def take(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """`tensor[rows]`, as a view if the rows are consecutive."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return tensor[rows[0] : rows[0] + len(rows)]
    return tensor.index_select(0, torch.tensor(rows, device=tensor.device))
