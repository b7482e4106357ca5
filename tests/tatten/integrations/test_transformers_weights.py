"""`attn_implementation="tatten"` with `output_attentions=True`: the weights of "eager", for every model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import every_model
import pytest
import torch
from slow import slow_but
from torch import Tensor
from transformers import PreTrainedModel

import tatten.integrations.transformers

IDS = torch.arange(3, 12).repeat(2, 1)
Build = Callable[[tuple[str, str]], list[PreTrainedModel]]


def inputs(model: PreTrainedModel, seq2seq: bool) -> dict[str, Tensor]:
    """Random inputs for a model, by the name of its main one."""
    name, generator = model.main_input_name, torch.Generator().manual_seed(0)
    if name == "pixel_values":
        return {name: torch.randn(2, getattr(model.config, "num_channels", 3), 32, 32, generator=generator)}
    if name == "input_values":
        return {name: torch.randn(2, 4000, generator=generator)}
    if name == "past_values":
        values = torch.randn(2, 64, generator=generator)
        return {name: values, "past_values_padding": torch.zeros(2, 64).long(), "freq": torch.zeros(2, 1).long()}
    return {name: IDS, "decoder_input_ids": IDS[:, :4]} if seq2seq else {name: IDS}


@torch.no_grad()
def weights(model: PreTrainedModel, seq2seq: bool) -> dict[str, Any]:
    """The tuples of attention weights that a model returns."""
    torch.manual_seed(1)
    out = model(**inputs(model, seq2seq), output_attentions=True)
    return {name: found for name, found in out.items() if "attentions" in name and found is not None}


def check(build: Build, seq2seq: bool = False) -> None:
    """Skip a model that "eager" can't run at these sizes, that has no weights, or that transformers refuses."""
    try:
        eager, _ = build(("eager", "eager"))
        want = weights(eager, seq2seq)
    except Exception as error:
        pytest.skip(f'{type(error).__name__} with attn_implementation="eager": {error}')
    if not any(want.values()):
        pytest.skip("it returns no attention weights")
    try:
        ours = build(("eager", "tatten"))[1]
    except KeyError as error:
        if str(error) != "'tatten'":
            raise
        pytest.skip("it has classes of attention by name")
    got = weights(ours, seq2seq)
    assert [(name, len(x)) for name, x in got.items()] == [(name, len(x)) for name, x in want.items()]
    try:
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0, equal_nan=True)
    except AssertionError:
        if sees_other_keys_with_sdpa(build, seq2seq):
            pytest.skip('transformers gives it other masks for "sdpa" than for "eager"')
        raise


@torch.no_grad()
def sees_other_keys_with_sdpa(build: Build, seq2seq: bool) -> bool:
    """Tell whether transformers itself computes something else with SDPA, as for UMT5 and Moshi in 5.17."""
    eager, sdpa = (model(**inputs(model, seq2seq))[0] for model in build(("eager", "sdpa")))
    return bool((eager - sdpa).abs().max() > 1e-3)


@pytest.mark.parametrize("name", slow_but(["gpt2", "opt", "stablelm", "gpt_bigcode"], every_model.NAMES))
def test_decoder(name: str) -> None:
    check(lambda attentions: every_model.build_pair(name, attentions))


@pytest.mark.parametrize("name", slow_but(["t5", "bart"], every_model.SEQ2SEQ_NAMES))
def test_encoder_decoder(name: str) -> None:
    check(lambda attentions: every_model.build_pair(name, attentions, seq2seq=True), seq2seq=True)


@pytest.mark.parametrize("name", slow_but(["siglip_vision_model", "timesfm", "albert"], every_model.BASE_NAMES))
def test_base_model(name: str) -> None:
    check(lambda attentions: every_model.build_base_pair(name, attentions))


def test_generate() -> None:
    found = []
    for model in every_model.build_pair("opt", ("eager", "tatten")):
        options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
        found.append(model.generate(IDS, output_attentions=True, **options).attentions)
    assert len(found[0]) == 3
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=0)


@pytest.mark.drawn(2, "compiled decoding with transformers")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_compiled(name: str) -> None:
    """The weights are outputs of the graph, and the calls are left as they are."""
    torch._dynamo.reset()
    eager, ours = every_model.build_pair(name, ("eager", "tatten"))
    with tatten.recording() as report, torch.no_grad():
        got = torch.compile(ours, backend="tatten", options={"inner": "eager"})(IDS, output_attentions=True).attentions
    assert len(got) == 2
    torch.testing.assert_close(got, eager(IDS, output_attentions=True).attentions, atol=1e-6, rtol=0)
    assert not report.rewritten


def test_weights_are_not_computed_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from tatten.integrations.transformers import local

    def refuse(*args: Any) -> None:
        raise AssertionError("the model's own code was called")

    monkeypatch.setattr(local, "eager_attention", refuse)
    _, model = every_model.build_pair("gpt2", ("eager", "tatten"))
    with torch.no_grad():
        assert model(IDS, output_hidden_states=True).attentions is None
    with pytest.raises(AssertionError, match="own code"):
        model(IDS, output_attentions=True)
