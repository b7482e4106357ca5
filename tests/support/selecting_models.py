"""Models whose attention reads the keys that a top-k selects, tiny and with random weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import latent_models
import torch
import transformers
from latent_models import LatentModel, build_model


@dataclass(frozen=True)
class SelectingModel:
    """A model, and how many of its calls of attention select keys.

    Attributes:
        model: the class and its configuration.
        picked: the number of calls whose keys are read by their indices.
        read: the number of all other calls.
        scored: the number of indexers whose scores one op computes.
        block: how many keys an index names.
        finite: whether keys that aren't picked have a finite bias.
        static: whether there is a static cache for it.
        captured: what Dynamo has to be told for one graph.
    """

    model: LatentModel
    picked: int
    read: int = 0
    scored: int = 0
    block: int = 1
    finite: bool = False
    static: bool = True
    captured: dict[str, bool] = field(default_factory=dict)


def _with(name: str, **config: Any) -> LatentModel:
    model = latent_models.MODELS[name]
    return dataclasses.replace(model, config=model.config | config)


SHARED = {"indexer_types": ["full", "shared"]}
OUTPUT_SIZES = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
MODELS = {
    "deepseek_v32": SelectingModel(_with("deepseek_v32", num_key_value_heads=4), 2, scored=2),
    "glm_moe_dsa": SelectingModel(
        _with("glm_moe_dsa", num_hidden_layers=4, num_key_value_heads=4, indexer_types=["full", "shared"] * 2),
        4,
        scored=2,
    ),
    "axk2": SelectingModel(_with("axk2"), 2, scored=2),
    "mistral_large4": SelectingModel(_with("mistral_large4"), 2, scored=2),
    "hy_v4": SelectingModel(_with("hy_v4", **SHARED), 2, scored=1, finite=True),
    "dots3_note": SelectingModel(_with("dots3_note"), 1, 1, scored=1),
    "glm5_next": SelectingModel(_with("glm5_next"), 1, scored=1, captured=OUTPUT_SIZES),
    "minimax_m3_vl": SelectingModel(
        LatentModel(
            "minimax_m3_vl",
            "MiniMaxM3VLForCausalLM",
            {
                "num_key_value_heads": 2,
                "head_dim": 16,
                "index_block_size": 4,
                "index_topk_blocks": 2,
                "index_local_blocks": 1,
                "layer_types": ["full_attention", "minimax_m3_sparse"],
                "dense_intermediate_size": 32,
                "shared_intermediate_size": 16,
                "mlp_layer_types": ["dense", "dense"],
            },
        ),
        picked=1,
        read=1,
        block=4,
        finite=True,
    ),
    "deepseek_v4": SelectingModel(
        LatentModel(
            "deepseek_v4",
            "DeepseekV4ForCausalLM",
            {
                "num_key_value_heads": 1,
                "head_dim": 16,
                "o_groups": 2,
                "o_lora_rank": 8,
                "index_topk": 2,
                "sliding_window": 4,
                "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
                "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
                "mlp_layer_types": ["moe", "moe"],
            },
        ),
        picked=1,
        read=1,
        scored=1,
        static=False,
    ),
    "doge": SelectingModel(
        LatentModel("doge", "DogeForCausalLM", {"num_key_value_heads": 2, "keep_window_size": 4, "head_dim": 16}),
        picked=2,
        finite=True,
    ),
}


def build(name: str, dtype: torch.dtype, **options: Any) -> transformers.PreTrainedModel:
    """The model of that name in MODELS."""
    return build_model(MODELS[name].model, dtype, **options)
