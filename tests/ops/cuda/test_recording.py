"""The launches of an op, recorded on tensors without data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tatten.ops.cuda.launcher import Launch, by_layout
from tatten.ops.cuda.recording import Gluon, NotRecordableError, may_take_gluon, record, recorder


class Kernel:
    arg_names = ("x", "out", "n")
    __name__ = "kernel"


def empty(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def launch() -> Launch:
    return Launch(Kernel(), (2,), {"num_warps": 4}, n=3)


def test_launches_and_allocations() -> None:
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        out = x.new_empty(4)
        launch()(x.view(2, 3).transpose(0, 1), out)
        other = torch.empty(4, device="meta")
        launch()(out, (other, x))
        return out.view(2, 2), other

    x = empty(6)
    found, (out, other) = record(op, x)
    assert [y.shape for y in found.allocated] == [(4,), (4,)]
    (_, (first, second)), (_, (third, pair)) = found.launches
    assert found.base(first) is x
    assert found.base(second) is found.base(third) is found.base(out) is found.allocated[0]
    assert found.base(pair[0]) is found.base(other) is found.allocated[1]
    assert recorder.get() is None


@pytest.mark.parametrize(
    "op, why",
    [
        (lambda x: x + 1, "calls aten.add"),
        (lambda x: x.t().contiguous(), "calls aten.clone"),
        (lambda x: x.zero_(), "calls aten.zero_"),
        (lambda x: torch.sort(x), "calls aten.sort"),
        (lambda x: torch._foreach_add_([x], 1), "calls aten._foreach_add_"),
    ],
)
def test_anything_else_is_refused(op: object, why: str) -> None:
    with pytest.raises(NotRecordableError, match=why):
        record(op, empty(2, 3))
    assert recorder.get() is None


def test_tensors_of_unknown_origin_are_refused() -> None:
    x, other = empty(6), empty(6)
    found, _ = record(lambda x: launch()(x[1:], other), x)
    ((_, (view, captured)),) = found.launches
    with pytest.raises(NotRecordableError, match="a view that begins elsewhere"):
        found.base(view)
    with pytest.raises(NotRecordableError, match="unknown origin"):
        found.base(captured)


def test_a_result_is_a_whole_tensor() -> None:
    found, (whole, turned) = record(lambda x: (x.new_empty(4), x.t()), empty(2, 3))
    assert found.exact_base(whole) is found.allocated[0]
    with pytest.raises(NotRecordableError, match=r"returns a view, \(3, 2\) of \(2, 3\)"):
        found.exact_base(turned)


def test_plans_made_while_recording_are_not_kept() -> None:
    made = []

    @by_layout
    def plan(x: Tensor) -> int:
        made.append(x)
        return len(made)

    x = empty(3)
    found, _ = record(lambda x: [plan(x), plan(x)], x)
    assert len(made) == 2
    assert not found.launches


def test_a_launch_outside_runs() -> None:
    ran = []

    class Runs(Kernel):
        def __getitem__(self, grid: object) -> object:
            return lambda *args, **kwargs: ran.append((args, kwargs))

    one = Launch(Runs(), (2,), {}, n=3)
    x = torch.ones(2)
    one(x, x)
    assert ran == [((x, x), {"n": 3, "enable_fp_fusion": False})]


def test_kernels_in_gluon() -> None:
    """Launched by Python alone; an op that can't be called either, as in a package, does without."""
    assert may_take_gluon("prefix_sm90")
    assert record(may_take_gluon, "prefix_sm90", gluon=Gluon.LAUNCHED)[1] is True
    assert record(may_take_gluon, "prefix_sm90", gluon=Gluon.AVOIDED)[1] is False
    with pytest.raises(NotRecordableError, match="launches the prefix_sm90 kernel, which is in Gluon"):
        record(may_take_gluon, "prefix_sm90")
