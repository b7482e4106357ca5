"""Imports between the modules of the package: one way, and in no circle.

They are parsed, not imported: a circle counts that hides in a function or behind TYPE_CHECKING, too.
"""

from __future__ import annotations

import ast
import graphlib
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"tatten.ops": ROOT / "ops", "tatten.passes": ROOT / "passes", "tatten": ROOT / "tatten"}
LAYERS = tuple(FOLDERS)  # each imports itself and those before it
KERNELS = "tatten.ops.cuda.kernels"


def _modules() -> dict[str, ast.Module]:
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            inner = path.relative_to(folder).with_suffix("").parts
            if package != "tatten" or inner[0] not in ("ops", "passes"):  # links to the other folders
                name = ".".join((package, *inner)).removesuffix(".__init__")
                found[name] = ast.parse(path.read_text(), filename=str(path))
    return found


MODULES = _modules()


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The module and the name in it of each import; of a module as a whole, the name is empty."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner, "") if inner in MODULES else (node.module or "", alias.name)


def _own(tree: ast.Module) -> set[str]:
    return {module for module, _ in _imports(tree) if module in MODULES}


def _layer(module: str) -> int:
    return next(i for i, package in enumerate(LAYERS) if f"{module}.".startswith(f"{package}."))


def find_circle(imports: dict[str, set[str]]) -> list[str]:
    """The modules of one circle, each before what it imports, and the first of them again; empty if there is none."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return []


@pytest.mark.parametrize("layer", LAYERS)
def test_no_module_imports_itself_through_others(layer: str) -> None:
    circle = find_circle({name: _own(tree) for name, tree in MODULES.items() if LAYERS[_layer(name)] == layer})
    assert not circle, "a circle of imports: " + " -> ".join(circle)


def test_a_circle_is_shown_in_the_order_of_its_imports() -> None:
    circle = find_circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})
    assert sorted(itertools.pairwise(circle)) == [("a", "b"), ("b", "c"), ("c", "a")]
    assert not find_circle({"a": {"b", "c"}, "b": {"c"}, "c": set()})


@pytest.mark.parametrize("module", MODULES)
def test_layers_import_downwards(module: str) -> None:
    """`tatten` builds on `tatten.passes`, and that on `tatten.ops`."""
    up = sorted(name for name in _own(MODULES[module]) if _layer(name) > _layer(module))
    assert not up, f"{module} imports {', '.join(up)}"


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith(f"{KERNELS}.")])
def test_kernels_import_kernels_triton_and_constants(module: str) -> None:
    """Device code knows nothing of what plans its launches."""
    allowed = ("__future__.", "triton.", f"{KERNELS}.")
    others = [x for x in _imports(MODULES[module]) if not f"{x[0]}.".startswith(allowed) and not x[1].isupper()]
    assert not others, f"{module} imports {', '.join(map('.'.join, others))}"


WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import torch
import tatten
q, kv = torch.randn(1, 4, 1, 64), torch.randn(1, 2, 32, 64)
compiled = torch.compile(tatten.decode_attention, backend="eager")
torch.testing.assert_close(compiled(q, kv, kv)[0], tatten.decode_attention(q, kv, kv)[0])
"""


@pytest.mark.drawn(1, "imports of a fresh interpreter")
def test_a_cpu_needs_neither_triton_nor_transformers() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
