"""The JSON format in which each benchmark writes its figures, and what reads them back.

    {"benchmark": ..., "command": ..., "date": ..., "device": ..., "torch": ..., "triton": ...,
     "transformers": ..., "rows": [{...}, ...]}

`transformers` is null if the benchmark did not load it. Files that were recorded before the field was added lack it.
A benchmark may add fields of its own. `rows` has one flat or nested object for each line of the printed table.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from support.command_line import command, device_name

FIELDS = ("benchmark", "command", "date", "device", "torch", "triton", "rows")


class ResultsError(ValueError):
    """A file of figures that is missing, or lacks a field that is read."""


class NotRecorded(ResultsError):
    """A file of figures that is missing."""


def write(path: Path, device: str, rows: Sequence[dict[str, Any]], **more: object) -> None:
    """Write a run's figures; `device` is `cpu` or `cuda`."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # PyTorch for CPUs comes without
        triton = None
    transformers = importlib.metadata.version("transformers") if "transformers" in sys.modules else None
    written = {
        "benchmark": Path(sys.argv[0]).stem,
        "command": command(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": triton,
        "transformers": transformers,
        **more,
    }
    fields = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in written.items()]
    lines = ",\n  ".join(map(json.dumps, rows))
    path.write_text("{\n " + ",\n ".join([*fields, f'"rows": [\n  {lines}\n ]']) + "\n}\n")  # a line for each row


def read(path: Path) -> dict[str, Any]:
    """Return a run's figures; raise NotRecorded if the file is missing, and ResultsError if it isn't in the format."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise NotRecorded(f"{path} is missing") from None
    except json.JSONDecodeError as error:
        raise ResultsError(f"{path} is not valid JSON: {error}") from None
    missing = [field for field in FIELDS if not isinstance(data, dict) or field not in data]
    if missing:
        raise ResultsError(f"{path} lacks {', '.join(missing)}")
    return data


def select(path: Path, keys: Iterable[str] = (), **only: object) -> list[dict[str, Any]]:
    """Return the rows for which `only` holds; raise ResultsError if there are none, or one lacks one of `keys`."""
    rows = read(path)["rows"]
    need(path, rows, only)
    rows = [row for row in rows if all(row[key] == value for key, value in only.items())]
    if not rows:
        raise ResultsError(f"{path} has no rows" + (f" with {only}" if only else ""))
    need(path, rows, keys)
    return rows


def need(path: Path, rows: Iterable[dict[str, Any]], keys: Iterable[str]) -> None:
    """Raise ResultsError unless each row has all keys."""
    keys = list(keys)
    for row in rows:
        missing = [key for key in keys if key not in row]
        if missing:
            raise ResultsError(f"{path}: a row lacks {', '.join(missing)}: {row}")
