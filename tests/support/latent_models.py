"""Models of latent attention, tiny and with random weights: one decode step of each as graphs."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

TINY = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_topk": 4,
    "index_n_heads": 2,
    "index_head_dim": 16,
}
LINEAR = {"linear_num_heads": 4, "linear_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}


@dataclass(frozen=True)
class LatentModel:
    """A class of a model, what its configuration has beside TINY, and in how many layers SDPA attends to latents."""

    module: str
    cls: str
    config: dict[str, Any] = field(default_factory=dict)
    layers: int = 2


MODELS = {
    x.module: x
    for x in (
        LatentModel("deepseek_v3", "DeepseekV3ForCausalLM"),
        LatentModel("deepseek_v2", "DeepseekV2ForCausalLM"),
        LatentModel("deepseek_v32", "DeepseekV32ForCausalLM"),
        LatentModel("glm_moe_dsa", "GlmMoeDsaForCausalLM"),
        LatentModel("glm4_moe_lite", "Glm4MoeLiteForCausalLM"),
        LatentModel("minicpm3", "MiniCPM3ForCausalLM"),
        LatentModel("mistral4", "Mistral4ForCausalLM"),
        LatentModel("youtu", "YoutuForCausalLM"),
        LatentModel("axk1", "AXK1ForCausalLM"),
        LatentModel("axk2", "AXK2ForCausalLM"),
        LatentModel("hy_v4", "HYV4ForCausalLM", layers=0),
        LatentModel("kimi_linear", "KimiLinearForCausalLM", LINEAR, 1),
        LatentModel("bailing_hybrid", "BailingHybridForCausalLM", LINEAR, 1),
        LatentModel(
            "mistral_large4",
            "MistralLarge4TextModel",
            {"no_rope_layers": [1, 0], "num_key_value_heads": 4},
        ),
        LatentModel(
            "dots3_note",
            "Dots3NoteTextModel",
            {
                "layer_types": ["indexed_attention", "sliding_attention"],
                "sliding_window": 8,
                "num_key_value_heads": 4,
                "swa_num_attention_heads": 4,
                "swa_num_key_value_heads": 4,
                "swa_q_lora_rank": 20,
                "swa_kv_lora_rank": 32,
                "swa_qk_nope_head_dim": 12,
                "swa_qk_rope_head_dim": 8,
                "swa_head_dim": 20,
                "swa_v_head_dim": 16,
            },
        ),
        LatentModel(
            "glm5_next",
            "Glm5NextTextModel",
            {
                "layer_types": ["linear_attention", "indexed_attention"],
                "qk_rope_head_dim": 0,
                "linear_num_heads": 4,
                "linear_head_dim": 16,
                "index_kpool": 2,
                "num_key_value_heads": 4,
            },
            1,
        ),
        LatentModel(
            "longcat_flash",
            "LongcatFlashForCausalLM",
            {
                "num_layers": 1,
                "expert_ffn_hidden_size": 16,
                "ffn_hidden_size": 32,
                "moe_topk": 2,
                "zero_expert_num": 1,
                "head_dim": 8,
                "qk_head_dim": 20,
                "num_key_value_heads": 4,
            },
        ),
    )
}


def build(name: str, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """The model of that name in MODELS, with weights so large that attention matters; the same each time."""
    return build_model(MODELS[name], dtype)


def build_model(spec: LatentModel, dtype: torch.dtype, **options: Any) -> transformers.PreTrainedModel:
    """A model, made with `options`, whose weights are so large that attention matters; the same each time."""
    cls = getattr(importlib.import_module(f"transformers.models.{spec.module}.modeling_{spec.module}"), spec.cls)
    taken = {*inspect.signature(cls.config_class.__init__).parameters, *cls.config_class.attribute_map}
    taken |= {key for key in TINY if hasattr(cls.config_class, key)}
    config = cls.config_class(**{key: value for key, value in TINY.items() if key in taken} | spec.config)
    torch.manual_seed(0)
    model = cls._from_config(config, **options).eval().to(dtype)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, weight.shape[-1] ** -0.5)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the default takes no float64
    return model
