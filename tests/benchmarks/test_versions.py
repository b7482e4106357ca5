"""Each table says which versions of torch, Triton and transformers its figures were recorded with."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from support import results
from tables.table import RUNS_MODELS, provenance

BENCHMARKS = Path(results.__file__).parents[1]


def written(path: Path) -> str:
    results.write(path, "cpu", [{"us": 1.0}])
    return provenance({**results.read(path), "command": "python b.py", "device": "CPU"})


def test_a_recording_has_the_versions_that_ran(tmp_path: Path) -> None:
    import transformers

    said = written(tmp_path / "figures.json")
    assert f"torch {torch.__version__}, " in said
    assert f"transformers {transformers.__version__}, " in said


def test_transformers_is_left_out_where_it_was_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    assert "transformers" not in written(tmp_path / "figures.json")
    assert results.read(tmp_path / "figures.json")["transformers"] is None


def test_a_version_that_was_not_recorded_is_not_made_up() -> None:
    old = {"command": "python b.py", "device": "CPU", "date": "2026-11-22", "torch": "2.13.0", "triton": "3.9.0"}
    said = provenance({**old, "benchmark": "generate"})
    assert said == "`python b.py` — CPU, torch 2.13.0, triton 3.9.0, transformers not recorded, 2026-11-22"
    assert "transformers" not in provenance({**old, "benchmark": "decode"})
    assert importlib.metadata.version("transformers") not in said


def loads_transformers(path: Path) -> bool:
    source = path.read_text()
    if re.search(r"^ *(from|import) (transformers|tatten\.integrations)\b", source, re.MULTILINE):
        return True
    modules = re.findall(r"^ *from support\.(\w+) import", source, re.MULTILINE)
    for names in re.findall(r"^ *from support import (.+)", source, re.MULTILINE):
        modules += re.findall(r"\w+", names)
    return any(
        loads_transformers(path) for name in modules if (path := BENCHMARKS / "support" / f"{name}.py").is_file()
    )


def test_benchmarks_of_models_are_known() -> None:
    assert {path.stem for path in BENCHMARKS.glob("*.py") if loads_transformers(path)} == RUNS_MODELS
