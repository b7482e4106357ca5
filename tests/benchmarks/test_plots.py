"""Pictures are the same bytes each time, and hold what was measured."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import plots
from support import results


def svg(name: str, theme: plots.Theme, monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setitem(matplotlib.rcParams, "svg.hashsalt", "tatten")
    file = io.BytesIO()
    plots.PICTURES[name](theme).savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return file.getvalue()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", plots.PICTURES)
def test_pictures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        plots.PICTURES[name](plots.LIGHT)
    except results.NotRecorded:
        pytest.skip("not recorded yet")
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


def drawn(figure: Figure) -> dict[str, list[tuple[float, float]]]:
    """The points of each curve, by its label."""
    ax = figure.axes[0]
    curves = [[tuple(map(float, point)) for point in curve.get_xydata()] for curve in ax.lines]
    return dict(zip((label.get_text() for label in ax.texts), curves, strict=True))


def test_prefill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU beside all, which a prompt that is too long for one has alone."""
    monkeypatch.setattr(plots, "RESULTS", tmp_path)
    rows = [
        {"arm": arm, "length": length, "ranks": ranks, "s": length / ranks, "floor_s": length / ranks / 2}
        for length in (8, 32)
        for arm, ranks in (("sdpa", 1), ("alone", 1), ("striped", 2))
    ]
    results.write(tmp_path / "prefill.json", "cpu", rows)
    assert drawn(plots.prefill(plots.DARK))["tatten: 2 GPUs"] == [(8, 4), (32, 16)]
    results.write(tmp_path / "prefill_long.json", "cpu", [{"length": 64, "ranks": 2, "s": 40.0, "floor_s": 20.0}])
    found = drawn(plots.prefill(plots.DARK))
    assert found["one GPU"] == [(8, 8), (32, 32)]
    assert found["tatten: 2 GPUs"] == [(8, 4), (32, 16), (64, 40)]
    assert found["its floor"] == [(8, 2), (32, 8), (64, 20)]


def test_sparse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megabytes, from the times that bytes take at a rate; other heads, batches and picks are left out."""
    monkeypatch.setattr(plots, "RESULTS", tmp_path)
    shown = {"heads": 128, "batch": 1, "picks": "random", "bytes_us": 2.0}
    rows = [{**shown, "length": n, "dense_bytes_us": n / 4} for n in (8, 32)]
    rows += [{**shown, change: 64, "length": 8, "dense_bytes_us": 1.0} for change in ("heads", "batch", "picks")]
    results.write(tmp_path / "sparse_kernel.json", "cpu", rows, bytes_per_second=3e12)
    found = drawn(plots.sparse(plots.LIGHT))
    assert found["all latents"] == [(8, 6), (32, 24)]
    assert found["tatten: 2048 picks"] == [(8, 6), (32, 6)]


def test_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "RESULTS", tmp_path)
    speeds = {"inductor": 600.0, "tatten": 2000.0, "fork": 7000.0}
    rows = [{"samples": n, "prompts": 8, "tokens_per_second": {x: n * y for x, y in speeds.items()}} for n in (4, 16)]
    results.write(tmp_path / "rollouts.json", "cpu", rows)
    assert [*drawn(plots.rollouts(plots.LIGHT)).values()] == [[(n, n * x) for n in (4, 16)] for x in speeds.values()]
