"""The static cache in 8 bits inside transformers: `generate` eager and compiled, bytes, errors, beams."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from slow import slow_but
from tiny_models import prompts
from torch import Tensor
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM, MistralConfig, PreTrainedModel, StaticCache

import tatten
from tatten.integrations import transformers as integration
from tatten.integrations.transformers import cache_kwargs
from tatten.integrations.transformers.quantised import dequantise, quantise

DTYPES = [torch.float8_e4m3fn, torch.int8]
NEW = 6


def build() -> PreTrainedModel:
    return tiny_models.build("llama", "sdpa")


def generate(model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: object, **kwargs: object) -> Tensor:
    kwargs = {"max_new_tokens": NEW, "do_sample": False, **kwargs}
    return model.generate(ids, attention_mask=mask, **cache_kwargs(cache), **kwargs)


def compiled(backend: str) -> dict[str, object]:
    config = CompileConfig(backend=backend, mode="default")
    config._compile_all_devices = True
    return {"compile_config": config}


@pytest.mark.drawn(2, "compiled decoding with transformers")
@pytest.mark.parametrize("dtype", slow_but([torch.float8_e4m3fn], DTYPES))
def test_a_compiled_step_reads_8_bits_and_gives_the_tokens_of_eager_mode(dtype: torch.dtype) -> None:
    model, (ids, mask) = build(), prompts(padded=True)
    length = ids.shape[1] + NEW
    eager, ours = (tatten.QuantizedStaticCache(model.config, length, dtype) for _ in range(2))
    want = generate(model, ids, mask, eager, disable_compile=True)
    torch._dynamo.reset()
    with tatten.recording() as report:
        got = generate(model, ids, mask, ours, **compiled("tatten"))
    assert torch.equal(got, want)
    assert report.rewritten
    kind = str(dtype)[6:]
    assert all(f"k {kind}" in x.shapes and f"v {kind}" in x.shapes for x in report.rewritten), str(report)
    ours.reset()
    assert torch.equal(generate(model, ids, mask, ours, **compiled("tatten")), want), "after a reset"


def test_beams() -> None:
    """Beams reorder scales as well as keys."""
    model, (ids, mask) = build(), prompts(padded=False)
    cache = tatten.QuantizedStaticCache(model.config, ids.shape[1] + NEW, torch.int8)
    tokens = generate(model, ids, mask, cache, num_beams=3, disable_compile=True)
    assert tokens.shape == (ids.shape[0], ids.shape[1] + NEW)
    layer = cache.layers[0]
    assert layer.keys.shape[0] == layer.key_scale.shape[0] == 3 * ids.shape[0]
    before = dequantise(layer.values, layer.value_scale, torch.float32)
    order = torch.randperm(layer.keys.shape[0])
    layer.reorder_cache(order)
    assert torch.equal(dequantise(layer.values, layer.value_scale, torch.float32), before[order])


def test_bytes() -> None:
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2, intermediate_size=8,
        vocab_size=16,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    ours, theirs = tatten.QuantizedStaticCache(config, 64), StaticCache(config, 64)
    assert ours.nbytes == 0
    with torch.no_grad():
        for cache in (ours, theirs):
            model(torch.ones(2, 3, dtype=torch.long), **cache_kwargs(cache))
    assert ours.nbytes <= 0.55 * sum(x.keys.nbytes + x.values.nbytes for x in theirs.layers)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding(dtype: torch.dtype) -> None:
    x = torch.randn(50, 64) * torch.logspace(-30, 30, 50)[:, None]
    x[0] = 0
    narrow, scale = quantise(x, dtype)
    assert narrow.dtype == dtype
    assert scale.dtype == torch.float32
    error = (dequantise(narrow, scale, torch.float64) - x).abs()
    largest = x.abs().amax(dim=1, keepdim=True)
    allowed = largest / 127 / 2 if dtype == torch.int8 else x.abs() / 16 + largest / 448 * 2**-10
    assert (error <= 1.001 * allowed).all()
    poisoned = dequantise(*quantise(torch.tensor([[1.0, float("nan")], [1.0, 2.0]]), dtype), torch.float32)
    assert poisoned.isnan().all(dim=1).tolist() == [True, False]


def test_bad_input() -> None:
    config = LlamaConfig(num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"`dtype` must be torch.float8_e4m3fn or torch.int8, got torch.float16"):
        tatten.QuantizedStaticCache(config, 8, torch.float16)
    with pytest.raises(ValueError, match="`max_cache_len` must be at least 1, got 0"):
        tatten.QuantizedStaticCache(config, 0)
    with pytest.raises(TypeError, match="`max_cache_len` must be an int, got '16'"):
        tatten.QuantizedStaticCache(config, "16")
    sliding = MistralConfig(num_hidden_layers=2, sliding_window=4)
    with pytest.raises(ValueError, match=r"`config` must have layers of full attention only, got .*Sliding.* at 0"):
        tatten.QuantizedStaticCache(sliding, 8)
    assert integration.QuantizedStaticCache is tatten.QuantizedStaticCache
