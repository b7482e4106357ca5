"""Private APIs that differ from the versions tatten was tested with: each is logged once, and reports name it.

Code that finds a broken API calls `moved` and goes on without it.
"""

from __future__ import annotations

import logging

log = logging.getLogger("tatten")
_notes: dict[tuple[str, str], str] = {}


def moved(name: str, error: BaseException | str, instead: str) -> str:
    """Log that a private API has moved, once per error; note it for later reports, and return the note.

    Args:
        name: the dotted name of the API.
        error: the error that the API raised, or a description of the difference.
        instead: the behaviour without the API.
    """
    difference = text_of(error) if isinstance(error, BaseException) else error
    if (name, difference) not in _notes:
        _notes[name, difference] = (
            f"{name} is not as in the versions that tatten was tested with ({difference}); {instead}"
        )
        log.warning("%s", _notes[name, difference])
    return _notes[name, difference]


def text_of(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def moved_notes() -> list[str]:
    """Return the notes on all private APIs that have moved in this process, in order."""
    return list(_notes.values())
