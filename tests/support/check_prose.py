"""Report docstrings and error messages that open with "Of", "By", "What", "Whether" or "Who"."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("tatten", "passes", "ops", "examples", "benchmarks", "tests")
OPENING = re.compile(r"\s*(Of|By|What|Whether|Who)\b", re.IGNORECASE)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def python_files(root: Path) -> Iterator[Path]:
    """Yield each file once: `os.walk` does not follow the links tatten/ops and tatten/passes."""
    for folder in FOLDERS:
        for path, _, names in os.walk(root / folder):
            yield from (Path(path, name) for name in sorted(names) if name.endswith(".py"))


def docstrings(node: ast.AST) -> Iterator[ast.Constant]:
    if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
        first = node.body[0]
        assert isinstance(first, ast.Expr)
        yield from first_piece(first.value)


def messages(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield the first piece of each text that an exception or a `Decline` is made from."""
    match node:
        case ast.Raise(exc=ast.Call(args=[message, *_])):
            yield from first_piece(message)
        case ast.Call(func=ast.Name(id="Decline"), args=[_, message, *_]):
            yield from first_piece(message)


def first_piece(text: ast.expr) -> Iterator[ast.Constant]:
    match text:
        case ast.Constant(value=str()):
            yield text
        case ast.JoinedStr(values=[piece, *_]) | ast.BinOp(left=piece):
            yield from first_piece(piece)
        case ast.IfExp(body=one, orelse=other):
            yield from first_piece(one)
            yield from first_piece(other)


def findings(source: str) -> list[tuple[int, str]]:
    """Return the line number of each bad opening, and the first line of its text."""
    found = []
    for node in ast.walk(ast.parse(source)):
        for kind, texts in (("docstring", docstrings(node)), ("message", messages(node))):
            for text in texts:
                assert isinstance(text.value, str)
                if OPENING.match(text.value):
                    found.append((text.lineno, f"{kind} opens badly: {text.value.strip().splitlines()[0]}"))
    return sorted(found)


def main(root: Path) -> int:
    """Print each finding as `file:line: text`, and return the exit status."""
    found = [
        f"{path.relative_to(root)}:{line}: {text}"
        for path in python_files(root)
        for line, text in findings(path.read_text(encoding="utf-8"))
    ]
    print("\n".join(found) or "docstrings and messages: no bad opening")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[2]))
