"""A tiny model of every class of transformers that is a causal or a sequence-to-sequence language model."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

VOCABULARY = 64
WINDOW = 8
MANY = 60_000_000  # parameters of a model whose sizes are not all known by the names below
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
_WIDE = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size", "word_embed_proj_dim", "lru_width")
_NARROW = (
    "intermediate_size",
    "n_inner",
    "d_ff",
    "d_inner",
    "decoder_ffn_dim",
    "encoder_ffn_dim",
    "ffn_dim",
    "hidden_dim",
)
_LONG = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
SIZES: dict[str, Any] = {
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_LAYERS, 2),
    **dict.fromkeys(_WIDE, 64),
    **dict.fromkeys(_NARROW, 32),
    **dict.fromkeys(_LONG, 128),
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "d_kv": 16,
    "d_head": 16,
    "rotary_dim": 8,
    "image_size": 32,
    "patch_size": 8,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "attention_chunk_size": WINDOW,
    "attention_window": WINDOW,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "intermediate_size_mlp": 32,
    "shared_intermediate_size": 32,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    # Experts
    **dict.fromkeys(("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace", "zero_expert_num"), 1),
    # Latents, and the keys that an indexer selects
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_topk": 4,
    "index_n_heads": 2,
    "index_head_dim": 16,
    # Layers without attention
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size"), 8),
    "mamba_d_head": 32,
    "mamba_head_dim": 32,
    "mamba_n_groups": 1,
    "n_mamba_heads": 2,
    "linear_num_key_heads": 2,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
}
_LATENTS = (
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "minicpm3", "mistral4", "youtu"),
    *("axk1", "axk2", "hy_v4", "dots3_note_text", "mistral_large4_text", "kimi_linear", "bailing_hybrid"),
)
_LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "minimax", "kimi_linear", "bailing_hybrid")
_CONVOLVING = ("lfm2", "lfm2_moe", "lfm3")
OWN_SIZES: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "mamba_dt_rank": 4},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
}
NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
SEQ2SEQ_NAMES = sorted(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
BASE_NAMES = sorted(set(MODEL_MAPPING_NAMES) - set(NAMES) - set(SEQ2SEQ_NAMES))


def build_pair(name: str, attentions: tuple[str, str], seq2seq: bool = False) -> list[PreTrainedModel]:
    """The model twice, with the same random weights in float32 and another attention.

    Raises:
        Exception: whatever transformers raises at sizes that do not fit the model.
    """
    classes = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if seq2seq else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return _pair(*_class_and_config(getattr(transformers, classes[name]), name, seq2seq), name, attentions)


def build_base_pair(name: str, attentions: tuple[str, str]) -> list[PreTrainedModel]:
    """The same for a base model that is no language model: an encoder of text, images or sound."""
    found = MODEL_MAPPING_NAMES[name]
    model_class = getattr(transformers, found if isinstance(found, str) else found[0])
    return _pair(*_class_and_config(model_class, name, True), name, attentions)


def _pair(model_class: Any, config: PreTrainedConfig, name: str, attentions: tuple[str, str]) -> list[PreTrainedModel]:
    with torch.device("meta"):
        count = sum(x.numel() for x in model_class._from_config(copy.deepcopy(config)).parameters())
    if count > MANY:
        raise ValueError(f"{name} has {count} parameters with these sizes")
    models = []
    for attention in attentions:
        torch.manual_seed(0)
        models.append(model_class._from_config(copy.deepcopy(config), attn_implementation=attention).eval().float())
    models[1].load_state_dict(models[0].state_dict())
    return models


def _class_and_config(model_class: type[PreTrainedModel], name: str, seq2seq: bool) -> tuple[Any, PreTrainedConfig]:
    """The class of a model that reads text alone, and its tiny config."""
    config_class = CONFIG_MAPPING[name]
    parameters = inspect.signature(config_class.__init__).parameters
    if "text_config" in parameters and "hidden_size" not in parameters:
        part = config_class.sub_configs["text_config"]
        module = importlib.import_module(model_class.__module__)
        of_text = [
            found
            for name, found in vars(module).items()
            if name.endswith("ForCausalLM") and getattr(found, "config_class", None) is part
        ]
        return of_text[-1], _config(part)
    return model_class, _config(config_class, is_decoder=not seq2seq)


def _config(config_class: type[PreTrainedConfig], is_decoder: bool = False) -> PreTrainedConfig:
    parameters = inspect.signature(config_class.__init__).parameters
    aliases = config_class.attribute_map or {}
    sizes = {name: size for name, size in SIZES.items() if name in parameters or name in aliases}
    sizes |= OWN_SIZES.get(config_class.model_type, {})
    if config_class.model_type in _LATENTS:
        sizes["num_key_value_heads"] = 4
    for first, names in (("linear_attention", _LINEAR), ("conv", _CONVOLVING)):
        if config_class.model_type in names:
            sizes["layer_types"] = [first, "full_attention"]
    if is_decoder and "is_decoder" in parameters:
        sizes["is_decoder"] = True
    return _accepted(config_class, sizes)


def _accepted(config_class: type[PreTrainedConfig], sizes: dict[str, Any]) -> PreTrainedConfig:
    """The config with those of the sizes that it accepts: it names in its error what it does not."""
    try:
        return config_class(**sizes)
    except Exception as error:
        wrong = [name for name in sizes if re.search(rf"\b{name}\b", str(error))]
        if not wrong:
            raise
        return _accepted(config_class, {name: size for name, size in sizes.items() if name != wrong[0]})
