"""Warnings that our own code causes, for the code that users copy: examples and pages."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

from transformers.utils import logging as transformers_logging


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """Raise a warning about an argument of transformers, and each one that points at tatten or at a script.

    Fail if transformers logs a deprecation. Warnings that PyTorch raises about its own code are left alone.
    """
    records, logger = _Records(), logging.getLogger("transformers")
    transformers_logging.warning_once.cache_clear()  # else a warning that an earlier test caused is not logged again
    logger.addHandler(records)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=r"`\w+` is deprecated and ", category=FutureWarning)
            warnings.filterwarnings("error", module=r"tatten\b|__main__$")
            yield
    finally:
        logger.removeHandler(records)
    assert [message for message in records.messages if "deprecated" in message] == []
