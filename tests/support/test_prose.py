"""The check of docstrings and error messages in `make lint` finds each kind of text that opens badly."""

from __future__ import annotations

from pathlib import Path

import pytest
from check_prose import findings, main

PLACES = {
    "module": '"""{}"""',
    "class": 'class A:\n    """{}"""',
    "function": 'def f():\n    """{}"""',
    "async function": 'async def f():\n    """{}"""',
    "method": 'class A:\n    def f(self):\n        """{}"""',
    "next line": 'def f():\n    """\n    {}\n    """',
    "error": 'raise ValueError("{}")',
    "error from another": 'raise ValueError("{}") from error',
    "f-string": 'raise ValueError(f"{} {{x}}")',
    "concatenated": 'raise ValueError("{} " + x)',
    "one of two": 'raise ValueError("a" if x else "{}")',
    "decline": 'Decline(Reason.MASK, "{}")',
    "decline with an f-string": 'Decline(Reason.MASK, f"{} {{x}}")',
}
BAD = ["Of each row, the sum.", "By row, the sum.", "What it is.", "Whether x is even.", "Who calls.", "what x is"]
GOOD = ["Return the sum of each row.", "Tell whether x is even.", "Offsets of the rows.", "Whole rows."]


@pytest.mark.parametrize("place", PLACES)
def test_each_place_is_read(place: str) -> None:
    for text in BAD:
        assert len(findings(PLACES[place].format(text))) == 1, text
    for text in GOOD:
        assert findings(PLACES[place].format(text)) == [], text


def test_other_strings_are_free() -> None:
    assert findings('x = "What is this?"\nprint("Of course")\n# By the way\n') == []


def test_lines_are_reported_and_links_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ops").mkdir()
    (tmp_path / "tatten").mkdir()
    (tmp_path / "tatten/ops").symlink_to("../ops")
    (tmp_path / "ops/a.py").write_text('x = 1\n\n\ndef f():\n    """What f does."""\n')
    assert main(tmp_path) == 1
    assert capsys.readouterr().out == "ops/a.py:5: docstring opens badly: What f does.\n"
    (tmp_path / "ops/a.py").write_text('"""Say what f does."""\n')
    assert main(tmp_path) == 0
