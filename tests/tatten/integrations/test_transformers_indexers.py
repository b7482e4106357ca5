"""Caches of tatten with models whose indexers pick keys: the logits and tokens of transformers' own caches."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import selecting_models
import torch
import transformers
from latent_models import build_model
from slow import slow_but
from tiny_models import PROMPT, prompts
from torch import Tensor
from transformers import CompileConfig, DynamicCache

import tatten
from tatten.integrations.transformers import QuantizedStaticCache, SharedPrefixCache, cache_kwargs
from tatten.passes import cost

NEW, N = 5, 3
NAMES = ["deepseek_v32", "glm_moe_dsa", "axk2", "mistral_large4", "hy_v4", "dots3_note"]


def build(name: str, **config: Any) -> transformers.PreTrainedModel:
    """A model with so many index heads that hardly any two keys have the same score."""
    pytest.importorskip(f"transformers.models.{name}", reason=f"this transformers has no {name}")
    spec = selecting_models.MODELS[name].model
    model = build_model(dataclasses.replace(spec, config=spec.config | {"index_n_heads": 16} | config), torch.float32)
    if hasattr(model, "generation_config"):  # of those with a head
        model.generation_config.eos_token_id = None
    return model


def inputs(padded: bool) -> tuple[Tensor, Tensor]:
    ids, mask = prompts(padded)
    return ids % 60 + 3, mask


def forward(model: Any, ids: Tensor, mask: Tensor, cache: Any, run: Any = None) -> Tensor:
    """The result for the last tokens `ids` of those in the mask."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.no_grad():
        out = (run or model)(ids, attention_mask=mask, position_ids=positions, **cache_kwargs(cache), use_cache=True)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def prefilled(model: Any, ids: Tensor, mask: Tensor) -> SharedPrefixCache:
    """Prefill all tokens but the last, in two parts."""
    cache = SharedPrefixCache(model.config)
    for part in (slice(0, 7), slice(7, PROMPT - 1)):
        forward(model, ids[:, part], mask[:, : part.stop], cache)
    return cache


@pytest.mark.drawn(2)
@pytest.mark.parametrize("padded", [False, True], ids=["one", "padded"])
@pytest.mark.parametrize("name", slow_but(["deepseek_v32", "glm_moe_dsa"], NAMES))
def test_steps_of_a_fork_and_of_a_selection(name: str, padded: bool) -> None:
    """The logits of a dynamic cache with as many copies of the prompts, and index keys of a prefix are stored once."""
    model, (ids, mask) = build(name), inputs(padded)
    root = prefilled(model, ids, mask)
    fork, own = root.fork(N, NEW), DynamicCache(config=model.config)
    ids, mask = (x.repeat_interleave(N, 0) for x in (ids, mask))
    forward(model, ids[:, :-1], mask[:, :-1], own)
    suffix = fork.nbytes - root.nbytes
    bytes_of_a_token = sum(x.nbytes for layer in own.layers for x in held(layer)) // (PROMPT - 1)
    if not any(layer.is_sliding for layer in own.layers):
        assert root.nbytes == bytes_of_a_token // N * (PROMPT - 1)
        assert suffix == bytes_of_a_token * NEW
    generator = torch.Generator().manual_seed(0)
    for new, kept in ((1, None), (2, None), (1, [N - 1, 0, 1, N - 1])):  # several tokens at once, then a selection
        if kept is not None:
            fork = fork.select(kept)
            own.batch_select_indices(torch.tensor(kept))
            mask = mask[kept]
        tokens = torch.randint(3, 60, (len(mask), new), generator=generator)
        mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
        want = forward(model, tokens, mask, own)
        torch.testing.assert_close(forward(model, tokens, mask, fork), want, rtol=1e-4, atol=1e-4)
        assert want.abs().max() > 0.1


def held(layer: Any) -> list[Tensor]:
    """All that a layer of transformers holds."""
    index_keys = getattr(layer, "indexer_keys", None)
    return [layer.keys, layer.values, *([] if index_keys is None else [index_keys])]


MODES = {
    "sampling": (N, {"do_sample": True, "num_return_sequences": N}),
    "beams": (N, {"do_sample": False, "num_beams": N}),
}


def generate(model: Any, ids: Tensor, mask: Tensor, **kwargs: Any) -> Tensor:
    torch.manual_seed(0)
    return model.generate(ids, attention_mask=mask, **({"max_new_tokens": NEW} | kwargs))


@pytest.mark.parametrize("mode", MODES)
def test_generate(mode: str) -> None:
    """Also again in the memory of the last fork, and from a second level."""
    model, (ids, mask) = build("deepseek_v32"), inputs(True)
    n, kwargs = MODES[mode]
    root, fork = prefilled(model, ids, mask), None
    want = generate(model, ids, mask, **kwargs)
    for _ in range(2):
        fork = root.fork(n, NEW, into=fork)
        assert torch.equal(generate(model, ids, mask, **cache_kwargs(fork), **kwargs), want)
    second = root.fork(1, NEW).fork(n, NEW)
    assert torch.equal(generate(model, ids, mask, **cache_kwargs(second), **kwargs), want)


