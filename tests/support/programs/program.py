"""A program as data: lines of Python that make its inputs, that run, and what is returned."""

from __future__ import annotations

import contextlib
import linecache
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fuzz import small_shapes
from torch import Tensor

from programs import custom_ops, forms

Functions = dict[str, Callable[..., Any]]  # by their names in programs
FILE = "program.py"  # where tracebacks and reports find the lines of the program that runs

IMPORTS, _, FORMS = Path(forms.__file__).read_text().partition('"""\n\n')[2].partition("\n\n\n")

RAND = """

DT = torch.{dtype}


def rand(*shape):
    return torch.randn(shape).to(DT)


"""
FORM_NAMES = [name for name, x in vars(forms).items() if getattr(x, "__module__", "") == forms.__name__]
MARKS = {"dynamic": "torch._dynamo.mark_dynamic", "unbacked": "torch._dynamo.decorators.mark_unbacked"}

SCRIPT = """
from tatten.ops.cpu import thresholds
from tatten.passes import cost, rewrite, sliding

{costs}
sliding.LEAST_BYTES["cpu"] = 1
thresholds.CPU = thresholds.Thresholds{thresholds}
torch.set_num_threads({threads})
torch._dynamo.config.capture_scalar_outputs = {scalars}
with torch.{grad}():
    for backend in ("{inner}", {backend}):
        options = {options} if backend == "tatten" else {inductor}
        compiled = torch.compile(program, backend=backend, dynamic={dynamic}, options=options)
        for sizes in {sizes}:
            ours, theirs = inputs(**sizes), inputs(**sizes)
            mark(*ours)
            got, want = [*compiled(*ours), *ours], [*program(*theirs), *theirs]
            for name, x, y in zip({names}, got, want):
                same = torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())
                off = "" if same else f"differs by {{(x.double() - y.double()).abs().max():.3g}}"
                print(backend, sizes, name, "equal" if same else off)
"""
AS_FOR_INDUCTOR = "lambda gm, _: rewrite(gm, fuses=True) and gm.forward"


@dataclass(frozen=True)
class Mode:
    """How a program is compiled and run.

    Attributes:
        marks: "dynamic" or "unbacked", the mark of sizes that differ between calls; "" for none.
        scalars: sizes that `.item()` gives are part of the graph.
        fuses: graphs are rewritten as Inductor's are, and run by `inner`, which is "eager".
        weighed: only what pays is rewritten, so that most is left.
    """

    inner: str = "eager"
    cpp_wrapper: bool = False
    dynamic: bool | None = None
    inference: bool = False
    threads: int = 1
    thresholds: tuple[int, int, int] = (0, 1, 1)  # run_bytes, split_bytes, packed_rows
    marks: str = ""
    scalars: bool = False
    fuses: bool = False
    weighed: bool = False

    @property
    def inductor_options(self) -> dict[str, Any]:
        """Inductor rounds where eager rounds: what it fuses would otherwise be more exact than eager."""
        if self.inner != "inductor":
            return {}
        return {"emulate_precision_casts": True, **({"cpp_wrapper": True} if self.cpp_wrapper else {})}

    @contextlib.contextmanager
    def set_up(self) -> Iterator[None]:
        threads = torch.get_num_threads()
        grad = torch.inference_mode if self.inference else torch.no_grad
        scalars = torch._dynamo.config.patch(capture_scalar_outputs=self.scalars)
        try:
            torch.set_num_threads(self.threads)
            with small_shapes(*self.thresholds, free=not self.weighed), scalars, grad():
                yield
        finally:
            torch.set_num_threads(threads)


