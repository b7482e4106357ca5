"""`attn_implementation="tatten"` on one device: the logits of "eager", with decode steps through the op."""

from __future__ import annotations

import sys
from typing import Any

import every_model
import pytest
import torch
import transformers
from slow import slow_but
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache
from transformers.masking_utils import create_causal_mask
from transformers.models.llama import modeling_llama

import tatten.backend
from tatten.integrations.transformers import cache_kwargs, local, masks, registration

BATCH, PROMPT, SLOTS = 2, 20, 40
# A layer's call: one of an op, or what transformers has.
CALLS = {"op": "decode", "sdpa": "sdpa_attention_forward", "own": "eager_attention"}
REFUSED = '`(block_)?indices` must be None, as attention "tatten" selects keys by masks alone'


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often attention was which of CALLS; `clear` it before a run."""
    counts: dict[str, int] = {}

    def counted(kind: str) -> Any:
        called = getattr(local, CALLS[kind])

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[kind] = counts.get(kind, 0) + 1
            return called(*args, **kwargs)

        return call

    for kind, name in CALLS.items():
        monkeypatch.setattr(local, name, counted(kind))
    return counts


def tokens(n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, every_model.VOCABULARY, (BATCH, n), generator=generator)


def cache_of(model: PreTrainedModel, static: bool, slots: int = SLOTS) -> transformers.Cache:
    config = model.config.get_text_config(decoder=True)
    return StaticCache(config=config, max_cache_len=slots) if static else DynamicCache(config=config)


@torch.no_grad()
def decoder_logits(model: PreTrainedModel, static: bool, padded: bool, run: Any = None) -> list[Tensor]:
    """Logits of a prompt, of two single tokens, and of three at once."""
    run = model if run is None else run
    cache, seen = cache_of(model, static), torch.ones(BATCH, 0, dtype=torch.int64)
    logits = []
    for n in (PROMPT, 1, 1, 3):
        seen = torch.cat([seen, seen.new_ones(BATCH, n)], dim=1)
        if padded:
            seen[0, :3] = 0
        options = {"attention_mask": seen} if padded else {}
        out = run(input_ids=tokens(n, seen.shape[1]), **cache_kwargs(cache), use_cache=True, **options).logits
        logits.append(out[seen[:, -n:].bool()])  # what padding gets is nobody's business
    return logits


@torch.no_grad()
def seq2seq_logits(model: PreTrainedModel, static: bool, padded: bool) -> list[Tensor]:
    """Logits of three tokens of a decoder, and of two more."""
    seen = torch.ones(BATCH, PROMPT, dtype=torch.int64)
    if padded:
        seen[0, -3:] = 0
    encoded = model.get_encoder()(tokens(PROMPT), attention_mask=seen)
    cache = EncoderDecoderCache(cache_of(model, static), cache_of(model, static, PROMPT))
    options = {"encoder_outputs": encoded, "attention_mask": seen, **cache_kwargs(cache), "use_cache": True}
    return [model(decoder_input_ids=tokens(n, n), **options).logits for n in (3, 1, 1)]


def check(name: str, static: bool, padded: bool, seq2seq: bool = False) -> None:
    eager, ours = every_model.build_pair(name, ("eager", "tatten"), seq2seq)
    logits = seq2seq_logits if seq2seq else decoder_logits
    for got, want in zip(logits(ours, static, padded), logits(eager, static, padded), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


# What computes a prompt; later tokens are the op's if they have a mask, a soft cap or sinks.
PREFILL = {
    "llama": "sdpa",
    "mistral": "sdpa",
    "gemma3_text": "sdpa",
    "gemma4_text": "sdpa",
    "llama4_text": "sdpa",
    "deepseek_v3": "sdpa",
    "deepseek_v32": "sdpa",
    "gpt_oss": "own",
    "gemma2": "own",
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", slow_but(["gpt_oss", "mistral", "deepseek_v32"], PREFILL))
def test_decoder(name: str, static: bool, padded: bool, calls: dict[str, int]) -> None:
    check(name, static, padded)
    if static or padded or PREFILL[name] == "own":
        assert calls == {PREFILL[name]: 2, "op": 6}
    if name == "llama" and not static and not padded:  # SDPA reads each key of a dynamic cache once
        assert calls == {"sdpa": 6, "op": 2}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", slow_but(["t5"], ["t5", "bart"]))
def test_encoder_decoder(name: str, static: bool, padded: bool, calls: dict[str, int]) -> None:
    check(name, static, padded, seq2seq=True)
    assert calls.get("op", 0) >= (4 if static or padded or name == "t5" else 0)


@pytest.mark.parametrize("static", [False, True])
def test_whisper(static: bool, calls: dict[str, int]) -> None:
    """Cross attention over frames of sound, none of which is padding."""
    config = transformers.WhisperConfig(
        vocab_size=99,
        d_model=64,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=30,
        max_target_positions=SLOTS,
        num_mel_bins=8,
        pad_token_id=0,
    )
    logits = []
    frames = torch.randn(BATCH, 8, 60, generator=torch.Generator().manual_seed(0))
    for attention in ("eager", "tatten"):
        torch.manual_seed(0)
        model = transformers.WhisperForConditionalGeneration._from_config(config, attn_implementation=attention).eval()
        cache = EncoderDecoderCache(cache_of(model, static), cache_of(model, static, 30))
        with torch.no_grad():
            encoded = model.get_encoder()(frames)
            options = {"encoder_outputs": encoded, **cache_kwargs(cache), "use_cache": True}
            logits.append([model(decoder_input_ids=tokens(n, n), **options).logits for n in (3, 1, 1)])
    for want, got in zip(*logits, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert calls.get("op", 0) == (4 if static else 0)  # of single tokens, to the decoder's own keys


def knows_names_of_attention(name: str, model: torch.nn.Module) -> bool:
    """Return True if the model's code has a class of attention for each name that it knows.

    GPT-J's had one until transformers 5.23.
    """
    own = any(x.endswith("_ATTENTION_CLASSES") for x in vars(sys.modules[type(model).__module__]))
    return own and name in ("falcon", "gpt_neo", "gptj")


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static-padded"])
@pytest.mark.parametrize(
    "name, seq2seq",
    [(name, False) for name in every_model.NAMES] + [(name, True) for name in every_model.SEQ2SEQ_NAMES],
)
def test_every_model(name: str, seq2seq: bool, static: bool) -> None:
    """Right, or refused. What "eager" cannot do with sizes as these is no case."""
    logits = seq2seq_logits if seq2seq else decoder_logits
    try:
        eager, _ = every_model.build_pair(name, ("eager", "eager"), seq2seq)
        want = logits(eager, static, static)
    except Exception as error:
        pytest.skip(f'{type(error).__name__} with attn_implementation="eager": {error}')
    if knows_names_of_attention(name, eager):
        with pytest.raises(KeyError, match="'tatten'"):
            every_model.build_pair(name, ("eager", "tatten"), seq2seq)
        return
    got = logits(every_model.build_pair(name, ("eager", "tatten"), seq2seq)[1], static, static)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["gpt_oss", "t5"])
def test_float64(name: str) -> None:
    """Models that keep softmax in the dtype of the scores are the same to the last digits."""
    eager, ours = (model.double() for model in every_model.build_pair(name, ("eager", "tatten"), name == "t5"))
    for model in (eager, ours):
        model.set_experts_implementation("eager")  # the only one that is made for float64
    logits = seq2seq_logits if name == "t5" else decoder_logits
    for got, want in zip(logits(ours, True, True), logits(eager, True, True), strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_unused_slots_are_not_read() -> None:
    """NaN in slots that nothing was written to, which eager attention would multiply by 0."""
    _, model = every_model.build_pair("llama", ("eager", "tatten"))
    logits = []
    for unused in (0.0, torch.nan):
        cache = cache_of(model, static=True)
        with torch.no_grad():
            model(tokens(PROMPT), **cache_kwargs(cache))
            for layer in cache.layers:
                layer.keys[:, :, PROMPT:] = layer.values[:, :, PROMPT:] = unused
            logits.append(model(tokens(1), **cache_kwargs(cache)).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_gradients(name: str, calls: dict[str, int]) -> None:
    losses = []
    for model in every_model.build_pair(name, ("eager", "tatten")):
        model(input_ids=tokens(6), labels=tokens(6)).loss.backward()
        losses.append([x.grad for x in model.parameters() if x.grad is not None])
    assert losses[0]
    for want, got in zip(*losses, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    assert "op" not in calls


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_weights_that_are_asked_for_are_those_of_the_model(name: str, calls: dict[str, int]) -> None:
    found = []
    for model in every_model.build_pair(name, ("eager", "tatten")):
        cache = cache_of(model, static=False)
        with torch.no_grad():
            prompt = model(tokens(PROMPT), **cache_kwargs(cache), output_attentions=True)
            step = model(tokens(1), **cache_kwargs(cache), output_attentions=True)
        found.append([*prompt.attentions, *step.attentions])
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=0)
    assert calls == {"own": 4}


def test_attention_weights_in_float64() -> None:
    """Whose lowest number is none of float32."""
    found = []
    for model in every_model.build_pair("llama", ("eager", "tatten")):
        with torch.no_grad():
            found.append(model.double()(tokens(PROMPT), output_attentions=True).attentions)
    torch.testing.assert_close(found[1], found[0])


def test_blocks_that_are_selected_by_index_are_refused() -> None:
    query = torch.zeros(1, 2, 1, 8)
    with pytest.raises(NotImplementedError, match=r"`block_indices` must be None .* got a Tensor: Identity makes"):
        registration.attention(torch.nn.Identity(), query, query, query, None, block_indices=torch.zeros(1))


@pytest.mark.drawn(2, "compiled decoding with transformers")
@pytest.mark.parametrize("backend", slow_but(["tatten"], ["tatten", "aot_eager"]))
@pytest.mark.parametrize("name", slow_but(["gpt_oss"], ["gpt_oss", "llama"]))
def test_compiled(name: str, backend: str) -> None:
    eager, ours = every_model.build_pair(name, ("eager", "tatten"))
    torch._dynamo.reset()
    options = {"options": {"inner": "eager"}} if backend == "tatten" else {}
    with tatten.recording() as report:
        got = decoder_logits(ours, True, True, torch.compile(ours, backend=backend, **options))
    for a, b in zip(got, decoder_logits(eager, True, True), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    if (name, backend) == ("llama", "tatten"):
        assert report.rewritten


def make_mask(slots: int, used: int, queries: int = 1, **options: Any) -> Tensor | None:
    """The mask of a Llama's step, with the keys of `used` tokens in as many or more slots."""
    config = modeling_llama.LlamaConfig(attn_implementation="tatten")
    cache = DynamicCache(config=config) if slots == used else StaticCache(config=config, max_cache_len=slots)
    if used:
        cache.update(*torch.zeros(2, 1, 1, used, 4).unbind(), 0)
    embeds = torch.zeros(1, queries, 8)
    return create_causal_mask(config, embeds, **cache_kwargs(cache), attention_mask=None, **options)


