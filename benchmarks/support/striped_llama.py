"""The prefill of `sharded_llama.py`'s decoder by `cache.prefill`, of a model of transformers over its weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from support.sharded_llama import Decoder
from tatten.integrations.transformers import ShardedKVCache


class StripedPrefill:
    """A prefill like `decoder.prefill`, but rank r of n runs tokens r, r + n, ... of the prompt."""

    def __init__(self, decoder: Decoder) -> None:
        ranks = decoder.ranks
        self.decoder, self.model = decoder, as_transformers(decoder)
        self.mesh = DeviceMesh.from_group(ranks.group, ranks.device, mesh_dim_names=("kv",))

    def __call__(self, tokens: Tensor) -> None:
        decoder, tokens_per_rank = self.decoder, tokens.shape[1] // self.decoder.ranks.size
        cache = ShardedKVCache(self.model.config, self.mesh, capacity=tokens.shape[1])
        decoder.first.copy_(cache.prefill(self.model, tokens).argmax(-1, keepdim=True))
        for layer, layer_cache in enumerate(cache.layers):
            for to, stored in zip((decoder.keys, decoder.values), layer_cache.kv.tensors, strict=True):
                to[layer, :, :, :tokens_per_rank] = stored[:, :, :tokens_per_rank]


def as_transformers(decoder: Decoder) -> LlamaForCausalLM:
    """Return a Llama over the decoder's own weights, with attention "tatten"."""
    s, device = decoder.sizes, decoder.ranks.device
    config = LlamaConfig(
        hidden_size=s.hidden,
        intermediate_size=s.intermediate,
        num_hidden_layers=s.layers,
        num_attention_heads=s.q_heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head_dim,
        vocab_size=s.vocabulary,
        rms_norm_eps=torch.finfo(torch.float32).eps,  # as F.rms_norm's
        max_position_embeddings=1 << 20,
        rope_parameters={"rope_type": "default", "rope_theta": s.theta},
        attn_implementation="tatten",
    )
    one = torch.ones(s.hidden, device=device, dtype=decoder.dtype)
    weights = {"model.embed_tokens": decoder.embedding, "lm_head": decoder.head, "model.norm": one}
    for i, (qkv, project, up, down) in enumerate(decoder.layers):
        q, k, v = qkv.split([n * s.head_dim for n in (s.q_heads, s.kv_heads, s.kv_heads)])
        gate, value = up.chunk(2)
        attention, mlp = {"q": q, "k": k, "v": v, "o": project}, {"gate": gate, "up": value, "down": down}
        weights |= {f"model.layers.{i}.self_attn.{name}_proj": x for name, x in attention.items()}
        weights |= {f"model.layers.{i}.mlp.{name}_proj": x for name, x in mlp.items()}
        weights |= {f"model.layers.{i}.{name}_layernorm": one for name in ("input", "post_attention")}
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=decoder.dtype).eval()
    model.load_state_dict({f"{name}.weight": x for name, x in weights.items()}, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)  # has no weights, so it was left on "meta"
    return model
