"""Facts about a model, from its config or its code.

All use of private parts of transformers is in this file, except for those of continuous batching.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionMaskInterface, Cache, DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from tatten.ops.moved import moved

# The name that the methods of transformers give to a cache.
CACHE = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
# With one of these attributes, the indexer of a config scores pools of keys, and reads more of a cache than index keys.
_POOLS = ("index_kpool", "indexer_compress_ratio")


def count_layers(config: PreTrainedConfig) -> int:
    """Return the number of layers that cache keys and values.

    Raises:
        ValueError: a layer caches anything else.
    """
    # DynamicCache chooses a class for each layer, by rules that differ between versions of transformers.
    layers = DynamicCache(config=config).layers
    while layers and type(layers[-1]).__name__ == "DummyLayer":  # the last layers may share those of earlier ones
        layers.pop()
    layer_types = getattr(config.get_text_config(decoder=True), "layer_types", None)
    for index, layer in enumerate(layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer):
            kind = layer_types[index] if layer_types else type(layer).__name__
            raise ValueError(
                "`config` must have layers of full, sliding, chunked or indexed attention only, each with its own keys "
                f"and values, got {kind!r} in layer {index}"
            )
    return len(layers)


def layers_of_index_keys(config: PreTrainedConfig) -> list[int]:
    """Return the layers that cache index keys, one key for each token. Other layers use the picks of these layers.

    Raises:
        ValueError: index keys are pooled, or a layer attends to the keys and values of another.
    """
    text = config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    indexed = [index for index, layer in enumerate(layers) if type(layer) is DynamicIndexedLayer]
    if not indexed:
        return []
    for name in _POOLS:
        if (pools := getattr(text, name, None)) is not None:
            raise ValueError(f"`config` must have index keys of single tokens, got `{name}` {pools}")
    for index, source in enumerate(getattr(text, "kv_source_layers", None) or ()):
        if index != source:
            raise ValueError(
                "`config` must have separate keys and values in each layer with index keys, got those of layer "
                f"{source} in layer {index}"
            )
    kinds = getattr(text, "indexer_types", None) or ["full"] * len(layers)
    return [index for index in indexed if kinds[index] != "shared"]


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of a model's argument for its cache. transformers 5.24 renamed it in its models."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def cache_kwargs(cache: Cache | None) -> dict[str, Cache | None]:
    """Return the keyword argument that passes a cache to a model of transformers, or to its `generate`.

    transformers 5.24 renamed the argument `past_key_values` to `cache`. Later versions warn about the old name, and
    earlier versions refuse the new one. This function returns the name that the installed version takes:

        out = model.generate(prompt, **cache_kwargs(cache), max_new_tokens=256)
    """
    return {CACHE: cache}


def caches_latents(config: PreTrainedConfig) -> bool:
    """Return True if the model has multi-head latent attention.

    It may cache latents, and expand them to keys and values.
    """
    # transformers raises an error for an attribute that differs between layers, as in dots3-note.
    return vars(config.get_text_config(decoder=True)).get("kv_lora_rank") is not None


def count_full_layers(config: PreTrainedConfig) -> int:
    """Return the number of layers, all of which must attend to all tokens.

    Raises:
        ValueError: a layer attends to a window, or caches anything but keys and values.
    """
    n = count_layers(config)
    for index, layer in enumerate(DynamicCache(config=config).layers[:n]):
        if type(layer) is not DynamicLayer:
            raise ValueError(
                f"`config` must have layers of full attention only, got a {type(layer).__name__} at {index}"
            )
    return n


def rope_types(config: PreTrainedConfig) -> set[str]:
    """Return the types of the model's rotary embeddings; empty if it has none."""
    return {x.get("rope_type", "default") for x in _rope_parameters(config)}


