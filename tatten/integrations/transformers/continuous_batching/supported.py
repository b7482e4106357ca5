"""The models and versions of transformers that continuous batching on attention "tatten" supports."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

from tatten.integrations.transformers.config import caches_latents
from tatten.integrations.transformers.continuous_batching.contract import moved_code
from tatten.ops.pages import LARGEST_PAGE, is_page_size

NAME = "tatten"
VERSIONS = ("5.24",)
DEVICES = ("cpu", "cuda")


def uses_tatten(config: Any) -> bool:
    """Return True if the text of a model has attention "tatten", whatever attention its other parts have."""
    return getattr(config.get_text_config(), "_attn_implementation", None) == NAME


def check_transformers() -> None:
    """Raise NotImplementedError unless the installed version of transformers was tested."""
    version = ".".join(transformers.__version__.split(".")[:2])
    reason = None
    if version not in VERSIONS:
        reason = f"transformers {transformers.__version__} was not tested with it, but {' and '.join(VERSIONS)}"
    elif names := moved_code():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        reason = f"transformers {transformers.__version__} has other code than was tested: {names[0]}{more}"
    if reason is not None:
        raise NotImplementedError(
            f'continuous batching on attention "tatten" does not run, as {reason}; '
            'load the model with attn_implementation="sdpa" for it'
        )


def check_model(model: Any) -> None:
    """Raise NotImplementedError unless a model can run in continuous batching on attention "tatten"."""
    check_transformers()
    config, name = model.config.get_text_config(), type(model).__name__
    if caches_latents(config):
        raise NotImplementedError(
            f"`model` must cache keys and values for continuous batching, got {name}, which has latents (MLA)"
        )
    if shared := getattr(config, "num_kv_shared_layers", None):
        raise NotImplementedError(
            f"`model` must have separate keys in each layer for continuous batching, got {name}, in which {shared} "
            "layers share the keys of others"
        )
    if kinds := unsupported_layers(config):
        raise NotImplementedError(
            f"`model` must have layers of full or sliding attention for continuous batching, got {name} with {kinds}"
        )
    if len(widths := key_widths(model, config)) > 1:
        raise NotImplementedError(
            f"`model` must have keys of one width in all layers for continuous batching, got {name} with {widths}"
        )
    if model.device.type not in DEVICES:
        raise NotImplementedError(f"`model` must be on one of {DEVICES} for continuous batching, got {model.device}")


def unsupported_layers(config: Any) -> list[str]:
    """Return the kinds of layers for which transformers has no pages."""
    from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR

    return sorted(set(getattr(config, "layer_types", None) or ()) - set(ATTN_TYPE_TO_ALLOCATOR))


def key_widths(model: nn.Module, config: Any) -> list[int]:
    """Return the distinct widths of a token's keys in the layers that have this configuration."""
    projections = (getattr(x, "k_proj", None) for x in model.modules() if getattr(x, "config", None) is config)
    return sorted({x.out_features for x in projections if isinstance(x, nn.Linear)})


def check_page_size(page_size: int) -> None:
    """Raise ValueError unless the ops support the page size."""
    if not (isinstance(page_size, int) and is_page_size(page_size)):
        raise ValueError(
            f'`page_size` must be a power of two up to {LARGEST_PAGE} on attention "tatten", got {page_size}'
        )
