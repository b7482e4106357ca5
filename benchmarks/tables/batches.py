"""Tables of continuous batching: the host's part of its steps, and requests that come and go."""

from __future__ import annotations

from tables.table import Cell, Row, Table, figure, number


def part(name: str) -> Cell:
    return lambda r: number(r["parts_ms"][name], 2)


def measured(r: Row) -> bool:
    return "left_out" not in r


HOST: dict[str, Cell | str] = {
    "attention": "candidate",
    "prepare ms": part("prepare"),
    "launch ms": part("launch"),
    "update ms": part("update"),
    "together ms": figure("host_ms", 2),
}
SOAK: dict[str, Cell | str] = {
    "model": "model",
    "requests": "requests",
    "samples of each": "samples",
    "cancelled": "cancelled",
    "outputs that finished": "finished",
    "outputs on the way": "streamed",
    "seconds": figure("seconds", 0),
    "faults": lambda r: len(r["faults"]),
    "MiB that memory grew by": figure("growth_mib", 2),
}
TABLES = {
    "generate_batch_host": Table("generate_batch_host", HOST, measured),
    "soak": Table("soak", SOAK),
    "soak_rings": Table("soak_rings", SOAK),
}
