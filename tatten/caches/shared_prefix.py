"""A KV cache for sequences that share a prefix: prefill once, fork n ways, fork again; the prefix is stored once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tatten.caches.shared_prefix_layer import PrefixedKV, repeat_rows, shared_rows, take


class SharedPrefixCache:
    """Keys and values of all layers. A new cache is filled by a prefill, then forked.

        cache = SharedPrefixCache(num_layers)       # prefill G prompts through `update`
        samples = cache.fork(n, capacity=256)       # n sequences for each prompt, 256 new tokens for each
        best = samples.select([3, 3, 0])            # three sequences: two that go on from 3, one from 0

    A step asks for `positions` and `mask`, and gives each layer's new keys and values to `update`. After a fork shapes
    stay and lengths are on the device: a step compiles once, fits into a CUDA graph and never waits for the device;
    in eager mode it does, to check the capacity. Forks and selections leave their source usable; none disturbs another.

    Args:
        num_layers: layers of the model.
        prompt_mask: bool `[G, P]`, True for real tokens and False for padding, on either side; None for no padding.
            P is the length of the prompts, all of which may be prefilled, or all but the last tokens.
        device: where `mask` and `positions` are made for the prefill; later it is that of the keys. Default: that of
            `prompt_mask`, or torch's.
    """

    def __init__(self, num_layers: int, prompt_mask: Tensor | None = None, device: torch.device | str | None = None):
        check_positive("num_layers", num_layers)
        if prompt_mask is not None and prompt_mask.dtype != torch.bool:
            raise TypeError(f"`prompt_mask` must be bool, got {prompt_mask.dtype}")
        if prompt_mask is not None and prompt_mask.dim() != 2:
            raise ValueError(f"`prompt_mask` must be [prompts, length], got shape {tuple(prompt_mask.shape)}")
        self.layers = [PrefixedKV() for _ in range(num_layers)]
        self.prompt_mask = prompt_mask
        self.device = prompt_mask.device if device is None and prompt_mask is not None else device

    @property
    def batch_size(self) -> int:
        """Number of sequences; 0 before the prefill."""
        return self.layers[0].batch_size

    @property
    def capacity(self) -> int:
        """Slots of a sequence's suffix; 0 before a fork."""
        return self.layers[0].capacity

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values in all layers: each prefix once, and of what a parent holds only the part in use."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors)

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens to layer `layer`, and return all that it holds.

        Args:
            layer: 0 to num_layers - 1.
            key, value: `[batch, kv_heads, q_len, head_dim]`; head_dim may differ between them.

        Returns:
            `(keys, values)`, `[batch, kv_heads, total, head_dim]` with `total` as in `mask`.

        Raises:
            IndexError: there is no such layer.
            ValueError, TypeError: the tensors fit neither each other, nor what the cache holds, nor its capacity, nor
                `prompt_mask`. Nothing has been written.
        """
        if not 0 <= layer < len(self.layers):
            raise IndexError(f"`layer` must be 0 to {len(self.layers) - 1}, got {layer}")
        if not self.layers[layer].forked and key.dim() == 4:
            self._check_prompt(self.layers[layer], key)
        return self.layers[layer].append(key, value)

    def fork(self, n: int, capacity: int) -> SharedPrefixCache:
        """A new cache with `n` children of each sequence: child i of sequence j is sequence `j * n + i`.

        Nothing is copied: all tokens so far become the shared prefix. Reads the number of used slots on the host.

        Args:
            n: children of each sequence.
            capacity: number of tokens that each child can add.

        Raises ValueError or TypeError for `n` or `capacity` below 1 or not int, before the prefill and amid a step.
        """
        check_positive("n", n)
        check_positive("capacity", capacity)
        used = self._used()
        return self._of([layer.fork(n, capacity, used) for layer in self.layers], self.prompt_mask)

    def select(self, indices: Sequence[int] | Tensor) -> SharedPrefixCache:
        """A new cache of the sequences `indices`, in that order, with repetitions.

        Suffixes are copied. A prefix keeps as few rows as serve equal, aligned blocks of the new batch: the same rows
        as before or consecutive ones are shared, others are copied.

        Args:
            indices: ints, or an integer tensor with one dimension, which is read on the host.

        Raises IndexError for a sequence that is not there, ValueError for none at all, TypeError for other types.
        """
        rows = sequence_indices(indices, self.batch_size)
        prompt_mask = self.prompt_mask
        if prompt_mask is not None:
            prompt_mask = take(prompt_mask, shared_rows(rows, self.batch_size // prompt_mask.shape[0]))
        return self._of([layer.select(rows) for layer in self.layers], prompt_mask)

    def mask(self, q_len: int = 1) -> Tensor:
        """Bool mask for the step about to be done, before or amid its updates: True where attention may look.

        Returns:
            `[1 or batch, 1, q_len, total]`: causal, without unused slots and padding. `total` is the length of what
            `update` will return: the tokens so far and `q_len`, or after a fork the prefix and `capacity`.

        Raises ValueError if `q_len` is below 1 or, unless in a graph, does not fit into the suffix any more.
        """
        tokens, total = self._step(q_len)
        visible = (torch.arange(total, device=tokens.device) <= tokens[:, None])[None, None]
        if self.prompt_mask is None:
            return visible
        real = F.pad(self.prompt_mask, (0, total - self.prompt_mask.shape[1]), value=True)
        return visible & repeat_rows(real, self.batch_size or real.shape[0])[:, None, None]

    def positions(self, q_len: int = 1) -> Tensor:
        """Position ids of the step's tokens, int64 `[1 or batch, q_len]`; padding does not count. Raises as `mask`."""
        tokens, total = self._step(q_len)
        if self.prompt_mask is None:
            return tokens[None]
        real = F.pad(self.prompt_mask, (0, total - self.prompt_mask.shape[1]), value=True)
        positions = (real.cumsum(1) - 1).clamp(min=0).index_select(1, tokens)
        return repeat_rows(positions, self.batch_size or real.shape[0])

    def _step(self, q_len: int) -> tuple[Tensor, int]:
        """Places of the step's tokens, `[q_len]`, and `total`. Within a step the last layer is updated last."""
        check_positive("q_len", q_len)
        last = self.layers[-1]
        prefix = last.prefix_length
        if last.forked:
            last.check_room(q_len)
            new = torch.arange(q_len, device=last.length.device)
            return prefix + last.length + new, prefix + last.capacity
        held = self.layers[0].tensors
        return torch.arange(prefix, prefix + q_len, device=held[0].device if held else self.device), prefix + q_len

    def _used(self) -> int:
        """Used slots of the suffixes, one synchronisation for all layers; 0 before a fork."""
        empty = [index for index, layer in enumerate(self.layers) if not layer.segments]
        if empty:
            raise ValueError(f"`fork` needs a prefill of all {len(self.layers)} layers, got none in layers {empty}")
        lengths = [layer.prefix_length for layer in self.layers]
        if self.layers[0].forked:
            device = self.layers[0].length.device
            lengths = torch.stack([layer.length.to(device) for layer in self.layers]).tolist()
        if len(set(lengths)) > 1:
            raise ValueError(f"`fork` must come between steps, with as many tokens in each layer, got {lengths}")
        return lengths[0] if self.layers[0].forked else 0

    def _check_prompt(self, layer: PrefixedKV, key: Tensor) -> None:
        """What a prefill has to agree with beyond its own layer: the other layers and the mask."""
        if not layer.segments and self.batch_size not in (0, key.shape[0]):
            raise ValueError(f"`key` must have batch {self.batch_size}, as in layer 0, got {key.shape[0]}")
        if self.prompt_mask is None:
            return
        prompts, prompt_length = self.prompt_mask.shape
        if not layer.segments and prompts != key.shape[0]:
            raise ValueError(f"`prompt_mask` must have {key.shape[0]} rows, as the batch of `key`, got {prompts}")
        if self.prompt_mask.device != key.device:
            raise ValueError(f"`prompt_mask` must be on {key.device}, as `key`, got {self.prompt_mask.device}")
        start, end = layer.prefix_length, layer.prefix_length + key.shape[2]
        if start < prompt_length < end:
            raise ValueError(
                f"`prompt_mask` must cover all or none of tokens {start} to {end - 1}, got {prompt_length}"
            )

    def _of(self, layers: list[PrefixedKV], prompt_mask: Tensor | None) -> SharedPrefixCache:
        cache = SharedPrefixCache(len(layers), prompt_mask, self.device)
        cache.layers = layers
        return cache


def sequence_indices(indices: Sequence[int] | Tensor, batch: int) -> list[int]:
    """`indices` as a list, checked against the number of sequences."""
    if isinstance(indices, Tensor):
        if indices.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
            raise TypeError(f"`indices` must be integers, got a tensor of {indices.dtype}")
        if indices.dim() != 1:
            raise ValueError(f"`indices` must have one dimension, got shape {tuple(indices.shape)}")
        indices = indices.tolist()
    for index in indices:
        if not isinstance(index, int) or isinstance(index, bool):
            raise TypeError(f"`indices` must be integers, got {index!r}")
        if not 0 <= index < batch:
            raise IndexError(f"`indices` must be 0 to {batch - 1}, as the cache holds {batch} sequences, got {index}")
    if not indices:
        raise ValueError("`indices` must name at least one sequence, got none")
    return list(indices)


def check_positive(name: str, value: int) -> None:
    """Raise unless `value` is an int of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"`{name}` must be at least 1, got {value}")
