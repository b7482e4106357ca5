"""The command `tatten-serve`: `transformers serve` with continuous batching on tatten's attention.

    tatten-serve <model> --port 8000
    python -m tatten.serve --help

It takes the options of `transformers serve`. `--continuous-batching` and `--attn-implementation tatten` are the
defaults.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

INSTALL = 'install "tatten[serve]"'
CACHE_SECONDS = 60  # the longest wait for the thread of batches to allocate its cache
DEFAULTS = ("--continuous-batching", "--attn-implementation", "tatten")


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve models over HTTP until the process is interrupted.

    Args:
        arguments: arguments of the command line. Default: `sys.argv[1:]`.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    check_server()
    import typer
    from transformers.cli.serve import Serve

    import tatten.integrations.transformers  # noqa: F401  (registers the attention)

    class Server(Serve):  # type: ignore[misc]
        @functools.wraps(Serve.__init__)  # type: ignore[misc]  # the options of the command
        def __init__(self, **options: Any) -> None:
            check_page_option(options)
            try:
                super().__init__(**options)
            finally:
                # Uvicorn raises the signal that stopped it, after which transformers (5.24) leaves its thread alive.
                if (state := getattr(self, "_generation_state", None)) is not None:
                    state.shutdown()

    command = typer.Typer(add_completion=False)
    command.command()(Server)
    with accepted_by_the_server():
        command([*DEFAULTS, *arguments], prog_name="tatten-serve")


def check_server() -> None:
    """Exit with a message unless transformers can serve, in a version that supports continuous batching on tatten."""
    try:
        from transformers.utils.import_utils import is_serve_available
    except ImportError as error:
        raise SystemExit(f"tatten-serve needs transformers: {INSTALL} ({error})") from error
    if not is_serve_available():
        raise SystemExit(
            f"tatten-serve needs FastAPI, Uvicorn and the other packages of `transformers serve`: {INSTALL}"
        )
    from tatten.integrations.transformers.continuous_batching.supported import check_transformers

    try:
        check_transformers()
    except NotImplementedError as error:
        raise SystemExit(f"tatten-serve: {error}") from error


def check_page_option(options: dict[str, Any]) -> None:
    """Exit with a message unless tatten's attention takes the pages that the options of the server ask for."""
    from tatten.integrations.transformers.continuous_batching.supported import check_page_size

    page_size, uses_pages = options["cb_block_size"], options["continuous_batching"]
    if page_size is None or not uses_pages or options["attn_implementation"] != "tatten":
        return
    try:
        check_page_size(page_size)
    except ValueError as error:
        raise SystemExit(f"tatten-serve: {error}, as `--cb-block-size`") from error


@contextmanager
def accepted_by_the_server() -> Iterator[None]:
    """Let the server load models with tatten's attention, and refuse what batches on it can't take."""
    from transformers.cli.serving import model_manager, utils

    originals = model_manager.ModelManager, utils.CBGenerateManager
    replacements = _loads_tatten(originals[0]), _guards_batches(originals[1])  # either may exit
    model_manager.ModelManager, utils.CBGenerateManager = replacements
    try:
        yield
    finally:
        model_manager.ModelManager, utils.CBGenerateManager = originals


def _loads_tatten(manager: type) -> type:
    """Let the manager of models take the name "tatten": its list of names is closed."""
    _check_methods(manager, "_validate_args")

    class ManagerWithTatten(manager):  # type: ignore[misc, valid-type]
        def _validate_args(self) -> None:
            requested: str | None = self.attn_implementation  # type: ignore[has-type]
            self.attn_implementation = None if requested == "tatten" else requested
            super()._validate_args()
            self.attn_implementation = requested

    return ManagerWithTatten


def _guards_batches(manager: type) -> type:
    """Let the manager of batches refuse a model or a prompt with status 400 and the reason.

    transformers (5.24) answers a refused model with status 500, and a request that outgrows the memory ends the thread
    of all batches.
    """
    _check_methods(manager, "init_cb", "generate_streaming", "generate_non_streaming")
    from fastapi import HTTPException
    from transformers.generation.continuous_batching.utils import drain_queue

    from tatten.integrations.transformers.continuous_batching.cache import PagedCache
    from tatten.integrations.transformers.continuous_batching.supported import check_model, uses_tatten

    class BatchesOnTatten(manager):  # type: ignore[misc, valid-type]
        def init_cb(self, model: Any, gen_config: Any) -> None:
            if self._cb is None and uses_tatten(model.config):
                try:
                    check_model(model)
                except NotImplementedError as error:
                    raise HTTPException(400, str(error)) from error
            super().init_cb(model, gen_config)

        def generate_streaming(self, model: Any, processor: Any, inputs: Any, config: Any, **options: Any) -> Any:
            self._fit(inputs["input_ids"], config)
            texts, streamer = super().generate_streaming(model, processor, inputs, config, **options)
            streamer.cancel = functools.partial(self._cancel, options["request_id"], streamer.cancel)
            return texts, streamer

        def _cancel(self, request_id: str, cancel: Callable[[], None]) -> None:
            """Cancel a stream, and drop its receiver, which transformers (5.24) keeps forever."""
            cancel()
            router = self._cb.output_router
            with router._lock:
                router.result_handlers.pop(request_id, None)

        async def generate_non_streaming(
            self, model: Any, processor: Any, inputs: Any, config: Any, **options: Any
        ) -> Any:
            self._fit(inputs["input_ids"], config)
            return await super().generate_non_streaming(model, processor, inputs, config, **options)

        def _fit(self, prompt: list[int], config: Any) -> None:
            """Let a request end where the memory does, or refuse its prompt."""
            give_up = time.monotonic() + CACHE_SECONDS
            while self._cb.batch_processor is None and self._cb.is_running():  # the first request only
                if time.monotonic() > give_up:
                    raise HTTPException(503, f"the thread of batches made no cache in {CACHE_SECONDS} s")
                time.sleep(0.01)
            drain_queue(self._cb.output_router.output_queue)  # outputs of cancelled streams, which nobody receives
            cache = getattr(self._cb.batch_processor, "cache", None)
            if not isinstance(cache, PagedCache):
                return
            if not 0 < len(prompt) < cache.room:
                raise HTTPException(
                    400,
                    f"the prompt must have 1 to {cache.room - 1} tokens, as the memory of the server has room for "
                    f"{cache.room} tokens of a request, got {len(prompt)}",
                )
            left = cache.room - len(prompt)
            config.max_new_tokens = left if config.max_new_tokens is None else min(config.max_new_tokens, left)

    return BatchesOnTatten


def _check_methods(manager: type, *names: str) -> None:
    """Exit with a message unless a manager of transformers has the methods that are replaced."""
    for name in names:
        if name not in vars(manager):
            raise SystemExit(f"tatten-serve: `{manager.__name__}.{name}` of transformers, which it replaces, moved")


if __name__ == "__main__":
    main()
