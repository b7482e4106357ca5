"""Shared-prefix caches through the backend: every layer reads its prefix once, and nothing is expanded in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product

import pytest
import tiny_models
import torch
import transformers
from slow import slow_but
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

import tatten
from tatten.integrations.transformers import SharedPrefixCache, cache_kwargs

pytestmark = pytest.mark.drawn(2, "models")

N, PROMPT, NEW = 6, 33, 4
COMMON = tiny_models.COMMON | {"max_position_embeddings": 256, "eos_token_id": None}
GQA = COMMON | {"num_key_value_heads": 2}
MODELS = {
    "Llama": GQA,
    "Mistral": GQA | {"sliding_window": 8},
    "Qwen3": GQA | {"head_dim": 16},
    "Gemma3Text": GQA | {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "GPTNeoX": COMMON,
    "GPT2": {"vocab_size": 99, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "eos_token_id": None},
    "Falcon": COMMON | {"multi_query": True, "new_decoder_architecture": False},
}


def build(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name], pad_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    return model


def prefilled(model: transformers.PreTrainedModel, ids: Tensor, mask: Tensor) -> SharedPrefixCache:
    cache = SharedPrefixCache(model.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, :-1]
    with torch.no_grad():
        model(ids[:, :-1], attention_mask=mask[:, :-1], position_ids=positions, **cache_kwargs(cache))
    return cache


def prompts(padded: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    ids, mask = torch.randint(1, 99, (3 if padded else 1, PROMPT)), torch.ones(3 if padded else 1, PROMPT).long()
    if padded:
        mask[0, :9], mask[2, :1] = 0, 0
    return ids, mask


def through(backend: str, inner: str, dynamic: bool | None = None) -> CompileConfig:
    config = CompileConfig(backend=backend, mode=None, options={"inner": inner}, fullgraph=True, dynamic=dynamic)
    config._compile_all_devices = True  # transformers compiles on accelerators only, unless told
    return config


@pytest.mark.parametrize("padded", [False, True], ids=["one", "padded"])
@pytest.mark.parametrize(
    "name, dynamic", slow_but([("Llama", None), ("Gemma3Text", None)], product(MODELS, [None, True]))
)
def test_generate(name: str, dynamic: bool | None, padded: bool) -> None:
    """Samples of one prompt, and of several with padding: the tokens of plain `generate`."""
    model, (ids, mask) = build(name), prompts(padded)
    kwargs = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": True, "num_return_sequences": N}
    torch.manual_seed(2)
    want = model.generate(ids, **kwargs)
    torch._dynamo.reset()
    with tatten.recording() as report:
        torch.manual_seed(2)
        fork = prefilled(model, ids, mask).fork(N, NEW)
        got = model.generate(ids, **cache_kwargs(fork), compile_config=through("tatten", "eager", dynamic), **kwargs)
    assert torch.equal(got, want)
    assert [x.op for x in report.rewritten] == ["tatten.bifurcated_attention.default"] * 2
    assert not report.declined


def test_a_second_level() -> None:
    model, (ids, mask) = build("Llama"), prompts(True)
    root = prefilled(model, ids, mask)
    many, ones = ids.repeat_interleave(2, 0), mask.repeat_interleave(2, 0)
    child = root.fork(2, capacity=3)
    kwargs = {"max_new_tokens": NEW, "do_sample": True, "num_return_sequences": 3}
    positions = ones.sum(1, keepdim=True) - 1
    with torch.no_grad():
        model(many[:, -1:], attention_mask=ones, position_ids=positions, **cache_kwargs(child))
    many, ones = torch.cat([many, torch.arange(1, 7)[:, None]], 1), torch.cat([ones, ones[:, -1:]], 1)
    torch.manual_seed(2)
    want = model.generate(many, attention_mask=ones, **kwargs)
    torch._dynamo.reset()
    with tatten.recording() as report:
        torch.manual_seed(2)
        fork = child.fork(3, NEW)
        config = through("tatten", "eager")
        got = model.generate(many, attention_mask=ones, **cache_kwargs(fork), compile_config=config, **kwargs)
    assert torch.equal(got, want)
    assert report.rewritten
    assert all(x.cost.segments == 3 for x in report.rewritten)


@pytest.mark.slow
def test_another_prompt_of_another_length_is_one_more_graph() -> None:
    """Later lengths compile no more: they are symbols from then on, and every layer is still rewritten."""
    model = build("Llama")
    step = torch.compile(model, backend="tatten", options={"inner": "aot_eager"})
    torch._dynamo.reset()
    with tatten.recording() as report, torch.no_grad():
        for length in (20, 31, 45, 27):
            ids = torch.randint(1, 99, (1, length))
            fork = prefilled(model, ids, torch.ones_like(ids)).fork(N, NEW)
            mask = torch.ones(N, length).long()
            token = ids[:, -1:].repeat(N, 1)
            position = torch.full((N, 1), length - 1)
            got = step(token, attention_mask=mask, position_ids=position, **cache_kwargs(fork)).logits
            torch.testing.assert_close(got[0, -1], model(ids).logits[0, -1])
    assert len(report.graphs) == 2
    assert [x.op for x in report.rewritten] == ["tatten.bifurcated_attention.default"] * 4


def largest_allocation(step: Callable[[], object]) -> int:
    """The most bytes that one tensor gets while `step` runs."""
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.slow
def test_nothing_of_the_size_of_batch_times_prefix_is_allocated() -> None:
    length, n = 3000, 8
    config = LlamaConfig(**GQA | {"num_hidden_layers": 1, "max_position_embeddings": 4096})
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    root = SharedPrefixCache(config)
    keys, values = torch.randn(2, 1, 2, length, 16).unbind()
    root.layers[0].update(keys, values)
    expanded = n * keys.nbytes
    largest = {}
    inputs = {"input_ids": torch.ones(n, 1, dtype=torch.int64), "position_ids": torch.full((n, 1), length)}
    for backend in ("tatten", "inductor"):
        fork = root.fork(n, capacity=8)
        torch._dynamo.reset()
        step = functools.partial(torch.compile(model, backend=backend), **cache_kwargs(fork), **inputs)
        with torch.no_grad():
            largest[backend] = largest_allocation(step)
    assert largest["inductor"] >= expanded  # or the profiler sees nothing
    # The mask has an element for each sequence and key, scores one for each query head: neither holds head_dim of them.
    assert largest["tatten"] < expanded / 4


def test_a_sample_has_the_same_bits_beside_any_others() -> None:
    """In batches of one size: products with the weights are those of PyTorch."""
    torch.manual_seed(1)
    model, ids, mask = build("Llama"), torch.randint(1, 99, (3, 700)), torch.ones(3, 700).long()
    mask[0, :50] = mask[1, :20] = 0
    step = torch.compile(model, backend="tatten", options={"batch_invariant": True, "inner": "eager"}, fullgraph=True)
    cache, want = prefilled(model, ids, mask), []
    torch._dynamo.reset()
    with tatten.recording() as report, torch.no_grad():
        for others in ([1, 0, 1], [2, 2, 2], [0, 1, 2], [1, 1, 1]):
            rows = [others[0], 1, *others[1:]]
            fork = cache.fork(1, capacity=NEW).select(rows)
            token, seen = ids[rows, -1:], torch.nn.functional.pad(mask[rows], (0, NEW - 1), value=1)
            positions, logits = mask[rows].sum(1, keepdim=True) - 1, []
            for t in range(NEW):
                logits.append(step(token, seen, positions + t, fork).logits[1])
                token = torch.randint(1, 99, (4, 1))
                token[1] = 5 + t
            want = want or logits
            assert all(torch.equal(x, y) for x, y in zip(logits, want, strict=True))
    assert not report.declined
    assert {finding.op for finding in report.rewritten} == {"tatten.bifurcated_attention.default"}
