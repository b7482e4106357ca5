"""Code in the pages: each block of Python that imports what it uses runs, and prints what its comments say."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
BLOCKS = [
    pytest.param(code, id=f"{path.stem}-{i}")
    for path in sorted(DOCS.glob("*.md"))
    for i, code in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL))
    if code.startswith(("import torch\n", "from tatten.ops")) and "init_device_mesh" not in code
]


def test_pages_have_code_that_runs() -> None:
    assert len(BLOCKS) >= 5


@pytest.mark.parametrize("code", BLOCKS)
def test_code_in_a_page(code: str) -> None:
    said = re.findall(r"print\(.*\)(?:  # |\n# )([^:\n]*)", code)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "__main__"})  # Dynamo imports the module of that name
    assert not said or printed.getvalue().splitlines() == said
