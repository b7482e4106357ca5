"""Encoder-decoders of transformers: the tokens of plain `generate`, each source's keys stored and read once."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.nn.functional as F
import transformers
from graphs import capture, listing
from slow import slow_but
from torch import Tensor
from transformers import CompileConfig, DynamicCache, EncoderDecoderCache, StaticCache

import tatten
from tatten.integrations.transformers import CrossAttentionCache, cache_kwargs
from tatten.passes import cost
from tatten.passes.rewrite import rewrite

pytestmark = pytest.mark.drawn(2)

SOURCES, LENGTH, NEW = 2, 7, 6
TOKENS = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
BART = TOKENS | {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
T5 = TOKENS | {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
ZOO = {
    "t5": (transformers.T5Config, transformers.T5ForConditionalGeneration, T5),
    "bart": (transformers.BartConfig, transformers.BartForConditionalGeneration, BART),
    "whisper": (
        transformers.WhisperConfig,
        transformers.WhisperForConditionalGeneration,
        BART | {"num_mel_bins": 8, "max_source_positions": LENGTH, "max_target_positions": 64},
    ),
    "marian": (transformers.MarianConfig, transformers.MarianMTModel, BART),
}
MODES = {
    "beams": (3, {"do_sample": False, "num_beams": 3}),
    "beams returned": (3, {"do_sample": True, "num_beams": 3, "num_return_sequences": 2}),
    "sampling": (4, {"do_sample": True, "num_return_sequences": 4}),
}
ONCE = 2 * 2 * SOURCES * LENGTH * 32 * 8  # bytes: keys and values of 2 layers, 4 heads of 8, in float64


def build(name: str) -> transformers.PreTrainedModel:
    """A tiny model in float64, with weights large enough that its attention is not uniform."""
    config, model, sizes = ZOO[name]
    torch.manual_seed(0)
    built = model(config(**sizes)).eval().double()
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    built.generation_config.update(eos_token_id=None, forced_eos_token_id=None, max_length=None)
    return built


def sources(name: str) -> dict[str, Tensor]:
    """Two sources, of which the second one is shorter where the model takes a mask."""
    if name == "whisper":
        torch.manual_seed(1)
        return {"input_features": torch.randn(SOURCES, 8, 2 * LENGTH, dtype=torch.float64)}
    mask = torch.ones(SOURCES, LENGTH, dtype=torch.long)
    mask[1, 4:] = 0
    return {"input_ids": torch.arange(1, SOURCES * LENGTH + 1).view(SOURCES, LENGTH) * mask, "attention_mask": mask}


def new_cache(model: transformers.PreTrainedModel, kind: str, n: int) -> EncoderDecoderCache:
    config = model.config.get_text_config(decoder=True)
    own = StaticCache(config=config, max_cache_len=NEW) if kind == "static" else DynamicCache(config=config)
    return EncoderDecoderCache(own, CrossAttentionCache(n))


def generate(model: transformers.PreTrainedModel, given: dict[str, Tensor], **kwargs: object) -> Tensor:
    torch.manual_seed(2)
    return model.generate(**given, max_new_tokens=NEW, **kwargs)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ZOO)
def test_generate(name: str, kind: str) -> None:
    model, given = build(name), sources(name)
    for mode, (n, kwargs) in MODES.items():
        if (name, mode) == ("whisper", "beams returned"):
            n = 6  # Whisper repeats its inputs for each returned sequence, and `generate` each of those for each beam
        cache = new_cache(model, kind, n)
        want = generate(model, given, **kwargs)
        assert torch.equal(generate(model, given, **cache_kwargs(cache), **kwargs), want)
        assert cache.cross_attention_cache.nbytes == ONCE
        cache.reset()
        assert cache.cross_attention_cache.nbytes == 0
        if kind == "dynamic":  # some versions of transformers reset it to as many zeros
            cache.self_attention_cache = DynamicCache(config=model.config)
        assert torch.equal(generate(model, given, **cache_kwargs(cache), **kwargs), want)


@pytest.mark.drawn(2, "compiled decoding with transformers")
@pytest.mark.parametrize("name", slow_but(["whisper"], ZOO))
def test_compiled_sampling(name: str) -> None:
    """`generate` compiles the step after the first one, and both kinds of attention are rewritten."""
    model, given = build(name), sources(name)
    n, kwargs = MODES["sampling"]
    compiled = CompileConfig(backend="tatten", mode=None, fullgraph=True, options={"inner": "eager"})
    compiled._compile_all_devices = True  # transformers compiles on accelerators only, unless told
    torch._dynamo.reset()
    with tatten.recording() as report:
        got = generate(model, given, **cache_kwargs(new_cache(model, "static", n)), compile_config=compiled, **kwargs)
    assert torch.equal(got, generate(model, given, **kwargs))
    assert [(x.op, x.shapes.count(f"[{SOURCES}, 4, {LENGTH}, 8]")) for x in report.rewritten] == [
        ("tatten.decode_attention.default", 0),
        ("tatten.bifurcated_attention.default", 2),
    ] * 2


@pytest.mark.drawn(2, "compiled decoding with transformers")
@pytest.mark.parametrize("kind", slow_but(["static"], ["dynamic", "static"]))
@pytest.mark.parametrize("name", slow_but(["t5"], ZOO))
def test_compiled_beams(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` compiles no beam search; a compiled `forward` takes the first step, too, which fills the cache."""
    model, given = build(name), sources(name)
    n, kwargs = MODES["beams"]
    want = generate(model, given, **kwargs)
    torch._dynamo.reset()
    cache = new_cache(model, kind, n)
    monkeypatch.setattr(
        model, "forward", torch.compile(model.forward, backend="tatten", options={"inner": "eager"}, fullgraph=True)
    )
    with tatten.recording() as report:
        assert torch.equal(generate(model, given, **cache_kwargs(cache), **kwargs), want)
    assert cache.cross_attention_cache.nbytes == ONCE
    read_once = [x for x in report.rewritten if x.op == "tatten.bifurcated_attention.default"]
    graphs = 2 if kind == "dynamic" else 1  # beyond that of the first step
    assert len(read_once) == 2 * graphs


