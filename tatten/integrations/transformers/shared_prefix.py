"""The shared-prefix cache as a `transformers.Cache`: prefill each prompt once, then `generate` n sequences from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tatten.caches import shared_prefix
from tatten.caches.index_layers import add_index_layers
from tatten.integrations.transformers.config import (
    caches_latents,
    check_attention,
    count_layers,
    layers_of_index_keys,
)
from tatten.integrations.transformers.layer import WrappedCache

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class SharedPrefixCache(WrappedCache):
    """Keys and values of G prompts, stored once, and of n sequences for each prompt.

    Prefill all tokens of the prompts except the last, which `generate` runs for each sequence of a fork:

        cache = SharedPrefixCache(model.config)
        position_ids = (mask.cumsum(-1) - 1).clamp(min=0)  # as `generate` computes them
        with torch.no_grad():
            model(prompt[:, :-1], attention_mask=mask[:, :-1], position_ids=position_ids[:, :-1], **cache_kwargs(cache))
        out = model.generate(prompt, attention_mask=mask, **cache_kwargs(cache.fork(n, capacity=max_new_tokens)),
                             num_return_sequences=n, do_sample=True, max_new_tokens=max_new_tokens)

    `position_ids` can be omitted without padding. With padding, a model called without them counts the padding, and its
    positions differ from those of `generate`. With beam search, n is `num_beams`. Each `generate` needs a new fork, or
    a fork `into` the last one. `generate` treats a fork as a static cache: it is compileable, and works for models that
    support a static cache. Assisted decoding (`assistant_model=`) computes the prompt again, as it does with any cache.
    Candidates need room in the suffix.

    Args:
        config: the config of the model, or its number of layers. The number is not enough for a model with indexers,
            nor over a mesh for one that caches latents. Attention may be full, sliding, chunked or indexed; every layer
            keeps all tokens, and the masks of the model apply windows.
        mesh, sequence, heads: as for `tatten.SharedPrefixCache`, on every rank, for a model with
            `attn_implementation="tatten"`. Each rank computes the full prompt and keeps its share. With `prefill` it
            computes only its share. A cache over a mesh has to be forked before a model is called with single tokens.

    Raises:
        ValueError: a layer caches anything other than its own keys, values and index keys of single tokens, or over a
            mesh, the model has another `attn_implementation`.
        ValueError, TypeError: as for `tatten.SharedPrefixCache`.
    """

    _cache: shared_prefix.SharedPrefixCache

    def __init__(
        self,
        config: PreTrainedConfig | int,
        *,
        mesh: DeviceMesh | None = None,
        sequence: str | Sequence[str] = "kv",
        heads: str | None = None,
    ):
        if mesh is not None:
            check_attention(config)
        latents = mesh is not None and not isinstance(config, int) and caches_latents(config)
        num_layers = config if isinstance(config, int) else count_layers(config)
        cache = shared_prefix.SharedPrefixCache(num_layers, mesh=mesh, sequence=sequence, heads=heads)
        indexed = [] if isinstance(config, int) else layers_of_index_keys(config)
        add_index_layers(cache, len(indexed))
        super().__init__(cache, latents, indexed)

    def fork(self, n: int, capacity: int, into: SharedPrefixCache | None = None) -> SharedPrefixCache:
        """Make a cache with `n` children of each sequence, each of which can add `capacity` tokens.

        Child i of sequence j is sequence `j * n + i`, as `num_return_sequences=n` and `num_beams=n` expect. See
        `tatten.SharedPrefixCache.fork`, also for `into`.
        """
        if into is None:
            return self._wrap(self._cache.fork(n, capacity))
        self._cache.fork(n, capacity, into=_unwrap(into))
        return into

    def prefill(self, model: PreTrainedModel, prompt: Tensor, chunk: int | None = None) -> Tensor:
        """Compute the keys and values of prompts over a mesh, with each rank running its share of the tokens.

        See `tatten.integrations.transformers.ShardedKVCache.prefill`.
        """
        if self._cache.layout.mesh is None:
            raise ValueError("`prefill` needs a cache over a `mesh`, got mesh=None: call the model with the cache")
        from tatten.caches.interleaved import Interleaved  # imports DTensor
        from tatten.integrations.transformers.prefill import prefill

        assert isinstance(self._cache.layout, Interleaved)
        return prefill(self, self._cache.layout, model, prompt, chunk, cache_length=self._cache.length)

    def select(self, indices: Sequence[int] | Tensor, into: SharedPrefixCache | None = None) -> SharedPrefixCache:
        """Make a cache of the sequences `indices`; see `tatten.SharedPrefixCache.select`, also for `into`."""
        if into is None:
            return self._wrap(self._cache.select(indices))
        self._cache.select(indices, into=_unwrap(into))
        return into

    def activate_past_recording(self) -> None:
        """Expect the next step to pass all tokens of the text, including those that the cache holds.

        Assisted decoding calls this first. Its first step passes the full text, whatever the cache holds.
        """
        cache_length = self._cache.length
        for layer in self.layers:
            layer.expect_again(cache_length)

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the last `-tokens_to_remove` tokens, as assisted decoding does with rejected candidates.

        Raises:
            ValueError: `tokens_to_remove` is positive, or there are not as many tokens since the last fork.
        """
        tokens = -int(tokens_to_remove)  # transformers 5.17 passes a tensor
        if tokens < 0:
            raise ValueError(f"`tokens_to_remove` must be 0 or negative, as transformers has it, got {-tokens}")
        self._cache.crop(tokens)

    def reset(self) -> NoReturn:
        """Raise NotImplementedError: other forks may share the tokens that a reset would remove."""
        raise NotImplementedError("SharedPrefixCache cannot be reset: make a new one, or a new fork")

    def _wrap(self, cache: shared_prefix.SharedPrefixCache) -> SharedPrefixCache:
        new = type(self).__new__(type(self))
        WrappedCache.__init__(new, cache, self._latents, self._indexed)
        return new


def _unwrap(into: SharedPrefixCache) -> shared_prefix.SharedPrefixCache:
    if not isinstance(into, SharedPrefixCache):
        raise TypeError(f"`into` must be a SharedPrefixCache of this module, got {type(into).__name__}")
    return into._cache
