"""The names and signatures of vLLM that an attention backend rests on: read from its source, stored, made into stubs.

    python tests/support/vllm_contract.py <folder with vllm/> > tests/support/vllm_contract.json

reads a release, which need not be installed: `python -m pip download vllm==0.33.0 --no-deps`, and unpack the wheel.
"""

from __future__ import annotations

import abc
import ast
import enum
import json
import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

STORED = Path(__file__).with_suffix(".json")
BACKEND, REGISTRY = "vllm.v1.attention.backend", "vllm.v1.attention.backends.registry"
LAYER = "vllm.model_executor.layers.attention.attention"
CLASSES = (
    "AttentionType",
    "AttentionBackend",
    "AttentionMetadata",
    "CommonAttentionMetadata",
    "AttentionCGSupport",
    "AttentionMetadataBuilder",
    "AttentionImplBase",
    "AttentionImpl",
)
CALLS = ("impl_cls", "forward", "do_kv_cache_update")  # of the layer, which calls the backend
Stored = dict[str, Any]


def read(root: Path) -> Stored:
    """Return what the source says: nothing is imported."""
    backend, registry, layer = (parse(root / f"{name.replace('.', '/')}.py") for name in (BACKEND, REGISTRY, LAYER))
    return {
        "version": version(parse(root / "vllm/_version.py")),
        BACKEND: {name: facts for name, facts in classes(backend).items() if name in CLASSES},
        REGISTRY: {x.name: parameters(x) for x in registry.body if getattr(x, "name", None) == "register_backend"},
        "calls": calls(layer),
    }


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def version(tree: ast.Module) -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and "__version__" in map(ast.unparse, node.targets):
            return str(ast.literal_eval(node.value))
    raise ValueError("`vllm/_version.py` must have a version")


def classes(tree: ast.Module) -> dict[str, Stored]:
    """Return what is stored of each class of a module: the example's, too."""
    return {node.name: class_facts(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def class_facts(node: ast.ClassDef) -> Stored:
    """Return bases, attributes and methods of a class; names of what has a default end with `=`."""
    attributes, methods = [], {}
    for part in node.body:
        if isinstance(part, ast.AnnAssign):
            attributes.append(ast.unparse(part.target) + "=" * (part.value is not None))
        elif isinstance(part, ast.Assign):
            attributes += [f"{ast.unparse(target)}=" for target in part.targets]
        elif isinstance(part, ast.FunctionDef):
            methods[part.name] = " ".join((*map(ast.unparse, part.decorator_list), f"({parameters(part)})"))
    return {
        "bases": [ast.unparse(base) for base in node.bases],
        "attributes": ", ".join(attributes),
        "methods": methods,
    }


def parameters(node: ast.FunctionDef) -> str:
    """Return the names of the parameters, with `=` after those that have a default."""
    names = node.args
    plain = [x.arg for x in (*names.posonlyargs, *names.args)]
    first_default = len(plain) - len(names.defaults)
    found = [name + "=" * (i >= first_default) for i, name in enumerate(plain)]
    found += [f"*{names.vararg.arg}"] if names.vararg else ["*"] if names.kwonlyargs else []
    found += [x.arg + "=" * (y is not None) for x, y in zip(names.kwonlyargs, names.kw_defaults, strict=True)]
    return ", ".join(found + ([f"**{names.kwarg.arg}"] if names.kwarg else []))


def calls(tree: ast.Module) -> dict[str, str]:
    """Return the arguments of the layer's calls, as they are written, with `=` after those that are passed by name."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "impl_cls" or (".impl." in name and name.endswith(CALLS)):
                keywords = [f"{x.arg}=" if x.arg else f"**{ast.unparse(x.value)}" for x in node.keywords]
                found[name.rpartition(".")[2]] = ", ".join((*map(ast.unparse, node.args), *keywords))
    return found


def stored() -> Stored:
    found: Stored = json.loads(STORED.read_text())
    return found


def stub(facts: Stored) -> dict[str, ModuleType]:
    """Make the modules, and every package above them, with these classes and a register that keeps names."""
    modules = {name: ModuleType(name) for name in (BACKEND, REGISTRY)}
    for name in (BACKEND, REGISTRY):
        while name := name.rpartition(".")[0]:
            modules.setdefault(name, ModuleType(name)).__path__ = []
    made: dict[str, type] = {}
    for name in CLASSES:
        made[name] = stub_class(name, facts[BACKEND][name], made)
    vars(modules[BACKEND]).update(made)
    registered: dict[str, str] = {}
    vars(modules[REGISTRY]).update(registered=registered, register_backend=registered.__setitem__)
    return modules


def stub_class(name: str, facts: Stored, made: dict[str, type]) -> type:
    """Make a class with the same members, fields or attributes, whose abstract methods have to be overridden."""
    names = [x for x in facts["attributes"].split(", ") if x]
    if "Enum" in facts["bases"]:
        return enum.Enum(name, [x.rstrip("=") for x in names])  # type: ignore[return-value]
    if name == "CommonAttentionMetadata":
        return make_dataclass(name, [(x[:-1], Any, None) if x.endswith("=") else (x, Any) for x in names])
    body: dict[str, Any] = {x[:-1]: None for x in names if x.endswith("=")}
    body["__class_getitem__"] = classmethod(lambda cls, _: cls)
    for method, signature in facts["methods"].items():
        if "abstractmethod" in signature:
            body[method] = abc.abstractmethod(keeps(signature))
    base = next((x for at, x in made.items() if facts["bases"] and facts["bases"][0] in (at, f"{at}[T]")), object)
    return abc.ABCMeta(name, (base,), body)


def names_of(signature: str) -> list[str]:
    """Return the parameters of a stored method."""
    return [x for x in signature.partition("(")[2].rstrip(")").split(", ") if x]


def keeps(signature: str) -> Any:
    """Return a method that keeps its arguments under their names, as the initialiser of a builder does."""

    def method(self: Any, *arguments: Any) -> None:
        vars(self).update(zip(names_of(signature)[1:], arguments, strict=True))

    return method


if __name__ == "__main__":
    print(json.dumps(read(Path(sys.argv[1])), indent=1))
