"""The tables of docs/benchmarks.md, made from the JSON of the benchmarks.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`, and begins with the command, machine and date
of its figures.
"""

from __future__ import annotations

import re
from pathlib import Path

from tables import attention, model_steps, several_gpus, shared_prefixes
from tables.table import markdown

MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
TABLES = model_steps.TABLES | attention.TABLES | shared_prefixes.TABLES | several_gpus.TABLES


def fill(page: str, folder: Path) -> str:
    """The page with each of its tables made anew."""
    return MARKED.sub(lambda m: f"{m[1]}\n{markdown(TABLES[m[2]], folder)}\n{m[3]}", page)
