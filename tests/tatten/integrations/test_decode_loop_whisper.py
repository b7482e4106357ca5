"""Whisper in the decode loop: timestamps, recordings longer than its window, and prompts of several lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_loops import EAGER, graphs_of, with_weights
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration

from tatten.integrations.transformers import DecodeLoop
from tatten.integrations.transformers.loop import timestamps
from tatten.ops import moved

pytestmark = pytest.mark.drawn(8)

SIZES = {"vocab_size": 200, "d_model": 64, "num_mel_bins": 8, "max_source_positions": 50, "max_target_positions": 90}
LAYERS = {"encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 100, "decoder_start_token_id": 2}
WINDOW, FIRST_TIMESTAMP = 100, 120  # frames, and a token
FORMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "conditioned": {"condition_on_prev_tokens": True},
    "prompted": {"prompt_ids": torch.tensor([101, 5, 6, 7])},
    "fallback": {"temperature": (0.0, 0.5), "compression_ratio_threshold": 0.1, "logprob_threshold": -9.0},
}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def model() -> WhisperForConditionalGeneration:
    config = WhisperConfig(**SIZES, **LAYERS, **HEADS, **TOKENS, begin_suppress_tokens=None)
    model = with_weights(WhisperForConditionalGeneration, config)
    numbers = {
        "no_timestamps_token_id": FIRST_TIMESTAMP - 1,
        "prev_sot_token_id": 101,
        "max_initial_timestamp_index": 30,
    }
    for name, x in (numbers | {"return_timestamps": False, "is_multilingual": False}).items():
        setattr(model.generation_config, name, x)
    return model


def frames(windows: float, batch: int = 1, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sound = torch.randn(batch, SIZES["num_mel_bins"], int(windows * WINDOW), generator=generator)
    heard = torch.ones(batch, sound.shape[2], dtype=torch.int64)
    heard[1:, WINDOW + 30 :] = 0
    return {"input_features": sound, "attention_mask": heard}


def both(model: WhisperForConditionalGeneration, loop: DecodeLoop, **arguments: Any) -> tuple[Tensor, Tensor]:
    """The tokens of the loop and of `generate`, from one seed."""
    results = []
    for options in ({"custom_generate": loop, "compile_config": EAGER}, {}):
        torch.manual_seed(0)
        result = model.generate(**{"max_new_tokens": 24, "return_timestamps": True} | arguments, **options)
        results.append(result if isinstance(result, Tensor) else result["sequences"])
    return results[0], results[1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("windows, batch", [(1, 1), (1, 2), (2.7, 1), (2.7, 2)])
def test_timestamps(model: WhisperForConditionalGeneration, form: str, windows: float, batch: int) -> None:
    """Prompts of the windows after the first may have any length, and padding on the left."""
    loop = DecodeLoop()
    result, expected = both(model, loop, **frames(windows, batch), **FORMS[form])
    assert torch.equal(result, expected)
    assert windows > 1 or (result >= FIRST_TIMESTAMP).any()
    assert loop.reason is None
    assert loop.launched_steps > 0


def test_sounds_and_prompts_share_a_step(model: WhisperForConditionalGeneration) -> None:
    loop, texts = DecodeLoop(), list[Tensor]()

    def run(seed: int, tokens: int) -> None:
        prompt = torch.arange(101, 101 + tokens)
        texts.extend(both(model, loop, **frames(1, 1, seed), prompt_ids=prompt))

    assert graphs_of(lambda: run(0, 3)) == 1
    assert graphs_of(lambda: [run(1, 5), run(2, 9)]) == 0
    assert loop.reason is None
    assert all(map(torch.equal, texts[::2], texts[1::2]))
    assert not torch.equal(texts[0][0, -20:], texts[2][0, -20:])


def test_padding_of_the_decoders_tokens(model: WhisperForConditionalGeneration) -> None:
    """Whisper counts positions by the mask, which has room for future tokens in the loop."""
    loop, ids = DecodeLoop(), torch.tensor([[0, 0, 2, 9], [2, 5, 6, 7]])
    arguments = {"decoder_input_ids": ids, "decoder_attention_mask": (ids > 0).long(), "return_timestamps": False}
    result, expected = both(model, loop, **frames(1, 2), **arguments)
    assert torch.equal(result, expected)
    assert loop.reason is None


class Derived(WhisperForConditionalGeneration):
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return super().prepare_inputs_for_generation(*args, **kwargs)


def test_positions_that_a_step_may_count_in_another_way(model: WhisperForConditionalGeneration) -> None:
    derived, ids = Derived(model.config).eval(), torch.tensor([[0, 0, 2, 9], [2, 5, 6, 7]])
    arguments = {"decoder_input_ids": ids, "decoder_attention_mask": (ids > 0).long(), "return_timestamps": False}
    for called, more, reason in (
        (derived, {}, "Derived prepares masks by code of its own, and there are no `decoder_position_ids`"),
        (model, {"decoder_position_ids": None}, "`decoder_position_ids` is None, beside a mask"),
    ):
        loop = DecodeLoop()
        assert torch.equal(*both(called, loop, **frames(1, 2), **arguments, **more))
        assert loop.reason == reason


def test_the_cache_of_a_result(model: WhisperForConditionalGeneration) -> None:
    """Whisper splits the cache of a result, with all of its slots."""
    results = [
        model.generate(**frames(1), max_new_tokens=24, return_dict_in_generate=True, output_scores=True, **options)
        for options in ({"custom_generate": DecodeLoop(), "compile_config": EAGER}, {})
    ]
    caches = [getattr(x, "past_key_values", None) or x.cache for x in results]
    for ours, theirs in zip(*(x.self_attention_cache.layers for x in caches), strict=True):
        torch.testing.assert_close([ours.keys, ours.values], [theirs.keys, theirs.values])


@pytest.mark.parametrize("end", [-1, -60])
def test_a_negative_end_token(model: WhisperForConditionalGeneration, end: int) -> None:
    """The processor of transformers counts it from the last token."""
    loop = DecodeLoop()
    assert torch.equal(*both(model, loop, **frames(1), eos_token_id=end))
    assert loop.reason is None


def test_several_tokens_that_end_a_text(model: WhisperForConditionalGeneration) -> None:
    """The processor of transformers raises an error for a list of them."""
    loop = DecodeLoop()
    with pytest.raises(TypeError, match="slice indices must be integers"):
        both(model, loop, **frames(1), eos_token_id=[100, 99])
    assert loop.reason == "timestamps need one token that ends a text, got [100, 99]"


def test_timestamps_if_transformers_has_moved(
    model: WhisperForConditionalGeneration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moved, "_notes", {})
    monkeypatch.setattr(timestamps, "DETECTS", "_moved")
    loop = DecodeLoop()
    assert torch.equal(*both(model, loop, **frames(1)))
    (note,) = moved.moved_notes()
    assert "transformers.WhisperTimeStampLogitsProcessor._moved" in note
    assert "`generate` runs its own loop for timestamps" in str(loop.reason)
