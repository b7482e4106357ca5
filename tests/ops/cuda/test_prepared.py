"""Calls that generated Python code makes: what is written down of the launches that were recorded."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from tatten.ops.cuda import sm90, tma
from tatten.ops.cuda.launcher import Launch
from tatten.ops.cuda.prepared import Bytes, PreparedCall, PreparedLaunch, TmaTiles, prepare
from tatten.ops.cuda.recording import NotRecordableError, record
from tatten.ops.cuda.sm90 import key_tiling

RAN: list[Any] = []


class Kernel:
    """Notes what it is launched with."""

    def __init__(self, name: str, *arg_names: str, gluon: bool = True) -> None:
        self.__name__, self.__module__, self.arg_names, self.gluon = name, __name__, arg_names, gluon

    def is_gluon(self) -> bool:
        return self.gluon

    def __getitem__(self, grid: object) -> Any:
        return lambda *args, **options: RAN.append((self.__name__, grid, args, options))


first, second = Kernel("first", "x", "parts", "none", "n", "scale"), Kernel("second", "out", "n", "scale")
tiled, tiled_in_triton = Kernel("tiled", "keys"), Kernel("tiled_in_triton", "keys", gluon=False)
NUMBERS = {"n": 3, "scale": 0.1}


def tensors(*shape: int, device: str = "meta") -> Tensor:
    return torch.ones(shape, device=device)


def two_launches(x: Tensor, y: Tensor) -> Tensor:
    out = x.new_empty(4)
    Launch(first, (2, 3), {"num_warps": 4}, **NUMBERS)(x, (y, (), (out, None)), None)
    Launch(second, (1,), {}, **NUMBERS)(out)
    return out


def test_launches_are_written_down_with_tensors_by_number() -> None:
    x, y = tensors(3), tensors(5)
    found, out = record(two_launches, x, y)
    call, given = prepare(found)
    assert len(given) == 3
    assert all(a is b for a, b in zip(given, (x, y, found.exact_base(out)), strict=True))
    (a, b) = call.launches
    assert a.tensors == (0, (1, (), (2, None)), None)
    assert b.tensors == (2,)
    assert (a.kernel, a.grid, a.arguments) == ("first", (2, 3), NUMBERS)


def test_what_is_printed_makes_the_same_launches() -> None:
    found, _ = record(two_launches, tensors(3), tensors(5))
    call, _ = prepare(found)
    again = eval(repr(call), {"PreparedCall": PreparedCall, "PreparedLaunch": PreparedLaunch})
    x, y, out = (torch.ones(n) for n in (3, 5, 4))
    options = {"enable_fp_fusion": False, **NUMBERS}
    for made in (call, again, again):
        RAN.clear()
        made(x, y, out)
        one, other = RAN
        assert one == ("first", (2, 3), (x, (y, (), (out, None)), None), {**options, "num_warps": 4})
        assert other == ("second", (1,), (out,), options)


def test_masks_are_read_as_bytes() -> None:
    def op(mask: Tensor) -> None:
        Launch(second, (1,), {}, **NUMBERS)(mask.view(torch.uint8))
        Launch(second, (1,), {}, **NUMBERS)(mask)

    found, _ = record(op, torch.ones(3, dtype=torch.bool, device="meta"))
    call, given = prepare(found)
    assert len(given) == 1
    assert [launch.tensors for launch in call.launches] == [(Bytes(0),), (0,)]
    RAN.clear()
    mask = torch.tensor([True, False, True])
    call(mask)
    (_, _, (read,), _), (_, _, (same,), _) = RAN
    assert read.dtype == torch.uint8
    assert read.data_ptr() == mask.data_ptr()
    assert same is mask


@pytest.mark.parametrize("kernel, module", [(tiled, sm90), (tiled_in_triton, tma)])
def test_tiles_are_described_anew_for_each_tensor(kernel: Kernel, module: Any) -> None:
    """A descriptor holds the tensor that it was made for; what is prepared holds none."""
    x = torch.ones(2, 1, 100, 64, device="meta", dtype=torch.bfloat16)
    found, _ = record(lambda x: Launch(kernel, (1,), {})(module.key_tiling(x, 64, 32)(x)), x)
    call, _ = prepare(found)
    assert call.launches[0].tensors == (TmaTiles(0, (64, 32)),)
    RAN.clear()
    keys = [torch.ones(2, 1, 100, 64, dtype=torch.bfloat16) for _ in range(2)]
    for key in keys:
        call(key)
    for (_, _, (descriptor,), _), key in zip(RAN, keys, strict=True):
        assert descriptor.base is key
        assert (descriptor.shape, descriptor.block_shape) == ([2, 1, 100, 64], [1, 1, 64, 32])
        assert type(descriptor) is type(module.key_tiling(key, 64, 32)(key))
        assert hasattr(descriptor, "layout") == (module is sm90)


def test_tiles_begin_at_multiples_of_16_bytes() -> None:
    x = torch.ones(1, 1, 10, 64, device="meta", dtype=torch.bfloat16)
    found, _ = record(lambda x: Launch(tiled, (1,), {})(key_tiling(x, 64, 32)(x)), x)
    call, _ = prepare(found)
    memory = torch.ones(10 * 64 + 8, dtype=torch.bfloat16)
    aligned, other = (memory[at : at + 640].view(1, 1, 10, 64) for at in (0, 4))
    call(aligned)
    with pytest.raises(ValueError, match=r"\(1, 1, 10, 64\) must begin at a multiple of 16 bytes, got address \d+"):
        call(other)


def test_no_tensor_is_kept() -> None:
    """A model has a call for each layer, whose tensors would stay until the garbage is collected."""
    x = torch.ones(2, 1, 100, 64, device="meta", dtype=torch.bfloat16)
    found, _ = record(lambda x: Launch(tiled, (1,), {})(key_tiling(x, 64, 32)(x)), x)
    call, _ = prepare(found)
    key = torch.ones(2, 1, 100, 64, dtype=torch.bfloat16)
    gone = weakref.ref(key)
    gc.collect()
    gc.disable()
    try:
        call(key)
        RAN.clear()
        del key
        assert gone() is None
    finally:
        gc.enable()


def of_another_kind(x: Tensor, module: Any, **changed: object) -> object:
    descriptor = module.key_tiling(x, 64, 32)(x)
    vars(descriptor).update(changed)
    return descriptor


CHANGED = [{"block_shape": [2, 1, 64, 32]}, {"shape": [2, 1, 50, 64]}, {"strides": [1, 1, 64, 1]}]


@pytest.mark.parametrize(
    "kernel, module, changed",
    [
        *((tiled, sm90, changed) for changed in CHANGED),
        (tiled, sm90, {"layout": gl.NVMMASharedLayout.get_default_for([1, 1, 64, 16], gl.bfloat16)}),
        *((tiled_in_triton, tma, changed) for changed in [*CHANGED, {"padding": "nan"}]),
    ],
)
def test_tiles_of_another_kind_are_refused(kernel: Kernel, module: Any, changed: dict[str, object]) -> None:
    x = torch.ones(2, 1, 100, 64, device="meta", dtype=torch.bfloat16)
    found, _ = record(lambda x: Launch(kernel, (1,), {})(of_another_kind(x, module, **changed)), x)
    with pytest.raises(NotRecordableError, match="takes tiles of another kind"):
        prepare(found)


def test_a_view_from_the_first_element_on_is_the_tensor_to_a_pointer_but_not_to_tma() -> None:
    found, _ = record(lambda x: Launch(second, (1,), {}, **NUMBERS)(x.view(3, 1)), tensors(3))
    call, (x,) = prepare(found)
    assert call.launches[0].tensors == (0,)
    assert x.shape == (3,)
    pool = torch.ones(2, 100, 8, 64, device="meta", dtype=torch.bfloat16)

    def tiles_of_a_view(x: Tensor) -> None:
        view = x.transpose(1, 2)
        Launch(tiled, (1,), {})(sm90.key_tiling(view, 64, 32)(view))

    found, _ = record(tiles_of_a_view, pool)
    with pytest.raises(NotRecordableError, match=r"takes tiles of a view, \(2, 8, 100, 64\)"):
        prepare(found)


@pytest.mark.parametrize(
    "op, why",
    [
        (lambda x, y: Launch(second, (1,), {}, **NUMBERS)(x[1:]), "a view that begins elsewhere"),
        (lambda x, y: Launch(second, (1,), {}, **NUMBERS)(x.view(torch.int32)), "reads torch.float32 as torch.int32"),
        (lambda x, y: Launch(second, (1,), {}, **NUMBERS)(x.view(torch.int16)), "reads torch.float32 as torch.int16"),
        (
            lambda x, y: Launch(second, (1,), {}, n=3, scale=float("inf"))(x),
            "launches second with arguments that have no literal",
        ),
        (lambda x, y: Launch(Kernel("first", "x"), (1,), {})(x), "a kernel that its name does not import, .*first"),
        (
            lambda x, y: Launch(second, (1,), {}, n=object(), scale=1.0)(x),
            "launches second with arguments that have no literal",
        ),
    ],
)
def test_what_cannot_be_written_down_is_refused(op: Any, why: str) -> None:
    found, _ = record(op, tensors(3), tensors(5))
    with pytest.raises(NotRecordableError, match=why):
        prepare(found)
