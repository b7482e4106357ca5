"""A cache of an encoder's keys and values that stores those of each source once, however many sequences decode it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from tatten.caches.arguments import check_positive
from tatten.caches.static_address import mark_static

LAYOUT = torch.contiguous_format


class CrossAttentionLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of a layer, `[sources, heads, length, head_dim]`, that layers see repeated for each sequence."""

    is_sliding = False
    is_compileable = True

    def __init__(self, n: int):
        # Not the initializer of the base class, which assigns `keys` and `values`.
        self.n = n
        self.is_initialized = False
        self.stored: tuple[Tensor, Tensor] | None = None

    @property
    def keys(self) -> Tensor | None:
        return None if self.stored is None else _repeated(self.stored[0], self.n)

    @property
    def values(self) -> Tensor | None:
        return None if self.stored is None else _repeated(self.stored[1], self.n)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        first = key_states[:: self.n], value_states[:: self.n]
        self.stored = first[0].clone(memory_format=LAYOUT), first[1].clone(memory_format=LAYOUT)
        if not torch.compiler.is_compiling():
            mark_static(*self.stored)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.is_initialized:
            raise ValueError("an encoder's keys are stored once: use a new CrossAttentionCache, or reset this one")
        if key_states.shape[0] % self.n:
            raise ValueError(f"the batch must be a multiple of `n`, {self.n} sequences a source, got {len(key_states)}")
        if not torch.compiler.is_compiling():
            _check_repeated("keys", key_states, self.n)
            _check_repeated("values", value_states, self.n)
        self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0 if self.stored is None else self.stored[0].shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.stored, self.is_initialized = None, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Leave all as it is: beams take the place of beams of the same source."""
        if beam_idx.device.type == "cpu":  # elsewhere the check would wait for the device
            sources = torch.arange(len(beam_idx)) // self.n
            if not torch.equal(beam_idx // self.n, sources):
                raise ValueError(f"`beam_idx` must keep each source's {self.n} sequences, got {beam_idx.tolist()}")


class CrossAttentionCache(Cache):  # type: ignore[misc]
    """An encoder's keys and values, stored once for the `n` sequences that decode each source.

    `generate` repeats what the encoder returns for each beam or returned sequence, and other caches store all copies.
    This one is the second half of an `EncoderDecoderCache`; the first may be any cache:

        decoder = StaticCache(model.config, max_cache_len=max_new_tokens)
        cache = EncoderDecoderCache(decoder, CrossAttentionCache(n=5))
        out = model.generate(**inputs, **cache_kwargs(cache), num_beams=5, max_new_tokens=max_new_tokens,
                             compile_config=CompileConfig(backend="tatten"))

    Args:
        n: how many sequences decode each source: the larger one of `num_beams` and `num_return_sequences`; for Whisper,
            which repeats its input for both, their product. Sequence i decodes source `i // n`.

    Raises:
        TypeError: `n` is not an int.
        ValueError: `n` is less than 1; or, in the first step, the batch isn't a multiple of it, or the keys or values
            of a source's sequences differ by more than rounding. A compiled first step isn't compared.
    """

    def __init__(self, n: int):
        check_positive("n", n)
        super().__init__(layer_class_to_replicate=functools.partial(CrossAttentionLayer, n))

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, those of each source once."""
        return sum(x.nbytes for layer in self.layers for x in layer.stored or ())


def _repeated(stored: Tensor, n: int) -> Tensor:
    """Each source's rows `n` times, as the backend sees through: a copy in eager mode, but for a single source."""
    return stored.unsqueeze(1).expand(-1, n, -1, -1, -1).flatten(0, 1)


def _check_repeated(name: str, states: Tensor, n: int) -> None:
    """Raise unless each `n` rows are the same, up to what one matrix product rounds differently in different rows."""
    if n == 1 or not states.numel():
        return
    rows = states.unflatten(0, (-1, n))
    error = (rows - rows[:, :1]).abs().max()
    bound = 2 * torch.finfo(states.dtype).eps + 64 * torch.finfo(torch.float32).eps
    if not error <= bound * states.abs().max():
        raise ValueError(f"each {n} sequences, `n`, must decode one source: their {name} differ by up to {error:.2g}")
