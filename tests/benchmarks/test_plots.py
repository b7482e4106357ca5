"""Pictures are the same bytes each time, and hold what was measured."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import matplotlib
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import plots
from support import results


def svg(name: str, theme: plots.Theme, monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setitem(matplotlib.rcParams, "svg.hashsalt", "tatten")
    file = io.BytesIO()
    plots.PICTURES[name](theme).savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return file.getvalue()


@pytest.mark.parametrize("name", plots.PICTURES)
def test_pictures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    light, dark = (svg(name, theme, monkeypatch) for theme in (plots.LIGHT, plots.DARK))
    assert light == svg(name, plots.LIGHT, monkeypatch)
    assert b"<dc:date>" not in light
    for picture, theme, other in ((light, plots.LIGHT, plots.DARK), (dark, plots.DARK, plots.LIGHT)):
        assert theme.text.encode() in picture
        assert theme.ours.encode() in picture
        assert other.text.encode() not in picture


def test_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times over the floor, the best of a peer's columns, and none for what was left out."""
    monkeypatch.setattr(plots, "RESULTS", tmp_path)
    row = {"name": "1k to 2k", "lengths": [1024, 2048], "q_heads": 8, "kv_heads": 2, "floor_us": 2.0}
    results.write(tmp_path / "decode_ragged.json", "cpu", [{**row, "us": {"auto": 3.0, "fa3": 8.0, "fa3_8": 5.0}}])
    assert plots.ragged() == [plots.Case("2 x 1k to 2k, 8/2", 1.5, {"FA3": 2.5})]
    results.write(tmp_path / "decode_ragged.json", "cpu", [{**row, "us": {"fa3": 8.0}}])
    with pytest.raises(KeyError, match="auto"):
        plots.ragged()
