"""The entry point `torch_dynamo_backends`, by which `torch.compile(..., backend="tatten")` finds the backend.

PyTorch's registry checks whether the name is known, loads the entry point, and registers the result, asserting that the
name is new. If two threads compile for the first time at once, the assertion fails in the second. So the backend is
registered here, under a lock, and the entry point loads as None. `register_backend(None)` only returns a decorator.
"""

from __future__ import annotations

import threading

from tatten.ops.moved import moved

_lock = threading.Lock()
_registered = False


def __getattr__(name: str) -> object:
    """Register the backend with Dynamo on the first access to `backend`, and return None.

    If `register_backend` has changed, return the backend, so that PyTorch registers it.
    """
    global _registered
    if name != "backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tatten.backend import tatten

    with _lock:
        if not _registered:
            try:
                from torch._dynamo import register_backend

                register_backend(tatten, name="tatten")  # type: ignore[no-untyped-call]
            except Exception as error:
                moved("torch._dynamo.register_backend", error, "two threads may not compile for the first time at once")
                return tatten
            _registered = True
    return None
