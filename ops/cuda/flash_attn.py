"""FlashAttention-2, 3 and 4 as providers: the features of each package, and its calls.

`PACKAGES` was written from the sources: flash-attn 2.8.0 to 2.8.4 (`csrc/flash_attn`), flash_attn_3 3.0.0 (`hopper/` of
Dao-AILab/flash-attention at 0251105) and flash-attn-4 4.0.0b36. All of them take `[batch, length, heads, head_dim]`,
pack the query heads of a kv head themselves, count a window from the end of the keys that count as tatten does, and
return a float32 lse `[batch, heads, length]` of natural logarithms.

They read whole tiles of keys. If a length or a window cuts a tile, the values in it that do not count are multiplied by
0, so they must be finite. FlashAttention-2 clears the values behind a length.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tatten.ops.call import AttentionCall
from tatten.ops.cuda.gpu import capability
from tatten.ops.cuda.recording import NotRecordableError, recorder
from tatten.ops.cuda.workload import NARROW, Needs, Workload
from tatten.ops.states import State


@dataclass(frozen=True)
class Package:
    """The features of a FlashAttention package.

    Attributes:
        name: the name of the package.
        install: the command or the source to install it from.
        modules: the modules that may have its function; the first that can be imported counts.
        function: the name of the function.
        arguments: for each need of a `Workload` that it meets, and for the lse, the name of the argument.
        majors: the compute capabilities it has kernels for, by their first number.
        head_dims: the rule of `fits`, in words.
        fits: whether it supports the head_dims of key and value, on a compute capability with this first number.
        empty_is_inf: a query without keys gets an lse of +inf instead of -inf.
        splits: the argument `num_splits` for each major; 0 lets the package choose. Empty: it is not passed.
    """

    name: str
    install: str
    modules: tuple[str, ...]
    function: str
    arguments: Mapping[str, str]
    majors: tuple[int, ...]
    head_dims: str
    fits: Callable[[int, int, int], bool]
    empty_is_inf: bool = False
    splits: Mapping[int, int] = field(default_factory=dict)


def _fits_fa2(dim: int, value_dim: int, major: int) -> bool:
    return dim == value_dim <= 256


def _fits_fa3(dim: int, value_dim: int, major: int) -> bool:
    return dim == value_dim <= 256 or (major == 9 and 128 < dim <= 192 and 96 < value_dim <= 128)


def _fits_fa4(dim: int, value_dim: int, major: int) -> bool:
    widest = max(dim, value_dim)
    return widest <= 128 or (widest <= 256 if major == 9 else (dim, value_dim) in ((192, 128), (256, 256)))


KVCACHE = {"lse": "return_softmax_lse", "lengths": "cache_seqlens", "window": "window_size", "soft cap": "softcap"}
VARLEN = {**KVCACHE, "lse": "return_lse", "lengths": "seqused_k", "sinks": "learnable_sink"}
PACKAGES = {
    "fa2": Package(
        name="FlashAttention-2",
        install="pip install --no-build-isolation 'flash-attn>=2.8'",
        modules=("flash_attn",),
        function="flash_attn_with_kvcache",
        arguments=KVCACHE,
        majors=(8, 9, 10, 12),
        head_dims="one head_dim up to 256",
        fits=_fits_fa2,
        empty_is_inf=True,
    ),
    "fa3": Package(
        name="FlashAttention-3",
        install="build hopper/ of https://github.com/Dao-AILab/flash-attention",
        modules=("flash_attn_interface", "flash_attn_3.flash_attn_interface"),
        function="flash_attn_with_kvcache",
        arguments=KVCACHE,
        majors=(8, 9),
        head_dims="one head_dim up to 256, or on Hopper 136 to 192 with values of 104 to 128",
        fits=_fits_fa3,
    ),
    "fa4": Package(
        name="FlashAttention-4",
        install="pip install 'flash-attn-4>=4.0.0b36'",
        modules=("flash_attn.cute",),
        function="flash_attn_varlen_func",
        arguments=VARLEN,
        majors=(9, 10, 11),  # its head_dims are unchecked on 8 and 12
        head_dims="head_dims up to 256 on Hopper, else up to 128, 192 with values of 128, or 256",
        fits=_fits_fa4,
        splits={9: 1, 10: 0, 11: 0},  # it can't split keys on Hopper
    ),
}


def package_unsupported_reason(provider: str, work: Workload) -> str | None:
    """Return the reason why the package of `provider` can't compute this here, or None."""
    package = PACKAGES[provider]
    dim, value_dim, (major, minor) = work.key[3], work.value_dim, capability(work.device)
    unmet = [need for need in work.needs if need not in package.arguments]
    if work.kv_dtype != work.dtype and NARROW not in unmet:
        unmet.append(NARROW)
    if unmet:
        return f"it takes no {', '.join(unmet)}"
    if work.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {work.dtype}"
    if major not in package.majors:
        return f"it takes compute capability {', '.join(map(str, package.majors))}, not {major}.{minor}"
    if dim % 8 or value_dim % 8 or not package.fits(dim, value_dim, major):
        return f"it takes {package.head_dims}, in eights, not {dim} and {value_dim}"
    if work.key[2] == 0:
        return "it takes keys, at least one"
    if not (work.dense and work.aligned):
        return "it takes tensors that are dense in head_dim, with other strides that are multiples of 16 bytes"
    return _unmet_by_release(package, work.needs)


