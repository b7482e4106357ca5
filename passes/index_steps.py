"""Steps that multiply an indexer's scores by numbers or copy them, before and after relu."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from tatten.passes.calls import argument, op_name
from tatten.passes.literals import TIMES, factor_of, number_of
from tatten.passes.metadata import reads_values
from tatten.passes.op_names import CASTS, COPIES
from tatten.passes.products import product_of
from tatten.passes.symbolic import is_input_number, known_shape, tensor_of
from tatten.passes.views import source_of


@dataclass(frozen=True)
class ScaleStep:
    """A step from `source`: a product with a number, or an `obstacle`, which the op can't compute.

    The number is `scale`, times `factor` if there is one: a number that is an input of the graph.
    """

    source: Node
    scale: float = 1.0
    factor: Node | None = None
    obstacle: str = ""


@dataclass(frozen=True)
class ScaleSteps:
    """The steps between two nodes, the last of which is `node`: their nodes, factors and first obstacle."""

    node: Node
    path: tuple[Node, ...]
    scale: float = 1.0
    factors: tuple[Node, ...] = ()
    obstacle: str = ""

    def after(self, node: Node, step: ScaleStep) -> ScaleSteps:
        """Return these steps and one more, which ends at `node`."""
        factors = self.factors if step.factor is None else (*self.factors, step.factor)
        return ScaleSteps(node, (*self.path, node), self.scale * step.scale, factors, self.obstacle or step.obstacle)


def is_relu(node: Node) -> bool:
    """Return True if a node is relu, in place or not, or a clamp with `min=0` and no `max`."""
    name = op_name(node).removesuffix("_")
    if name in ("clamp", "clip", "clamp_min"):
        return number_of(argument(node, 1, "min"), node) == 0 and argument(node, 2, "max") is None
    return name == "relu"


def steps_back(relu: Node) -> ScaleSteps | None:
    """Return the steps between a relu and the product that it reads, or None if it reads something else."""
    source = source_of(relu)
    steps = None if source is None else ScaleSteps(source, (source,))
    while steps is not None and product_of(steps.node) is None:
        step = step_at(steps.node)
        steps = None if step is None else steps.after(step.source, step)
    return steps


def step_at(node: Node) -> ScaleStep | None:
    """Return the step that a node computes, or None."""
    name, tensor, scaled = op_name(node), tensor_of(node), factor_of(node)
    if scaled is not None:
        return ScaleStep(*scaled)
    if name in CASTS | COPIES:
        source = source_of(node)
        before = tensor_of(source)
        if source is None or before is None or tensor is None:
            return None
        return ScaleStep(
            source, obstacle="" if before.dtype == tensor.dtype else f"`{node}` casts them to {tensor.dtype}"
        )
    if name.removesuffix("_") not in TIMES or tensor is None:
        return None
    a, b = argument(node, 0, "input"), argument(node, 1, "other")
    for source, other in ((a, b), (b, a)):
        before = tensor_of(source)
        if before is not None and known_shape(before.shape, tensor.shape):
            if is_input_number(other) and "div" not in name:
                return ScaleStep(source, factor=other)
            return ScaleStep(source, obstacle=f"`{node}` multiplies them by something else than a number")
    return None


def next_step(node: Node) -> tuple[Node, ScaleStep] | None:
    """Return the first user of a node after relu that is a step, and the step. A scale must be above 0."""
    for user in sorted(node.users):
        step = step_at(user)
        if step is not None and step.source is node:
            negative = f"`{user}` multiplies them by {step.scale:g} after relu"
            return user, step if step.scale > 0 else ScaleStep(node, obstacle=negative)
    return None


def only_reader(node: Node) -> Node | None:
    """Return the only user that reads values of a node, or None if there are none or several."""
    value_readers = [user for user in node.users if reads_values(user, node)]
    return value_readers[0] if len(value_readers) == 1 else None
