"""`decode_loop` on a GPU: the captured step gives the tokens of `generate`, and notices what has moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import CompileConfig, StaticCache
from transformers.generation.logits_process import SuppressTokensAtBeginLogitsProcessor

from tatten.integrations.transformers import DecodeLoop, cache_kwargs

pytestmark = pytest.mark.gpu
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
WARPS = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.2}
OF_TEXT = {"do_sample": True, "no_repeat_ngram_size": 2, "bad_words_ids": [[x] for x in range(9, 300)] + [[3, 4]]}
# Without fused matrix products, so that logits have the bits of eager mode in all but a few places.
CONFIG = CompileConfig(backend="tatten", mode=None, options={"inner": "aot_eager"})


def build() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval().cuda()
    model.get_output_embeddings().weight.data.normal_(0, 0.5)
    return model


def prompts(batch: int, length: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.randint(2, 500, (batch, length), generator=torch.Generator().manual_seed(seed)).cuda()
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[1, : length // 4] = 0
    return ids, mask


def runner(loop: DecodeLoop, model: transformers.PreTrainedModel) -> Any:
    return next(reversed(loop._steps[model].values())).runner


@pytest.mark.parametrize(
    "kwargs",
    [{"do_sample": False}, {"do_sample": True}, WARPS, OF_TEXT],
    ids=["greedy", "sampled", "warped", "of the text"],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_captured_steps_give_the_tokens_of_generate(batch: int, kwargs: dict[str, Any]) -> None:
    model, loop = build(), DecodeLoop()
    for seed, ends in ((0, [1]), (1, [1]), (2, list(range(1, 40)))):
        ids, mask = prompts(batch, 40 - seed, seed)
        arguments = {"attention_mask": mask, "max_new_tokens": 50, "eos_token_id": ends, **kwargs}
        torch.manual_seed(seed)
        expected = model.generate(ids, **arguments, disable_compile=True)
        state = torch.cuda.get_rng_state()
        torch.manual_seed(seed)
        result = model.generate(ids, **arguments, custom_generate=loop, compile_config=CONFIG)
        assert loop.reason is None
        assert torch.equal(result, expected)
        assert torch.equal(torch.cuda.get_rng_state(), state)
        assert runner(loop, model).not_captured is None


def test_a_second_call_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loop = build(), DecodeLoop()
    arguments = {"max_new_tokens": 20, "custom_generate": loop, "compile_config": CONFIG, "eos_token_id": None}
    model.generate(prompts(1)[0], **arguments, **WARPS)
    graph = runner(loop, model)._graph
    assert graph is not None
    for length in (17, 300):
        model.generate(prompts(1, length)[0], **arguments, **{**WARPS, "temperature": 1.7, "top_k": 3})
        assert runner(loop, model)._graph is graph


def test_weights_that_moved_are_captured_anew() -> None:
    model, loop = build(), DecodeLoop()
    ids = prompts(1)[0]
    arguments = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    looped = {"custom_generate": loop, "compile_config": CONFIG}
    model.generate(ids, **arguments, **looped)
    graph = runner(loop, model)._graph
    with torch.no_grad():
        for x in model.model.layers[0].parameters():
            x.mul_(1.5)  # in place: the graph reads the new weights
    assert torch.equal(model.generate(ids, **arguments, **looped), model.generate(ids, **arguments))
    assert runner(loop, model)._graph is graph
    with torch.no_grad():
        for x in model.model.layers[1].parameters():
            x.data = x.data * 0.5
    assert torch.equal(model.generate(ids, **arguments, **looped), model.generate(ids, **arguments))
    assert runner(loop, model)._graph is not graph


def test_a_number_in_a_closure_is_captured_anew() -> None:
    """A replay evaluates no guards, so a call asks Dynamo before it replays."""
    model, loop, ids, scale = build(), DecodeLoop(), prompts(1)[0], [0.0]
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: output + scale[0])
    arguments = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    graphs = []
    for number in (0.0, 0.0, 2.0, 0.0):
        scale[0] = number
        expected = model.generate(ids, **arguments)
        assert torch.equal(model.generate(ids, **arguments, custom_generate=loop, compile_config=CONFIG), expected)
        assert loop.reason is None
        graphs.append(runner(loop, model)._graph)
    assert graphs[0] is graphs[1]
    assert len({id(graph) for graph in graphs}) == 3


@pytest.mark.parametrize("ahead", [0, 2])
def test_scores_without_a_token_to_sample_raise(ahead: int) -> None:
    model, loop, ids = build(), DecodeLoop(ahead), prompts(1)[0]
    none_left = SuppressTokensAtBeginLogitsProcessor(list(range(500)), 50, device="cuda")
    arguments = {"max_new_tokens": 30, "do_sample": True, "eos_token_id": None, "logits_processor": [none_left]}
    for _ in range(2):
        with pytest.raises(RuntimeError, match="finite maximum"):
            model.generate(ids, **arguments, custom_generate=loop, compile_config=CONFIG)


def test_a_users_cache_is_captured_and_goes_on_after_an_early_end() -> None:
    model, loop = build(), DecodeLoop()
    ids = prompts(1)[0]
    arguments = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": list(range(1, 60))}
    caches = [StaticCache(model.config, max_cache_len=128) for _ in range(2)]
    for _ in range(2):
        expected = model.generate(ids, **arguments, **cache_kwargs(caches[0]), disable_compile=True)
        result = model.generate(
            ids, **arguments, **cache_kwargs(caches[1]), custom_generate=loop, compile_config=CONFIG
        )
        assert torch.equal(result, expected)
        assert int(caches[0].get_seq_length()) == int(caches[1].get_seq_length())
        for cache in caches:
            cache.reset()


def test_sampling_many_rows_from_a_large_vocabulary_compiles_under_inductor() -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, "vocab_size": 32000})).eval().cuda()
    loop, (ids, mask) = DecodeLoop(), prompts(8)
    config = CompileConfig(backend="tatten", mode=None)
    model.generate(ids, attention_mask=mask, max_new_tokens=20, custom_generate=loop, compile_config=config, **WARPS)
    assert loop.reason is None
    assert runner(loop, model).not_captured is None


@pytest.mark.parametrize("options", [None, {"decode": False}], ids=["decode", "without"])
def test_with_inductor(options: dict[str, Any] | None) -> None:
    """In float32, where sums in another order choose no other token of these."""
    model, loop, ids = build(), DecodeLoop(), prompts(1)[0]
    config = {} if options is None else {"compile_config": CompileConfig(backend="tatten", mode=None, options=options)}
    arguments = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **arguments)
    assert torch.equal(model.generate(ids, **arguments, custom_generate=loop, **config), expected)
    assert runner(loop, model)._graph is not None


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "glm4", "phi3", "olmo2"])
def test_models_with_combined_kernels(name: str, batch: int) -> None:
    """Norms of heads, two kinds of masks, partial and interleaved rotary embeddings: in float32, as above."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SMALL, head_dim=16)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().cuda()
    loop, (ids, mask) = DecodeLoop(), prompts(batch)
    arguments = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **arguments, disable_compile=True)
    assert torch.equal(model.generate(ids, **arguments, custom_generate=loop), expected)
    assert loop.reason is None


