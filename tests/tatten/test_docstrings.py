"""Every public name has an example in its docstring, and each example runs."""

from __future__ import annotations

import doctest

import pytest
import torch
from ranks import run_ranks

import tatten

PUBLIC = [*tatten.__all__, "Report.rewritten", "Report.declined"]
ON_RANKS = ("ShardedKVCache", "disable_dtensor_sdpa", "enable_dtensor_sdpa", "tree_merge")


def public(name: str) -> object:
    x: object = tatten
    for part in name.split("."):
        x = getattr(x, part)
    return x


def run_example(name: str) -> str:
    """Return the wrong output of a public name's example: an exception, or another result."""
    found = doctest.DocTestFinder(recurse=False).find(public(name), name, module=False, globs={})
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in found:
        runner.run(example, out=report.append, clear_globs=False)  # Dynamo has put names of its own there
    return "".join(report)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example(name: str) -> None:
    doc = public(name).__doc__ or ""
    assert "    >>> " in doc.partition("Examples:\n")[2], f"tatten.{name} needs an example that runs, after `Examples:`"


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in ON_RANKS])
def test_examples_run(name: str) -> None:
    torch._dynamo.reset()
    assert run_example(name) == ""


@pytest.mark.drawn(2)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ON_RANKS)
def test_examples_run_on_ranks(name: str, ranks: int) -> None:
    assert run_ranks(ranks, run_example, name) == [""] * ranks


def test_an_example_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tatten.merge_state, "__doc__", "Examples:\n    >>> 1 + 1\n    3\n")
    assert "Expected:\n    3\nGot:\n    2" in run_example("merge_state")
