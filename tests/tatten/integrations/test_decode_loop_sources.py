"""Sources of an encoder-decoder in the decode loop: lengths that share a step, other inputs, and caches of results."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from decode_loops import EAGER, with_weights
from slow import slow_but
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.moonshine_streaming.modeling_moonshine_streaming import MoonshineStreamingEncoderModelOutput

from tatten.integrations.transformers import DecodeLoop, cache_kwargs
from tatten.integrations.transformers.config import CACHE
from tatten.integrations.transformers.loop.source import source_inputs

pytestmark = pytest.mark.drawn(8)

TOKENS = {"vocab_size": 120, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 2}
T5 = {"d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4, "d_kv": 16}
BART = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 300}
BART |= {"forced_eos_token_id": None}
GEMMA = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
GEMMA |= {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16}
# Kinds of transformers (5.24) that compile with a static cache and read a text.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", T5),
    "mt5": ("MT5ForConditionalGeneration", T5),
    "umt5": ("UMT5ForConditionalGeneration", T5),
    "bart": ("BartForConditionalGeneration", BART),
    "mbart": ("MBartForConditionalGeneration", BART),
    "marian": ("MarianMTModel", BART),
    "pegasus": ("PegasusForConditionalGeneration", BART),
    "pegasus_x": ("PegasusXForConditionalGeneration", BART | {"block_size": 16, "num_global_tokens": 4}),
    "m2m_100": ("M2M100ForConditionalGeneration", BART),
    "blenderbot": ("BlenderbotForConditionalGeneration", BART | {"encoder_no_repeat_ngram_size": 3}),
    "blenderbot_small": ("BlenderbotSmallForConditionalGeneration", BART),
    "bigbird_pegasus": ("BigBirdPegasusForConditionalGeneration", BART | {"attention_type": "original_full"}),
    "t5gemma": ("T5GemmaForConditionalGeneration", {"encoder": GEMMA, "decoder": GEMMA}),
}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def build(kind: str = "t5", base: type[PreTrainedModel] | None = None) -> Any:
    name, sizes = KINDS[kind]
    model = base or getattr(transformers, name)
    return with_weights(model, model.config_class(**TOKENS | sizes))


def padded(tokens: int) -> tuple[Tensor, Tensor]:
    """Return two sources, of which the second has padding, and their mask."""
    mask = torch.ones(2, tokens, dtype=torch.int64)
    mask[1, max(1, tokens - 3) :] = 0
    return torch.randint(3, 120, (2, tokens), generator=torch.Generator().manual_seed(tokens)) * mask, mask


class Retrained(T5ForConditionalGeneration):
    """A model outside of transformers, which may read a source in another way."""


def generated(model: Any, loop: DecodeLoop | None, tokens: int, **more: Any) -> Any:
    ids, mask = padded(tokens)
    looped = {"disable_compile": True} if loop is None else {"custom_generate": loop, "compile_config": EAGER}
    # Sampled tokens depend on small differences of scores: a source of one more key changes them.
    arguments = {"do_sample": True, "max_new_tokens": 12, "min_new_tokens": 8, "attention_mask": mask, **more}
    torch.manual_seed(tokens)
    return model.generate(ids, **arguments, **looped)


def assert_same(model: Any, loop: DecodeLoop, tokens: int, graphs: int | None = None, **more: Any) -> None:
    expected = generated(model, None, tokens, **more)
    counters.clear()
    assert torch.equal(generated(model, loop, tokens, **more), expected)
    assert loop.reason is None
    if graphs is not None:
        assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("kind", slow_but(["t5", "bart"], KINDS))
def test_sources_of_many_lengths_share_a_step(kind: str) -> None:
    model, loop = build(kind), DecodeLoop()
    if not model._can_compile_fullgraph:
        pytest.skip("this transformers does not compile it")
    for tokens, graphs in ((20, 1), (128, 0), (5, 0), (129, 1), (256, 0), (37, 0)):
        assert_same(model, loop, tokens, graphs)


def slots(model: Any, tokens: int, wrap: Callable[[Tensor], Any] = BaseModelOutput, **inputs: Any) -> int | None:
    states = torch.zeros(1, tokens, 64)
    defaults = {"encoder_outputs": wrap(states), "attention_mask": torch.ones(1, tokens)}
    return source_inputs(model, {**defaults, **inputs}).slots


def test_the_slots_of_a_source() -> None:
    model, lengths = build(), (1, 128, 129, 1000, 1024, 1025, 2048, 2049, 5000)
    assert [slots(model, n) for n in lengths] == [128, 128, 256, 1024, 1024, 1280, 2048, 2560, 5120]
    assert slots(model, 20, attention_mask=None) == 128
    assert slots(model, 20, attention_mask=torch.ones(1, 160)) is None  # of samples of sound
    assert slots(model, 20, attention_mask=torch.zeros(1, 20)) is None
    assert slots(model, 20, lambda x: BaseModelOutput(x, hidden_states=(x, x))) is None
    assert slots(model, 20, MoonshineStreamingEncoderModelOutput) is None  # its own mask counts
    assert slots(build(base=Retrained), 20) is None
    model.decoder.config._attn_implementation = "mine"
    assert slots(model, 20) is None


def test_a_source_does_not_read_the_one_before_it() -> None:
    model, loop = build(), DecodeLoop()
    assert_same(model, loop, 100, 1)
    (step,) = loop._steps[model].values()
    assert step.source is not None
    states = step.source.inputs["encoder_outputs"][0], step.source.inputs["attention_mask"]
    for layer in step.source.cache.cross_attention_cache.layers:
        states += layer.keys, layer.values
    for x in states:
        x.fill_(torch.nan if x.is_floating_point() else 1)
    assert_same(model, loop, 7, 0)


def test_greedy_and_sampled_calls_share_a_source() -> None:
    model, loop = build(), DecodeLoop()
    for tokens in (20, 30, 25):
        assert_same(model, loop, tokens, int(tokens == 20), do_sample=False)
        assert_same(model, loop, tokens, int(tokens == 20))
    greedy, sampled = loop._steps[model].values()
    assert greedy.source is sampled.source


def test_n_grams_of_a_source() -> None:
    model, loop = build(), DecodeLoop()
    for tokens, graphs in ((20, 1), (30, 0), (128, 0)):
        more = {"encoder_no_repeat_ngram_size": 1, "no_repeat_ngram_size": 2, "num_return_sequences": 2}
        assert_same(model, loop, tokens, graphs, **more)


def test_a_model_outside_of_transformers_has_a_step_for_each_length() -> None:
    model, loop = build(base=Retrained), DecodeLoop()
    for tokens, graphs in ((20, 1), (21, 1), (20, 0)):
        assert_same(model, loop, tokens, graphs)


def test_a_result_has_the_source_without_more_slots() -> None:
    model, loop = build(), DecodeLoop()
    for tokens in (20, 30):
        kept, expected = (generated(model, x, tokens, return_dict_in_generate=True) for x in (loop, None))
        assert torch.equal(kept.sequences, expected.sequences)
        caches = [getattr(x, "past_key_values", None) or x.cache for x in (kept, expected)]
        for ours, theirs in zip(*(x.cross_attention_cache.layers for x in caches), strict=True):
            torch.testing.assert_close([ours.keys, ours.values], [theirs.keys, theirs.values])
    assert len(loop._steps[model]) == 1


class Encoded(NamedTuple):
    states: Tensor
    more: tuple[Tensor, ...] = ()


WRAPPERS = {
    "output": (BaseModelOutput, 0),
    "named tuple": (Encoded, 0),
    "tuple": (lambda states: (states,), 0),
    "of all layers": (lambda states: BaseModelOutput(states, hidden_states=(states, states)), 1),
}


@pytest.mark.parametrize("wrap, more_graphs", WRAPPERS.values(), ids=[*WRAPPERS])
def test_an_encoders_output_that_the_user_passes(wrap: Any, more_graphs: int) -> None:
    model, loop = build(), DecodeLoop()
    for tokens, graphs in ((20, 1), (20, 0), (30, more_graphs)):
        ids, mask = padded(tokens)
        states = model.get_encoder()(ids, attention_mask=mask)[0].detach()
        assert_same(model, loop, tokens, graphs, encoder_outputs=wrap(states))
        states.mul_(2)  # the steps of later calls must not read it
    assert_same(model, loop, 25, None)


def test_sound_without_a_mask() -> None:
    """Whisper's decoder takes no mask of its source, which always has one length."""
    sizes = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 8}
    sizes |= {"max_source_positions": 15, "max_target_positions": 60, "suppress_tokens": None}
    config = transformers.WhisperConfig(**TOKENS | sizes, begin_suppress_tokens=None, bos_token_id=1)
    model, loop = with_weights(transformers.WhisperForConditionalGeneration, config), DecodeLoop()
    for seed, graphs in ((1, 1), (2, 0)):
        features = torch.randn(2, 8, 30, generator=torch.Generator().manual_seed(seed))
        arguments = {"max_new_tokens": 12, "do_sample": False, "return_timestamps": False}
        expected = model.generate(features, **arguments, disable_compile=True)
        counters.clear()
        result = model.generate(features, **arguments, custom_generate=loop, compile_config=EAGER)
        assert loop.reason is None
        assert torch.equal(result, expected)
        assert counters["stats"]["unique_graphs"] == graphs