def test_a_draft_model_in_a_captured_step() -> None:
    """The step is captured once; the graph is dropped when a weight of the draft model has moved."""
    model, loop, (ids, _) = build(), DecodeLoop(), prompts(1)
    draft = build()
    arguments = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **arguments)
    given = {"assistant_model": draft, "num_assistant_tokens": 4, "custom_generate": loop, "compile_config": CONFIG}
    for _ in range(3):
        assert torch.equal(model.generate(ids, **arguments, **given), expected)
        assert loop.reason is None
        assert loop.launched_steps < 20
    (step,) = loop._steps[model].values()
    graph = step.runner._graph
    assert graph is not None
    draft.lm_head.weight.data = draft.lm_head.weight.data * -1
    assert torch.equal(model.generate(ids, **arguments, **given), expected)
    assert loop.launched_steps > 20
    assert step.runner._graph is not graph


@pytest.mark.parametrize("drafting", ["lookup", "assistant"])
@pytest.mark.parametrize(
    "processors", [{"repetition_penalty": 1.3}, {"repetition_penalty": 0.6}, {"min_new_tokens": 40}]
)
def test_drafts_under_processors_in_a_captured_step(processors: dict[str, float], drafting: str) -> None:
    model, loop, (ids, _) = build(), DecodeLoop(), prompts(1)
    arguments = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": list(range(1, 100)), **processors}
    more: dict[str, Any] = {"prompt_lookup_num_tokens": 5}
    if drafting == "assistant":
        more = {"assistant_model": build(), "num_assistant_tokens": 4}
    for prompt in (ids, ids[:, :7].repeat(1, 6), ids):
        expected = model.generate(prompt, **arguments, disable_compile=True)
        result = model.generate(prompt, **arguments, **more, custom_generate=loop, compile_config=CONFIG)
        assert loop.reason is None
        assert torch.equal(result, expected)
        assert loop.not_captured is None


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_sources_in_captured_steps(name: str, inner: str) -> None:
    """Sources of many lengths share a graph, which reads those of the present call. Float32 has the tokens of eager."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 500, "d_model": 256, "pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 2}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512}
    layers |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    kinds: dict[str, Any] = {
        "t5": transformers.T5Config(**sizes, d_ff=512, num_layers=2, num_heads=4, d_kv=64),
        "bart": transformers.BartConfig(**sizes, **layers, forced_eos_token_id=None),
        "whisper": transformers.WhisperConfig(
            **sizes, **layers, num_mel_bins=8, max_source_positions=50, begin_suppress_tokens=None, bos_token_id=1
        ),
    }
    kind = {"t5": "T5ForConditionalGeneration", "bart": "BartForConditionalGeneration"}
    model = getattr(transformers, kind.get(name, "WhisperForConditionalGeneration"))(kinds[name]).eval().cuda()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.2)
    loop, graphs = DecodeLoop(), set()
    config = CompileConfig(backend="tatten", mode=None, options={"inner": inner})
    for seed, length in enumerate((40, 100, 7, 128)):
        ids, mask = prompts(2, length if name != "whisper" else 50, seed)
        source: Tensor = ids * mask
        arguments: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False}
        if name == "whisper":
            source = torch.randn(2, 8, 100, generator=torch.Generator().manual_seed(seed)).cuda()
            arguments = {"max_new_tokens": 30, "do_sample": False, "return_timestamps": False}
        expected = model.generate(source, **arguments, disable_compile=True)
        result = model.generate(source, **arguments, custom_generate=loop, compile_config=config)
        assert (loop.reason, loop.not_captured) == (None, None)
        assert torch.equal(result, expected)
        graphs.add(id(runner(loop, model)._graph))
    assert len(graphs) == 1
    assert None not in graphs
