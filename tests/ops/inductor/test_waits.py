"""The pass that lets Inductor's kernels wait first: when it is added, and what it leaves of the user's own pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch._inductor import config
from torch._inductor.scheduler import Scheduler

from tatten.ops.inductor.custom_pass import with_lowerings
from tatten.ops.inductor.waits import OPTION, WaitFirst, with_waits

EARLY = {"triton.enable_pdl": True}


def test_it_is_added_where_kernels_are_launched_early() -> None:
    assert with_waits({}) == {}
    assert isinstance(with_waits(EARLY)[OPTION], WaitFirst)
    assert isinstance(with_lowerings(EARLY)[OPTION], WaitFirst)
    with config.patch(EARLY):
        assert isinstance(with_waits({})[OPTION], WaitFirst)
        assert with_waits({"triton.enable_pdl": False}) == {"triton.enable_pdl": False}


def test_a_pass_of_the_user_runs_once() -> None:
    def backwards(nodes: list[Any]) -> list[Any]:
        return nodes[::-1]

    scheduler: Any = object.__new__(Scheduler)
    scheduler.previous_node = "a node"
    nodes = [SimpleNamespace(scheduler=scheduler, number=i) for i in range(3)]
    options = with_waits(with_waits({**EARLY, OPTION: backwards}))
    assert [node.number for node in options[OPTION](nodes)] == [2, 1, 0]
    assert WaitFirst()([]) == []


def test_the_kernel_before_is_hidden() -> None:
    scheduler: Any = object.__new__(Scheduler)
    scheduler.previous_node = "a node"
    WaitFirst()([SimpleNamespace(scheduler=scheduler)])
    assert scheduler.previous_node is None
    scheduler.previous_node = "another node"
    assert scheduler.previous_node is None
    assert isinstance(scheduler, Scheduler)


def test_a_moved_interface_is_an_error() -> None:
    """Inductor then compiles the graph again, without early launches; see `tatten.lowered`."""
    with pytest.raises(AttributeError, match="Scheduler has no attribute `previous_node`"):
        WaitFirst()([SimpleNamespace(scheduler=object.__new__(Scheduler))])