def longrope_length(config: PreTrainedConfig) -> int | None:
    """Return the length of a text from which on longrope rotates all of its keys by other angles; None without it."""
    longropes = [x for x in _rope_parameters(config) if x.get("rope_type") == "longrope"]
    lengths = [x.get("original_max_position_embeddings") for x in longropes]
    return min((x for x in lengths if x is not None), default=None)


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the parameters of the rotary embeddings of each type of layer."""
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return [x for x in rope.values() if isinstance(x, dict)] or ([rope] if rope else [])


def attention_implementation(config: PreTrainedConfig) -> str | None:
    """Return the name of the attention function that the model calls, or None if it was not set.

    Raises:
        NotImplementedError: transformers has moved the attribute.
    """
    try:
        name: str | None = config.get_text_config(decoder=True)._attn_implementation
    except AttributeError as error:
        note = moved(
            "transformers.PreTrainedConfig._attn_implementation", error, "no cache over a mesh, no decode loop"
        )
        raise NotImplementedError(note) from error
    return name


def check_attention(config: PreTrainedConfig | int) -> None:
    """Raise ValueError if the model of a config calls another attention than "tatten"."""
    implementation = None if isinstance(config, int) else attention_implementation(config)
    if implementation not in (None, "tatten"):
        raise ValueError(
            f'`config` must be of a model with attn_implementation="tatten", got {implementation!r}: only "tatten" can '
            'attend to a sharded cache; call `model.set_attn_implementation("tatten")`'
        )


def made_for_sdpa(config: PreTrainedConfig) -> bool:
    """Return True if a model passes masks to the function of its `attn_implementation`, whatever that is called.

    Only these models accept the masks that SDPA takes, and None for a causal mask. The source code of a model decides.
    """
    return bool(_made_for_sdpa(type(config).__module__.replace("configuration_", "modeling_")))


@torch.compiler.assume_constant_result
def _made_for_sdpa(module: str) -> bool:
    return module in sys.modules and _source_is_made_for_sdpa(module)


@functools.cache
def _source_is_made_for_sdpa(module: str) -> bool:
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):  # defined interactively
        return False
    required = ("ALL_ATTENTION_FUNCTIONS.get_interface(", "_supports_sdpa = True")
    return all(text in source for text in required) and '_attn_implementation == "sdpa"' not in source


def weights_collected() -> bool:
    """Return True if hooks on the layers of the running model collect attention weights.

    Many models (GPT-2, OPT) do not pass `output_attentions` on to their attention function.
    """
    try:
        from transformers.utils.output_capturing import _active_collector as collector

        # Dynamo can't trace a context variable. transformers has a global variable for compiled models.
        collected = collector.global_var if torch.compiler.is_compiling() else collector.get()
    except (ImportError, AttributeError) as error:
        if not torch.compiler.is_compiling():  # Dynamo can't trace logging
            effect = "models that do not pass `output_attentions` on return no weights"
            moved("transformers.utils.output_capturing._active_collector", error, effect)
        return False
    return collected is not None and any("attentions" in name for name in collected)


def eager_attention(module: nn.Module) -> Callable[..., Any]:
    """Return the function that a layer calls with `attn_implementation="eager"`.

    Raises:
        NotImplementedError: the code of the model has no function of the usual name.
    """
    for cls in type(module).__mro__:
        code = vars(sys.modules[cls.__module__])
        for name in ("eager_attention_forward", "simple_eager_attention_forward"):  # the second is TimesFM's
            function: Callable[..., Any] | None = code.get(name)
            if function is not None:
                return function
    raise NotImplementedError(
        f"the module of {type(module).__name__} must define `eager_attention_forward` for soft caps, sinks and "
        'attention weights beyond decode steps, got none: load the model with attn_implementation="eager"'
    )


def attention_without_masks(model: PreTrainedModel) -> str | None:
    """Return the reason why a model can't use a static cache: transformers makes no masks for its attention."""
    try:
        name = attention_implementation(model.config)
    except NotImplementedError as error:
        return str(error)
    if name is None or name in AttentionMaskInterface():
        return None
    return f"transformers makes no masks for the attention {name!r} of {type(model).__name__}"
