"""Building a program line by line: each line is run when it is drawn, so that shapes are known and it is legal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import hypothesis.strategies as st
import torch
from torch import Tensor

from programs.program import first_environment

T = TypeVar("T")


class Builder:
    """The lines so far, and what they made of tensors of each of the sizes that the program will be called with."""

    def __init__(
        self, draw: Callable[..., Any], dtype: str, sizes: Sequence[dict[str, int]], autocast: bool, kind: str = ""
    ) -> None:
        self.draw, self.dtype, self.sizes, self.autocast, self.kind = draw, dtype, sizes, autocast, kind
        self.dynamic = len(sizes) > 1
        self.inputs: list[tuple[str, str]] = []
        self.settings: list[tuple[str, str]] = []
        self.shapes: dict[str, list[torch.Size]] = {}  # of each input, for each of the sizes
        self.steps: list[str] = []
        self.tensors: list[str] = []  # that a step may write or return
        self.returned: list[str] = []
        self.forms: list[str] = []  # of attention, beside calls of SDPA
        self.length = " + ".join(sizes[0])  # of all segments together, as inputs see it
        self._spaces = [first_environment(dtype) | s for s in sizes]
        self._count = 0

    def pick(self, options: Sequence[T]) -> T:
        """One of them; shrinks towards the first."""
        return self.draw(st.sampled_from(options))

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def chance(self, percent: int) -> bool:
        """Draw whether something out of the ordinary happens; shrinks towards False."""
        return self.number(1, 100) > 100 - percent

    def name(self, stem: str) -> str:
        self._count += 1
        return f"{stem}{self._count}"

    def input(self, stem: str, code: str) -> str:
        name = self.name(stem)
        for space in self._spaces:
            exec(f"{name} = {code}", space)
        self.inputs.append((name, code))
        self.shapes[name] = [space[name].shape for space in self._spaces]
        if self.tensor(name).dim():
            self.tensors.append(name)
        return name

    def setting(self, stem: str, code: str) -> str:
        """An argument that is no tensor."""
        name = self.name(stem)
        for space in self._spaces:
            exec(f"{name} = {code}", space)
        self.settings.append((name, code))
        return name

    def marks(self) -> tuple[tuple[str, int, str], ...]:
        """Dims of inputs whose sizes differ between calls, and a name for those that are alike in all calls."""
        found = []
        for name, shapes in self.shapes.items():
            for dim, sizes in enumerate(zip(*shapes, strict=True)):
                if len(set(sizes)) > 1 and min(sizes) > 1:
                    found.append((name, dim, "_".join(map(str, sizes))))
        return tuple(found)

    def step(self, code: str) -> bool:
        """Add a line if it can be run; say whether."""
        with torch.no_grad(), contextlib.ExitStack() as stack:
            if self.autocast:
                stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
            try:
                for space in self._spaces:
                    exec(code, space)
            except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AssertionError):
                return False
        self.steps.append(code)
        return True

    def let(self, stem: str, code: str, keep: bool = True) -> str | None:
        """Add a line that names a new tensor; its name, or None where it can't be run."""
        name = self.name(stem)
        if not self.step(f"{name} = {code}"):
            return None
        if keep:
            self.tensors.append(name)
        return name

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name, for the first sizes."""
        return self._spaces[0][name]

    def size(self, name: str, dim: int) -> str:
        """A size as a program writes it: asked of the tensor, or a number where there is but one."""
        if not self.dynamic and self.number(0, 2) == 0:
            return str(self.tensor(name).shape[dim])
        return f"{name}.{self.pick([f'size({dim})', f'shape[{dim}]'])}"

    def shape(self, name: str) -> str:
        return ", ".join(self.size(name, dim) for dim in range(self.tensor(name).dim()))
