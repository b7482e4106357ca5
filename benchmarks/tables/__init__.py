"""The tables of docs/benchmarks.md and docs/benchmarks/, made from the JSON of the benchmarks.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. It begins with the command, machine and date
of its figures, or, on docs/benchmarks.md, with a sentence about them.
"""

from __future__ import annotations

import re
from pathlib import Path

from tables import attention, batches, model_steps, pages, several_gpus, shared_prefixes
from tables.headlines import HEADLINES

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "benchmarks.md", *sorted((DOCS / "benchmarks").glob("*.md"))]
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
TABLES = HEADLINES | model_steps.TABLES | attention.TABLES | batches.TABLES | pages.TABLES
TABLES |= shared_prefixes.TABLES | several_gpus.TABLES


def fill(page: str, folder: Path) -> str:
    """Return the page with each of its tables written anew."""
    return MARKED.sub(lambda m: f"{m[1]}\n{TABLES[m[2]].markdown(folder)}\n{m[3]}", page)
