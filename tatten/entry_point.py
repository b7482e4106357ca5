"""The entry point `torch_dynamo_backends`: how `torch.compile(..., backend="tatten")` finds the backend.

PyTorch's registry looks whether a name is there, loads the entry point, and registers what it got, with an assertion
that the name is new. Of two threads that compile first at one time the second would fail. So the backend is registered
here, under a lock, and what is loaded is None, of which `register_backend` makes a decorator that nobody uses.
"""

from __future__ import annotations

import threading

_lock = threading.Lock()
_registered = False


def __getattr__(name: str) -> None:
    """`backend`: register it with Dynamo, once, and return None."""
    global _registered
    if name != "backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torch._dynamo import register_backend

    from tatten.backend import tatten

    with _lock:
        if not _registered:
            register_backend(tatten, name="tatten")  # type: ignore[no-untyped-call]
            _registered = True
