"""The sharded cache as a `transformers.Cache`, and attention over it: `generate` with a context on many devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tatten.caches import sharded as sharded_cache
from tatten.caches.sharded_layer import Interleaved, ShardedKV
from tatten.dtensor_sdpa import merged_attention
from tatten.integrations.transformers.config import count_layers


class ShardedKVLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer: a `ShardedKV`. Attention gets the first tokens as they are, and all slots as DTensors later on."""

    is_sliding = False
    is_compileable = True

    def __init__(self, kv: ShardedKV):
        super().__init__()
        self.kv = kv

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.is_initialized:
            return self.kv.append(key_states, value_states)
        self.kv.prefill(key_states, value_states)
        self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int | Tensor:
        return self.kv.length if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if not self.is_initialized:
            return query_length, 0
        # `generate` asks on the host, ahead of a compiled forward that cannot check.
        if self.kv.length.device.type == "cpu":
            self.kv.check_room(query_length)
        return self.kv.capacity, 0

    def get_max_length(self) -> int:
        return self.kv.capacity

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.kv.reorder(beam_idx)

    def reset(self) -> None:
        self.kv.clear()
        self.is_initialized = False


class ShardedKVCache(Cache):  # type: ignore[misc]
    """Keys and values of all layers, sharded over the ranks of a mesh; for `attn_implementation="tatten"`.

    Run it on every rank, under torchrun:

        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tatten")
        mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("kv",))
        cache = ShardedKVCache(model.config, mesh, capacity=prompt_length + max_new_tokens)
        out = model.generate(prompt, past_key_values=cache, max_new_tokens=max_new_tokens)

    Each rank computes the whole prefill, with ordinary causal attention, and keeps its share of the keys and values,
    layer by layer. Each decode step attends to that share, and what the ranks found is merged. The weights are the same
    on all ranks, or tensor-parallel over a dim of the mesh: `heads="tp"`, mesh `("tp", "kv")`.

    Each rank draws its own tokens. They are the same as long as prompts, weights and options are and, with sampling,
    all ranks were seeded alike (`torch.manual_seed`). Nothing checks that: ranks that draw other tokens attend to a
    mixture of their texts.

    Args:
        config: of the model, whose layers may attend in full, to a sliding window or to a chunk. All of them keep all
            tokens: the model's masks see to the windows. Or the number of layers.
        mesh, capacity, sequence, heads: as those of `tatten.ShardedKVCache`.

    Raises ValueError if a layer holds anything else than keys and values, or none, and as `tatten.ShardedKVCache`.
    """

    def __init__(
        self,
        config: PreTrainedConfig | int,
        mesh: DeviceMesh,
        capacity: int,
        sequence: str | Sequence[str] = "kv",
        heads: str | None = None,
    ):
        if not isinstance(config, int):
            found = config.get_text_config(decoder=True)._attn_implementation
            if found not in (None, "tatten"):
                raise ValueError(
                    f'`config` must be of a model with attn_implementation="tatten", got {found!r}: nothing else can '
                    'attend to a sharded cache; see `model.set_attn_implementation("tatten")`'
                )
        num_layers = config if isinstance(config, int) else count_layers(config)
        self._cache = sharded_cache.ShardedKVCache(num_layers, mesh, capacity, sequence=sequence, heads=heads)
        super().__init__(layers=[ShardedKVLayer(kv) for kv in self._cache.layers])

    @property
    def batch_size(self) -> int:
        """Number of sequences; -1 before the prefill."""
        return self._cache.batch_size or -1

    @property
    def capacity(self) -> int:
        """Number of tokens that all ranks together can hold."""
        return self._cache.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values on this rank."""
        return self._cache.nbytes

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Not supported."""
        raise NotImplementedError("ShardedKVCache cannot be cropped: make a new one")


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for "tatten": its own SDPA, unless keys and values are DTensors of a sharded cache."""
    if kwargs.get("s_aux") is not None:
        raise ValueError('`s_aux` must be None: attention "tatten" has no sinks')
    if not isinstance(key, DTensor):
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return result
    for name in ("softcap", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f'`{name}` must be None: attention "tatten" has none over a sharded cache')
    if attention_mask is None:
        raise ValueError("`attention_mask` must exclude the unused slots of a sharded cache, got None")
    layout = Interleaved(key.device_mesh, key.placements)
    assert isinstance(value, DTensor)
    queries, mask = layout.queries(query), layout.mask(attention_mask[..., layout.own])
    # In eager mode PyTorch has no kernel for values with a head_dim of their own (DeepSeek), and SDPA can't be merged.
    out: Tensor | None = (
        None if torch.compiler.is_compiling() else merged_attention(queries, key, value, mask, dropout, scaling)
    )
    if out is None:
        out = F.scaled_dot_product_attention(
            queries, key, value, mask, dropout_p=dropout, scale=scaling, enable_gqa=True
        )
    assert isinstance(out, DTensor)
    return out.to_local().transpose(1, 2).contiguous(), None


AttentionInterface.register("tatten", attention)
AttentionMaskInterface.register("tatten", sdpa_mask)  # without one, the mask would be None
