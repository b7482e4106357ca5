"""Models of many kinds, tiny and with random weights, for the tests of caches under transformers."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor

PROMPT = 12  # tokens of a prompt
WINDOW = 8  # smaller than a prompt
COMMON = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GQA = COMMON | {"num_key_value_heads": 2}
GPT = {"vocab_size": 99, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
MIXED = ["sliding_attention", "full_attention"]

ZOO = {
    "llama": ("Llama", GQA),
    "mistral_window": ("Mistral", GQA | {"sliding_window": WINDOW}),
    "mixtral": ("Mixtral", GQA | {"num_local_experts": 4}),
    "qwen2_window": ("Qwen2", GQA | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3", GQA | {"head_dim": 16}),
    "gemma3": ("Gemma3Text", GQA | {"head_dim": 16, "sliding_window": WINDOW, "layer_types": MIXED}),
    "gemma4": (
        "Gemma4Text",
        GQA
        | {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": MIXED * 2,
            "vocab_size_per_layer_input": 99,
        }
        | {"head_dim": 16, "global_head_dim": 32, "sliding_window": WINDOW, "hidden_size_per_layer_input": 8},
    ),
    "llama4": (
        "Llama4Text",
        GQA | {"head_dim": 16, "attention_chunk_size": 8, "intermediate_size_mlp": 64, "num_local_experts": 2},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        COMMON
        | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
        | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    ),
    "phi": ("Phi", GQA),
    "gpt2": ("GPT2", GPT),
    "gpt_neox": ("GPTNeoX", COMMON),
    "gpt_bigcode": ("GPTBigCode", GPT | {"multi_query": True}),
    "falcon": ("Falcon", COMMON | {"multi_query": True, "new_decoder_architecture": False}),
    "opt": ("OPT", COMMON | {"ffn_dim": 96, "word_embed_proj_dim": 64}),
}


def build(name: str, attention: str) -> transformers.PreTrainedModel:
    """The model of that name in ZOO, in float32; the same weights each time."""
    prefix, config = ZOO[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**config, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.generation_config.eos_token_id = None
    return model.eval().float()


def prompts(padded: bool) -> tuple[Tensor, Tensor]:
    """Ids and mask of three left-padded prompts, or of one whole one."""
    ids = torch.arange(1, 3 * PROMPT + 1).view(3, PROMPT)
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[2, :1] = 0
    return (ids, mask) if padded else (ids[1:2], mask[1:2])
