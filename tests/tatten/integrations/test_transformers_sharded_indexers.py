"""Caches over a mesh with models whose indexers pick keys: tokens and logits of one process, picks on all ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import selecting_models
import torch
import transformers
from latent_models import build_model
from ranks import run_ranks
from sharded_generate import NEW, N, forked, generate, one_dim
from slow import slow_but
from tiny_models import PROMPT, prompts
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import CompileConfig

import tatten
from tatten.integrations.transformers import ShardedKVCache, SharedPrefixCache, cache_kwargs
from tatten.passes import cost


def build(name: str, attention: str = "tatten") -> transformers.PreTrainedModel:
    """A model with so many index heads that hardly any two keys have the same score."""
    spec = selecting_models.MODELS[name].model
    model = build_model(
        dataclasses.replace(spec, config=spec.config | {"index_n_heads": 16, "index_topk": 3}), torch.float64
    )
    model.set_attn_implementation(attention)
    if hasattr(model, "generation_config"):  # of those with a head
        model.generation_config.eos_token_id = None
    return model


def check_models(names: list[str], compiled: bool) -> list[str]:
    cost.RATES["cpu"] = cost.Rates(bytes_per_us=1.0, segment_us=0.0)  # a process of its own, without the fixture
    mesh, (ids, mask) = one_dim(), prompts(True)
    ids, reports = ids % 60 + 3, []
    for name in names:
        model, plain, options = build(name), build(name, "sdpa"), {}
        if compiled:
            config = CompileConfig(backend="tatten", mode=None, options={"inner": "eager"}, fullgraph=True)
            config._compile_all_devices = True
            options = {"compile_config": config}
        for kind in ("whole", "forked"):
            how = {"do_sample": False} if kind == "whole" else {"do_sample": True, "num_return_sequences": N}
            want = generate(plain, ids, mask, **how)
            cache = ShardedKVCache(model.config, mesh, PROMPT + NEW) if kind == "whole" else None
            torch._dynamo.reset()
            with tatten.recording() as report:
                got = generate(
                    model, ids, mask, **cache_kwargs(cache or forked(model, ids, mask, mesh)), **how, **options
                )
            assert torch.equal(got[0], want[0]), f"{name}, {kind}"
            torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)  # its norms are in float32
            if cache is not None:
                check_bytes(cache, model.config, mesh, len(ids))
            reports += [str(report)] if compiled else []
    return reports


def check_bytes(cache: ShardedKVCache, config: Any, mesh: DeviceMesh, batch: int) -> None:
    """Check that each rank has its share of the latents, and all index keys."""
    indexed = (getattr(config, "indexer_types", None) or ["full"] * len(cache.layers)).count("full")
    share = sum(x.nbytes for layer in cache.layers for x in layer.kv.tensors)
    assert cache.nbytes == share + batch * cache.capacity * indexed * config.index_head_dim * 8
    if cache.layers[0].kv.keys.shape[1] == 1:  # transformers 5.17 caches the keys and values that it projects
        of_a_token = len(cache.layers) * (config.kv_lora_rank + config.qk_rope_head_dim)
        assert share == batch * cache.capacity // mesh.size() * of_a_token * 8


@pytest.mark.drawn(2, "compiled decoding with transformers")
@pytest.mark.parametrize("n", slow_but([2], [2, 3]))
def test_compiled_steps_read_the_picks_of_each_rank(n: int) -> None:
    pytest.importorskip("transformers.models.deepseek_v32")
    for reports in run_ranks(n, check_models, ["deepseek_v32"], True):
        for report in reports:
            assert "2 of 2 attention calls rewritten, and the scores of 2 of 2 indexers" in report
            assert "local, then merged over mesh dim 'kv'; 3 of " in report
            assert "keys by top-k" in report
            if hasattr(
                transformers, "Dots3NoteConfig"
            ):  # transformers 5.17 caches the keys and values that it projects
                assert "keys by top-k; keys and values were made of latents" in report


@pytest.mark.parametrize("names", slow_but([["deepseek_v32"]], [["deepseek_v32"], ["glm_moe_dsa"], ["axk2"]]), ids=str)
def test_eager_steps(names: list[str]) -> None:
    pytest.importorskip(f"transformers.models.{names[0]}")
    run_ranks(2, check_models, names, False)


def check_bodies(names: list[str]) -> None:
    """Steps of models without a head: of one token and of two."""
    mesh, (ids, mask) = one_dim(), prompts(True)
    ids, positions = ids % 60 + 3, (mask.cumsum(-1) - 1).clamp(min=0)
    parts = slice(0, 9), slice(9, 10), slice(10, 12)
    for name in names:
        model, plain = build(name), build(name, "sdpa")
        cache, own = ShardedKVCache(model.config, mesh, PROMPT), transformers.DynamicCache(config=model.config)
        for part in parts:
            given = {"attention_mask": mask[:, : part.stop], "position_ids": positions[:, part], "use_cache": True}
            with torch.no_grad():
                got = model(ids[:, part], **given, **cache_kwargs(cache)).last_hidden_state
                want = plain(ids[:, part], **given, **cache_kwargs(own)).last_hidden_state
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert want.abs().max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral_large4", "dots3_note"])
def test_models_without_a_head(name: str) -> None:
    pytest.importorskip(f"transformers.models.{name}", reason=f"this transformers has no {name}")
    run_ranks(2, check_bodies, [name])


def check_refilled() -> None:
    """A cache that was reset, and a fork in the memory of another: index keys of old tokens are gone; then beams."""
    mesh, (ids, mask), model = one_dim(), prompts(True), build("deepseek_v32")
    cache, fork = ShardedKVCache(model.config, mesh, PROMPT + NEW), None
    for shift in (0, 7):
        shifted = (ids + shift) % 60 + 3
        want = generate(model, shifted, mask, do_sample=False)
        for past in (cache, fork := prefilled_into(model, shifted, mask, mesh, fork)):
            got = generate(model, shifted, mask, **cache_kwargs(past), do_sample=False)
            assert torch.equal(got[0], want[0])
        cache.reset()
    want = generate(model, ids, mask, do_sample=False, num_beams=2)
    cache = ShardedKVCache(model.config, mesh, PROMPT + NEW)
    got = generate(model, ids, mask, **cache_kwargs(cache), do_sample=False, num_beams=2)
    assert torch.equal(got[0], want[0])


def prefilled_into(model: Any, ids: Tensor, mask: Tensor, mesh: DeviceMesh, fork: Any) -> SharedPrefixCache:
    cache = SharedPrefixCache(model.config, mesh=mesh)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, :-1]
    model(ids[:, :-1], attention_mask=mask[:, :-1], position_ids=positions, **cache_kwargs(cache))
    return cache.fork(1, NEW, into=fork)


def test_caches_that_are_used_again() -> None:
    pytest.importorskip("transformers.models.deepseek_v32")
    run_ranks(2, check_refilled)


def check_refusals() -> None:
    mesh, (ids, mask) = one_dim(), prompts(False)
    model = build("deepseek_v32")
    cache = ShardedKVCache(model.config, mesh, PROMPT)
    with pytest.raises(NotImplementedError, match="keys and values in the cache, and it has latents there"):
        cache.prefill(model, ids)
    with pytest.raises(ValueError, match=r'must be of a model with attn_implementation="tatten", got .sdpa.'):
        ShardedKVCache(build("deepseek_v32", "sdpa").config, mesh, PROMPT)
    sinks = selecting_models.build("hy_v4", torch.float32)
    sinks.set_attn_implementation("tatten")
    cache = ShardedKVCache(sinks.config, mesh, PROMPT + 1)
    sinks(ids[:, :-1], attention_mask=mask[:, :-1], **cache_kwargs(cache))
    with pytest.raises(ValueError, match="`s_aux` must be None"):
        sinks(ids[:, -1:], attention_mask=mask, **cache_kwargs(cache))


def test_what_is_refused() -> None:
    pytest.importorskip("transformers.models.deepseek_v32")
    run_ranks(2, check_refusals)
