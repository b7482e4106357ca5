"""The shared-prefix cache inside transformers: the tokens of plain `generate`, each prefix stored once."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import tiny_models
import torch
import transformers
from slow import slow_but
from tiny_models import GQA, PROMPT, ZOO, prompts
from torch import Tensor
from transformers import CompileConfig
from transformers.masking_utils import create_chunked_causal_mask

from tatten.integrations.transformers import SharedPrefixCache, cache_kwargs

NEW, N = 5, 2


def build(name: str) -> transformers.PreTrainedModel:
    return tiny_models.build(name, "sdpa")


def prefilled(model: transformers.PreTrainedModel, ids: Tensor, mask: Tensor) -> SharedPrefixCache:
    """Prefill all tokens but the last. Only `generate` derives positions from the mask; a plain call passes them."""
    cache = SharedPrefixCache(model.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, :-1]
    with torch.no_grad():
        model(ids[:, :-1], attention_mask=mask[:, :-1], position_ids=positions, **cache_kwargs(cache))
    return cache


def generate(model: transformers.PreTrainedModel, ids: Tensor, mask: Tensor, **kwargs: object) -> Tensor:
    torch.manual_seed(0)
    return model.generate(ids, attention_mask=mask, max_new_tokens=NEW, **kwargs)


MODES = {
    "greedy": (1, {"do_sample": False}),
    "sampling": (N, {"do_sample": True, "num_return_sequences": N}),
    "beams": (N, {"do_sample": False, "num_beams": N}),
    "beams returned": (3, {"do_sample": True, "num_beams": 3, "num_return_sequences": 2}),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("padded", [False, True], ids=["one", "padded"])
@pytest.mark.parametrize("name", slow_but(["llama", "gemma3", "deepseek_v3", "gpt2"], ZOO))
def test_generate(name: str, padded: bool) -> None:
    if name == "llama4" and "block_sequence_ids" not in inspect.signature(create_chunked_causal_mask).parameters:
        pytest.skip(f"`generate` of transformers {transformers.__version__} has no static cache for chunked attention")
    model, (ids, mask) = build(name), prompts(padded)
    cache = prefilled(model, ids, mask)
    prefix = cache.nbytes
    for n, kwargs in MODES.values():
        fork = cache.fork(n, capacity=NEW)
        assert torch.equal(
            generate(model, ids, mask, **cache_kwargs(fork), **kwargs), generate(model, ids, mask, **kwargs)
        )
        assert fork.nbytes == prefix + prefix // (PROMPT - 1) * NEW * n
    assert cache.nbytes == prefix


@pytest.mark.drawn(2, "compiled decoding with transformers")
@pytest.mark.parametrize("name", slow_but(["llama"], ["llama", "gemma3", "gpt2"]))
@pytest.mark.parametrize("padded", [False, True], ids=["one", "padded"])
def test_compiled_generate(name: str, padded: bool) -> None:
    """One graph for all steps, and for the next fork."""
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(gm)
        return gm

    model, (ids, mask) = build(name), prompts(padded)
    config = CompileConfig(backend=backend, mode=None, fullgraph=True)
    config._compile_all_devices = True  # transformers compiles on accelerators only, unless told
    torch._dynamo.reset()
    for _ in range(2):
        cache = prefilled(model, ids, mask)
        got = generate(
            model, ids, mask, **cache_kwargs(cache.fork(N, NEW)), compile_config=config, **MODES["sampling"][1]
        )
        assert torch.equal(got, generate(model, ids, mask, **MODES["sampling"][1]))
    assert len(graphs) == 1


@pytest.mark.slow
def test_compiled_generate_through_inductor() -> None:
    model, (ids, mask) = build("llama"), prompts(True)
    config = CompileConfig(backend="tatten", mode="default")
    config._compile_all_devices = True
    torch._dynamo.reset()
    fork = prefilled(model, ids, mask).fork(N, NEW)
    got = generate(model, ids, mask, **cache_kwargs(fork), compile_config=config, **MODES["sampling"][1])
    assert torch.equal(got, generate(model, ids, mask, **MODES["sampling"][1]))


def test_generate_can_prefill() -> None:
    """`generate` prefills with the positions of padded prompts."""
    model, (ids, mask) = build("qwen3"), prompts(True)
    cache = SharedPrefixCache(model.config)
    model.generate(ids[:, :-1], attention_mask=mask[:, :-1], **cache_kwargs(cache), max_new_tokens=1)
    got = generate(model, ids, mask, **cache_kwargs(cache.fork(1, NEW)), do_sample=False)
    assert torch.equal(got, generate(model, ids, mask, do_sample=False))


def continued(model: transformers.PreTrainedModel, fork: SharedPrefixCache, ids: Tensor, mask: Tensor) -> tuple:
    """Take two greedy steps by hand: the tokens of `fork`, and a last one that it does not hold."""
    with torch.no_grad():
        for _ in range(2):
            positions = mask.sum(1, keepdim=True) - 1
            logits = model(ids[:, -1:], attention_mask=mask, position_ids=positions, **cache_kwargs(fork)).logits
            # not the same token for all children of a prompt
            best = logits[:, -1].topk(fork.batch_size).indices.gather(1, torch.arange(fork.batch_size)[:, None])
            ids, mask = torch.cat([ids, best], dim=1), torch.cat([mask, torch.ones_like(best)], dim=1)
    return ids, mask


@pytest.mark.parametrize("mode", MODES)
def test_second_level(mode: str) -> None:
    model, (ids, mask) = build("llama"), prompts(True)
    root = prefilled(model, ids, mask)
    child = root.fork(2, capacity=8)
    ids, mask = continued(model, child, ids.repeat_interleave(2, 0), mask.repeat_interleave(2, 0))
    n, kwargs = MODES[mode]
    grandchild = child.fork(n, NEW)
    got = generate(model, ids, mask, **cache_kwargs(grandchild), **kwargs)
    assert torch.equal(got, generate(model, ids, mask, **kwargs))
    assert [key.shape[0] for key, _ in grandchild.layers[0].kv.segments] == [3, 6]
    # the parent continues as if nothing had been forked from it
    again = generate(model, ids, mask, **cache_kwargs(child), do_sample=False)
    assert torch.equal(again, generate(model, ids, mask, do_sample=False))


def test_beams_across_forks() -> None:
    """Beams that move between the children of a first fork move its segment too."""
    model, (ids, mask) = build("llama"), prompts(False)
    child = prefilled(model, ids, mask).fork(3, capacity=NEW)
    parent = [tensor.clone() for tensor in child.layers[0].kv.tensors]
    got = generate(model, ids, mask, **cache_kwargs(child.fork(1, NEW)), num_beams=3, do_sample=False)
    assert torch.equal(got, generate(model, ids, mask, num_beams=3, do_sample=False))

    many, ones = ids.repeat_interleave(3, 0), mask.repeat_interleave(3, 0)
    many, ones = continued(model, child, many, ones)
    order = torch.tensor([2, 0, 0])
    for move in ("reorder_cache", "batch_select_indices", "select"):
        fork = child.fork(1, NEW)
        fork = fork.select(order) if move == "select" else (getattr(fork, move)(order), fork)[1]
        got = generate(model, many[order], ones[order], **cache_kwargs(fork), do_sample=False)
        assert torch.equal(got, generate(model, many[order], ones[order], do_sample=False))
    assert torch.equal(child.layers[0].kv.tensors[0], parent[0])

    fork = child.fork(1, NEW)
    fork.batch_repeat_interleave(2)
    twice, ones = many.repeat_interleave(2, 0), ones.repeat_interleave(2, 0)
    assert [key.shape[0] for key, _ in fork.layers[0].kv.segments] == [1, 3]
    assert fork.layers[0].kv.rows == (None, None)
    assert torch.equal(
        generate(model, twice, ones, **cache_kwargs(fork), do_sample=False),
        generate(model, twice, ones, do_sample=False),
    )


def slightly_wrong() -> transformers.PreTrainedModel:
    assistant = build("llama")
    torch.manual_seed(1)
    with torch.no_grad():
        assistant.lm_head.weight.add_(torch.randn_like(assistant.lm_head.weight), alpha=0.005)
    return assistant


@pytest.mark.parametrize("start", ["empty", "root", "fork", "used fork"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_assisted_decoding(do_sample: bool, start: str) -> None:
    """Rejected candidates are cropped from the suffix, step after step, and what is held is not added again."""
    model, (ids, mask) = build("llama"), prompts(False)
    kwargs = {"do_sample": do_sample, "max_new_tokens": 16}
    cache = SharedPrefixCache(model.config) if start == "empty" else prefilled(model, ids, mask)
    cache = cache.fork(1, 48) if "fork" in start else cache
    if start == "used fork":
        ids, mask = continued(model, cache, ids, mask)
    cropped = []
    crop = cache.crop
    cache.crop = lambda tokens: (cropped.append(-tokens), crop(tokens))
    results = []
    for past in (cache, None):
        torch.manual_seed(0)
        more = {"assistant_model": slightly_wrong(), **cache_kwargs(past)} if past is not None or do_sample else {}
        results.append(model.generate(ids, attention_mask=mask, **kwargs, **more))
    assert torch.equal(*results)
    assert do_sample or sum(cropped) > 0
    assert int(cache.get_seq_length()) == results[0].shape[1] - 1


def test_assisted_decoding_needs_the_whole_text() -> None:
    model, (ids, mask) = build("llama"), prompts(False)
    fork = prefilled(model, ids, mask).fork(1, 32)
    with pytest.raises(ValueError, match="the full text as `input_ids`, with the 11 tokens in the cache, got 2"):
        model.generate(ids[:, -1:], **cache_kwargs(fork), assistant_model=slightly_wrong(), max_new_tokens=4)


@pytest.mark.parametrize("mode", MODES)
def test_a_fork_into_an_old_one(mode: str) -> None:
    """A second rollout, in the memory of the first."""
    model = build("llama")
    n, kwargs = MODES[mode]
    fork = None
    for shift in (0, 5):
        ids, mask = prompts(True)
        ids = (ids + shift) % 40
        old, fork = fork, prefilled(model, ids, mask).fork(n, NEW, into=fork)
        assert old in (None, fork)
        got = generate(model, ids, mask, **cache_kwargs(fork), **kwargs)
        assert torch.equal(got, generate(model, ids, mask, **kwargs))


def test_finished_sequences_are_dropped() -> None:
    """Dropping any of the samples of unequal prompts copies no prefix, and the others go on as if nothing was."""
    model, (ids, mask) = build("llama"), prompts(True)
    root = prefilled(model, ids, mask)
    child = root.fork(4, capacity=8)
    ids, mask = continued(model, child, ids.repeat_interleave(4, 0), mask.repeat_interleave(4, 0))
    for left in ([0, 1, 3, 4, 8, 9, 11], [1, 2, 6], [2, 0]):
        left = torch.tensor(left)
        child = child.select(left)
        ids, mask = ids[left], mask[left]
        token = root.nbytes // (3 * (PROMPT - 1))
        assert child.nbytes == root.nbytes + token * len(left) * 8
        ids, mask = continued(model, child, ids, mask)
        want = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits[:, -2]
        best = want.topk(child.batch_size).indices.gather(1, torch.arange(child.batch_size)[:, None])
        assert torch.equal(ids[:, -1:], best)


def test_prompts_padded_between_their_last_tokens() -> None:
    """`generate` wants the last token of each prompt at the end; the padding of unequal prompts may be before it."""
    model, (left_ids, left_mask) = build("llama"), prompts(True)
    ids, mask = torch.zeros_like(left_ids), torch.zeros_like(left_mask)
    for row in range(3):
        real = left_ids[row, left_mask[row].bool()]
        ids[row, : len(real) - 1], mask[row, : len(real) - 1] = real[:-1], 1
        ids[row, -1], mask[row, -1] = real[-1], 1
    got = generate(model, ids, mask, **cache_kwargs(prefilled(model, ids, mask).fork(1, NEW)), do_sample=False)
    want = generate(model, left_ids, left_mask, do_sample=False)
    assert torch.equal(got[:, PROMPT:], want[:, PROMPT:])


def test_an_unforked_cache_grows_as_a_dynamic_one() -> None:
    model, (ids, mask) = build("llama"), prompts(True)
    cache = SharedPrefixCache(model.config.num_hidden_layers)
    assert (cache.batch_size, cache.get_seq_length(), cache.get_max_length()) == (-1, 0, -1)
    assert not cache.is_initialized
    want = generate(model, ids, mask, num_beams=2, do_sample=False)
    got = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, num_beams=2, **cache_kwargs(cache))
    assert torch.equal(got, want)
    assert cache.is_initialized
    assert (cache.batch_size, cache.get_seq_length()) == (6, PROMPT + NEW - 1)


def test_answers_to_transformers() -> None:
    model, (ids, mask) = build("llama"), prompts(True)
    root = prefilled(model, ids, mask)
    fork = root.fork(N, 4)
    assert not root.is_compileable
    assert fork.is_compileable
    assert fork.is_initialized
    assert (root.get_mask_sizes(3, 0), fork.get_mask_sizes(3, 0)) == ((PROMPT + 2, 0), (PROMPT + 3, 0))
    assert (fork.get_max_length(), fork.batch_size, fork.capacity) == (PROMPT + 3, 6, 4)
    assert isinstance(fork.get_seq_length(), Tensor)
    for call in (fork.reset, root.reset):
        with pytest.raises(NotImplementedError, match="SharedPrefixCache cannot be"):
            call()
    fork.crop(0)
    with pytest.raises(ValueError, match="`tokens` must be at most 0, the tokens since the last fork, got 1"):
        fork.crop(-1)
    with pytest.raises(ValueError, match="`tokens_to_remove` must be 0 or negative, as transformers has it, got 12"):
        fork.crop(12)
    with pytest.raises(TypeError, match="`into` must be a SharedPrefixCache of this module, got int"):
        root.fork(1, 1, into=1)
    with pytest.raises(TypeError, match="`into` must be a SharedPrefixCache of this module, got int"):
        root.select([0], into=1)


@pytest.mark.parametrize("compiled", slow_but([False], [False, True]))
def test_generating_past_the_capacity(compiled: bool) -> None:
    model, (ids, mask) = build("llama"), prompts(True)
    fork = prefilled(model, ids, mask).fork(1, NEW - 1)
    config = CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = compiled
    with pytest.raises(ValueError, match=f"`capacity` must hold {NEW - 1} used and 1 new slots, got {NEW - 1}"):
        generate(model, ids, mask, **cache_kwargs(fork), do_sample=False, compile_config=config)
    assert [int(layer.kv.length) for layer in fork.layers] == [NEW - 1] * 2


def test_generating_more_sequences_than_were_forked() -> None:
    model, (ids, mask) = build("llama"), prompts(True)
    fork = prefilled(model, ids, mask).fork(2, NEW)
    with pytest.raises(ValueError, match=r"`key` must have shape \(6, .* got \(9, "):
        generate(model, ids, mask, **cache_kwargs(fork), num_return_sequences=3, do_sample=True)
    assert int(fork.layers[0].kv.length) == 0


@pytest.mark.parametrize(
    "name, config, found",
    [
        ("Qwen3Next", GQA | {"head_dim": 16}, "linear_attention"),
        ("FalconH1", GQA | {"head_dim": 16}, "hybrid"),
    ],
)
def test_layers_that_hold_more_than_keys_and_values(name: str, config: dict, found: str) -> None:
    with pytest.raises(ValueError, match=f"attention only.*got '{found}' in layer 0"):
        SharedPrefixCache(getattr(transformers, f"{name}Config")(**config))


@pytest.mark.drawn(1, "imports of a fresh interpreter")
def test_tatten_imports_no_transformers() -> None:
    code = "import sys, tatten, tatten.caches.shared_prefix; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
