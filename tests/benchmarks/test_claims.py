"""The page's claims fail where a run does not support them, and its tables are what the recorded figures say."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import verify as command
from claims import CLAIMS
from claims.claim import Claim, geomean, largest, to_peers
from record import STEPS
from support import results
from tables import MARKED, PAGES, TABLES, fill
from verify import verify

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TEXT = "\n".join(page.read_text() for page in PAGES)
WORST = Claim("worst", "nine", 2, largest(to_peers), "at most 1.01", at_most=1.01)
MEAN = Claim("mean", "nine", 2, geomean(to_peers), "0.98 on average", at_most=0.98)
RING = Claim("ring", "nine", 2, lambda rows: rows[0]["us"]["flash"] / rows[0]["us"]["auto"], "1.5 times", at_least=1.5)
Rows = list[dict]


def run(folder: Path, change: Callable[[Rows], object] = lambda rows: None) -> dict[str, str]:
    """Return the findings of `verify` on a run that supports all claims, but for the change."""
    rows: Rows = [{"us": {"auto": 9.8, "triton": 9.0, "cudnn": 10.0, "flash": 15.0}} for _ in range(2)]
    change(rows)
    results.write(folder / "nine.json", "cpu", rows)
    return verify([WORST, MEAN, RING], folder)


def test_a_run_that_supports_all(tmp_path: Path) -> None:
    assert run(tmp_path) == {}


def test_a_figure_that_is_worse_within_the_tolerance(tmp_path: Path) -> None:
    assert run(tmp_path, lambda rows: rows[0]["us"].update(auto=10.3)) == {}


@pytest.mark.parametrize(
    "auto, failed",
    [(10.7, {"worst", "ring"}), (12.0, {"worst", "mean", "ring"}), (math.nan, {"worst", "mean", "ring"})],
)
def test_a_worse_figure(auto: float, failed: set[str], tmp_path: Path) -> None:
    found = run(tmp_path, lambda rows: rows[0]["us"].update(auto=auto))
    assert found.keys() == failed
    assert all("is claimed" in why for why in found.values())


def test_a_missing_file(tmp_path: Path) -> None:
    found = verify([WORST], tmp_path)
    assert found == {"worst": f"{tmp_path / 'nine.json'} is missing"}


def test_a_renamed_column(tmp_path: Path) -> None:
    def rename(rows: Rows) -> None:
        for row in rows:
            row["us"]["ours"] = row["us"].pop("auto")

    assert {why.split(": ")[1] for why in run(tmp_path, rename).values()} == {"a row lacks 'auto'"}


def test_peers_that_are_all_left_out(tmp_path: Path) -> None:
    def leave_out(rows: Rows) -> None:
        del rows[1]["us"]["cudnn"], rows[1]["us"]["flash"]

    found = run(tmp_path, leave_out)
    assert found.keys() == {"worst", "mean"}
    assert all("does not give the figure" in why for why in found.values())


def test_a_run_that_was_cut_short(tmp_path: Path) -> None:
    assert all("has 1 rows, a complete run has 2" in why for why in run(tmp_path, lambda rows: rows.pop()).values())


@pytest.mark.parametrize(
    "text, why", [("{", "is not valid JSON"), ("[]", "lacks benchmark"), ('{"rows": []}', "lacks benchmark")]
)
def test_a_file_in_another_format(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "nine.json").write_text(text)
    assert why in verify([WORST], tmp_path)["worst"]


def test_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["verify.py", str(tmp_path), "--machines", "two"])
    with pytest.raises(SystemExit) as exit:
        command.main()
    assert exit.value.code == 1
    said = capsys.readouterr().out
    claims = [claim for claim in CLAIMS if claim.file in {step.name for step in STEPS["two"]}]
    assert all(f"FAILS  {claim.name}: " in said for claim in claims)
    assert f"0 of {len(claims)} claims hold" in said


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_the_page_says_what_is_claimed(claim: Claim) -> None:
    assert claim.said in " ".join(TEXT.split())
    assert (claim.at_most, claim.at_least) != (None, None)
    assert claim.file in {step.name for steps in STEPS.values() for step in steps}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_recorded_figures_support_the_claims(claim: Claim) -> None:
    path = RESULTS / f"{claim.file}.json"
    if not path.exists() or "note" in results.read(path):
        pytest.skip("not recorded yet")
    assert verify([claim], RESULTS) == {}


def test_the_page_is_made_from_the_results() -> None:
    """After `make plots` nothing differs; each table stands once."""
    assert fill(TEXT, RESULTS) == TEXT
    assert sorted(name for _, name, _ in MARKED.findall(TEXT)) == sorted(TABLES)


def test_a_headline(tmp_path: Path) -> None:
    """A sentence about all rows, and of many rows the fastest, the median and the slowest."""
    lengths = (1, 2, 3, 4, 5, 6)
    rows = [{"length": n, "ranks": 2, "us": {"ring": 20.0 * n, "tree:push": 10.0, "local": 8.0}} for n in lengths]
    results.write(tmp_path / "tree_latency.json", "cpu", rows)
    filled = fill("<!-- table: headline_gpus -->\n<!-- end of table -->", tmp_path)
    assert "**2 x CPU" in filled
    assert "is 2.0 to 12.0 times as fast" in filled
    assert "It takes 1.25 to 1.25 times as long" in filled
    shown = [line.split(" | ")[0] for line in filled.splitlines() if line.startswith("| ")]
    assert shown == ["| keys", "| ---", "| 6", "| 3", "| 1"]


def test_a_table_whose_column_is_missing(tmp_path: Path) -> None:
    results.write(tmp_path / "best_of_n.json", "cpu", [{"n": 1, "with_ms": 2.0}])
    with pytest.raises(results.ResultsError, match="a row lacks 'floor_ms'"):
        fill("<!-- table: best_of_n -->\n<!-- end of table -->", tmp_path)


def test_a_table_of_some_rows(tmp_path: Path) -> None:
    step = {"section": "step", "model": "a", "batch": 8, "slots": 64, "used": 8, "floor_ms": 0.5, "faster": 2.0}
    step |= {f"{who}_{what}": 1.0 for who in ("tatten", "inductor") for what in ("ms", "error")}
    marked = "<!-- table: written_out_steps -->\n<!-- end of table -->"
    results.write(tmp_path / "written_out.json", "cpu", [{"section": "layer", "batch": 8}, step])
    assert fill(marked, tmp_path).count("\n|") == 3
    results.write(tmp_path / "written_out.json", "cpu", [{"section": "layer", "batch": 8}])
    with pytest.raises(results.ResultsError, match="has no rows for the table"):
        fill(marked, tmp_path)


def test_results_name_their_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    monkeypatch.setattr(
        sys, "argv", ["/a/benchmarks/decode.py", "--section", "nine", "--json", str(path), "--rounds", "1"]
    )
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    results.write(path, "cpu", [{"us": 1.0}], extra=2)
    data = json.loads(path.read_text())
    fields = ["benchmark", "command", "date", "device", "torch", "triton", "transformers", "extra", "rows"]
    assert list(data) == fields
    assert data["command"] == "python benchmarks/decode.py --section nine --rounds 1"
    assert data["benchmark"] == "decode"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    results.write(path, "cpu", [])
    assert results.read(path)["command"].startswith("torchrun --nproc-per-node 2 benchmarks/decode.py")
    with pytest.raises(results.ResultsError, match="has no rows"):
        results.select(path)
