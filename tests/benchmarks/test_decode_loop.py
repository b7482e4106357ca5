"""`benchmarks/decode_loop.py` bounds first calls, leaves candidates out with a reason, and measures eight sequences."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import decode_loop
from support import gpt_fast

Rows = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rows:
    """The rows of a command on a CPU."""

    def rows(options: str) -> list[dict[str, Any]]:
        path = tmp_path / "x.json"
        monkeypatch.setattr(sys, "argv", ["decode_loop.py", *options.split(), "--rounds", "1", "--json", str(path)])
        decode_loop.main()
        return json.loads(path.read_text())["rows"]

    monkeypatch.setattr(decode_loop, "read_rate", lambda device: 1e9)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return rows


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates that only sleep: a second in the first call of one of them, and a millisecond for each token."""
    first = {"loop_inductor": 1.0}

    def candidate(name: str, *_: object) -> tuple[Callable[[int], None], None]:
        return lambda tokens: time.sleep(first.pop(name, tokens / 1e3)), None

    monkeypatch.setattr(decode_loop, "candidate", candidate)


@pytest.mark.usefixtures("stand_ins")
def test_a_first_call_beyond_the_limit_costs_no_other_figures(run: Rows, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = run("--batch 1 --only loop_inductor loop loop_streamed --first-call-limit 0.5")
    assert row["left_out"] == {"loop_inductor": "its first call took longer than 0.5 s"}
    assert row["token_ms"].keys() == row["first_call_s"].keys() == row["compile_s"].keys() == {"loop", "loop_streamed"}
    assert row["token_ms"]["loop"] == pytest.approx(1.0, rel=0.5)
    assert "loop_inductor: left out, its first call took longer" in capsys.readouterr().out


@pytest.mark.usefixtures("stand_ins")
def test_eight_sequences(run: Rows) -> None:
    """They are sampled and streamed like one; drafts are those of one sequence."""
    (row,) = run("--batch 8 --only loop loop_sampled loop_streamed loop_lookup loop_assisted")
    assert row["token_ms"].keys() == {"loop", "loop_sampled", "loop_streamed"}
    assert row["left_out"].keys() == {"loop_lookup", "loop_assisted"}


def test_gpt_fast_is_named_by_the_hash_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("hello\n")
    assert gpt_fast.version(tmp_path) == "ce013625030ba8dba906f756967f9e9ca394464a"  # of `git hash-object`


@pytest.mark.usefixtures("stand_ins")
def test_gpt_fast_is_left_out_without_its_files(run: Rows, tmp_path: Path) -> None:
    (row,) = run("--batch 1 --only loop gpt_fast")
    assert row["left_out"] == {"gpt_fast": "no `--gpt-fast` folder"}
    (row,) = run(f"--batch 1 --only loop gpt_fast --gpt-fast {tmp_path}")
    assert row["left_out"] == {"gpt_fast": f"{tmp_path} has no model.py"}
    assert row["token_ms"].keys() == {"loop"}


def test_gpt_fast_changes_no_options_of_other_candidates(tmp_path: Path) -> None:
    """Its files set options of Inductor for the whole process as they are imported."""
    (tmp_path / "model.py").write_text("class Transformer: pass\n")
    lines = "import torch", "torch._inductor.config.coordinate_descent_tuning = True", "from model import Transformer"
    lines += "from tokenizer import get_tokenizer", "def decode_one_token(): pass"
    (tmp_path / "generate.py").write_text("\n".join(lines))
    path = list(sys.path)
    try:
        module = gpt_fast.load(tmp_path, torch.device("cpu"))
    finally:
        sys.modules.pop("model", None), sys.modules.pop("tokenizer", None)
    assert module.Transformer.__module__ == "model"
    assert not torch._inductor.config.coordinate_descent_tuning
    assert sys.path == path


@pytest.mark.slow
def test_on_a_cpu(run: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_loop, "MANY", 24)
    rows = run("--batch 1 2 --only loop loop_sampled loop_streamed loop_assisted")
    assert [row["batch"] for row in rows] == [1, 2]
    assert [row["left_out"].keys() for row in rows] == [set(), {"loop_assisted"}]
    for row in rows:
        assert all(0 <= row["compile_s"][name] <= row["first_call_s"][name] for name in row["token_ms"])
        assert row["compile_s"]["loop"] > 0
    assert rows[0]["drafts"]["loop_assisted"]["tokens_per_step"] == 8.0
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_second_process_finds_what_the_first_compiled(run: Rows) -> None:
    (row,) = run("--section start --only loop --used 8 --capacity 64")
    assert row["candidate"] == "loop"
    assert 0 < row["warm"]["first_tokens_s"] < row["cold"]["first_tokens_s"] < row["cold"]["process_s"]
