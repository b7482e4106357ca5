"""Facts about a model's config. All use of private parts of transformers is in this file."""

from __future__ import annotations

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


def count_layers(config: PreTrainedConfig) -> int:
    """The number of layers that have keys and values of their own.

    Raises:
        ValueError: a layer holds anything else.
    """
    # DynamicCache chooses a class for each layer, by rules that differ between versions of transformers.
    layers = DynamicCache(config=config).layers
    while layers and type(layers[-1]).__name__ == "DummyLayer":  # the last layers may share those of earlier ones
        layers.pop()
    layer_types = getattr(config.get_text_config(decoder=True), "layer_types", None)
    for index, layer in enumerate(layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            found = layer_types[index] if layer_types else type(layer).__name__
            raise ValueError(
                "`config` must have layers of full, sliding or chunked attention only, each with its own keys and "
                f"values, got {found!r} in layer {index}"
            )
    return len(layers)


def caches_latents(config: PreTrainedConfig) -> bool:
    """Whether the model has multi-head latent attention: it may cache latents, and expand them to keys and values."""
    return getattr(config.get_text_config(decoder=True), "kv_lora_rank", None) is not None


def count_full_layers(config: PreTrainedConfig) -> int:
    """The number of layers, each of which attends to all tokens.

    Raises:
        ValueError: a layer attends to a window, or holds anything but keys and values.
    """
    n = count_layers(config)
    for index, layer in enumerate(DynamicCache(config=config).layers[:n]):
        if type(layer) is not DynamicLayer:
            raise ValueError(
                f"`config` must have layers of full attention only, got a {type(layer).__name__} at {index}"
            )
    return n


def attention_implementation(config: PreTrainedConfig) -> str | None:
    """The name of the attention function that the model calls; None if it was not set."""
    name: str | None = config.get_text_config(decoder=True)._attn_implementation
    return name
