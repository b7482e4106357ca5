"""What the caches need to know of a model's config."""

from __future__ import annotations

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


def count_layers(config: PreTrainedConfig) -> int:
    """The number of layers, all of which must be attention over keys and values of their own."""
    # transformers knows which cache a layer needs; how it finds out differs between versions.
    layers = DynamicCache(config=config).layers
    while layers and type(layers[-1]).__name__ == "DummyLayer":  # at the end, where layers reuse what others hold
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
