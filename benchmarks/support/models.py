"""Decoders in the shapes of published models with random weights, and the bytes that one of their steps has to read."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

# By transformers' model types: Llama-3.1-8B, Gemma-2-9b, the text of Gemma-3-12b, gpt-oss-20b, and DeepSeek-V3 with
# small dense MLPs in place of its experts. Llama and DeepSeek-V3 have the vocabulary of Llama 2, beside which a few
# layers still weigh. The small models, Llama-3.2-1B and Qwen3-0.6B, have their own.
SHAPES: dict[str, dict[str, int]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
    "gemma2": {
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
    },
    "gemma3_text": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "vocab_size": 262208,
    },
    "gpt_oss": {"num_hidden_layers": 24, "num_local_experts": 32},
    "deepseek_v3": {
        "intermediate_size": 2048,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 61,
        "vocab_size": 32000,
    },
    "llama_1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "qwen3_600m": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
}
MODEL_TYPES = {"llama_1b": "llama", "qwen3_600m": "qwen3"}  # of the names that are no model types
_TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}
TINY: dict[str, dict[str, int]] = {
    "llama": _TINY,
    "gemma2": {**_TINY, "query_pre_attn_scalar": 32, "sliding_window": 64},
    "gemma3_text": {**_TINY, "query_pre_attn_scalar": 32, "sliding_window": 64, "sliding_window_pattern": 2},
    "llama_1b": _TINY,
    "qwen3_600m": _TINY,
    "gpt_oss": {**_TINY, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64},
    "deepseek_v3": {
        **_TINY,
        "num_key_value_heads": 4,
        "head_dim": 16,  # of the rotary part alone
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
}


def shape(name: str, tiny: bool = False, **changes: object) -> PreTrainedConfig:
    """Return the configuration of a model, with the changes."""
    sizes = SHAPES[name] | (TINY[name] if tiny else {}) | changes
    return AutoConfig.for_model(
        MODEL_TYPES.get(name, name), **({"max_position_embeddings": 1 << 17, "pad_token_id": 0} | sizes)
    )


def build(config: PreTrainedConfig, device: str, dtype: torch.dtype, attention: str | None = None) -> PreTrainedModel:
    """Build a model for inference, always with the same weights; transformers picks the attention if none is named."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.eval().requires_grad_(False)


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the weights that a step reads.

    An embedding that is no output projection does not count: a step reads a row of it per sequence.
    """
    weights = sum(p.nbytes for p in model.parameters())
    return weights if model.config.tie_word_embeddings else weights - model.get_input_embeddings().weight.nbytes


def floor_bytes(model: PreTrainedModel, batch: int, used: int) -> int:
    """Return the bytes of each weight, of as many experts as even routing picks, and of keys and values or latents.

    A layer with a sliding window reads no more keys than its window has.
    """
    config, weights = model.config, weight_bytes(model)
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    if experts:
        weights -= int(experts * (1 - config.num_experts_per_tok / config.num_local_experts) ** batch)
    layers = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    keys = sum(min(used, config.sliding_window) if kind == "sliding_attention" else used for kind in layers)
    if rank := getattr(config, "kv_lora_rank", None):
        per_key = rank + config.qk_rope_head_dim
    else:
        per_key = 2 * config.num_key_value_heads * config.head_dim
    return weights + batch * keys * per_key * model.dtype.itemsize
