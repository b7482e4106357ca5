"""Cases that a prefill over several ranks refuses: on all ranks, in bounded time, with the cache as it was."""

from __future__ import annotations

import copy
import functools
import inspect
import time
from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed as dist
import transformers
from ranks import RankError, run_ranks, try_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tatten.integrations.transformers import ShardedKVCache, SharedPrefixCache, cache_kwargs
from tatten.integrations.transformers.config import cache_argument

SMALL = tiny_models.GQA | {"head_dim": 16}
FULL = {"layer_types": ["full_attention"] * 2}


def one_dim() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("kv",))


def message(model: Any, prompt: Any, chunk: Any = None, cache: Any = None) -> str:
    """The error of a prefill, after which the cache is empty, and of use."""
    cache = ShardedKVCache(model.config, one_dim(), 16) if cache is None else cache
    held, nbytes = int(cache._cache.length), cache.nbytes
    try:
        cache.prefill(model, prompt, chunk)
    except (TypeError, ValueError, NotImplementedError) as error:
        assert (int(cache._cache.length), cache.nbytes) == (held, nbytes)
        return f"{type(error).__name__}: {error}"
    raise AssertionError("accepted")


def check_arguments() -> list[str]:
    model, ids, rank = tiny_models.build("llama", "tatten"), torch.arange(1, 13)[None], dist.get_rank()
    first, other = ShardedKVCache(model.config, one_dim(), 32), ids.clone()
    first.prefill(model, ids)
    prefix = SharedPrefixCache(model.config, mesh=one_dim())
    prefix.prefill(model, ids)
    other[0, 5] += rank
    no_tatten = tiny_models.build("llama", "sdpa")
    return [
        message(model, ids, cache=first),
        message(model, ids, cache=prefix),
        message(model, ids, cache=prefix.fork(2, 4)),
        message(model, ids.repeat(1, 2)),
        message(model, ids, 3),
        message(model, ids, 0),
        message(model, ids, 4.0),
        message(model, ids[0]),
        message(model, ids.float()),
        message(model, other),
        message(model, ids[:, rank:]),
        message(model, ids, 2 + 2 * rank),
        message(model, ids, 2 + rank),
        message(tiny_models.build("llama", "tatten").to([torch.bfloat16, torch.float16][rank]), ids),
        message(tiny_models.build(["llama", "qwen3"][rank], "tatten"), ids),
        message(no_tatten, ids, cache=SharedPrefixCache(2, mesh=one_dim())),
        message(model, ids, cache=SharedPrefixCache(3, mesh=one_dim())),
        message(model, ids, cache=SharedPrefixCache(2)),
    ]


def test_arguments() -> None:
    zero, one = run_ranks(2, check_arguments)
    differ = "ValueError: `prompt`, `chunk` and `model` must be the same on all ranks that share a cache, got "
    says = [
        "ValueError: `prefill` needs an empty cache for the 12 tokens of `prompt`, got one with 12",
        "ValueError: `prefill` needs an empty cache for the 12 tokens of `prompt`, got one with 12",
        "ValueError: `prefill` needs an empty cache for the 12 tokens of `prompt`, got one with 12",
        "ValueError: `capacity` must hold the 24 tokens of `prompt`, got 16",
        "ValueError: `chunk` must be a multiple of 2, the ranks that share the sequence, got 3",
        "ValueError: `chunk` must be at least 1, got 0",
        "TypeError: `chunk` must be an int, got 4.0",
        "ValueError: `prompt` must be [batch, P] with a token at least, got shape (12,)",
        "TypeError: `prompt` must be a tensor of integers, got torch.float32",
        differ + "a prompt of shape (1, 12) (#",
        differ + "a prompt of shape (1, 12) (#",
        differ + "a prompt of shape (1, 12) (#",
        differ + "a prompt of shape (1, 12) (#",
        differ + "a prompt of shape (1, 12) (#",
        differ + "a prompt of shape (1, 12) (#",
        "ValueError: `model` must have attn_implementation=\"tatten\", got 'sdpa'",
        "ValueError: `model` must have the 3 layers of the cache, got 2",
        "ValueError: `prefill` needs a cache over a `mesh`, got mesh=None",
    ]
    for want, mine, theirs in zip(says, zero, one, strict=True):
        if want.startswith(differ) and "must be a multiple" in theirs:  # the other rank's own error, which that raises
            assert "ValueError (`chunk` must be a multiple of 2" in mine
            assert "on ranks [0] and " in mine
            continue
        assert mine == theirs
        assert mine.startswith(want), mine
        assert not want.startswith(differ) or ("on ranks [0] and " in mine and mine.endswith(" on ranks [1]"))
    for i, mine, theirs in (
        (11, ", chunk 2, a LlamaForCausalLM", ", chunk 4, a LlamaForCausalLM"),
        (13, "a LlamaForCausalLM in torch.bfloat16 on ranks [0]", "a LlamaForCausalLM in torch.float16 on ranks [1]"),
        (14, "a LlamaForCausalLM in torch.float32 on ranks [0]", "a Qwen3ForCausalLM in torch.float32 on ranks [1]"),
    ):
        assert mine in zero[i]
        assert theirs in zero[i]