@pytest.mark.parametrize("start", ["empty", "fork"])
def test_assisted_decoding(start: str) -> None:
    """Rejected candidates are cropped, index keys with them, and what is held is not added again."""
    model, assistant, (ids, mask) = build("deepseek_v32"), build("deepseek_v32"), inputs(False)
    with torch.no_grad():
        assistant.lm_head.weight.mul_(1 + 0.3 * torch.randn(64, 1, generator=torch.Generator().manual_seed(0)))
    cache = SharedPrefixCache(model.config) if start == "empty" else prefilled(model, ids, mask).fork(1, 40)
    kwargs = {"do_sample": False, "max_new_tokens": 12}
    got = generate(model, ids, mask, **cache_kwargs(cache), assistant_model=assistant, **kwargs)
    assert torch.equal(got, generate(model, ids, mask, **kwargs))


@pytest.mark.drawn(2, "compiled decoding with transformers")
@pytest.mark.parametrize("backend", slow_but(["tatten"], ["tatten", "inductor"]))
def test_compiled_generate(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads what the indexer picks of the prompt's latents, which are stored once, and of each sample's."""
    monkeypatch.setitem(cost.RATES, "cpu", cost.Rates(1.0, 0.0, 1.0))
    model, (ids, mask) = build("deepseek_v32"), inputs(True)
    _, kwargs = MODES["sampling"]
    options = {"inner": "eager"} if backend == "tatten" else None
    config = CompileConfig(backend="tatten", mode=None, options=options, fullgraph=True)
    config._compile_all_devices = True
    fork = prefilled(model, ids, mask).fork(N, NEW)
    torch._dynamo.reset()
    with tatten.recording() as report:
        got = generate(model, ids, mask, **cache_kwargs(fork), compile_config=config, **kwargs)
    assert torch.equal(got, generate(model, ids, mask, **kwargs))
    attention = [x for x in report.rewritten if x.attention]
    if fork.layers[0].kv.keys.shape[1] == 1:  # transformers 5.17 caches the keys and values that it projects
        assert [x.op for x in attention] == ["tatten.latent_attention.default"] * 2
        assert all(f"c float32[3, 1, {PROMPT - 1}, " in x.shapes for x in attention)
    assert all(f"4 of {PROMPT - 1 + NEW} keys by top-k" in x.note for x in attention)
    scores = [x for x in report.rewritten if not x.attention]
    assert [x.op for x in scores] == ["tatten.index_scores.default"] * 2
    assert all(f"k float32[3, 1, {PROMPT - 1}, 16] k float32[9, 1, {NEW}, 16] " in x.shapes for x in scores)


def test_attention_tatten_in_eager_mode() -> None:
    model, (ids, mask) = build("deepseek_v32"), inputs(True)
    want = generate(model, ids, mask, do_sample=False)
    model.set_attn_implementation("tatten")
    got = generate(model, ids, mask, **cache_kwargs(prefilled(model, ids, mask).fork(1, NEW)), do_sample=False)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "config, found",
    [
        ({"index_kpool": 2}, "index keys of single tokens, got `index_kpool` 2"),
        ({"kv_source_layers": [0, 0]}, "separate keys and values in each layer .* got those of layer 0 in layer 1"),
    ],
)
def test_caches_that_hold_other_index_keys_are_refused(config: dict[str, Any], found: str) -> None:
    """Pools of keys, whose models read more of a cache than index keys; and layers with index keys alone."""
    own = build("deepseek_v32").config
    for name, value in config.items():
        setattr(own, name, value)
    with pytest.raises(ValueError, match=f"`config` must have {found}"):
        SharedPrefixCache(own)


@pytest.mark.parametrize("name, found", [("glm5_next", "linear_attention"), ("minimax_m3_vl", "minimax_m3_sparse")])
def test_layers_that_hold_something_else_are_refused(name: str, found: str) -> None:
    pytest.importorskip(f"transformers.models.{name}")
    if name == "glm5_next" and not hasattr(transformers, "Dots3NoteConfig"):
        pytest.skip("transformers 5.17 has another name for its layers")
    with pytest.raises(ValueError, match=f"attention only.* got '{found}' in layer"):
        SharedPrefixCache(selecting_models.build(name, torch.float32).config)


def test_a_layer_without_an_indexer_takes_no_index_keys() -> None:
    cache = SharedPrefixCache(build("glm_moe_dsa").config)  # layers 1 and 3 share the picks of others
    key = torch.zeros(1, 2, 16)
    assert cache.layers[0].update_indexer(key) is key
    with pytest.raises(ValueError, match="layer 1 must have an indexer of its own to store index keys, got none"):
        cache.layers[1].update_indexer(key)


def test_a_number_of_layers_tells_of_no_indexer() -> None:
    with pytest.raises(ValueError, match=r"layer 0 must have an indexer .* give the cache the config of the model"):
        SharedPrefixCache(2).layers[0].update_indexer(torch.zeros(1, 2, 16))


def test_8_bit_caches_refuse_index_layers() -> None:
    with pytest.raises(ValueError, match="layers of full attention only, got a DynamicIndexedLayer at 0"):
        QuantizedStaticCache(build("deepseek_v32").config, 32)
