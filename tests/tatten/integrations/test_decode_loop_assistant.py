"""`decode_loop` with an assistant: a draft model inside the step, whose tokens are those of greedy decoding."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from itertools import chain
from typing import Any

import pytest
import torch
import transformers
from decode_loops import EAGER, PROCESSORS, Kept, Launching
from packaging.version import Version
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

import tatten
from tatten.integrations.transformers import DecodeLoop
from tatten.passes import cost
from tatten.passes.reasons import Reason

pytestmark = pytest.mark.drawn(6)

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 120,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def build(name: str = "Llama", layers: int = 3, **sizes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, "num_hidden_layers": layers, **sizes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.get_output_embeddings().weight.data.normal_(0, 0.5)
    return model


def first_layers(model: PreTrainedModel, layers: int, noise: float = 0.0) -> PreTrainedModel:
    """A draft model: the first layers of a model, with other weights to some degree."""
    draft = copy.deepcopy(model)
    draft.config.num_hidden_layers = layers
    draft.model.layers = draft.model.layers[:layers]
    torch.manual_seed(1)
    for x in draft.parameters():
        x.data.add_(torch.randn_like(x) * x.std() * noise)
    return draft


def prompt(length: int = 20, seed: int = 3) -> Tensor:
    return torch.randint(2, 120, (1, length), generator=torch.Generator().manual_seed(seed))


def assert_same_tokens(
    model: PreTrainedModel, draft: PreTrainedModel, loop: DecodeLoop, ids: Tensor, tokens: int, **more: Any
) -> None:
    arguments = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, **more}
    drafts = arguments.pop("num_assistant_tokens", 4)
    streamer, plain = Kept(), Kept()
    expected = model.generate(ids, **arguments, streamer=plain)
    given = {"assistant_model": draft, "num_assistant_tokens": drafts, "custom_generate": loop, "compile_config": EAGER}
    result = model.generate(ids, **arguments, **given, streamer=streamer)
    assert loop.reason is None
    assert torch.equal(result, expected)
    assert [*chain(*streamer.tokens)] == [*chain(*plain.tokens)]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("ends", [[1], list(range(1, 20)), None], ids=["one", "many", "none"])
@pytest.mark.parametrize("drafts", [1, 3, 7])
@pytest.mark.parametrize("noise", [0.0, 0.3, 10.0], ids=["good", "fair", "bad"])
def test_tokens_are_greedy(noise: float, drafts: int, ends: list[int] | None, ahead: int) -> None:
    """Whatever the draft model chooses; and from prompts and to texts of few tokens, in the same compiled graphs.

    One graph checks drafts, one chooses the first of them, and one all others, however many.
    """
    model, loop = build(), Launching(ahead)
    draft = first_layers(model, 2, noise)
    torch._dynamo.reset()
    counters.clear()
    for ids, tokens in ((prompt(), 60), (prompt(7), 40), (prompt(1), 25), (prompt(2), 1), (prompt(), 2), (prompt(), 3)):
        assert_same_tokens(model, draft, loop, ids, tokens, num_assistant_tokens=drafts, eos_token_id=ends)
    assert counters["stats"]["unique_graphs"] == 1 + min(drafts, 2)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("noise", [0.0, 10.0], ids=["good", "bad"])
@pytest.mark.parametrize("setting", PROCESSORS)
def test_processors_of_greedy_decoding(setting: str, noise: float) -> None:
    model, loop = build(), DecodeLoop()
    for ids in (prompt(), prompt(6).repeat(1, 4)):
        assert_same_tokens(model, first_layers(model, 2, noise), loop, ids, 50, **PROCESSORS[setting])


def test_drafts_follow_the_processors() -> None:
    """A model that assists itself has its drafts accepted, unless one occurs twice among the drafts of a step."""
    model, loop = build(), DecodeLoop()
    assert_same_tokens(model, model, loop, prompt(), 61, **PROCESSORS["suppressed"])
    assert loop.launched_steps == 12
    assert_same_tokens(model, model, loop, prompt(), 61, **PROCESSORS["penalty"])
    assert loop.launched_steps < 25


def test_a_model_that_assists_itself_has_all_drafts_accepted() -> None:
    """The draft model reads the last draft of a step in the next one, so that its cache has no gap."""
    model, loop = build(), DecodeLoop()
    assert_same_tokens(model, model, loop, prompt(), 61, num_assistant_tokens=4)
    assert loop.launched_steps == 12
    assert_same_tokens(model, copy.deepcopy(model), loop, prompt(), 61, num_assistant_tokens=4)
    assert loop.launched_steps == 12


MODELS: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 16},
    "Qwen3": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "sliding_window": 16},
    "GPTNeoX": {},
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    """Windows are shorter than the text; drafts of another kind of model."""
    model, loop = build(name, **MODELS[name]), DecodeLoop()
    assert_same_tokens(model, build(name, 1, **MODELS[name]), loop, prompt(), 40)
    assert_same_tokens(model, model, loop, prompt(), 40)
    assert loop.launched_steps < 12
    assert_same_tokens(model, build(), loop, prompt(), 40)


def test_attention_of_both_models_is_rewritten() -> None:
    model = build()
    torch._dynamo.reset()
    with tatten.recording() as report:
        assert_same_tokens(model, first_layers(model, 1), DecodeLoop(), prompt(), 9, num_assistant_tokens=4)
    assert len(report.rewritten) == 3 + 2 * 1, str(report)  # of four drafts, three share a graph
    assert not report.declined


def test_the_number_of_drafts_is_that_of_the_assistant_then_that_of_the_call() -> None:
    model, loop = build(), DecodeLoop()
    draft = copy.deepcopy(model)
    draft.generation_config.num_assistant_tokens = 2
    assert_same_tokens(model, draft, loop, prompt(), 31, num_assistant_tokens=4)
    assert loop.launched_steps == 10


def test_another_draft_model_has_a_step_of_its_own() -> None:
    model, loop = build(), DecodeLoop()
    drafts = [first_layers(model, 2, noise) for noise in (0.0, 10.0)]
    steps = []
    for draft in (*drafts, *drafts):
        assert_same_tokens(model, draft, loop, prompt(), 40)
        steps.append(loop.launched_steps)
    assert steps[:2] == steps[2:]
    assert steps[0] < steps[1]
    torch._dynamo.reset()


def test_weights_of_the_draft_model_may_change() -> None:
    model, loop = build(), DecodeLoop()
    draft = copy.deepcopy(model)
    assert_same_tokens(model, draft, loop, prompt(), 41)
    few = loop.launched_steps
    with torch.no_grad():
        for x in draft.parameters():
            x.normal_()
    assert_same_tokens(model, draft, loop, prompt(), 41)
    assert loop.launched_steps > few


def test_both_caches_have_the_capacity_that_was_asked_for() -> None:
    """A later call of the same step may need all of it."""
    model, loop = build(layers=1), DecodeLoop()
    asked = {"cache_implementation": "static", "max_cache_len": 2048}
    given = {"assistant_model": model, "num_assistant_tokens": 2, "custom_generate": loop, "compile_config": EAGER}
    for ids in prompt(), prompt(1030):
        arguments = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        assert torch.equal(model.generate(ids, **arguments, **asked, **given), model.generate(ids, **arguments))
        assert loop.reason is None
    (step,) = loop._steps[model].values()
    assert [x.layers[0].max_cache_len for x in (step.cache, step.assistant.cache)] == [2048, 2048]


def test_prompt_lookup_goes_before_an_assistant() -> None:
    """As in `generate`."""
    model, loop = build(), DecodeLoop()
    ids = prompt(6).repeat(1, 4)
    assert_same_tokens(model, model, loop, ids, 40, prompt_lookup_num_tokens=3)
    (step,) = loop._steps[model].values()
    assert step.assistant is None


def test_a_draft_model_is_not_kept_alive() -> None:
    model, loop = build(), DecodeLoop()
    draft = copy.deepcopy(model)
    assert_same_tokens(model, draft, loop, prompt(), 9)
    alive = weakref.ref(draft)
    del draft
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None


def other_vocabulary() -> PreTrainedModel:
    return build(vocab_size=130)


def in_training() -> PreTrainedModel:
    return build().train()


def linear_attention() -> PreTrainedModel:
    return build("Lfm2", 2, layer_types=["conv", "full_attention"])


OTHERS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "sampled": (build, {"do_sample": True}, "an assistant in one step is greedy"),
    "ensemble": (build, {"assistant_ensemble_weight": 0.4}, "`assistant_ensemble_weight`"),
    "results": (build, {"return_dict_in_generate": True}, "keeps its cache to itself"),
    "training": (in_training, {}, "the assistant is in training mode"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_calls_run_the_loop_of_generate_with_a_reason(case: str) -> None:
    make, more, reason = OTHERS[case]
    model, draft, loop = build(), make(), DecodeLoop()
    results = []
    for custom in ({}, {"custom_generate": loop}):
        torch.manual_seed(0)
        arguments = {"max_new_tokens": 12, "do_sample": False, "assistant_model": draft, **more, **custom}
        result = model.generate(prompt(), **arguments)
        results.append(result if isinstance(result, Tensor) else result.sequences)
    assert torch.equal(*results)
    assert reason in str(loop.reason)


@pytest.mark.parametrize("make", [other_vocabulary, linear_attention])
def test_draft_models_that_a_step_can_not_run(make: Any) -> None:
    model, loop, ids = build(), DecodeLoop(), prompt()
    seen: list[object] = []
    try:
        model.generate(ids, max_new_tokens=4, do_sample=False, assistant_model=make(), custom_generate=loop)
    except (IndexError, RuntimeError, ValueError) as error:  # as `generate` itself raises
        seen.append(error)
    assert loop.reason is not None
    assert ("vocabulary of 120 tokens" if make is other_vocabulary else "remove refused drafts") in loop.reason


def test_a_draft_model_that_does_not_compile_leaves_other_calls_alone() -> None:
    model, loop = build(), DecodeLoop()
    draft = copy.deepcopy(model)
    draft.lm_head.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    arguments = {"max_new_tokens": 9, "do_sample": False, "custom_generate": loop, "compile_config": EAGER}
    expected = model.generate(prompt(), max_new_tokens=9, do_sample=False)
    for _ in range(2):
        assert torch.equal(model.generate(prompt(), assistant_model=draft, **arguments), expected)
        assert "does not compile as one graph" in str(loop.reason)
    assert torch.equal(model.generate(prompt(), **arguments), expected)
    assert loop.reason is None


@pytest.mark.slow
def test_under_inductor() -> None:
    model, ids = build(), prompt()
    arguments = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    more = {"assistant_model": first_layers(model, 1), "num_assistant_tokens": 3, "custom_generate": DecodeLoop()}
    assert torch.equal(model.generate(ids, **arguments, **more), model.generate(ids, **arguments))


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="takes no static cache with an assistant"
)
@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("dynamic", [None, True])
def test_assisted_generate_has_one_graph_for_all_numbers_of_queries(
    dynamic: bool | None, bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop of transformers compiles the model alone: steps are rewritten where its forward bounds the number."""
    monkeypatch.setitem(cost.RATES, "cpu", cost.Rates(1.0, 0.0, 1.0))
    model = build()
    draft = first_layers(model, 3, 0.2)
    draft.generation_config.num_assistant_tokens = 6
    arguments = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    expected = model.generate(prompt(), **arguments)
    if bounded:
        forward = model.forward

        @functools.wraps(forward)
        def bounded_forward(*args: Any, **kwargs: Any) -> Any:
            if kwargs["input_ids"].shape[1] <= 16:
                return forward(*args, **kwargs)
            return forward(*args, **kwargs)

        model.forward = bounded_forward
    config = copy.copy(EAGER)
    config.dynamic, config._compile_all_devices = dynamic, True
    torch._dynamo.reset()
    with tatten.recording() as report:
        static = {"cache_implementation": "static", "max_cache_len": 128, "compile_config": config}
        result = model.generate(prompt(), assistant_model=draft, **arguments, **static)
    assert torch.equal(result, expected)
    assert len(report.graphs) <= 3
    reasons = {x.decline.reason for x in report.declined}
    assert reasons == (set() if bounded else {Reason.Q_LEN_DYNAMIC})


