"""Everything that continuous batching replaces in transformers, and the way back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from transformers.generation.continuous_batching import cache as cb_cache
from transformers.generation.continuous_batching import continuous_api, initialization

from tatten.integrations.transformers.continuous_batching.supported import check_model, check_page_size
from tatten.ops.moved import moved
from tatten.ops.sizes import ceil_div

NAME = "tatten"
# A table of so many bytes is copied to the device at each step, if transformers does not know how long requests get.
TABLE_BYTES = 1 << 20
# Graphs are captured for each multiple of keys, but no work on tables of pages depends on how many keys there are.
ONE_SIZE = 1 << 40


def uses_tatten(config: Any) -> bool:
    return getattr(config, "_attn_implementation", None) == NAME


class Replacement(NamedTuple):
    """A name of transformers, and a function that makes its replacement, given the original."""

    owner: Any
    name: str
    make: Callable[[Any], Any]

    @property
    def path(self) -> str:
        owner = self.owner
        return ".".join(
            (owner.__name__ if not isinstance(owner, type) else f"{owner.__module__}.{owner.__name__}", self.name)
        )


def _keeps_tatten(original: Callable[..., None]) -> Callable[..., None]:
    """Attention "tatten" stays where transformers would take FlashAttention, or refuse the name."""

    @functools.wraps(original)
    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if uses_tatten(model.config):
            check_model(model)
        else:
            original(self, model, *args, **kwargs)

    return switch_to_cb_friendly_attn


def _like_flash(original: Callable[..., bool]) -> Callable[..., bool]:
    """Attention "tatten" takes no masks and is captured in CUDA graphs, like FlashAttention. It is no version of it."""

    @functools.wraps(original)
    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, version: Any = None
    ) -> bool:
        if config is not None and uses_tatten(config):
            return version is None
        return original(config, requested_attention_implementation, version)

    return is_flash_attention_requested


def _with_decode_steps(original: Callable[..., None]) -> Callable[..., None]:
    """Attention "tatten" has decode steps for each kind of layer, on each device."""

    @functools.wraps(original)
    def ensure_decode_fast_path_is_available(
        config: Any, cb_config: Any, user_requested: bool, *args: Any, **kwargs: Any
    ) -> None:
        if not uses_tatten(config):
            original(config, cb_config, user_requested, *args, **kwargs)
            return
        check_page_size(cb_config)
        cb_config.kv_padding_interval_size = ONE_SIZE
        without_hints = initialization.FALLBACK_DEFAULTS["max_blocks_per_request"]
        if not user_requested and cb_config.max_blocks_per_request == without_hints:
            kinds = len(set(getattr(config, "layer_types", None) or [None]))
            most = TABLE_BYTES // (4 * kinds * cb_config.max_requests_per_batch)
            longest = getattr(config, "max_position_embeddings", None) or TABLE_BYTES
            needed = min(most, ceil_div(longest, cb_config.page_size))
            cb_config.max_blocks_per_request = max(without_hints, needed)

    return ensure_decode_fast_path_is_available


def _with_pages(original: type) -> Callable[..., Any]:
    """The cache of a model with attention "tatten" hands out pages."""

    def make_cache(config: Any, *args: Any, **kwargs: Any) -> Any:
        if not uses_tatten(config):
            return original(config, *args, **kwargs)
        from tatten.integrations.transformers.continuous_batching.cache import PagedCache

        return PagedCache(config, *args, **kwargs)

    return make_cache


REPLACEMENTS = (
    Replacement(continuous_api.ContinuousBatchingManager, "switch_to_cb_friendly_attn", _keeps_tatten),
    Replacement(continuous_api, "PagedAttentionCache", _with_pages),
    Replacement(initialization, "ensure_decode_fast_path_is_available", _with_decode_steps),
    Replacement(initialization, "is_flash_attention_requested", _like_flash),
    Replacement(cb_cache, "is_flash_attention_requested", _like_flash),
)
_installed: list[tuple[Replacement, Any, Any]] = []  # with the original and its replacement


def install() -> None:
    """Let `generate_batch` of models with attention "tatten" read pages in place; others run as before.

    `import tatten.integrations.transformers` calls it. A second call does nothing.

    Examples:
        >>> from tatten.integrations.transformers import continuous_batching
        >>> continuous_batching.uninstall()  # transformers is as it was: it refuses "tatten"
        >>> continuous_batching.install()
    """
    if _installed:
        return
    for replacement in REPLACEMENTS:
        original = getattr(replacement.owner, replacement.name, None)
        if original is None:
            moved(replacement.path, "it is not there", 'continuous batching does not run on attention "tatten"')
            continue
        made = replacement.make(original)
        setattr(replacement.owner, replacement.name, made)
        _installed.append((replacement, original, made))


def uninstall() -> None:
    """Give transformers back all that `install` replaced. Batches that run already go on as they are.

    Raises:
        RuntimeError: something else replaced the same name since, and would be lost.
    """
    for replacement, _, made in _installed:
        if getattr(replacement.owner, replacement.name, None) is not made:
            raise RuntimeError(f"{replacement.path} must be as `install` left it, but something else replaced it")
    for replacement, original, _ in _installed:
        setattr(replacement.owner, replacement.name, original)
    _installed.clear()