# While Dynamo of PyTorch 2.11 traces, transformers gives self-attention a mask: `is_exporting()` is true there.
SELF_ATTENTION_IS_MASKED = torch.__version__ < "2.12"


@pytest.mark.drawn(2, "compiled decoding with transformers")
def test_plain_caches() -> None:
    """Without copies to save, cross attention is rewritten where a mask leaves keys, and SDPA is kept without one."""
    for name, ops, reasons in [("bart", 2, ["no_gain"] * 2), ("whisper", 0, ["no_gain"] * 4), ("t5", 4, [])]:
        if SELF_ATTENTION_IS_MASKED and name != "t5":
            ops, reasons = ops + 2, reasons[2:]
        model, given = build(name), sources(name)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        token = torch.ones(SOURCES, 1, dtype=torch.long)
        mask = {"attention_mask": given["attention_mask"]} if "attention_mask" in given else {}
        with torch.no_grad():
            encoded = model.get_encoder()(**given)
            model(encoder_outputs=encoded, decoder_input_ids=token, **cache_kwargs(cache), **mask)
            step = {"encoder_outputs": encoded, "decoder_input_ids": token, **cache_kwargs(cache), **mask}
            report = tatten.explain(model, **step)
        assert len(report.rewritten) == ops
        assert [x.decline.reason.value for x in report.declined] == reasons


def filled(cache: CrossAttentionCache, states: Tensor) -> CrossAttentionCache:
    cache.update(states, states, 0)
    return cache


class Graphs(expecttest.TestCase):
    def test_padded_sources(self) -> None:
        """The mask of each sequence goes with the keys of its source."""
        kv = filled(CrossAttentionCache(3), torch.randn(SOURCES, 4, LENGTH, 8).repeat_interleave(3, 0)).layers[0]
        query, mask = torch.randn(6, 4, 1, 8), torch.arange(LENGTH).expand(6, 1, 1, LENGTH) < 5

        def attend(q: Tensor, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, kv.keys, kv.values, mask)

        gm = capture(attend, query, mask)
        rewrite(gm)
        self.assertExpectedInline(
            listing(gm),
            """\
block_mask_default = block_mask.default(l_mask_, 2)
bifurcated_attention_default = bifurcated_attention.default(l_q_, [l_kv_stored_0_], [l_kv_stored_1_], [l_mask_], [block_mask_default], None)
getitem = getitem(bifurcated_attention_default, 0)
return (getitem)""",
        )


def test_small_work_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cost.RATES, "cpu", cost.Rates(44e3, 97.0))
    model, given = build("whisper"), sources("whisper")
    cache = new_cache(model, "dynamic", 3)
    token = torch.ones(3 * SOURCES, 1, dtype=torch.long)
    with torch.no_grad():
        encoded = model.get_encoder()(**given)
        encoded.last_hidden_state = encoded.last_hidden_state.repeat_interleave(3, 0)
        step = {"encoder_outputs": encoded, "decoder_input_ids": token, **cache_kwargs(cache)}
        model(**step)
        report = tatten.explain(model, **step)
    each_layer = ["small" if SELF_ATTENTION_IS_MASKED else "no_gain", "small"]
    assert [x.decline.reason.value for x in report.declined] == each_layer * 2


def test_bad_input() -> None:
    for n, error in ((0, ValueError), (True, TypeError), (2.0, TypeError)):
        with pytest.raises(error, match="`n` must be"):
            CrossAttentionCache(n)
    states = torch.randn(4, 2, 5, 8)
    with pytest.raises(ValueError, match=r"multiple of `n`, 3 .* got 4"):
        filled(CrossAttentionCache(3), states)
    with pytest.raises(ValueError, match="each 2 sequences, `n`, must decode one source: their keys differ"):
        filled(CrossAttentionCache(2), states)
    repeated = states.repeat_interleave(2, 0)
    with pytest.raises(ValueError, match="their values differ"):
        CrossAttentionCache(2).update(repeated, states.repeat(2, 1, 1, 1), 0)
    cache = filled(CrossAttentionCache(2), repeated * (1 + torch.finfo(torch.float32).eps * (torch.arange(8) % 2)))
    with pytest.raises(ValueError, match="stored once"):
        cache.update(repeated, repeated, 0)
    cache.reorder_cache(torch.tensor([1, 1, 2, 2, 5, 4, 6, 7]))
    with pytest.raises(ValueError, match="must keep each source's 2 sequences"):
        cache.reorder_cache(torch.tensor([2, 1, 2, 2, 5, 4, 6, 7]))
