"""Tables of keys and values in pages: beside keys in order, gathered, shared by sequences, and in mixed batches."""

from __future__ import annotations

from tables.table import Cell, Row, Table, heads, number, us


def ratio(a: str, b: str) -> Cell:
    return lambda r: number(r["us"][a] / r["us"][b] if {a, b} <= r["us"].keys() else None, 2)


def _lengths(r: Row) -> str:
    return f"{r['name']} keys" if r["section"] == "nine" else str(r["name"])


PAGED: dict[str, Cell | str] = {
    "heads": heads,
    "batch": lambda r: len(r["lengths"]),
    "lengths": _lengths,
    "floor": us("floor"),
    "in order": us("dense"),
    "with lengths": us("lens"),
    **{f"pages of {n}": us(f"page {n}") for n in (256, 64, 16, 1)},
    **{f"FA3, {n}": us(f"fa3 {n}") for n in (256, 64, 16, 1)},
}
SHORT: dict[str, Cell | str] = {
    "heads": heads,
    "head_dim": "head_dim",
    "batch": lambda r: len(r["lengths"]),
    "keys": "name",
    "dtype": lambda r: r["dtype"].removeprefix("torch."),
    "in order": us("dense", 0),
    "pages of 16": us("page 16", 0),
    "pages of 64": us("page 64", 0),
    "pages of 256": us("page 256", 0),
    "gathered, 16": us("gathered 16", 0),
    "gathered, 64": us("gathered 64", 0),
    "Inductor, 16": us("inductor 16", 0),
    "pages of 16 to Inductor": ratio("page 16", "inductor 16"),
}
GATHERS: dict[str, Cell | str] = {
    "batch": "batch",
    "slots": "capacity",
    "used": lambda r: r["used"] if r["used"] == r["capacity"] else f"{r['used'] // 2} to {r['used']}",
    "page": "page",
    "floor": us("floor"),
    "Inductor": us("inductor"),
    "copied": us("copied"),
    "tatten": us("tatten"),
    "Inductor to tatten": ratio("inductor", "tatten"),
}
SHARED: dict[str, Cell | str] = {
    "heads, and keys of each level": "name",
    "pages apart": us("paged"),
    "shared": us("shared"),
    "finding them": us("find"),
    "dense segments": us("segments"),
    "shared, with 1/32 of finding, to segments": lambda r: number(r["ratio"], 2),
}
FINDING: dict[str, Cell | str] = {
    "sequences": "batch",
    "pages of each": "columns",
    "tables": "name",
    "finding": us("find"),
    "attention, pages apart": us("paged"),
    "with what was found": us("shared"),
}
CHUNKS: dict[str, Cell | str] = {
    "heads, keys of each level, and queries of the chunk": "name",
    "pages apart": us("paged"),
    "shared": us("shared"),
    "finding them": us("find"),
    "shared, with 1/32 of finding, to apart": lambda r: number(r["ratio"], 2),
}
MIXED: dict[str, Cell | str] = {
    "batch": "name",
    "page": "page",
    "floor": us("floor", 0),
    "FA3": us("fa3", 0),
    "tatten": us("tatten", 0),
    "tatten to FA3": ratio("tatten", "fa3"),
}
TABLES = {
    "paged": Table("paged", PAGED),
    "paged_h200": Table("paged_h200", PAGED),
    "paged_padded_h200": Table("paged_padded_h200", PAGED),
    "paged_short": Table("paged_cpu", SHORT, lambda r: r["section"] == "short"),
    "gathers": Table("gathers_cuda", GATHERS),
    "shared_pages": Table("shared_pages", SHARED, lambda r: r["section"] == "shared"),
    "shared_pages_h200": Table("shared_pages_h200", SHARED, lambda r: r["section"] == "shared"),
    "shared_ragged_h200": Table("shared_ragged_h200", SHARED),
    "finding_pages": Table("shared_pages", FINDING, lambda r: r["section"] == "finding"),
    "mixed": Table("mixed", MIXED),
    "mixed_h200": Table("mixed_h200", MIXED),
    "shared_chunks": Table("shared_chunks", CHUNKS),
}
