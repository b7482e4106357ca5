"""Code in the pages: each block of Python that imports what it uses runs, and prints what its comments say."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import textwrap
from pathlib import Path

import pytest
from caused_warnings import no_warnings

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BLOCKS = [
    pytest.param(code, id=f"{path.stem}-{i}")
    for path in sorted(DOCS.glob("*.md"))
    for i, code in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL))
    if code.startswith(("import torch\n", "from stream_k_schedule ")) and "init_device_mesh" not in code
]


def test_pages_have_code_that_runs() -> None:
    assert len(BLOCKS) >= 5


@pytest.mark.drawn(2)
@pytest.mark.parametrize("code", BLOCKS)
def test_code_in_a_page(code: str) -> None:
    said = re.findall(r"print\(.*\)(?:  # |\n# )([^:\n]*)", code)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), no_warnings():
        exec(code, {"__name__": "__main__"})  # Dynamo imports the module of that name
    assert not said or printed.getvalue().splitlines() == said


def without_times(text: str) -> str:
    return re.sub(r"[\d.]+ ms", "0 ms", text)


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "paged.md"], ids=lambda page: page.stem)
def test_a_page_prints_the_report_that_it_says(page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = r"^```python\n(import torch\n(?:(?!^```).)*tatten\.explain.*?)^```\n\n((?:    [^\n]*\n)+)"
    [(code, said)] = re.findall(block, page.read_text(), re.MULTILINE | re.DOTALL)
    script = tmp_path / "attend.py"
    script.write_text(code)
    runpy.run_path(str(script))
    printed = capsys.readouterr().out.replace(f"{tmp_path}/", "")
    assert without_times(printed) == without_times(textwrap.dedent(said))
