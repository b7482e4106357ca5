"""One step of a recording that fails or hangs costs no other step's figures, nor its own older ones."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import record
from record import STEPS, Step

SCRIPTS = {
    "good.py": "import sys; open(sys.argv[sys.argv.index('--json') + 1], 'w').write('new')",
    "bad.py": "import sys; open(sys.argv[-1], 'w').write('half'); raise RuntimeError('no luck')",
    "silent.py": "",
    "hangs.py": "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()",
}


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a recording whose benchmarks are `SCRIPTS`, with older figures of each."""
    monkeypatch.setattr(record, "HERE", tmp_path)
    folder = tmp_path / "out"
    folder.mkdir()
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text)
        (folder / f"{Path(name).stem}.json").write_text("old")
    return folder


def recorded(name: str, out: Path, seconds: float = 60.0, minutes: float = 1.0) -> tuple[str, str]:
    step = Step(name, f"{name}.py --device cuda", minutes)
    status = record.record(step, False, out, time.monotonic() + seconds)
    assert sorted(x.stem for x in out.iterdir()) == sorted(Path(x).stem for x in SCRIPTS)
    return status, (out / f"{name}.json").read_text()


def test_good(out: Path) -> None:
    assert recorded("good", out) == ("recorded", "new")


def test_failing(out: Path) -> None:
    status, figures = recorded("bad", out)
    assert status.startswith("failed with exit status 1\n")
    assert "RuntimeError: no luck" in status
    assert figures == "old"


def test_without_figures(out: Path) -> None:
    assert recorded("silent", out) == ("failed: it wrote no figures", "old")


def test_killed_with_its_children(out: Path) -> None:
    status, figures = recorded("hangs", out, minutes=1 / 30)
    assert status.startswith("killed after 2 s\n")
    assert figures == "old"
    child = int(status.split("\n")[1])
    for _ in range(50):
        try:
            state = Path(f"/proc/{child}/stat").read_text().rsplit(")")[1].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.1)
    os.kill(child, 9)
    pytest.fail("a child of the step is still running")


def test_no_time_left(out: Path) -> None:
    assert recorded("good", out, seconds=5) == ("skipped: no time left", "old")


def test_steps() -> None:
    names = [step.name for steps in STEPS.values() for step in steps]
    assert len(set(names)) == len(names)
    for steps in STEPS.values():
        for step in steps:
            for command in filter(None, (step.command, step.quick)):
                assert (record.HERE / command.split()[0]).is_file()
    assert "--nproc-per-node" in record.line(STEPS["two"][0], True, Path("x.json"))
