"""The source of an encoder-decoder, in buffers that the steps of later calls read, too."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.utils import ModelOutput

from tatten.caches.static_address import mark_static
from tatten.integrations.transformers.loop.fingerprint import leaves

LEAST_STEP = 128  # between the numbers of slots of short sources
INPUTS_DIM, KEYS_DIM = 1, 2  # the dimension of a source's tokens in inputs, and in keys and values


class Source:
    """Everything that a step reads of a source: inputs of the model, and the keys and values of each layer.

    Attributes:
        cache: the decoder's cache, with the keys and values of the source.
        inputs: the arguments of the model's forward that are the same at each step.

    Args:
        prefilled: the cache of a call, whose prefill has run.
        inputs: the inputs of the call.
        slots: see `slots_for`.
    """

    def __init__(self, prefilled: EncoderDecoderCache, inputs: dict[str, Any], slots: int | None):
        self._slots, source = slots, DynamicCache()
        for index, layer in enumerate(prefilled.cross_attention_cache.layers):
            source.update(_widened(layer.keys, KEYS_DIM, slots), _widened(layer.values, KEYS_DIM, slots), index)
        self.cache = EncoderDecoderCache(prefilled.self_attention_cache, source)
        self.inputs = _copied(inputs, slots)
        mark_static(*_tensors(self.inputs), *_keys_and_values(self.cache))

    def fill(self, prefilled: EncoderDecoderCache, inputs: dict[str, Any]) -> None:
        """Copy the source of another call, whose inputs have the same `layout`."""
        for buffer, x in zip(_tensors(self.inputs), _tensors(inputs), strict=True):
            buffer.copy_(_widened(x, INPUTS_DIM, self._slots))
        for buffer, x in zip(_keys_and_values(self.cache), _keys_and_values(prefilled), strict=True):
            buffer.copy_(_widened(x, KEYS_DIM, self._slots))


def slots_for(model: PreTrainedModel, inputs: dict[str, Any]) -> int | None:
    """Return the number of slots for the tokens of a source, or None for as many as it has tokens.

    The number is rounded up, so that many lengths share a step, if the mask of the source excludes the slots past its
    end. Additive masks with `finfo.min`, as T5 has, make a step read these slots, so a long source gets at most a
    fourth more. Of the models of transformers, those mask the source whose decoder takes an `encoder_attention_mask`.
    It has to be the mask that `generate` passes: Whisper's decoder takes none, and other models of speech compute one.
    """
    states, mask = inputs["encoder_outputs"][0], inputs.get("attention_mask")
    masked = isinstance(mask, Tensor) and mask.shape == states.shape[:2]
    if not masked or len([*_tensors(inputs)]) > 2 or not _decoder_takes_mask(model):
        return None
    tokens: int = states.shape[1]
    step = max(LEAST_STEP, 1 << (tokens - 1).bit_length() >> 3)
    return -(-tokens // step) * step


def layout(inputs: dict[str, Any], slots: int | None) -> tuple[object, ...]:
    """Return the type of an encoder's output, and the names, shapes and dtypes of the buffers for inputs."""
    described = ((_shape(x, INPUTS_DIM, slots), x.dtype) if isinstance(x, Tensor) else x for x in leaves(inputs))
    return type(inputs["encoder_outputs"]), *described


def _decoder_takes_mask(model: PreTrainedModel) -> bool:
    of_transformers = type(model).__module__.startswith("transformers.models.")
    return of_transformers and "encoder_attention_mask" in inspect.signature(model.get_decoder().forward).parameters


def _copied(x: Any, slots: int | None) -> Any:
    """Return inputs with copies of their tensors."""
    if isinstance(x, Tensor):
        return _widened(x, INPUTS_DIM, slots)
    if isinstance(x, dict):
        items = {name: _copied(y, slots) for name, y in x.items()}
        return type(x)(**items) if isinstance(x, ModelOutput) else items
    return type(x)(_copied(y, slots) for y in x) if isinstance(x, (list, tuple)) else x


def _widened(x: Tensor, dim: int, slots: int | None) -> Tensor:
    """Return a copy with `slots` tokens. The tokens that `x` lacks are zeros."""
    copy = x.new_zeros(_shape(x, dim, slots))
    copy[tuple([slice(n) for n in x.shape])] = x
    return copy


def _shape(x: Tensor, dim: int, slots: int | None) -> tuple[int, ...]:
    return tuple(x.shape) if slots is None else (*x.shape[:dim], slots, *x.shape[dim + 1 :])


def _tensors(inputs: object) -> Iterator[Tensor]:
    return (x for x in leaves(inputs) if isinstance(x, Tensor))


def _keys_and_values(cache: EncoderDecoderCache) -> list[Tensor]:
    return [x for layer in cache.cross_attention_cache.layers for x in (layer.keys, layer.values)]
