"""Local parts of DTensors as nodes of a graph: the parts themselves, and those of a mask that belong to them."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node

from tatten.passes.calls import argument, op_name
from tatten.passes.symbolic import LocalPart, held, same_storage, tensor_of

if TYPE_CHECKING:
    from tatten.ops.distributed.placement import Sharding


def local_part(dtensor: Any) -> LocalPart:
    return LocalPart(dtensor, held(tensor_of(dtensor)))


def to_local(x: Any) -> Node:
    """Insert `to_local` of a DTensor or local part."""
    part = x if isinstance(x, LocalPart) else local_part(x)
    node = part.dtensor.graph.call_method("to_local", (part.dtensor,))
    node.meta["example_value"] = part.tensor
    return node


def local_input(dtensor: Node) -> Node | None:
    """The plain tensor of the graph that is the local part of `dtensor`, from `DTensor.from_local`; None without one.

    `shape` and `stride` only describe the other ranks. `run_check` may write to the tensor what another rank has;
    Dynamo does not trace that, and PyTorch 2.11 would not show it.
    """
    if op_name(dtensor) != "from_local" or dtensor.kwargs.get("run_check"):
        return None
    node = argument(dtensor, 0, "local_tensor")
    local, whole = tensor_of(node), tensor_of(dtensor)
    if local is None or whole is None or not same_storage(local, whole):  # or it was moved to the device of the mesh
        return None
    return node  # type: ignore[no-any-return]


def local_mask(mask: Node, sharding: Sharding) -> Node:
    """Insert the local part of a mask. A replicated mask is cut where the scores are sharded, as by `torch.chunk`."""
    tensor: Any = tensor_of(mask)
    node = to_local(mask)
    assert sharding.mask is not None
    for mesh_dim, (have, want) in enumerate(zip(tensor.placements, sharding.mask, strict=True)):
        if have != want:
            node = chunk(node, want.dim, sharding.mesh.size(mesh_dim), sharding.mesh.get_local_rank(mesh_dim))  # type: ignore[attr-defined]
    return node


def chunk(node: Node, dim: int, parts: int, index: int) -> Node:
    """Insert what a DTensor that is sharded over `dim` has on one of its ranks."""
    whole = tensor_of(node)
    assert whole is not None
    size = whole.shape[dim]
    each = (size + parts - 1) // parts
    begin = torch.sym_min(index * each, size)
    example = whole.narrow(dim, begin, torch.sym_min(each, size - begin))
    if isinstance(size, int):
        cut = node.graph.call_function(torch.narrow, (node, dim, begin, example.shape[dim]))
    else:  # not torch.chunk, which may make less than `parts` of it
        call = node.graph.call_function
        size_node = node.graph.call_method("size", (node, dim))
        each_node = call(operator.floordiv, (call(operator.add, (size_node, parts - 1)), parts))
        begin_node = call(torch.sym_min, (call(operator.mul, (each_node, index)), size_node))
        length = call(torch.sym_min, (each_node, call(operator.sub, (size_node, begin_node))))
        cut = call(torch.narrow, (node, dim, begin_node, length))
    cut.meta["example_value"] = example
    return cut


def stripe(node: Node, dim: int, parts: int, index: int) -> Node:
    """Insert a view of every `parts`-th index of a dim, from `index` on; the node itself if that is all of it.

    Unlike chunks, stripes stay even while the first places of a tensor are filled, one after the other.
    """
    if parts == 1:
        return node
    whole = tensor_of(node)
    assert whole is not None
    places = (*[slice(None)] * dim, slice(index, None, parts))
    view = node.graph.call_function(operator.getitem, (node, places))
    view.meta["example_value"] = whole[places]
    return view


@dataclass(frozen=True)
class FromLocal:
    """`DTensor.from_local` for one sharding, as a callable: a graph takes no meshes or placements as arguments."""

    sharding: Sharding
    __name__ = "from_local"

    def __call__(self, local: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(local, self.sharding.mesh, self.sharding.out, run_check=False)
