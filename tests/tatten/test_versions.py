"""The version of tatten, and the versions of PyTorch that it is declared to run on."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

import tatten

PYPROJECT = (Path(__file__).parents[2] / "pyproject.toml").read_text()
BEFORE_WIDENING = """\
PyTorch {version} lies outside of `{declared}`, which pyproject.toml declares. Before you widen that, with this PyTorch:
- run every test_private_api.py: they say which private API moved, and the one file that uses it;
- run all tests on a CPU (`make test`) and on a GPU: graphs that Dynamo prints, and how Inductor reuses memory, change;
- run benchmarks/decode.py and compare its ratios with those in the docs."""


def declared() -> Requirement:
    (found,) = re.findall(r'^dependencies = \["(torch[^"]*)"\]', PYPROJECT, re.MULTILINE)
    return Requirement(found)


def test_the_range_has_both_ends() -> None:
    assert sorted(spec.operator for spec in declared().specifier) == ["<", ">="]


def test_the_running_pytorch_lies_in_the_declared_range() -> None:
    version = Version(Version(torch.__version__).base_version)  # nightlies and local builds count as their release
    assert version in declared().specifier, BEFORE_WIDENING.format(version=torch.__version__, declared=declared())


@pytest.mark.parametrize("version, fits", [("2.10.1", False), ("2.11.0", True), ("2.13.1", True), ("2.14.0", False)])
def test_what_was_verified_and_nothing_else(version: str, fits: bool) -> None:
    assert (Version(version) in declared().specifier) is fits


def test_the_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", tatten.__version__)
    assert metadata.version("tatten") == tatten.__version__