def test_sources_in_inference_mode() -> None:
    model, loop = build(), DecodeLoop()
    for _ in range(2):
        with torch.inference_mode():
            assert_same(model, loop, 20)
        assert_same(model, loop, 20)


def test_a_users_cache_between_other_calls() -> None:
    model, loop = build(), DecodeLoop()
    assert_same(model, loop, 20, 1)
    caches = [EncoderDecoderCache(StaticCache(model.config, max_cache_len=64), DynamicCache()) for _ in range(2)]
    results = [generated(model, x, 20, **cache_kwargs(cache)) for x, cache in zip((loop, None), caches, strict=True)]
    assert torch.equal(*results)
    assert loop.reason is None
    assert_same(model, loop, 25, 0)


def test_a_sequence_whose_source_is_masked_in_full() -> None:
    """Softmax over scores of `finfo.min` is uniform, so more slots would change it."""
    for kind in ("t5", "bart"):
        model, loop = build(kind), DecodeLoop()
        mask = padded(20)[1]
        mask[1] = 0
        assert_same(model, loop, 20, attention_mask=mask)
        assert_same(model, loop, 20)


def test_sources_without_a_mask_share_a_step() -> None:
    model, loop = build(), DecodeLoop()
    for tokens, graphs in ((20, 1), (30, 0), (9, 0)):
        assert_same(model, loop, tokens, graphs, attention_mask=None)
    assert_same(model, loop, 20, 0)


def test_the_keys_of_a_prefill_are_not_kept() -> None:
    model, loop, refs = build(), DecodeLoop(), list[weakref.ref[Tensor]]()
    prefill = model._prefill

    def noted(ids: Tensor, config: Any, inputs: dict[str, Any]) -> Any:
        output = prefill(ids, config, inputs)
        refs.extend(weakref.ref(x.keys) for x in inputs[CACHE].cross_attention_cache.layers)
        return output

    class Looking:
        def put(self, tokens: Tensor) -> None:
            assert all(ref() is None for ref in refs)

        def end(self) -> None:
            pass

    model._prefill = noted
    ids, mask = padded(20)
    arguments = {"attention_mask": mask[:1], "max_new_tokens": 4, "custom_generate": loop, "compile_config": EAGER}
    model.generate(ids[:1], **arguments, streamer=Looking())
    assert refs
