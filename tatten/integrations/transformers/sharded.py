"""The sharded cache as a `transformers.Cache`, and attention over it: `generate` with a context over many devices."""

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
from tatten.integrations.transformers.local import selecting
from tatten.integrations.transformers.prefill import prefill


class ShardedKVCache(WrappedCache):
    """Keys and values of all layers, sharded over the ranks of a mesh; for `attn_implementation="tatten"`.

    Run it on every rank, under torchrun:

        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tatten")
        mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("kv",))
        cache = ShardedKVCache(model.config, mesh, capacity=prompt_length + max_new_tokens)
        out = model.generate(prompt, **cache_kwargs(cache), max_new_tokens=max_new_tokens)

    Each rank computes the whole prompt, with ordinary causal attention, and keeps its share of the keys and values,
    layer by layer; or with `prefill`, its share of the prompt alone. In a decode step each rank attends to its share,
    and the states of the ranks are merged. The weights are the same on all ranks, or tensor-parallel over a dim of the
    mesh: `heads="tp"`, mesh `("tp", "kv")`. Of models with multi-head latent attention each rank keeps its share of the
    latents, for all heads, and expands only those. Index keys, of which an indexer picks keys, are whole on each rank.

    Each rank draws its own tokens. They agree as long as prompts, weights and options do and, with sampling, all ranks
    have the same seed (`torch.manual_seed`). This is not checked: ranks that draw different tokens would attend to a
    mixture of their texts.

    Args:
        config: the config of the model, or its number of layers if it caches no latents and no index keys. Attention
            may be full, sliding, chunked or indexed; every layer keeps all tokens, and the masks of the model apply
            windows.
        mesh, capacity, sequence, heads: as for `tatten.ShardedKVCache`.

    Raises:
        ValueError: a layer holds anything other than keys, values and index keys of single tokens, or none of its own;
            or the model has another `attn_implementation`.
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

        A collective. Of the n ranks that share the sequence, rank r runs tokens r, r + n, ..., and its keys and values
        are what it stores. Those of the others pass through it on a ring (Striped Attention, arXiv 2311.09431). The
        cache is left as a call of the model leaves it, in which every rank runs all tokens.

        Args:
            model: a causal language model with `attn_implementation="tatten"`, whose layers mix tokens by full causal
                attention alone. It runs in eager mode.
            prompt: int64 `[batch, P]`, token ids, all of them real, the same on all ranks; `generate` needs a cache
                that lacks its last token, `prompt[:, :-1]`.
            chunk: number of tokens to run at a time on all ranks together, which bounds the memory of activations: a
                multiple of n. None for all of them.

        Returns:
            The logits of the last token, `[batch, vocabulary]`, on every rank.

        Raises:
            ValueError, TypeError: an argument is not as above, the cache has tokens already or too few slots, or ranks
                were given different prompts, chunks or models. Nothing has been written.
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
        """Not supported, and with it neither assisted decoding nor contrastive search."""
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
    """Attention "tatten" of transformers over the DTensors of a sharded cache, laid out as `layout` says.

    `indices` name positions, on whatever rank: each rank attends to those of its own.
    """
    if kwargs.get("s_aux") is not None:
        raise ValueError(
            f'`s_aux` must be None, as attention "tatten" has no sinks, got a {type(kwargs["s_aux"]).__name__}'
        )
    for name in ("softcap", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"`{name}` must be None over a sharded cache, got {kwargs[name]!r}")
    if kwargs.get("output_attentions"):
        raise ValueError("`output_attentions` must be False over a sharded cache, as no rank has all weights, got True")
    if attention_mask is None:
        raise ValueError("`attention_mask` must exclude the unused slots of a sharded cache, got None")
    if indices is not None:
        attention_mask = selecting(indices, attention_mask, attention_mask.shape[-1])
    queries, mask = layout.queries(query), layout.mask(attention_mask[..., layout.local_tokens])
    # Eager PyTorch has no kernel that returns the lse if values have a head_dim of their own (DeepSeek), so its SDPA
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
