"""The sharded cache as a `transformers.Cache`, and attention over it: `generate` with a context on many devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from tatten.caches import sharded as sharded_cache
from tatten.caches.arguments import sequence_indices
from tatten.caches.index_layers import add_index_layers
from tatten.caches.interleaved import Interleaved
from tatten.dtensor_sdpa import merged_attention
from tatten.integrations.transformers.config import (
    caches_latents,
    check_attention,
    count_layers,
    layers_of_index_keys,
)
from tatten.integrations.transformers.layer import WrappedCache
from tatten.integrations.transformers.local import narrow_to_indices
from tatten.integrations.transformers.prefill import prefill


class ShardedKVCache(WrappedCache):
    """Keys and values of all layers, sharded over the ranks of a mesh, for `attn_implementation="tatten"`.

    Run it on every rank, under torchrun:

        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tatten")
        mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("kv",))
        cache = ShardedKVCache(model.config, mesh, capacity=prompt_length + max_new_tokens)
        out = model.generate(prompt, **cache_kwargs(cache), max_new_tokens=max_new_tokens)

    Each rank computes the full prompt with ordinary causal attention, and keeps its share of the keys and values, layer
    by layer. With `prefill`, each rank computes only its share of the prompt. In a decode step each rank attends to its
    share, and the states of the ranks are merged. The weights are the same on all ranks, or tensor-parallel over a dim
    of the mesh: `heads="tp"`, mesh `("tp", "kv")`. For multi-head latent attention, each rank keeps its share of the
    latents, for all heads, and expands only this share. Each rank stores all index keys, from which an indexer picks.

    Each rank samples its own tokens. They agree if prompts, weights and options do and, with sampling, all ranks have
    the same seed (`torch.manual_seed`). This is not checked: ranks that sample different tokens attend to a mixture of
    their texts.

    Args:
        config: the config of the model, or its number of layers if it caches no latents and no index keys. Attention
            may be full, sliding, chunked or indexed; every layer keeps all tokens, and the masks of the model apply
            windows.
        mesh, capacity, sequence, heads: as for `tatten.ShardedKVCache`.

    Raises:
        ValueError: a layer caches anything other than its own keys, values and index keys of single tokens, or the
            model has another `attn_implementation`.
        ValueError, TypeError: as for `tatten.ShardedKVCache`.
    """

    _cache: sharded_cache.ShardedKVCache

    def __init__(
        self,
        config: PreTrainedConfig | int,
        mesh: DeviceMesh,
        capacity: int,
        sequence: str | Sequence[str] = "kv",
        heads: str | None = None,
    ):
        check_attention(config)
        num_layers = config if isinstance(config, int) else count_layers(config)
        cache = sharded_cache.ShardedKVCache(num_layers, mesh, capacity, sequence=sequence, heads=heads)
        indexed = [] if isinstance(config, int) else layers_of_index_keys(config)
        add_index_layers(cache, len(indexed))
        super().__init__(cache, not isinstance(config, int) and caches_latents(config), indexed)

    def prefill(self, model: PreTrainedModel, prompt: Tensor, chunk: int | None = None) -> Tensor:
        """Compute the keys and values of a prompt, with each rank running its share of the tokens.

        A collective. Among the n ranks that share the sequence, rank r runs tokens r, r + n, ... and stores their keys
        and values. The keys and values of other ranks pass through it on a ring (Striped Attention, arXiv 2311.09431).
        The cache is then the same as after a call of the model in which every rank runs all tokens.

        Args:
            model: a causal language model with `attn_implementation="tatten"`, whose layers mix tokens by full causal
                attention alone. It runs in eager mode.
            prompt: int64 `[batch, P]`, token ids without padding, the same on all ranks. For `generate`, pass
                `prompt[:, :-1]`, as the cache must lack the last token.
            chunk: number of tokens to run at a time on all ranks together, which bounds the memory of activations: a
                multiple of n. None for all tokens at once.

        Returns:
            The logits of the last token, `[batch, vocabulary]`, on every rank.

        Raises:
            ValueError, TypeError: an argument is invalid, the cache has tokens already or too few slots, or ranks
                passed different prompts, chunks or models. Nothing has been written.
            NotImplementedError: layers have windows, chunks, sinks, soft caps or latents, mix tokens by anything but
                attention, or depend on the length in another way. The cache holds no tokens.
            RuntimeError: a rank did not come within the timeout of the process group. The cache holds no tokens.
        """
        return prefill(
            self, self._cache.layout, model, prompt, chunk, cache_length=int(self._cache.length), capacity=self.capacity
        )

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the sequences `indices`, in that order, on all ranks alike. Reads them on the host."""
        self._cache.select_(sequence_indices(indices, self._cache.batch_size))

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Raise NotImplementedError: assisted decoding and contrastive search, which crop caches, are not supported."""
        raise NotImplementedError(
            "ShardedKVCache cannot be cropped, as assisted decoding and contrastive search do: generate without them, "
            "or with a DynamicCache"
        )


def attention(
    module: nn.Module,
    query: Tensor,
    key: DTensor,
    value: DTensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    layout: Interleaved,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention "tatten" over the DTensors of a sharded cache with this layout.

    `indices` are positions in the full sequence. Each rank attends to the selected keys that it stores.
    """
    if kwargs.get("s_aux") is not None:
        raise ValueError(
            f"`s_aux` must be None, as a sharded cache supports no sinks, got a {type(kwargs['s_aux']).__name__}"
        )
    for name in ("softcap", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"`{name}` must be None over a sharded cache, got {kwargs[name]!r}")
    if kwargs.get("output_attentions"):
        raise ValueError("`output_attentions` must be False over a sharded cache, as no rank has all weights, got True")
    if attention_mask is None:
        raise ValueError("`attention_mask` must exclude the unused slots of a sharded cache, got None")
    if indices is not None:
        attention_mask = narrow_to_indices(indices, attention_mask, attention_mask.shape[-1])
    queries, mask = layout.queries(query), layout.mask(attention_mask[..., layout.local_tokens])
    # Eager SDPA has no kernel that returns the lse if keys and values differ in head_dim (DeepSeek), so its result
    # could not be merged.
    out: Tensor | None = (
        None if torch.compiler.is_compiling() else merged_attention(queries, key, value, mask, dropout, scaling)
    )
    if out is None:
        out = F.scaled_dot_product_attention(
            queries, key, value, mask, dropout_p=dropout, scale=scaling, enable_gqa=True
        )
    assert isinstance(out, DTensor)
    return out.to_local().transpose(1, 2).contiguous(), None
