"""The version of tatten, and the versions of PyTorch that pyproject.toml declares."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

import tatten

ROOT = Path(__file__).parents[2]


def declared() -> Requirement:
    (found,) = re.findall(r'^dependencies = \["(torch[^"]*)"\]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return Requirement(found)


def test_no_pytorch_is_too_new() -> None:
    """An upper bound would keep tatten out of every environment that a serving engine pins."""
    assert [spec.operator for spec in declared().specifier] == [">="]


def test_the_running_pytorch_lies_in_the_declared_range() -> None:
    version = Version(Version(torch.__version__).base_version)  # nightlies and local builds count as their release
    assert version in declared().specifier


@pytest.mark.parametrize("version, fits", [("2.10.1", False), ("2.11.0", True), ("2.15.0", True), ("3.0.0", True)])
def test_the_declared_range(version: str, fits: bool) -> None:
    assert (Version(version) in declared().specifier) is fits


def test_the_oldest_declared_pytorch_is_tested() -> None:
    (oldest,) = re.findall(r"^OLDEST \?= torch==(\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (lower,) = declared().specifier
    assert Version(oldest).release[:2] == Version(lower.version).release[:2]


def test_the_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", tatten.__version__)
    assert metadata.version("tatten") == tatten.__version__
