"""Tables of continuous batching: `generate_batch`, the host's part of its steps, and requests that come and go."""

from __future__ import annotations

from collections.abc import Callable

from tables.table import Cell, Row, Table, figure, number


def part(name: str) -> Cell:
    return lambda r: number(r["parts_ms"][name], 2)


def measured(r: Row) -> bool:
    return "left_out" not in r


BATCHES: dict[str, Cell | str] = {
    "attention": "candidate",
    "layers": "layers",
    "prompts": "prompts",
    "samples of each": "samples",
    "new tokens": "new",
    "tokens per second": figure("tokens_per_second", 0),
    "ms of a decode step": figure("step_ms", 2),
    "host ms of a step": figure("host_ms", 2),
    "first call s": figure("first_call_s", 0),
    "GiB of keys and values": lambda r: number(r["pool_bytes"] / 2**30, 1),
}
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


def of_setting(name: str) -> Callable[[Row], bool]:
    return lambda r: measured(r) and r["setting"] == name


TABLES = {
    **{
        name: Table(name, BATCHES, measured)
        for name in (
            "generate_batch_a",
            "generate_batch_a_sdpa",
            "generate_batch_compiled",
            "generate_batch_compiled_peers",
            "generate_batch_decode",
        )
    },
    "generate_batch_gemma3": Table("generate_batch_c", BATCHES, of_setting("gemma3")),
    "generate_batch_gpt_oss": Table("generate_batch_c", BATCHES, of_setting("gpt_oss")),
    "generate_batch_host": Table("generate_batch_host", HOST, measured),
    "soak": Table("soak", SOAK),
    "soak_rings": Table("soak_rings", SOAK),
}
