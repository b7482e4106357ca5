"""The source of an encoder-decoder, in buffers that the steps of later calls read, too."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.utils import ModelOutput

from tatten.caches.static_address import mark_static
from tatten.integrations.transformers.config import attention_implementation
from tatten.integrations.transformers.loop.fingerprint import leaves

LEAST_STEP = 128  # between the numbers of slots of short sources
INPUTS_DIM, KEYS_DIM = 1, 2  # the dimension of a source's tokens in inputs, and in keys and values
MASKING = {"eager", "sdpa", "tatten"}  # implementations of attention that apply a mask of the source


@dataclass(frozen=True)
class SourceInputs:
    """The arguments of the model's forward that are the same at each step of a call.

    Attributes:
        inputs: the arguments. With `slots`, they include the mask of the source.
        slots: the number of slots for the tokens of the source in buffers, or None for as many as it has tokens.
    """

    inputs: dict[str, Any]
    slots: int | None

    def layout(self) -> tuple[object, ...]:
        """Return the type of an encoder's output, and the names, shapes and dtypes of the buffers for inputs."""
        described = (
            (_shape(x, INPUTS_DIM, self.slots), x.dtype) if isinstance(x, Tensor) else x for x in leaves(self.inputs)
        )
        return type(self.inputs["encoder_outputs"]), *described


class Source:
    """Everything that a step reads of a source: inputs of the model, and the keys and values of each layer.

    Attributes:
        cache: the decoder's cache, with the keys and values of the source.
        inputs: the arguments of the model's forward that are the same at each step.

    Args:
        prefilled: the cache of a call, whose prefill has run.
        call: the inputs of the call.
    """

    def __init__(self, prefilled: EncoderDecoderCache, call: SourceInputs):
        source = DynamicCache()
        for index, layer in enumerate(prefilled.cross_attention_cache.layers):
            keys, values = (_copied(x, KEYS_DIM, call.slots) for x in (layer.keys, layer.values))
            source.update(keys, values, index)
        self.cache = EncoderDecoderCache(prefilled.self_attention_cache, source)
        self.inputs = _copied(call.inputs, INPUTS_DIM, call.slots)
        mark_static(*_tensors(self.inputs), *_keys_and_values(self.cache))

    def fill(self, prefilled: EncoderDecoderCache, call: SourceInputs) -> None:
        """Copy the source of another call, whose inputs have the same layout."""
        for buffer, x in zip(_tensors(self.inputs), _tensors(call.inputs), strict=True):
            _fill(buffer, x, INPUTS_DIM)
        for buffer, x in zip(_keys_and_values(self.cache), _keys_and_values(prefilled), strict=True):
            _fill(buffer, x, KEYS_DIM)


def source_inputs(model: PreTrainedModel, inputs: dict[str, Any]) -> SourceInputs:
    """Return the inputs of a call, and the number of slots for its source.

    The number is rounded up, so that many lengths share a step, if the mask of the source excludes the slots past its
    end. Additive masks with `finfo.min`, as T5 has, make a step read these slots, so a long source gets at most a
    fourth more. They exclude no slot of a sequence that is masked in full.

    A model of transformers masks the source by the mask that `generate` passes if its decoder takes an
    `encoder_attention_mask`, and its encoder returns no mask as those of Moonshine, Canary and Cohere ASR do.
    """
    outputs, mask = inputs["encoder_outputs"], inputs.get("attention_mask")
    states: Tensor = outputs[0]
    if mask is None:
        mask = torch.ones(states.shape[:2], dtype=torch.int64, device=states.device)
    unknown = len([*_tensors(outputs)]) > 1 or hasattr(outputs, "attention_mask") or mask.shape != states.shape[:2]
    if unknown or not _masks_source(model) or not bool(mask.any(1).all()):
        return SourceInputs(inputs, None)
    tokens = states.shape[1]
    step = max(LEAST_STEP, 1 << (tokens - 1).bit_length() >> 3)
    masked = dict(sorted({**inputs, "attention_mask": mask}.items()))  # in one order, whether there was a mask or not
    return SourceInputs(masked, -(-tokens // step) * step)


def _masks_source(model: PreTrainedModel) -> bool:
    decoder: nn.Module = model.get_decoder()
    of_transformers = type(model).__module__.startswith("transformers.models.")
    masks = of_transformers and attention_implementation(decoder.config) in MASKING
    return masks and "encoder_attention_mask" in inspect.signature(decoder.forward).parameters


def _copied(x: Any, dim: int, slots: int | None) -> Any:
    """Return a copy of a tensor, or of a structure of tensors, with `slots` slots."""
    if isinstance(x, Tensor):
        copy = x.new_empty(_shape(x, dim, slots))
        _fill(copy, x, dim)
        return copy
    if isinstance(x, dict):
        items = {name: _copied(y, dim, slots) for name, y in x.items()}
        return type(x)(**items) if isinstance(x, ModelOutput) else items
    if isinstance(x, (list, tuple)):
        parts = [_copied(y, dim, slots) for y in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    return x


def _fill(buffer: Tensor, x: Tensor, dim: int) -> None:
    """Copy the tokens of `x`, and clear the slots past its end."""
    if buffer.shape == x.shape:
        buffer.copy_(x)
        return
    tokens = x.shape[dim]
    buffer.narrow(dim, 0, tokens).copy_(x)
    buffer.narrow(dim, tokens, buffer.shape[dim] - tokens).zero_()


def _shape(x: Tensor, dim: int, slots: int | None) -> tuple[int, ...]:
    return tuple(x.shape) if slots is None else (*x.shape[:dim], slots, *x.shape[dim + 1 :])


def _tensors(inputs: object) -> Iterator[Tensor]:
    return (x for x in leaves(inputs) if isinstance(x, Tensor))


def _keys_and_values(cache: EncoderDecoderCache) -> list[Tensor]:
    return [x for layer in cache.cross_attention_cache.layers for x in (layer.keys, layer.values)]
