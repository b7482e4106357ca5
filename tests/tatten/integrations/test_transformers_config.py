"""Properties of models that are read from their configs."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import LlamaConfig, Phi3Config, StaticCache

from tatten.integrations.transformers import cache_kwargs
from tatten.integrations.transformers.config import longrope_length, rope_types

FACTORS = {"rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 32, **FACTORS}


def test_cache_kwargs_in_compiled_code() -> None:
    """Dynamo would warn of a function that keeps its results."""
    config = LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    cache = StaticCache(config=config, max_cache_len=8)

    def first_name(x: torch.Tensor) -> tuple[torch.Tensor, str]:
        return x + 1, next(iter(cache_kwargs(cache)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, name = torch.compile(first_name, backend="eager", fullgraph=True)(torch.ones(2))
    assert name in ("cache", "past_key_values")


@pytest.mark.parametrize(
    ("parameters", "types", "length"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, {"default"}, None),
        (LONGROPE, {"longrope"}, 32),
        ({"rope_type": "longrope", **FACTORS}, {"longrope"}, None),
    ],
)
def test_rotary_embeddings(parameters: dict, types: set[str], length: int | None) -> None:
    config = Phi3Config(hidden_size=32, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64)
    config.rope_parameters = parameters
    assert rope_types(config) == types
    assert longrope_length(config) == length
    config.rope_parameters = {"full_attention": parameters, "sliding_attention": {"rope_type": "linear"}}
    assert rope_types(config) == {*types, "linear"}
    assert longrope_length(config) == length
