"""Which provider `tatten::decode_attention` takes on CUDA, without a GPU: each stands in by its name."""

from __future__ import annotations

from typing import Any

import pytest

from tatten.ops.cuda import decode, dispatch
from tatten.ops.kernel_signatures import decode_kernel


def provider_of_op(*args: Any, **kwargs: Any) -> str:
    """Call the op on tensors without data, and return the name of who would have computed it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_plan", dispatch._plan.__wrapped__)
        patch.setattr(dispatch, "on_device_of", lambda x, run, *args: run(*args))
        for name in ("cudnn", "flash"):
            patch.setattr(dispatch, f"{name}_attention", lambda *args, name=name: name)
        patch.setattr(dispatch, "package_attention", lambda provider, *args: provider)
        patch.setattr(dispatch, "attention_reference", lambda call: "reference")
        patch.setattr(decode, "plan_attention", lambda *args, **options: lambda *args: "triton")
        return decode_kernel(dispatch.attention)(*args, **kwargs)
