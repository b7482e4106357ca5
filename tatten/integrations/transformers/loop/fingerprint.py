"""Detect changes of a model or a cache that compiled code, or a CUDA graph of it, does not notice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from tatten.integrations.transformers.loop.generate_call import BOOKKEEPING

# Compared by address, visited as modules, or written by `generate` for itself.
UNCOUNTED = frozenset({"_parameters", "_buffers", "_modules", *BOOKKEEPING})
PLAIN = frozenset({bool, int, float, str})
CONTAINERS = frozenset({dict, OrderedDict, list, tuple})


def state_of(model: nn.Module, numbers: bool = True) -> tuple[object, ...]:
    """Return everything besides its weights that affects a model's result: numbers, names, hooks, modes and configs.

    A CUDA graph checks nothing, and Dynamo does not check hooks. Each call of `generate` asks for the state. For speed,
    plain and empty attributes, which are the most, need no function call.

    Args:
        model: the model.
        numbers: include attributes of modules that are numbers, bools or strings.
    """
    visited: set[int] = set()
    state: list[object] = []
    kinds: set[type[nn.Module]] = set()
    for module in model.modules():
        state.append(type(module))
        kinds.add(type(module))
        for name, x in vars(module).items():
            kind = type(x)
            if name in UNCOUNTED:
                continue
            if kind in PLAIN:
                if numbers:
                    state += name, x
            elif x is not None and (kind not in CONTAINERS or x) and id(x) not in visited:
                state.append(name)
                state += [y for y in leaves(x, visited=visited) if not isinstance(y, Tensor)]
    forwards = frozenset((kind, kind.forward) for kind in kinds)  # a library may replace the method of a class
    return *state, forwards


def numbers_of(x: object) -> list[object]:
    """Return the numbers, bools and strings in a cache or a config, without its tensors."""
    return [y for y in leaves(x) if not isinstance(y, Tensor)]


def leaves(x: object, depth: int = 0, visited: set[int] | None = None) -> Iterator[object]:
    """Yield the tensors, numbers, strings and functions in an object, its containers and its attributes.

    Functions are yielded as their ids. Objects in `visited` are skipped, and new ones are added to it.
    """
    if isinstance(x, (Tensor, int, float, str)):
        yield x
        return
    if visited is not None and not isinstance(x, (list, tuple, dict, type(None))):
        if id(x) in visited:
            return
        visited.add(id(x))
    if depth > 6 or isinstance(x, (type, nn.Module)):
        return
    if isinstance(x, Callable):  # type: ignore[arg-type]
        yield id(x)
    elif isinstance(x, (list, tuple)):
        for item in x:
            yield from leaves(item, depth + 1, visited)
    elif isinstance(x, dict):
        for key, item in x.items():
            yield from leaves(key, depth + 1, visited)
            yield from leaves(item, depth + 1, visited)
    elif type(x).__module__.split(".")[0] in ("transformers", "tatten"):
        yield from leaves(vars(x) if hasattr(x, "__dict__") else (), depth + 1, visited)
