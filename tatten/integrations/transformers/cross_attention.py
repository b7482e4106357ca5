"""A cache of an encoder's keys and values, which stores each source once for all sequences that decode it."""

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
    """Keys and values of a layer, stored as `[sources, heads, length, head_dim]` and repeated for each sequence."""

    is_sliding = False
    is_compileable = True

    def __init__(self, n: int):
        # Without the initializer of the base class, which assigns to the properties `keys` and `values`.
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
        """Raise ValueError unless each beam replaces a beam of the same source, which changes nothing."""
        if beam_idx.device.type == "cpu":  # on an accelerator the check would wait for the device
            sources = torch.arange(len(beam_idx)) // self.n
            if not torch.equal(beam_idx // self.n, sources):
                raise ValueError(f"`beam_idx` must keep each source's {self.n} sequences, got {beam_idx.tolist()}")


class CrossAttentionCache(Cache):  # type: ignore[misc]
    """An encoder's keys and values, stored once for the `n` sequences that decode each source.

    `generate` repeats the encoder's output for each beam or returned sequence, and other caches store all copies. Use
    this cache as the second half of an `EncoderDecoderCache`; the first half may be any cache:

        decoder = StaticCache(model.config, max_cache_len=max_new_tokens)
        cache = EncoderDecoderCache(decoder, CrossAttentionCache(n=5))
        out = model.generate(**inputs, **cache_kwargs(cache), num_beams=5, max_new_tokens=max_new_tokens,
                             compile_config=CompileConfig(backend="tatten"))

    Args:
        n: number of sequences that decode each source: the larger one of `num_beams` and `num_return_sequences`; for
            Whisper, which repeats its input for both, their product. Sequence i decodes source `i // n`.

    Raises:
        TypeError: `n` is not an int.
        ValueError: `n` is less than 1; or, in the first step, the batch isn't a multiple of `n`, or the keys or values
            of a source's sequences differ by more than rounding. A compiled first step does not compare them.
    """

    def __init__(self, n: int):
        check_positive("n", n)
        super().__init__(layer_class_to_replicate=functools.partial(CrossAttentionLayer, n))

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values. Each source counts once."""
        return sum(x.nbytes for layer in self.layers for x in layer.stored or ())


def _repeated(stored: Tensor, n: int) -> Tensor:
    """Repeat each source's rows `n` times.

    The backend reads the stored rows instead. Eager mode copies them, unless there is only one source.
    """
    return stored.unsqueeze(1).expand(-1, n, -1, -1, -1).flatten(0, 1)


def _check_repeated(name: str, states: Tensor, n: int) -> None:
    """Raise ValueError unless each `n` rows are equal, up to the rounding of one matrix product."""
    if n == 1 or not states.numel():
        return
    rows = states.unflatten(0, (-1, n))
    error = (rows - rows[:, :1]).abs().max()
    bound = 2 * torch.finfo(states.dtype).eps + 64 * torch.finfo(torch.float32).eps
    if not error <= bound * states.abs().max():
        raise ValueError(f"each {n} sequences, `n`, must decode one source: their {name} differ by up to {error:.2g}")
