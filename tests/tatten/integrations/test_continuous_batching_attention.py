"""Attention of continuous batching: set for a part of a model, switched between calls, or given other keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from batched_models import SMALL, Tokens, batching, build, draw_weights, expected, greedy, prompts, quick
from transformers import PreTrainedModel
from transformers.generation.continuous_batching import continuous_api

import tatten.integrations.transformers  # noqa: F401  (registers the attention)

pytestmark = pytest.mark.skipif(not transformers.__version__.startswith("5.24"), reason="no other was tested")
NEW = 6


def generate(model: PreTrainedModel, ids: Tokens, **options: Any) -> list[Any]:
    """The tokens of each request, or its error."""
    with quick():
        results = model.generate_batch(
            ids, generation_config=greedy(NEW), continuous_batching_config=batching(), **options
        )
    return [x.error or x.generated_tokens for x in results.values()]


def with_images(attention: str | dict[str, str]) -> PreTrainedModel:
    torch.manual_seed(0)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=SMALL | {"query_pre_attn_scalar": 16, "layer_types": ["full_attention"] * 2},
        vision_config=vision | {"image_size": 16, "patch_size": 8},
        mm_tokens_per_image=4,
        image_token_index=90,
        boi_token_index=91,
        eoi_token_index=92,
    )
    model: PreTrainedModel = transformers.Gemma3ForConditionalGeneration._from_config(
        config, attn_implementation=attention
    )
    draw_weights(model, SMALL["hidden_size"])
    return model.eval()


@pytest.fixture
def kept() -> Iterator[PreTrainedModel]:
    model = build("llama")
    yield model
    model.destroy_cached_continuous_batching_manager()


@pytest.mark.parametrize(
    "name, sizes",
    [
        ("DiffLlama", SMALL | {"head_dim": 8}),  # each half of the heads attends to other values
        ("JetMoe", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16}),  # keys are repeated
    ],
)
def test_keys_that_are_changed_after_they_are_stored(name: str, sizes: dict[str, Any]) -> None:
    """The pages have what the model stored, which is not what it attends to."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="tatten").eval()
    draw_weights(model, SMALL["hidden_size"])
    for error in generate(model, prompts((5, 12))):
        assert f"{name}Attention must attend to the keys and values that it stores, got others" in error


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_kept_manager_after_a_switch_of_attention(kept: PreTrainedModel, attention: str) -> None:
    ids = prompts((24, 5))
    want = expected(kept, ids, NEW)
    assert generate(kept, ids, persistent_manager=True) == want
    kept.set_attn_implementation(attention)
    for error in generate(kept, ids, persistent_manager=True):
        assert re.search(rf'must have attention "tatten", for which it was made, got "(paged\|)?{attention}"', error)
    kept.set_attn_implementation("tatten")
    assert generate(kept, ids, persistent_manager=True) == want


def test_a_kept_manager_of_other_attention(kept: PreTrainedModel) -> None:
    ids = prompts((24, 5))
    kept.set_attn_implementation("sdpa")
    generate(kept, ids, persistent_manager=True)
    kept.set_attn_implementation("tatten")
    for error in generate(kept, ids, persistent_manager=True):
        assert "or whose manager was made for another attention" in error


def test_attention_of_the_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is checked, and stays, whatever attention the other parts have."""
    for version in (2, 3):
        monkeypatch.setattr(continuous_api, f"is_flash_attn_{version}_available", lambda **kwargs: True)
    model, ids = with_images({"": "eager", "text_config": "tatten", "vision_config": "eager"}), prompts((24, 5))
    want = expected(with_images("eager"), ids, NEW)
    assert generate(model, ids) == want
    assert model.config.get_text_config()._attn_implementation == "tatten"
    assert model.config.vision_config._attn_implementation == "eager"


def test_attention_of_all_but_the_text() -> None:
    model = with_images({"": "tatten", "text_config": "sdpa", "vision_config": "sdpa"})
    with pytest.raises(ValueError, match="tatten is not supported for continuous batching"):
        generate(model, prompts((5,)))