@dataclass(frozen=True)
class Program:
    """Lines of Python. `sizes` are the lengths it is called with, one call after another."""

    dtype: str
    sizes: tuple[dict[str, int], ...]
    inputs: tuple[tuple[str, str], ...]  # name and expression, which may use sizes and earlier inputs
    steps: tuple[str, ...]
    returns: tuple[str, ...]
    mode: Mode
    autocast: bool = False  # around all of it
    settings: tuple[tuple[str, str], ...] = ()  # arguments that are no tensors, such as numbers and modules
    marks: tuple[tuple[str, int, str], ...] = ()  # an input, a dim, a name that dims of the same size have

    def source(self) -> str:
        """The functions `inputs(**sizes)` and `program(*inputs)`, and what they need."""
        given = [*self.inputs, *self.settings]
        names = ", ".join(name for name, _ in given)
        made = [f"{name} = {code}" for name, code in given]
        body = "\n".join(self.steps)
        if self.autocast:
            body = 'with torch.autocast("cpu", dtype=torch.bfloat16):\n' + textwrap.indent(body, "    ")
        functions = [
            _function(f"inputs({', '.join(self.sizes[0])})", ["torch.manual_seed(0)", *made], names),
            _function(f"program({names})", [body], ", ".join(self.returns)),
            _function(f"mark({names})", self._marking(), ""),
        ]
        needed = any(re.search(rf"\b{name}\b", code) for name in FORM_NAMES for code in (body, *made))
        definitions = f"\n\n\n{FORMS}" if needed else ""
        return IMPORTS + definitions + RAND.format(dtype=self.dtype) + "\n\n".join(functions)

    def _marking(self) -> list[str]:
        if not self.mode.marks:
            return []
        mark, unbacked = MARKS[self.mode.marks], self.mode.marks == "unbacked"
        shared = [f', shape_id="{shape_id}"' if unbacked else "" for _, _, shape_id in self.marks]
        return [f"{mark}({name}, {dim}{x})" for (name, dim, _), x in zip(self.marks, shared, strict=True)]

    def script(self) -> str:
        """A whole script that prints which results differ from eager's, with `inner` alone and with tatten."""
        source, prelude = self.source(), Path(custom_ops.__file__).read_text().partition("import torch\n")[2]
        uses = any(name in source for name in ("custom_", "alias(", "fill("))
        mode = self.mode
        return (
            source.replace(IMPORTS, IMPORTS + ("\n" + prelude.rstrip() if uses else ""))
            + "\n"
            + SCRIPT.format(
                costs="" if mode.weighed else 'cost.RATES["cpu"] = cost.Rates(bytes_per_us=1.0, segment_us=0.0)',
                backend=AS_FOR_INDUCTOR if mode.fuses else '"tatten"',
                scalars=mode.scalars,
                thresholds=mode.thresholds,
                threads=mode.threads,
                grad="inference_mode" if mode.inference else "no_grad",
                inner=mode.inner,
                options={"inner": mode.inner, **mode.inductor_options},
                inductor=mode.inductor_options or None,
                dynamic=mode.dynamic,
                sizes=list(self.sizes),
                names=list(self.returns) + [name for name, _ in self.inputs],
            )
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print an example that fails, for hypothesis."""
        printer.text(f"\n{self.script()}")

    def functions(self, exact: Functions | None = None) -> tuple[Callable[..., Any], ...]:
        """`inputs`, `program` and `mark` as functions, with PyTorch's attention or another one in its place."""
        source = self.source()
        linecache.cache[FILE] = len(source), None, source.splitlines(keepends=True), FILE
        space: dict[str, Any] = {}
        exec(compile(source, FILE, "exec"), space)
        space.update({name: x for name, x in vars(custom_ops).items() if not name.startswith("_")})
        space.update(exact or {})
        return space["inputs"], space["program"], space["mark"]

    def run(self, sizes: dict[str, int], exact: Functions | None = None) -> list[Tensor]:
        """Return the results, and the inputs as the program leaves them, without a compiler."""
        inputs, program, _ = self.functions(exact)
        given = inputs(**sizes)
        return [*program(*given), *given[: len(self.inputs)]]

    def results(self) -> list[str]:
        """The names of what `run` returns."""
        return [*self.returns, *(name for name, _ in self.inputs)]


def _function(head: str, body: list[str], returns: str) -> str:
    lines = [*body, f"return [{returns}]"]
    return f"def {head}:\n" + textwrap.indent("\n".join(lines), "    ") + "\n"


def first_environment(dtype: str) -> dict[str, Any]:
    """Return the names that the lines of a program may use, for running them one by one."""
    space = {name: x for name, x in vars(custom_ops).items() if not name.startswith("_")}
    exec(IMPORTS + "\n\n\n" + FORMS + RAND.format(dtype=dtype), space)
    return space
