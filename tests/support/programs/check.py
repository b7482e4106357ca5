"""The property: a program gives compiled what it gives in eager mode, and leaves its inputs the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rewriting import as_for_inductor
from torch import Tensor

import tatten
from programs.program import Program
from programs.reference import attention
from tatten.passes import Declined, Rewritten


@dataclass(frozen=True)
class Outcome:
    """The backend's findings for the program's attention."""

    rewritten: tuple[str, ...] = ()  # ops
    declined: tuple[str, ...] = ()  # reasons
    not_ours: str = ""  # what is wrong with PyTorch's own compiler, which tatten can't mend


def check(program: Program) -> Outcome:
    """Run it with and without the backend, with each of its sizes; raises AssertionError where they differ.

    A program that fails in the same words without tatten, with the inner compiler alone, is none of ours.
    """
    mode = program.mode
    with mode.set_up(), tatten.recording() as report:
        try:
            if mode.fuses:
                _compare_compiled(program, as_for_inductor, {})
            else:
                _compare_compiled(program, "tatten", {"inner": mode.inner, **mode.inductor_options})
        except Exception as error:
            try:
                _compare_compiled(program, mode.inner, mode.inductor_options)
            except Exception as other:
                if _in_words(error) == _in_words(other):
                    return Outcome(not_ours=f"{type(other).__name__}: {other}")
            raise
    assert not any(x.decline.reason.value == "internal" for x in report.declined), str(report)
    return Outcome(
        tuple(x.op for x in report.rewritten if isinstance(x, Rewritten)),
        tuple(x.decline.reason.value for x in report.declined if isinstance(x, Declined)),
    )


def _in_words(error: Exception) -> tuple[type, str]:
    """The error's kind and first paragraph, without numbers and the backend's name."""
    return type(error), re.sub(r"[-+]?\d[\d.e+-]*|backend='\w+'", "#", str(error).split("\n\n")[0])


def _compare_compiled(program: Program, backend: str | Callable[..., Any], options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    inputs, function, mark = program.functions()
    compiled = torch.compile(function, backend=backend, dynamic=program.mode.dynamic, options=options or None)
    for sizes in program.sizes:
        given = inputs(**sizes)
        mark(*given)
        _compare(program, sizes, [*compiled(*given), *given[: len(program.inputs)]])


def _compare(program: Program, sizes: dict[str, int], got: list[Tensor]) -> None:
    """Each result is as near to the exact one as eager's, or nearer than the bound; NaN where eager's is."""
    eager, exact = program.run(sizes), program.run(sizes, attention())
    moved = [program.run(sizes, attention(move)) for move in (lambda x: x, torch.neg, lambda x: x * _random(x).sign())]
    far = program.run(sizes, attention(lambda x: 100 * x * _random(x)))
    for i, (name, have, want, best) in enumerate(zip(program.results(), got, eager, exact, strict=True)):
        where = f"{name} of {sizes}"
        assert have.shape == want.shape, f"{where}: is {list(have.shape)}, eager's {list(want.shape)}"
        assert have.dtype == want.dtype, f"{where}: is {have.dtype}, eager's {want.dtype}"
        if not want.dtype.is_floating_point:
            assert torch.equal(have, want), f"{where}: differs"
            continue
        # A key that the mask excludes may be NaN: eager's result is then, too, and tatten's need not be. Of a row with
        # +inf in its mask PyTorch's CPU kernel makes numbers in low precision from 32 keys on, where NaN is right.
        nans, needed = want.isnan() | best.isnan(), want.isnan() & best.isnan()
        assert not (have.isnan() & ~nans).any(), f"{where}: NaN where eager has none"
        assert have.isnan()[needed].all(), f"{where}: not NaN where eager is"
        bound = _bound(best, far[i], [run[i] for run in moved], program.mode.inner == "inductor")
        error, eager_error = (_difference(x, best) for x in (have, want))
        wrong = (error > bound + eager_error.nan_to_num(torch.inf)) & ~nans
        # Where eager itself is off (float64 beside a mask in float32), the exact result is right.
        wrong |= (bound == 0) & ~nans & (_difference(have, want) > 0) & (error > 0)
        assert not wrong.any(), (
            f"{where}: off by {error[wrong].max():.3g}, eager by {eager_error[wrong].max():.3g}, "
            f"allowed {bound[wrong].min():.3g} more; {int(wrong.sum())} of {wrong.numel()} elements"
        )


def _bound(best: Tensor, far: Tensor, moved: list[Tensor], fused: bool) -> Tensor:
    """How far each element may be off: not at all where attention doesn't move it, else as far as any one was moved.

    Twice that, because the bound went in three directions of many. In `far` attention was moved so far, and at random,
    that what several layers do to an element doesn't cancel. `fused`: Inductor sums in another order than eager, at
    most 16 numbers in programs, and fuses what eager rounds.
    """
    shifts = torch.stack([_difference(x, best) for x in moved]).nan_to_num(0.0, posinf=0.0)
    most = shifts.max() if shifts.numel() else 0.0
    depends = (shifts > 0).any(0) | ~(_difference(far, best) == 0)
    bound = torch.where(depends, 2 * most, 0.0)
    if not fused or not best.numel():
        return bound
    rounding = 2 * torch.finfo(best.dtype).eps + 16 * torch.finfo(torch.float32).eps
    return bound + rounding * best.double().nan_to_num(0.0, 0.0, 0.0).abs().max()


def _random(x: Tensor) -> Tensor:
    """Between -1 and 1."""
    return 2 * torch.rand(x.shape, dtype=x.dtype) - 1


def _difference(x: Tensor, y: Tensor) -> Tensor:
    """`|x - y|`, zero where they are the same infinity or both NaN."""
    x, y = x.double(), y.double()
    return torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs())
