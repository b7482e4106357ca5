"""The functions and classes that continuous batching replaces in transformers; `uninstall` restores them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from transformers.generation.continuous_batching import cache as cb_cache
from transformers.generation.continuous_batching import continuous_api, initialization

from tatten.integrations.transformers.continuous_batching.supported import check_model, check_page_size, uses_tatten
from tatten.ops.moved import moved
from tatten.ops.sizes import ceil_div

# The largest table that is copied to the device at each step, if transformers has no bound on the length of requests.
TABLE_BYTES = 1 << 20
# transformers captures a graph for each multiple of this many keys. Paged attention needs only one graph.
ONE_SIZE = 1 << 40


class Replacement(NamedTuple):
    """A name of transformers, and a function that makes its replacement from the original."""

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
    """Keep attention "tatten", which transformers would replace by FlashAttention or reject."""

    @functools.wraps(original)
    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if uses_tatten(model.config):
            check_model(model)
        else:
            original(self, model, *args, **kwargs)

    return switch_to_cb_friendly_attn


def _like_flash(original: Callable[..., bool]) -> Callable[..., bool]:
    """Treat attention "tatten" like FlashAttention: without masks and captured in CUDA graphs.

    It is not treated as any version of FlashAttention.
    """

    @functools.wraps(original)
    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, version: Any = None
    ) -> bool:
        if config is not None and uses_tatten(config):
            return version is None
        return original(config, requested_attention_implementation, version)

    return is_flash_attention_requested


def _with_decode_steps(original: Callable[..., None]) -> Callable[..., None]:
    """Allow decode steps with attention "tatten" for each kind of layer, on each device."""

    @functools.wraps(original)
    def ensure_decode_fast_path_is_available(
        config: Any, cb_config: Any, user_requested: bool, *args: Any, **kwargs: Any
    ) -> None:
        if not uses_tatten(config):
            original(config, cb_config, user_requested, *args, **kwargs)
            return
        check_page_size(cb_config.page_size)
        cb_config.kv_padding_interval_size = ONE_SIZE
        default = initialization.FALLBACK_DEFAULTS["max_blocks_per_request"]
        if not user_requested and cb_config.max_blocks_per_request == default:
            kinds = len(set(getattr(config, "layer_types", None) or [None]))
            most = TABLE_BYTES // (4 * kinds * cb_config.max_requests_per_batch)
            longest = getattr(config, "max_position_embeddings", None) or TABLE_BYTES
            needed = min(most, ceil_div(longest, cb_config.page_size))
            cb_config.max_blocks_per_request = max(default, needed)

    return ensure_decode_fast_path_is_available


def _with_pages(original: type) -> Callable[..., Any]:
    """Make a `PagedCache` for a model with attention "tatten"."""

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
_installed: list[tuple[Replacement, Any, Any]] = []  # each with the original object and its replacement


def install() -> None:
    """Let `generate_batch` read pages in place for models with attention "tatten". Other models run as before.

    `import tatten.integrations.transformers` calls it. A second call has no effect.

    Examples:
        >>> from tatten.integrations.transformers import continuous_batching
        >>> continuous_batching.uninstall()  # transformers rejects "tatten" again
        >>> continuous_batching.install()
    """
    if _installed:
        return
    for replacement in REPLACEMENTS:
        original = getattr(replacement.owner, replacement.name, None)
        if original is None:
            moved(replacement.path, "it is not there", 'continuous batching does not run on attention "tatten"')
            continue
        substitute = replacement.make(original)
        setattr(replacement.owner, replacement.name, substitute)
        _installed.append((replacement, original, substitute))


def uninstall() -> None:
    """Restore all that `install` replaced in transformers. Batches that already run are not affected.

    Raises:
        RuntimeError: other code has replaced the same name since `install`, and its replacement would be lost.
    """
    for replacement, _, substitute in _installed:
        if getattr(replacement.owner, replacement.name, None) is not substitute:
            raise RuntimeError(f"{replacement.path} must be as `install` left it, but something else replaced it")
    for replacement, original, _ in _installed:
        setattr(replacement.owner, replacement.name, original)
    _installed.clear()
