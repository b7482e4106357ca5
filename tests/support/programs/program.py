"""A program as data: lines of Python that make its inputs, that run, and what is returned."""

from __future__ import annotations

import contextlib
import linecache
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fuzz import small_shapes
from torch import Tensor

from programs import custom_ops

Attention = Callable[..., Tensor]
FILE = "program.py"  # where tracebacks and reports find the lines of the program that runs

IMPORTS = """\
import torch
import torch.nn.functional as F

sdpa, aten_sdpa = F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default
inf, nan = float("inf"), float("nan")
"""

RAND = """\
DT = torch.{dtype}


def rand(*shape):
    return torch.randn(shape).to(DT)


"""

SCRIPT = """
from tatten.ops.cpu import thresholds
from tatten.passes import cost

cost.RATES["cpu"] = cost.Rates(bytes_per_us=1.0, segment_us=0.0)
thresholds.CPU = thresholds.Thresholds{thresholds}
torch.set_num_threads({threads})
with torch.{grad}():
    for backend in ("{inner}", "tatten"):
        options = {options} if backend == "tatten" else {inductor}
        compiled = torch.compile(program, backend=backend, dynamic={dynamic}, options=options)
        for sizes in {sizes}:
            ours, theirs = inputs(**sizes), inputs(**sizes)
            got, want = [*compiled(*ours), *ours], [*program(*theirs), *theirs]
            for name, x, y in zip({names}, got, want):
                same = torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())
                off = "" if same else f"differs by {{(x.double() - y.double()).abs().max():.3g}}"
                print(backend, sizes, name, "equal" if same else off)
"""


@dataclass(frozen=True)
class Mode:
    """How a program is compiled and run."""

    inner: str = "eager"
    cpp_wrapper: bool = False
    dynamic: bool | None = None
    inference: bool = False
    threads: int = 1
    thresholds: tuple[int, int, int] = (0, 1, 1)  # run_bytes, split_bytes, packed_rows

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
        try:
            torch.set_num_threads(self.threads)
            with small_shapes(*self.thresholds), grad():
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

    def source(self) -> str:
        """The functions `inputs(**sizes)` and `program(*inputs)`, and what they need."""
        names = [name for name, _ in self.inputs]
        made = [f"{name} = {code}" for name, code in self.inputs]
        body = "\n".join(self.steps)
        if self.autocast:
            body = 'with torch.autocast("cpu", dtype=torch.bfloat16):\n' + textwrap.indent(body, "    ")
        functions = [
            _function(f"inputs({', '.join(self.sizes[0])})", ["torch.manual_seed(0)", *made], names),
            _function(f"program({', '.join(names)})", [body], self.returns),
        ]
        return IMPORTS + RAND.format(dtype=self.dtype) + "\n\n".join(functions)

    def script(self) -> str:
        """A whole script that prints which results differ from eager's, with `inner` alone and with tatten."""
        source, prelude = self.source(), Path(custom_ops.__file__).read_text().partition("import torch\n")[2]
        uses = any(name in source for name in ("custom_", "alias(", "fill("))
        mode = self.mode
        return (
            source.replace(IMPORTS, IMPORTS + (prelude if uses else ""))
            + "\n"
            + SCRIPT.format(
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
        """What hypothesis prints of an example that fails."""
        printer.text(f"\n{self.script()}")

    def functions(self, attention: Attention | None = None) -> tuple[Callable[..., list[Tensor]], Callable[..., Any]]:
        """`inputs` and `program` as functions, with PyTorch's attention or another one in its place."""
        source = self.source()
        linecache.cache[FILE] = len(source), None, source.splitlines(keepends=True), FILE
        space: dict[str, Any] = {}
        exec(compile(source, FILE, "exec"), space)
        space.update({name: x for name, x in vars(custom_ops).items() if not name.startswith("_")})
        if attention is not None:
            space["sdpa"] = space["aten_sdpa"] = attention
        return space["inputs"], space["program"]

    def run(self, sizes: dict[str, int], attention: Attention | None = None) -> list[Tensor]:
        """What it returns, and its inputs as it leaves them, without a compiler."""
        inputs, program = self.functions(attention)
        given = inputs(**sizes)
        return [*program(*given), *given]

    def results(self) -> list[str]:
        """The names of what `run` returns."""
        return [*self.returns, *(name for name, _ in self.inputs)]


def _function(head: str, body: list[str], returns: tuple[str, ...] | list[str]) -> str:
    lines = [*body, f"return [{', '.join(returns)}]"]
    return f"def {head}:\n" + textwrap.indent("\n".join(lines), "    ") + "\n"


def first_environment(dtype: str) -> dict[str, Any]:
    """What the lines of a program may name, for running them one by one."""
    space = {name: x for name, x in vars(custom_ops).items() if not name.startswith("_")}
    exec(IMPORTS + RAND.format(dtype=dtype), space)
    return space
