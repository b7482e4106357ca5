"""Models that drop their cache or change their angles as a text grows, and positions that the user passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from decode_loops import EAGER, SMALL, with_weights
from packaging.version import Version
from torch import Tensor
from transformers import (
    CompileConfig,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)

from tatten.integrations.transformers import DecodeLoop, cache_kwargs

LIMIT = 20  # tokens
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": LIMIT,
    "partial_rotary_factor": 1.0,
}
EVERY_OTHER = torch.arange(10)[None] * 2 + 3


class DropsItsCache(LlamaForCausalLM):
    """Writes another cache than it is given, as no model of transformers does that `reasons` doesn't know."""

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        return inputs | (cache_kwargs(DynamicCache()) if inputs["input_ids"].shape[1] > 1 else {})


def model_of(kind: str, longrope: bool) -> transformers.PreTrainedModel:
    sizes = SMALL | ({} if kind == "Llama" else {"original_max_position_embeddings": LIMIT})
    config = getattr(transformers, f"{kind}Config")(**sizes, **({"rope_parameters": LONGROPE} if longrope else {}))
    return with_weights(getattr(transformers, f"{kind}ForCausalLM"), config)


def generated(model: transformers.PreTrainedModel, prompt: int, **more: Any) -> Tensor:
    ids = torch.randint(3, 64, (1, prompt), generator=torch.Generator().manual_seed(3))
    return model.generate(ids, do_sample=False, **{"max_new_tokens": 30, **more})


LOOKUP = {"prompt_lookup_num_tokens": 5}
CASES: dict[str, tuple[str, bool, int, dict[str, Any], str | None]] = {
    "a long prompt": ("Phi3", False, 25, {}, "may compute its cache anew in a text of more than 20 tokens"),
    "a prompt that grows long": ("Phi3", True, 10, {}, "may compute its cache anew"),
    "experts": ("Phimoe", False, 25, {}, "PhimoeForCausalLM may compute its cache anew"),
    "a short text": ("Phi3", True, 5, {"max_new_tokens": 15}, None),
    "longrope": ("Llama", True, 10, {}, None),
    "drafts beyond longrope's limit": ("Llama", True, 10, LOOKUP, "longrope changes its angles at 20 tokens"),
    "drafts within it": ("Llama", True, 5, {**LOOKUP, "max_new_tokens": 15}, None),
    "positions": ("Llama", False, 10, {"position_ids": EVERY_OTHER}, None),
    "drafts at positions": ("Llama", False, 10, {**LOOKUP, "position_ids": EVERY_OTHER}, "counts positions from 0 on"),
    "drafts at the usual positions": ("Llama", False, 10, {**LOOKUP, "position_ids": torch.arange(10)[None]}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_generate(case: str) -> None:
    kind, longrope, prompt, more, reason = CASES[case]
    if longrope and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("longrope looks at positions on the host")
    model, loop = model_of(kind, longrope), DecodeLoop()
    # `generate` drafts across longrope's limit, too, and its tokens aren't greedy there.
    arguments = {name: x for name, x in more.items() if reason is not None or name not in LOOKUP}
    result = generated(model, prompt, **more, custom_generate=loop, compile_config=EAGER)
    assert torch.equal(result, generated(model, prompt, **arguments))
    assert str(loop.reason) == "None" if reason is None else reason in str(loop.reason)


@pytest.mark.parametrize("more", [{}, {"prefill_chunk_size": 4}, {"cache": StaticCache}], ids=["", "chunks", "users"])
def test_another_cache_is_seen(more: dict[str, Any]) -> None:
    """A prefill in chunks replaces the cache of the call, and one of the user's was not written."""
    model, loop = with_weights(DropsItsCache, LlamaConfig(**SMALL)), DecodeLoop()
    cache = cache_kwargs(StaticCache(config=model.config, max_cache_len=64)) if "cache" in more else {}
    options = {name: x for name, x in more.items() if name != "cache"}
    for _ in range(2):
        result = generated(model, 10, **options, **cache, custom_generate=loop, compile_config=EAGER)
        assert result.shape == (1, 40)
        assert "DropsItsCache returned another cache than it was given" in str(loop.reason)


def test_a_model_that_wraps_the_cache() -> None:
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=64, add_cross_attention=True, eos_token_id=None)
    torch.manual_seed(0)
    model, loop = GPT2LMHeadModel(config).eval(), DecodeLoop()
    more = {"max_new_tokens": 12, "pad_token_id": 0}
    result = generated(model, 10, **more, custom_generate=loop, compile_config=EAGER)
    assert loop.reason is None
    assert torch.equal(result, generated(model, 10, **more))


def test_the_limit_of_a_draft_model_is_no_reason() -> None:
    """The model checks all drafts, so that those of a draft model beyond its limit are only worse."""
    model, draft, loop = model_of("Llama", False), model_of("Phi3", False), DecodeLoop()
    draft.generation_config.num_assistant_tokens = 3
    looped = {"assistant_model": draft, "custom_generate": loop, "compile_config": EAGER}
    result = generated(model, 10, **looped)
    assert loop.reason is None
    assert torch.equal(result, generated(model, 10))


def test_an_assistant_at_positions() -> None:
    model, loop = model_of("Llama", False), DecodeLoop()
    more = {"position_ids": EVERY_OTHER}
    looped = {"assistant_model": model, "custom_generate": loop, "compile_config": EAGER}
    assert torch.equal(generated(model, 10, **more, **looped), generated(model, 10, **more))
    assert "counts positions from 0 on" in str(loop.reason)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"max_q_len": 0}, ValueError, "option `max_q_len` must be at least 1, got 0"),
        ({"inner": "eager", "decode": True}, ValueError, "option `decode` needs `inner`"),
        ({"max_q_len": "8"}, TypeError, "`max_q_len`"),
        ({"max_qlen": 2}, ValueError, "`options` must be options of tatten .*max_qlen"),
        ({"inner": "nope"}, ValueError, "option `inner` must be one of"),
    ],
)
def test_a_bad_option_is_an_error(options: dict[str, Any], error: type[Exception], says: str) -> None:
    """It is no step that can't be compiled, for which `generate` would run its own loop."""
    config = CompileConfig(backend="tatten", mode=None, options=options)
    with pytest.raises(error, match=says):
        generated(model_of("Llama", False), 5, custom_generate=DecodeLoop(), compile_config=config)