def test_a_step_has_no_mask_only_if_all_keys_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_mask(8, 8) is None
    monkeypatch.setattr(StaticCache, "is_compileable", False)  # as beside layers of another kind
    mask = make_mask(12, 8)
    assert mask is not None
    assert mask.flatten().tolist() == [True] * 9 + [False] * 3


def test_a_mask_is_searched_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Tensor] = []
    given: list[bool] = []
    search, decode = masks.block_mask, local.decode_attention
    monkeypatch.setattr(masks, "block_mask", lambda mask: searched.append(mask) or search(mask))

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        given.append(kwargs["block_mask"] is not None)
        return decode(*args, **kwargs)

    monkeypatch.setattr(local, "decode_attention", attend)
    _, model = every_model.build_pair("llama", ("eager", "tatten"))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            cache = cache_of(model, static=True)
            model(tokens(PROMPT), **cache_kwargs(cache))
            searched.clear()
            given.clear()
            model(tokens(1), **cache_kwargs(cache))
        assert len(searched) == 1
        assert given == [True, True]


def test_a_mask_that_was_written_to_is_searched_again() -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            mask = make_mask(12, 8)
            assert mask is not None
            assert masks.blocks_of(mask) is not None
            assert masks.blocks_of(mask[:, :, :, :9]) is None
            mask[..., -1:].fill_(True)
            assert masks.blocks_of(mask) is None
