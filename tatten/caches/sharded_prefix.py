"""One layer of a shared-prefix cache over a mesh: prefix and suffix are sharded over the sequence alike.

Position p is stored on rank `p % n` of the n that share a sequence, in whatever level it is. So each rank holds the
same expression as a layer on one device does, `cat([prefix, ..., suffix])` of its own tokens in order of position, and
attention gets it as the local part of a DTensor: what a rank reads of a mask are the columns `r, r + n, r + 2 n ...`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tatten.caches.agreement import Agreement
from tatten.caches.capture import is_captured
from tatten.caches.prompts import Prompts
from tatten.caches.sharded_layer import Interleaved, check_plain, placements, write_own
from tatten.caches.shared_prefix_layer import KeyValue, SegmentRows, SharedPrefixLayer, Suffix
from tatten.dtensor_sdpa import enable_dtensor_sdpa


def sharded_prefix_layers(
    num_layers: int, mesh: DeviceMesh, sequence: str | Sequence[str], heads: str | None, prompts: Prompts
) -> tuple[Interleaved, Agreement, list[ShardedPrefixLayer]]:
    """Empty layers over a mesh, what they store, and what compares the ranks. Lets SDPA merge over ranks."""
    layout = Interleaved(mesh, placements(mesh, sequence, heads))
    agreement = Agreement(layout, prompts)
    enable_dtensor_sdpa()
    return layout, agreement, [ShardedPrefixLayer(layout, agreement, index == 0) for index in range(num_layers)]


class ShardedPrefixLayer(SharedPrefixLayer):
    """This rank's keys and values of one layer. Lengths, positions and capacity are those of all ranks together.

    Attributes:
        layout: what this rank stores.
        agreement: asks whether ranks have been given the same.
        leads: whether this is the first layer, whose keys tell one prompt from another.
    """

    def __init__(
        self,
        layout: Interleaved,
        agreement: Agreement,
        leads: bool,
        segments: tuple[KeyValue, ...] = (),
        lengths: tuple[int, ...] = (),
        rows: SegmentRows = (),
        suffix: Suffix | None = None,
    ):
        super().__init__(segments, lengths, rows, suffix)
        self.layout, self.agreement, self.leads = layout, agreement, leads

    @property
    def capacity(self) -> int:
        """Tokens that the suffixes of all ranks together can hold; 0 before a fork."""
        return self.keys.shape[2] * self.layout.ranks if self.forked else 0

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens, the same on all ranks that share the sequence, as plain tensors of this rank's heads.

        Returns:
            The very first tokens as they are, for ordinary attention; later DTensors of all tokens, sharded over the
            sequence.

        Raises:
            ValueError, TypeError: as on one device, or ranks were given different prompts.
        """
        first = self.batch_size == 0
        keys, values = self.append_to_own(key, value)
        return (key, value) if first else (self.layout.keys(keys), self.layout.keys(values))

    def append_to_own(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens, as `append`, and return all that this rank holds as plain tensors."""
        check_plain(key, value)
        if self.leads and not self.forked and not torch.compiler.is_compiling():
            self.agreement.check_prompt(key, self.prefix_length)
        return super().append(key, value)

    def storage_for(self, key: Tensor, value: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Slots for this rank's share of the first `tokens` tokens, of keys and values like these; see `adopt`."""
        check_plain(key, value)
        self._check_fit(key, value)
        slots = self._slots_for(tokens)
        keys, values = (new.new_empty(*new.shape[:2], slots, new.shape[3]) for new in (key, value))
        return keys, values

    def adopt(self, storage: tuple[Tensor, Tensor], tokens: int) -> None:
        """Begin with what was written into `storage_for`, as the root."""
        own = self._slots(0, tokens)
        key, value = (tensor[:, :, :own] for tensor in storage)
        self.segments, self.lengths, self.rows = ((key, value),), (tokens,), (None,)

    def check_room(self, q_len: int) -> None:
        """Raise ValueError if there are fewer than `q_len` free slots, or ranks have selected different sequences."""
        super().check_room(q_len)
        if not is_captured(self.length):
            self.agreement.settle()

    def _own(self, new: Tensor) -> Tensor:
        return new[:, :, (self.layout.rank - self.prefix_length) % self.layout.ranks :: self.layout.ranks]

    def _slots(self, start: int, tokens: int) -> int:
        first = (self.layout.rank - start) % self.layout.ranks
        return len(range(first, tokens, self.layout.ranks))

    def _slots_for(self, capacity: int) -> int:
        return -(-capacity // self.layout.ranks)

    def _write(self, key: Tensor, value: Tensor) -> None:
        write_own(self.layout, self.prefix_length, self.length, (self.keys, self.values), (key, value))

    def _with(
        self, segments: tuple[KeyValue, ...], lengths: tuple[int, ...], rows: SegmentRows, suffix: Suffix | None
    ) -> SharedPrefixLayer:
        return ShardedPrefixLayer(self.layout, self.agreement, self.leads, segments, lengths, rows, suffix)
