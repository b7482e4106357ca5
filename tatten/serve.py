"""The command `tatten-serve`: `transformers serve` with continuous batching on tatten's attention.

    tatten-serve <model> --port 8000
    python -m tatten.serve --help

It takes the options of `transformers serve`. `--continuous-batching` and `--attn-implementation tatten` are the
defaults.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

INSTALL = 'install "tatten[serve]"'
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


@contextmanager
def accepted_by_the_server() -> Iterator[None]:
    """Let the server load models with tatten's attention, which is not in its fixed list of names."""
    from transformers.cli.serving import model_manager

    manager = model_manager.ModelManager
    if not hasattr(manager, "_validate_args"):
        raise SystemExit("tatten-serve: `ModelManager._validate_args` of transformers, which refuses `tatten`, moved")

    class ManagerWithTatten(manager):  # type: ignore[misc, valid-type]
        def _validate_args(self) -> None:
            requested: str | None = self.attn_implementation  # type: ignore[has-type]
            self.attn_implementation = None if requested == "tatten" else requested
            super()._validate_args()
            self.attn_implementation = requested

    model_manager.ModelManager = ManagerWithTatten
    try:
        yield
    finally:
        model_manager.ModelManager = manager


if __name__ == "__main__":
    main()
