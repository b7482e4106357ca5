"""The calls in programs that are not PyTorch's: custom ops, and functions put in the graph, some named like aten's."""

import torch


@torch.library.custom_op("fuzz::scale_", mutates_args={"x"})
def custom_scale_(x: torch.Tensor, factor: float) -> None:
    x.mul_(factor)


@torch.library.custom_op("fuzz::index_copy", mutates_args={"x"})
def custom_index_copy(x: torch.Tensor, y: torch.Tensor) -> None:
    x[:1] = y


@torch.library.custom_op("fuzz::to", mutates_args=())
def custom_to(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


@torch.library.custom_op("fuzz::clone", mutates_args=())
def custom_clone(x: torch.Tensor) -> torch.Tensor:
    return x.flip(2).clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("fuzz::contiguous", mutates_args=())
def custom_contiguous(x: torch.Tensor) -> torch.Tensor:
    return (x + 0.5).contiguous()


custom_to.register_fake(lambda x, factor: torch.empty_like(x))
custom_clone.register_fake(lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))
custom_contiguous.register_fake(lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))


@torch.compiler.allow_in_graph
def alias(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5


@torch.compiler.allow_in_graph
def fill(x: torch.Tensor, value: float) -> torch.Tensor:
    x.fill_(value)
    return x.sum()
