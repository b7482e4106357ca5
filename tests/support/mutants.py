"""Mutants: small faults in the code, each a change of one node of the syntax tree, sampled by a seed.

Only what runs is changed: no docstrings, annotations or assertions, and nothing of what a message says.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILES = [
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "passes").glob("*.py")),
    *(
        "ops/states.py",
        "ops/masks.py",
        "ops/reach.py",
        "ops/cpu/attention.py",
        "ops/cpu/flash.py",
    ),
    *(
        "tatten/caches/layer.py",
        "tatten/caches/base.py",
        "tatten/caches/shared_prefix.py",
        "tatten/caches/interleaved.py",
        "tatten/caches/sharded.py",
    ),
    *("tatten/integrations/transformers/shared_prefix.py", "tatten/integrations/transformers/sharded.py"),
]
COMPARISONS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq, ast.LtE, ast.GtE),
    ast.NotEq: (ast.Eq, ast.Lt, ast.Gt),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type, tuple[type, ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.FloorDiv, ast.Add),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult, ast.Mod),
    ast.Mod: (ast.FloorDiv,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.LShift: (ast.RShift,),
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
SYMMETRIC = {"min", "max", "minimum", "maximum", "logaddexp", "known_equal", "known_different", "same_storage"}
NAMES |= {"amin": "amax", "amax": "amin", "minimum": "maximum", "maximum": "minimum"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """The code of one node, `node`, of a file replaced by `after`; `lines` are those of the statement around it."""

    file: str
    node: ast.AST
    after: str
    lines: range
    function: range

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (ast.unparse(self.node), self.after))
        return f"{self.file}:{self.node.lineno}: {before[:100]}  ->  {after[:100]}"

    def source(self) -> str:
        lines = (ROOT / self.file).read_bytes().splitlines(keepends=True)
        first, last = self.node.lineno - 1, self.node.end_lineno - 1
        head, tail = lines[first][: self.node.col_offset], lines[last][self.node.end_col_offset :]
        return b"".join((*lines[:first], head, self.after.encode(), tail, *lines[last + 1 :])).decode()


def changed(node: Any, **fields: Any) -> str:
    """The code of an expression with other fields."""
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return f"({ast.unparse(other)})"


def variants(node: Any) -> Iterator[tuple[ast.AST, str]]:
    """Nodes of this one's own code, and what may stand in their place."""
    match node:
        case ast.Compare(ops=[op]):
            yield from ((node, changed(node, ops=[other()])) for other in COMPARISONS[type(op)])
        case ast.BoolOp(op=op):
            yield node, changed(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            yield node, f"({ast.unparse(operand)})"
        case ast.BinOp(op=op) if type(op) in ARITHMETIC:
            yield from ((node, changed(node, op=other())) for other in ARITHMETIC[type(op)])
        case ast.AugAssign(op=op) if type(op) in ARITHMETIC:
            yield from ((node, changed(node, op=other())[1:-1]) for other in ARITHMETIC[type(op)])
            yield node, "pass"
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value)):
            yield from ((node, f"({value + step})") for step in (1, -1))
        case ast.Call(func=func, args=args, keywords=keywords):
            for i, keyword in enumerate(keywords):
                if keyword.arg not in (None, "strict"):
                    yield node, changed(node, keywords=keywords[:i] + keywords[i + 1 :])
            if len(args) == 2 and not keywords and getattr(func, "attr", getattr(func, "id", "")) not in SYMMETRIC:
                yield node, changed(node, args=args[::-1])
            if isinstance(func, ast.Name) and func.id in NAMES:
                yield func, NAMES[func.id]
            if isinstance(func, ast.Attribute) and func.attr in NAMES:
                yield func, f"({ast.unparse(func.value)}).{NAMES[func.attr]}"
        case ast.Slice(lower=lower, upper=upper) if lower or upper:
            yield from (
                (node, changed(node, **{name: None})[1:-1]) for name in ("lower", "upper") if getattr(node, name)
            )
        case ast.If(test=test) | ast.IfExp(test=test):
            yield from ((test, text) for text in ("True", "False"))
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield node, "return None"
        case ast.Continue() | ast.Break() | ast.Raise() | ast.Expr(value=ast.Call() | ast.Yield() | ast.YieldFrom()):
            yield node, "pass"
        case ast.Assign(targets=[target]):
            again = isinstance(target, ast.Name) and any(
                getattr(x, "id", "") == target.id for x in ast.walk(node.value)
            )
            if again or isinstance(target, ast.Attribute | ast.Subscript):
                yield node, "pass"


def mutable(node: ast.AST) -> Iterator[ast.AST]:
    """The children of a node whose code runs and is no wording: no annotations, messages, decorators or assertions."""
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "type_params"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and getattr(child, "name", "") not in ("__repr__", "__str__"):
                    yield child


def mutants_of(file: str) -> list[list[Mutant]]:
    """For each node of a file that has any, its mutants."""
    found = []

    def visit(node: ast.AST, lines: range, function: range) -> None:
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            lines = range(node.lineno, body[0].lineno if body else node.end_lineno + 1)
        inside = range(node.lineno, node.end_lineno + 1) if isinstance(node, ast.FunctionDef) else function
        own = [Mutant(file, at, text, lines, inside) for at, text in variants(node)]
        if own and (inside or not isinstance(node, ast.Assign)):
            found.append(own)
        for child in mutable(node):
            visit(child, lines, inside)

    visit(ast.parse((ROOT / file).read_text()), range(0), range(0))
    return found


def sample(n: int, seed: int) -> list[Mutant]:
    """n mutants, as many of each file as its size asks for, each of a node of its own."""
    draw = random.Random(seed)
    sites = {file: mutants_of(file) for file in FILES}
    total, chosen, before = sum(map(len, sites.values())), [], 0
    for file in FILES:
        after = before + len(sites[file])
        count = n * after // total - n * before // total
        chosen += [draw.choice(mutants) for mutants in draw.sample(sites[file], count)]
        before = after
    return chosen