@pytest.mark.parametrize("drafts", [3, 5, 6])
@pytest.mark.parametrize("lookup", [False, True])
def test_drafts_never_reach_behind_a_table_of_positions(lookup: bool, drafts: int) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=120, n_positions=32, pad_token_id=0)
    model, loop = transformers.GPT2LMHeadModel(config).eval(), DecodeLoop()
    arguments = {"max_length": 32, "do_sample": False, "eos_token_id": None}
    more: dict[str, Any] = {"prompt_lookup_num_tokens": drafts}
    if not lookup:
        more = {"assistant_model": copy.deepcopy(model), "num_assistant_tokens": drafts}
        more["assistant_model"].generation_config.num_assistant_tokens = drafts
    expected = model.generate(prompt(8), **arguments)
    result = model.generate(prompt(8), **arguments, **more, custom_generate=loop, compile_config=EAGER)
    assert loop.reason is None
    assert torch.equal(result, expected)


def test_an_assistant_without_drafts_runs_the_loop_of_generate() -> None:
    model, loop = build(), DecodeLoop()
    draft = first_layers(model, 1)
    draft.generation_config.num_assistant_tokens = 0
    model.generate(
        prompt(), max_new_tokens=3, assistant_model=draft, num_assistant_tokens=0, custom_generate=loop, do_sample=False
    )
    assert "`num_assistant_tokens` leaves the assistant no token" in str(loop.reason)