def _unmet_by_release(package: Package, needs: Needs) -> str | None:
    """Return the reason why the installed release can't compute this, or None."""
    try:
        parameters = inspect.signature(_function(package)).parameters
    except ImportError as error:
        return f"{package.name} can't be imported ({error}); to get it: {package.install}"
    arguments = ["softmax_scale", *(package.arguments[need] for need in ("lse", *needs))]
    if package.splits:
        arguments.append("num_splits")
    missing = [name for name in arguments if name not in parameters]
    if not missing:
        return None
    return (
        f"the {package.name} that is installed takes no {', '.join(missing)}; to get one that does: {package.install}"
    )


def _function(package: Package) -> Callable[..., Any]:
    """Import the function of a package.

    Raises:
        ImportError: none of its modules has it; the message says why for each.
    """
    errors = []
    for module in package.modules:
        function_or_reason = _find(module, package.function)
        if not isinstance(function_or_reason, str):
            return function_or_reason
        errors.append(function_or_reason)
    raise ImportError("; ".join(errors))


def _find(module: str, function: str) -> Callable[..., Any] | str:
    """Return a function of a module, or the reason why there is none."""
    try:
        imported: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except ImportError as error:
        return str(error)
    except AttributeError:
        return f"module {module} has no {function}"
    return imported


def package_attention(provider: str, call: AttentionCall) -> State:
    """Call the package of `provider`, for calls that `package_unsupported_reason` has no reason against.

    Raises:
        NotImplementedError: a tensor's address is no multiple of 16, so that the kernels would fail.
        NotRecordableError: Inductor asks for the launches, which are not tatten's own.
    """
    package, query, (stored,), window = PACKAGES[provider], call.query, call.segments, call.window
    key, value, kv_lens = stored.key, stored.value, stored.kv_lens
    if recorder.get() is not None:
        raise NotRecordableError(f"is computed by {package.name}")
    for name, x in {"query": query, "key": key, "value": value}.items():
        if x.data_ptr() % 16:
            raise NotImplementedError(
                f"`provider` {provider!r} can't compute this: it takes addresses that are multiples of 16, "
                f"and `{name}` begins {x.data_ptr() % 16} bytes behind one"
            )
    lens = None if kv_lens is None else kv_lens.clamp(0, key.shape[2]).to(torch.int32).contiguous()
    by_need = {
        "lse": True,
        "lengths": lens,
        "window": None if window is None else (window - 1, 0),  # keys before and after the query's position
        "soft cap": call.softcap,
        "sinks": call.sinks,
    }
    arguments = {package.arguments[need]: x for need, x in by_need.items() if x is not None}
    if package.splits:
        arguments["num_splits"] = package.splits[capability(query.device)[0]]
    inputs = (x.transpose(1, 2) for x in (query, key, value))
    out, lse, *_ = _function(package)(*inputs, softmax_scale=call.score_scale, **arguments)
    out, lse = out.transpose(1, 2).contiguous(), lse.contiguous()
    if package.empty_is_inf and (lens is not None or window is not None):
        lse = lse.masked_fill(_without_keys(query, key, lens, window), -torch.inf)
    return out, lse


def _without_keys(query: Tensor, key: Tensor, lens: Tensor | None, window: int | None) -> Tensor:
    """Find the queries without keys, `[batch or 1, 1, q_length or 1]`, by lengths: other lse may be +inf too."""
    length = torch.full((1,), key.shape[2], device=key.device) if lens is None else lens
    behind = torch.arange(query.shape[2] - 1, -1, -1, device=key.device) if window is not None else 0
    return (length[:, None] - behind <= 0)[:, None]
