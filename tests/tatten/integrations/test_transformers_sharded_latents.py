"""Caches over a mesh with models of latent attention: tokens and logits of one process, each rank with its latents."""

from __future__ import annotations

import copy
from typing import Any

import latent_models
import pytest
import torch
import transformers
from ranks import run_ranks
from sharded_generate import NEW, N, forked, generate, one_dim
from slow import slow_but
from tiny_models import PROMPT, prompts
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import CompileConfig

import tatten
from tatten.integrations.transformers import ShardedKVCache, cache_kwargs
from tatten.integrations.transformers.handover import LayerShare, hand_over, take_over
from tatten.integrations.transformers.registration import attention
from tatten.passes import cost

NAMES = ["deepseek_v3", "deepseek_v2", "glm4_moe_lite", "minicpm3", "mistral4", "youtu", "axk1", "longcat_flash"]


def build(name: str) -> transformers.PreTrainedModel:
    model = latent_models.build(name, torch.float64)
    model.set_attn_implementation("tatten")
    model.generation_config.eos_token_id = None
    return model


def check_models(names: list[str], padded: bool, compiled: bool) -> list[str]:
    cost.RATES["cpu"] = cost.Rates(bytes_per_us=1.0, segment_us=0.0)  # a process of its own, without the fixture
    mesh, (ids, mask) = one_dim(), prompts(padded)
    ids = ids % 60 + 3
    reports = []
    for name in names:
        model, options = build(name), {}
        if compiled:
            config = CompileConfig(backend="tatten", mode=None, options={"inner": "eager"}, fullgraph=True)
            config._compile_all_devices = True
            options = {"compile_config": config}
        for kind in ("whole", "forked"):
            how = {"do_sample": False} if kind == "whole" else {"do_sample": True, "num_return_sequences": N}
            want = generate(model, ids, mask, **how)
            cache = ShardedKVCache(model.config, mesh, PROMPT + NEW) if kind == "whole" else None
            torch._dynamo.reset()
            with tatten.recording() as report:
                got = generate(
                    model, ids, mask, **cache_kwargs(cache or forked(model, ids, mask, mesh)), **how, **options
                )
            assert torch.equal(got[0], want[0]), f"{name}, {kind}"
            most = 1e-5 if name == "deepseek_v2" else 1e-10  # its rope is in float32
            torch.testing.assert_close(got[1], want[1], rtol=most, atol=most)
            if cache is not None:
                share = cache.capacity // mesh.size() * len(ids) * len(cache.layers)
                assert cache.nbytes == share * (model.config.kv_lora_rank + model.config.qk_rope_head_dim) * 8
            reports += [str(report)] if compiled else []
            if compiled:
                assert {x.op for x in report.rewritten} == {"tatten.latent_attention.default"}, str(report)
                assert len(report.rewritten) == len(model.model.layers)
                assert not report.declined
    return reports


@pytest.mark.drawn(2, "compiled decoding with transformers")
@pytest.mark.parametrize("n", slow_but([2], [2, 4]))
def test_compiled_steps_attend_to_latents(n: int) -> None:
    for whole, of_samples in run_ranks(n, check_models, ["deepseek_v3"], True, True):
        for report in (whole, of_samples):
            assert "local, then merged over mesh dim 'kv'; keys and values were made of latents" in report
        assert of_samples.count(" c float64[") == 2  # of the prompt and of the samples


@pytest.mark.slow
@pytest.mark.parametrize(
    "names, compiled", [(NAMES, False), (["mistral4", "minicpm3"], True)], ids=["eager", "compiled"]
)
def test_other_models(names: list[str], compiled: bool) -> None:
    run_ranks(2, check_models, names, True, compiled, seconds=900.0)


def test_eager_steps() -> None:
    run_ranks(2, check_models, ["deepseek_v3"], True, False)


