"""A table of the page: its cells, and the functions that write it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.results import NotRecorded, ResultsError, need, read

Row = dict[str, Any]
Cell = Callable[[Row], object]
# Benchmarks of models of transformers, whose version the oldest files lack.
RUNS_MODELS = {
    *(
        "aoti",
        "best_of_n",
        "bifurcated_paper",
        "decode_loop",
        "eager_step",
        "encoder_decoder",
        "encoder_decoder_loop",
        "generate",
        "generate_batch",
        "latent",
        "prefill",
    ),
    *("quantised", "rollouts", "soak", "sparse_layer", "static_cache", "tree_vs_ring", "written_out"),
}


@dataclass(frozen=True)
class Table:
    """A table that shows columns of a file's rows, by their heads."""

    file: str
    columns: dict[str, Cell | str]  # a string is the key of the row
    only: Callable[[Row], bool] = lambda r: True  # which rows are shown

    def markdown(self, folder: Path) -> str:
        """Return the table as it stands in the page; raise ResultsError if a column is missing."""
        path = folder / f"{self.file}.json"
        try:
            data = read(path)
        except NotRecorded:
            return f"Not recorded: `{path.name}` is missing.\n"
        try:
            rows = [r for r in data["rows"] if self.only(r)]
            if not rows:
                raise ResultsError(f"{path} has no rows for the table")
            need(path, rows, (key for key in self.columns.values() if isinstance(key, str)))
            return f"{provenance(data)}\n\n{lines_of(self.columns, rows)}\n"
        except KeyError as error:
            raise ResultsError(f"{path}: a row lacks {error}") from None


def number(x: float | None, digits: int = 1) -> str:
    """Return a figure with `digits` digits after the point, or `-` where it was not measured."""
    return "-" if x is None else f"{x:.{digits}f}"


def heads(r: Row) -> str:
    return f"{r['q_heads']}/{r['kv_heads']}"


def us(name: str, digits: int = 1) -> Cell:
    return lambda r: number(r["us"].get(name), digits)


def figure(name: str, digits: int = 1) -> Cell:
    return lambda r: number(r[name], digits)


def error(name: str) -> Cell:
    return lambda r: f"{r[name]:.1e}"


def provenance(data: dict[str, Any]) -> str:
    """Return how, where and when the figures were measured, and with which versions."""
    versions = [f"{name} {data[name]}" for name in ("torch", "triton", "transformers") if data.get(name)]
    if "transformers" not in data and data["benchmark"] in RUNS_MODELS:
        versions.append("transformers not recorded")
    where = ", ".join([data["device"], *versions, data["date"], *([data["note"]] if "note" in data else [])])
    return f"`{data['command']}` — {where}"


def lines_of(columns: dict[str, Cell | str], rows: Iterable[Row]) -> str:
    """Return the lines of a table."""
    lines: list[Sequence[object]] = [list(columns), ["---"] * len(columns)]
    lines += [[r[c] if isinstance(c, str) else c(r) for c in columns.values()] for r in rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
