"""The models and versions of transformers that continuous batching on attention "tatten" takes."""

from __future__ import annotations

from typing import Any

import transformers
from packaging.version import Version

from tatten.integrations.transformers.config import caches_latents
from tatten.ops.pages import LARGEST_PAGE, is_page_size

TESTED = ("5.24",)
INSTEAD = 'load the model with attn_implementation="sdpa" for continuous batching'


def check_version() -> None:
    release = Version(transformers.__version__).release
    version = ".".join(map(str, release[:2]))
    if version not in TESTED:
        raise NotImplementedError(
            f'transformers must be a version that continuous batching on attention "tatten" was tested with, '
            f"{' or '.join(TESTED)}, got {transformers.__version__}: {INSTEAD}"
        )


def check_model(model: Any) -> None:
    """Raise NotImplementedError unless a model can run in continuous batching on attention "tatten"."""
    check_version()
    config = model.config.get_text_config()
    if caches_latents(config):
        raise NotImplementedError(
            f"`model` must cache keys and values for continuous batching, got {type(model).__name__}, which caches "
            f"latents (`kv_lora_rank`)"
        )


def check_config(config: Any, cb_config: Any) -> None:
    """Raise ValueError unless the op takes the pages."""
    if not is_page_size(cb_config.page_size):
        raise ValueError(
            f'`page_size` must be a power of two up to {LARGEST_PAGE} on attention "tatten", got {cb_config.page_size}'
        )