def check_tensor_parallel() -> None:
    """Half of the heads on each rank of one mesh dim; the latents, which all heads share, over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "kv"))
    ids, mask = prompts(True)
    ids = ids % 60 + 3
    whole, split = build("deepseek_v3"), build("deepseek_v3")
    for layer in split.model.layers:
        plan = {"self_attn.q_b_proj": ColwiseParallel(), "self_attn.kv_b_proj": ColwiseParallel()}
        parallelize_module(layer, mesh["tp"], {**plan, "self_attn.o_proj": RowwiseParallel()})
    want = generate(whole, ids, mask, do_sample=False)
    cache = ShardedKVCache(split.config, mesh, PROMPT + NEW, heads="tp")
    got = generate(split, ids, mask, **cache_kwargs(cache), do_sample=False)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_tensor_parallel_weights() -> None:
    run_ranks(4, check_tensor_parallel)


def check_left_over() -> None:
    """The remains of a step that failed do not reach the attention of whole keys."""
    layer, k = ShardedKVCache(build("deepseek_v3").config, one_dim(), 8).layers[0], torch.randn(1, 1, 1, 16)
    layer.update(k, k[..., :8])
    own = layer.update(k, k[..., :8])
    assert [type(x) for x in own] == [Tensor, Tensor]
    q, mask = torch.randn(1, 1, 1, 16), torch.ones(1, 1, 1, 4, dtype=torch.bool)
    got, _ = attention(torch.nn.Module(), q, *[torch.ones(1, 1, 4, 16)] * 2, mask)
    assert torch.equal(got, torch.ones(1, 1, 1, 16))
    hand_over(LayerShare(layer.kv.layout, 0, 4))
    layer.reset()
    layer.update(k, k[..., :8])
    module = torch.nn.Module()
    module.layer_idx = 0
    assert take_over(module, torch.ones(1, 1, 4, 16)) is None


def test_what_is_left_over_of_a_failed_step() -> None:
    run_ranks(2, check_left_over)


def fail(*args: Any) -> None:
    raise ArithmeticError


def check_next_step_of_the_model(names: list[str]) -> None:
    """A step over latents fails between its cache and its attention; the model goes on with keys of its own."""
    ids, mask = prompts(False)
    ids = ids % 60 + 3
    for name in names:
        model = build(name)
        cache = ShardedKVCache(model.config, one_dim(), PROMPT + NEW)
        own = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :-1], **cache_kwargs(cache))
            model(ids[:, :-1], **cache_kwargs(own))
            want = model(ids, attention_mask=mask).logits[:, -1:]
            for wide in (None, mask[:, None, None].bool()):  # transformers makes no mask, or is given one
                hook = model.model.layers[0].self_attn.kv_b_proj.register_forward_pre_hook(fail)
                with pytest.raises(ArithmeticError):
                    model(ids[:, -1:], **cache_kwargs(cache))
                hook.remove()
                kept = copy.deepcopy(own)
                got = model(ids[:, -1:], attention_mask=wide, **cache_kwargs(kept)).logits
                torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_next_step_after_one_that_failed() -> None:
    run_ranks(2, check_next_step_of_the_model, ["deepseek_v3"])


def check_masks_of_other_widths() -> None:
    """Whole keys reach attention with any mask after a step that failed in the same layer or in another."""
    layer, k = ShardedKVCache(build("deepseek_v3").config, one_dim(), 8).layers[0], torch.randn(1, 1, 1, 16)
    layer.update(k, k[..., :8])
    q, keys = torch.randn(1, 1, 1, 16), torch.ones(1, 1, 5, 16)
    for index in (0, 1):
        module = torch.nn.Module()
        module.layer_idx, module.is_causal = index, True
        for mask in (None, torch.ones(1, 1, 1, 1).bool(), torch.ones(1, 1, 1, 5).bool()):
            layer.update(k, k[..., :8])
            got, _ = attention(module, q, keys, keys, mask)
            assert torch.equal(got, torch.ones(1, 1, 1, 16))


def test_masks_of_other_widths() -> None:
    run_ranks(2, check_masks_of_other_widths)
