"""A KV cache for sequences that share a prefix, which is stored once: prefill, fork n ways, and fork again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tatten.caches.shared_prefix_layer import SharedPrefixLayer, expand_to_batch, prefix_rows, select_rows


class SharedPrefixCache:
    """Keys and values of all layers. A new cache is filled by a prefill, then forked.

    Each step gets its `positions` and `mask`, and passes the new keys and values of each layer to `update`. After a
    fork all shapes are fixed and lengths are on the device: a step compiles once, can be captured in a CUDA graph and
    never waits for the device, except in eager mode, to check the capacity. A cache stays usable when it has been
    forked or selected from, and forks are independent of each other.

    Args:
        num_layers: layers of the model.
        prompt_mask: bool `[G, P]`, True for real tokens and False for padding, on either side; None for no padding.
            P is the length of the prompts. The prefill may leave out their last tokens.
        device: the device of `mask` and `positions` for the prefill; later it is that of the keys. Default: the device
            of `prompt_mask`, or torch's default.

    Raises:
        ValueError, TypeError: an argument is not as above.

    Examples:
        >>> import torch, tatten
        >>> import torch.nn.functional as F
        >>> cache = tatten.SharedPrefixCache(num_layers=1)
        >>> keys, values = cache.update(0, *torch.randn(2, 1, 8, 100, 64))  # the prefill of one prompt, in each layer
        >>> samples = cache.fork(4, capacity=256)  # 4 sequences for each prompt, 256 new tokens for each
        >>> mask, positions = samples.mask(), samples.positions()  # once per step
        >>> keys, values = samples.update(0, *torch.randn(2, 4, 8, 1, 64))  # in each layer
        >>> out = F.scaled_dot_product_attention(torch.randn(4, 8, 1, 64), keys, values, mask)
        >>> best = samples.select([3, 3, 0])  # three sequences: two that go on from 3, one from 0
        >>> best.batch_size
        3
    """

    def __init__(self, num_layers: int, prompt_mask: Tensor | None = None, device: torch.device | str | None = None):
        check_positive("num_layers", num_layers)
        if prompt_mask is not None and prompt_mask.dtype != torch.bool:
            raise TypeError(f"`prompt_mask` must be bool, got {prompt_mask.dtype}")
        if prompt_mask is not None and prompt_mask.dim() != 2:
            raise ValueError(f"`prompt_mask` must be [prompts, length], got shape {tuple(prompt_mask.shape)}")
        self.layers = [SharedPrefixLayer() for _ in range(num_layers)]
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
        """Bytes of keys and values in all layers: each prefix once, and of a parent's suffix only the part in use."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors)

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens to a layer, and return all of its keys and values.

        Args:
            layer: 0 to num_layers - 1.
            key, value: `[batch, kv_heads, q_len, head_dim]`; head_dim may differ between them.

        Returns:
            `(keys, values)`, `[batch, kv_heads, total, head_dim]` with `total` as in `mask`.

        Raises:
            IndexError: there is no such layer.
            ValueError, TypeError: the tensors do not fit each other, the cache, its capacity or `prompt_mask`. Nothing
                has been written.
        """
        if not 0 <= layer < len(self.layers):
            raise IndexError(f"`layer` must be 0 to {len(self.layers) - 1}, got {layer}")
        if not self.layers[layer].forked and key.dim() == 4:
            self._check_prompt(self.layers[layer], key)
        return self.layers[layer].append(key, value)

    def fork(self, n: int, capacity: int) -> SharedPrefixCache:
        """Make a cache with `n` children of each sequence: child i of sequence j is sequence `j * n + i`.

        Copies nothing: all tokens so far become the shared prefix. Reads the number of used slots on the host.

        Args:
            n: children of each sequence.
            capacity: number of tokens that each child can add.

        Raises:
            ValueError, TypeError: `n` or `capacity` is not an int of at least 1, or the call comes before the prefill
                or in the middle of a step.
        """
        check_positive("n", n)
        check_positive("capacity", capacity)
        used = self._used()
        return self._of([layer.fork(n, capacity, used) for layer in self.layers], self.prompt_mask)

    def select(self, indices: Sequence[int] | Tensor) -> SharedPrefixCache:
        """Make a cache of the sequences `indices`, in that order; one may occur several times.

        Copies the suffixes. A prefix is shared with this cache if the new batch needs consecutive rows of it, and
        copied otherwise.

        Args:
            indices: ints, or an integer tensor with one dimension, which is read on the host.

        Raises:
            IndexError: there is no such sequence.
            ValueError: `indices` is empty.
            TypeError: `indices` holds something other than integers.
        """
        rows = sequence_indices(indices, self.batch_size)
        prompt_mask = self.prompt_mask
        if prompt_mask is not None:
            prompt_mask = select_rows(prompt_mask, prefix_rows(rows, self.batch_size // prompt_mask.shape[0]))
        return self._of([layer.select(rows) for layer in self.layers], prompt_mask)

    def mask(self, q_len: int = 1) -> Tensor:
        """Bool mask of the current step, True where a query attends to a key. Call it before the last layer's update.

        Returns:
            `[1 or batch, 1, q_len, total]`: causal, without unused slots and padding. `total` is the length of what
            `update` will return: the tokens so far and `q_len`, or after a fork the prefix and `capacity`.

        Raises:
            ValueError: `q_len` is below 1 or, which graphs do not check, exceeds the free slots of the suffix.
            TypeError: `q_len` is not an int.
        """
        tokens, total = self._step(q_len)
        visible = (torch.arange(total, device=tokens.device) <= tokens[:, None])[None, None]
        if self.prompt_mask is None:
            return visible
        real = F.pad(self.prompt_mask, (0, total - self.prompt_mask.shape[1]), value=True)
        return visible & expand_to_batch(real, self.batch_size or real.shape[0])[:, None, None]

    def positions(self, q_len: int = 1) -> Tensor:
        """Position ids of the step's tokens, int64 `[1 or batch, q_len]`, not counting padding.

        Raises the errors of `mask`.
        """
        tokens, total = self._step(q_len)
        if self.prompt_mask is None:
            return tokens[None]
        real = F.pad(self.prompt_mask, (0, total - self.prompt_mask.shape[1]), value=True)
        positions = (real.cumsum(1) - 1).clamp(min=0).index_select(1, tokens)
        return expand_to_batch(positions, self.batch_size or real.shape[0])

    def _step(self, q_len: int) -> tuple[Tensor, int]:
        """Indices of the step's tokens, `[q_len]`, and `total`.

        The last layer counts, as it is updated last: so the answer is the same throughout a step.
        """
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
        """Used slots of the suffixes, read with one synchronisation for all layers; 0 before a fork."""
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

    def _check_prompt(self, layer: SharedPrefixLayer, key: Tensor) -> None:
        """Check a prefill against the other layers and the mask."""
        if not layer.segments and self.batch_size not in (0, key.shape[0]):
            raise ValueError(f"`key` must have batch {self.batch_size}, as in layer 0, got {key.shape[0]}")
        if self.prompt_mask is None:
            return
        prompts, prompt_length = self.prompt_mask.shape
        if not layer.segments and prompts != key.shape[0]:
            raise ValueError(f"`prompt_mask` must have batch {key.shape[0]}, as `key`, got {prompts}")
        if self.prompt_mask.device != key.device:
            raise ValueError(f"`prompt_mask` must be on {key.device}, as `key`, got {self.prompt_mask.device}")
        start, end = layer.prefix_length, layer.prefix_length + key.shape[2]
        if start < prompt_length < end:
            raise ValueError(
                f"`prompt_mask` must cover all or none of tokens {start} to {end - 1}, got {prompt_length}"
            )

    def _of(self, layers: list[SharedPrefixLayer], prompt_mask: Tensor | None) -> SharedPrefixCache:
        cache = SharedPrefixCache(len(layers), prompt_mask, self.device)
        cache.layers = layers
        return cache


def sequence_indices(indices: Sequence[int] | Tensor, batch: int) -> list[int]:
    """Return `indices` as a list, checked against the number of sequences."""
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