class Mixed(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.conv = inner, nn.Conv1d(64, 64, 2)


def models() -> dict[str, transformers.PreTrainedModel]:
    config = {"attn_implementation": "tatten"}
    made = {name: tiny_models.build(name, "tatten") for name in ("mistral_window", "gemma3", "llama4", "deepseek_v3")}
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    for name, kind, more in (
        ("dynamic rope", "Llama", {"rope_parameters": rope}),
        ("soft cap", "Gemma2", FULL | {"attn_logit_softcapping": 30.0}),
        ("sinks", "GptOss", FULL | experts),
        ("alibi", "Bloom", {}),
    ):
        made[name] = transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, f"{kind}Config")(**(SMALL | more)), **config
        ).eval()
    made["convolution"] = tiny_models.build("llama", "tatten")
    made["convolution"].model.layers[1].mlp = Mixed(made["convolution"].model.layers[1].mlp)
    made["both ways"] = tiny_models.build("llama", "tatten")
    for layer in made["both ways"].model.layers:
        layer.self_attn.is_causal = False
    made["soft cap unannounced"] = changed(softcap=3.0)
    made["own attention"] = tiny_models.build("llama", "tatten")
    made["own attention"].model.layers[0].self_attn.config = copy.copy(made["own attention"].config)
    made["own attention"].model.layers[0].self_attn.config._attn_implementation = "sdpa"
    made["no cache"] = changed(**{cache_argument(made["both ways"]): None})
    return made


def changed(**arguments: Any) -> transformers.PreTrainedModel:
    """A Llama that calls attention of its last layer with other arguments."""
    model = tiny_models.build("llama", "tatten")
    attention = model.model.layers[1].self_attn
    attention.forward = functools.partial(
        lambda forward, *args, **kwargs: forward(*args, **(kwargs | arguments)), attention.forward
    )
    return model


SAYS = {
    "mistral_window": "attention to all tokens (`config` must have layers of full attention only, got a "
    "DynamicSlidingWindowLayer at 0)",
    "gemma3": "got a DynamicSlidingWindowLayer at 0)",
    "llama4": "got a DynamicSlidingWindowLayer at 0)",
    "deepseek_v3": "keys and values in the cache, and it has latents there",
    "dynamic rope": "rotary embeddings that do not depend on the length, and its are 'dynamic'",
    "soft cap": "attention without a soft cap, and `attn_logit_softcapping` is set",
    "sinks": "attention without sinks, and model.layers.0.self_attn has some",
    "alibi": "the argument `position_ids`, and BloomForCausalLM has none",
    "convolution": "nothing but attention to mix tokens, and there is a Conv1d at model.layers.1.mlp.conv",
    "both ways": "LlamaAttention must have plain causal attention for a prefill over several ranks, got `is_causal`",
    "soft cap unannounced": "LlamaAttention must have plain causal attention for a prefill over several ranks, got "
    "`softcap`",
    "own attention": 'ValueError: `model` must call attention "tatten" in each layer, got one that did not',
    "no cache": "ValueError: `model` must give keys and values to each layer of the cache, got none for [1]",
}


def check_models() -> dict[str, str]:
    ids = torch.arange(1, 13)[None]
    return {name: message(model, ids) for name, model in models().items()}


def test_models_that_are_not_divided() -> None:
    for found in run_ranks(2, check_models):
        assert found.keys() == SAYS.keys()
        for name, says in SAYS.items():
            assert "Error" in says or found[name].startswith("NotImplementedError: "), found[name]
            assert says in found[name], found[name]


def test_the_name_of_a_cache() -> None:
    """Transformers' own models before and from 5.24 on, and models with code of their own."""

    class Before(nn.Module):
        def forward(self, input_ids: Any, past_key_values: Any = None) -> None: ...

    class Now(nn.Module):
        def forward(self, input_ids: Any, cache: Any = None) -> None: ...

    assert cache_argument(Before()) == "past_key_values"
    assert cache_argument(Now()) == "cache"
    model = tiny_models.build("llama", "tatten")
    assert cache_argument(model) in inspect.signature(model.forward).parameters


def fail_in_the_middle() -> str:
    """Rank 1 fails in the second layer of the second chunk; the cache of rank 0 is as it was, and works again."""
    model, ids = tiny_models.build("llama", "tatten"), torch.arange(1, 13)[None]
    caches = ShardedKVCache(model.config, one_dim(), 16), SharedPrefixCache(model.config, mesh=one_dim())
    calls = 0

    def broken(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if dist.get_rank() == 1 and calls == 2:
            raise MemoryError

    hook = model.model.layers[1].register_forward_pre_hook(broken)
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        caches[0].prefill(model, ids, chunk=4)
    assert int(caches[0]._cache.length) == caches[0].nbytes == 0
    hook.remove()
    assert caches[0].get_seq_length() == 0
    assert model(ids, **cache_kwargs(caches[0])).logits.isfinite().all()  # of this rank alone: no collective
    return str(caught.value)


@pytest.mark.drawn(1, "ranks that fail")
def test_a_rank_that_fails() -> None:
    start = time.monotonic()
    zero, _ = run_ranks(2, fail_in_the_middle, timeout=3)
    assert time.monotonic() - start < 60
    assert "rank 0 waited in vain for keys and values from rank 1" in zero


def come_late() -> None:
    model = tiny_models.build("llama", "tatten")
    cache = ShardedKVCache(model.config, one_dim(), 16)
    if dist.get_rank() == 1:
        time.sleep(8)
        return
    cache.prefill(model, torch.arange(1, 13)[None])


@pytest.mark.drawn(1, "ranks that fail")
def test_a_rank_that_does_not_come() -> None:
    zero, _ = try_ranks(2, come_late, timeout=3, seconds=60)
    assert isinstance(zero, RankError)
    assert "to agree on `prompt`, `chunk` and `model`: rank 1 of ranks [0, 1] did not arrive within 3 s" in str(zero)
