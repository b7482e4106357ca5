"""A KV cache sharded over the sequence on a DeviceMesh: contexts longer than one device holds, one merge per layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tatten.caches.arguments import check_positive
from tatten.caches.base import BaseCache
from tatten.caches.interleaved import Interleaved, placements
from tatten.caches.layer import Layer
from tatten.caches.prompts import Prompts
from tatten.dtensor_sdpa import enable_dtensor_sdpa
from tatten.ops.sizes import ceil_div


class ShardedKVCache(BaseCache):
    """Keys and values of all layers over the ranks of a mesh. Each rank runs the same step and stores its share.

    Each step gets its `positions` and `mask`, and passes the new keys and values of each layer to `append`. All shapes
    are fixed and lengths are on the device. A step compiles once and can be captured in a CUDA graph. It waits for the
    device only in eager mode, to check the capacity. Among the n ranks that share a sequence, rank `p % n` stores
    position p, in its slot `p // n`. These n ranks must compute the same tokens, keys and values.

    The constructor calls `tatten.enable_dtensor_sdpa`, with which `F.scaled_dot_product_attention` merges the states of
    the ranks.

    Args:
        num_layers: layers of the model.
        mesh: a mesh with named dims, on the device of keys and values, that contains this rank.
        capacity: number of tokens, rounded up to a multiple of n: each rank allocates `capacity / n` slots.
        sequence: the name of the mesh dim that shards the sequence, or several names in the order of the dims.
        heads: the name of the mesh dim that shards the heads, or None. Any other dim holds replicas.
        prompt_mask: bool `[batch, P]`, True for real tokens and False for padding among the first P; None for no
            padding.

    Raises:
        ValueError, TypeError: an argument is invalid.

    Examples:
        >>> import torch, tatten, torch.distributed as dist
        >>> import torch.nn.functional as F
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor import DTensor, Replicate
        >>> mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("kv",))  # under torchrun
        >>> cache = tatten.ShardedKVCache(num_layers=1, mesh=mesh, capacity=1 << 20)
        >>> _ = torch.manual_seed(0)  # the same tokens on all ranks
        >>> cache.prefill(0, *torch.randn(2, 1, 2, 100, 64))  # in each layer; the prompt's own attention is ordinary
        >>> mask, positions = cache.mask(), cache.positions()  # once per step
        >>> keys, values = cache.append(0, *torch.randn(2, 1, 2, 1, 64))  # in each layer
        >>> query = DTensor.from_local(torch.randn(1, 8, 1, 64), mesh, [Replicate()], run_check=False)
        >>> with torch.inference_mode():
        ...     out = F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True).to_local()
        >>> out.shape
        torch.Size([1, 8, 1, 64])
    """

    layout: Interleaved

    def __init__(
        self,
        num_layers: int,
        mesh: DeviceMesh,
        capacity: int,
        *,
        sequence: str | Sequence[str] = "kv",
        heads: str | None = None,
        prompt_mask: Tensor | None = None,
    ):
        check_positive("num_layers", num_layers)
        check_positive("capacity", capacity)
        self.layout = Interleaved(mesh, placements(mesh, sequence, heads))
        slots = ceil_div(capacity, self.layout.ranks)
        self.layers = [Layer(self.layout, slots) for _ in range(num_layers)]
        if prompt_mask is not None:
            self._check_prompt_mask(prompt_mask)
            prompt_mask = prompt_mask.clone()  # each step reads it
        self.prompts = Prompts(prompt_mask)
        enable_dtensor_sdpa()

    @property
    def length(self) -> Tensor:
        """Number of tokens, int64 without dimensions, on the device; it grows with the last layer of a step."""
        return self.layers[-1].length

    def prefill(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store this rank's share of a prompt in a layer.

        Args:
            layer: 0 to num_layers - 1.
            key, value: `[batch, kv_heads of this rank, P, head_dim]`, plain tensors, the same on all ranks that share
                the sequence; head_dim may differ between them.

        Raises:
            IndexError: there is no such layer.
            ValueError, TypeError: the tensors do not fit each other, the cache, its capacity or `prompt_mask`, or the
                layer has tokens already. Nothing has been written.
        """
        if used := int(self._checked_layer(layer, key).length):
            raise ValueError(f"`prefill` needs an empty cache, got one with {used} tokens: use `append`")
        self.layers[layer].append_local(key, value)

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[DTensor, DTensor]:
        """Add new tokens to a layer, and return the keys and values of all ranks.

        Args:
            layer: 0 to num_layers - 1.
            key, value: as for `prefill`, with q_len tokens.

        Returns:
            `(keys, values)`, `[batch, kv_heads, capacity, head_dim]`, sharded over the sequence, with unused slots.

        Raises:
            IndexError, ValueError, TypeError: as for `prefill`, but there may be tokens already.
        """
        keys, values = self._checked_layer(layer, key).append_local(key, value)
        return self.layout.keys(keys), self.layout.keys(values)

    def to_global(self, layer: int) -> tuple[Tensor, Tensor]:
        """Gather `(key, value)` of a layer, `[batch, kv_heads, length, head_dim]` in order of position, on every rank.

        A collective that waits for the device, meant for checks.

        Raises:
            IndexError: there is no such layer.
            ValueError: the layer has no tokens yet.
        """
        key, value = self._ordered(layer, int(self._layer(layer).length))
        return key.full_tensor(), value.full_tensor()

    def state_dict(self) -> dict[str, Tensor]:
        """Return keys and values in order of position, for `torch.distributed.checkpoint` and any number of ranks.

        A collective, to be called between steps. Each rank gathers one layer at a time.

        Returns:
            "keys.i" and "values.i" for each layer i, `[batch, kv_heads, length, head_dim]`, DTensors with consecutive
            tokens on each rank, and "length", int64 without dimensions. The prompt mask is not included.

        Raises:
            ValueError: a layer has no tokens yet, or the call comes in the middle of a step.
        """
        lengths = torch.stack([layer.length for layer in self.layers]).tolist()
        if len(set(lengths)) > 1:
            raise ValueError(
                f"`state_dict` must come between steps, when all layers have the same length, got {lengths}"
            )
        state: dict[str, Tensor] = {"length": self.length.clone()}
        for index in range(len(self.layers)):
            key, value = self._ordered(index, lengths[0])
            state[f"keys.{index}"], state[f"values.{index}"] = self.layout.chunks(key), self.layout.chunks(value)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the contents of the cache by a `state_dict` from any mesh with any number of ranks; a collective.

        Args:
            state: as `state_dict` returns it: DTensors on a mesh with all ranks of this one, or full plain tensors.

        Raises:
            ValueError, TypeError: `state` has other names or lengths, more tokens than `capacity`, or tensors that do
                not match those of the cache.
        """
        names = [f"{kind}.{index}" for kind in ("keys", "values") for index in range(len(self.layers))]
        if set(state) != {*names, "length"}:
            raise ValueError(f"`state` must have the names {sorted([*names, 'length'])}, got {sorted(state)}")
        length = int(state["length"])
        for name in names:
            if state[name].dim() != 4 or state[name].shape[2] != length:
                raise ValueError(f"`state[{name!r}]` must have {length} tokens, got shape {tuple(state[name].shape)}")
        if length > self.capacity:
            raise ValueError(f"`capacity` must hold the {length} tokens of `state`, got {self.capacity}")
        for index, layer in enumerate(self.layers):
            key, value = self._local_heads(state[f"keys.{index}"]), self._local_heads(state[f"values.{index}"])
            layer.clear()
            self.prefill(index, key, value)

    @property
    def prompt_mask(self) -> Tensor | None:
        """The argument `prompt_mask`."""
        return self.prompts.mask

    def _checked_layer(self, layer: int, key: Tensor) -> Layer:
        """Return a layer. Raise unless `key` fits the other layers and `prompt_mask`."""
        kv_layer = self._layer(layer)
        if key.dim() == 4:
            batch = self.batch_size or (key.shape[0] if self.prompt_mask is None else self.prompt_mask.shape[0])
            if key.shape[0] != batch:
                source = "layer 0" if self.batch_size else "`prompt_mask`"
                raise ValueError(f"`key` must have batch {batch}, as {source}, got {key.shape[0]}")
            if not key.shape[2]:
                raise ValueError(f"`key` must be [batch, kv_heads, q_len, head_dim], got shape {tuple(key.shape)}")
        return kv_layer

    def _ordered(self, layer: int, length: int) -> tuple[DTensor, DTensor]:
        if not self.layers[layer].tensors:
            raise ValueError(f"layer {layer} must have tokens, got none yet")
        key, value = (self.layout.by_position(tensor, length) for tensor in self.layers[layer].tensors)
        return key, value

    def _local_heads(self, tensor: Tensor) -> Tensor:
        """Return this rank's heads of `tensor`, `[batch, kv_heads, length, head_dim]`."""
        heads = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).to(self.length.device)
        for dim, placement in enumerate(self.layout.placements):
            if placement.is_shard(1):
                ranks = self.layout.mesh.size(dim)
                if heads.shape[1] % ranks:
                    raise ValueError(f"`state` must have a multiple of {ranks} heads, got {heads.shape[1]}")
                heads = heads.chunk(ranks, dim=1)[self.layout.mesh.get_local_rank(dim)]
        return heads

    def _check_prompt_mask(self, prompt_mask: Tensor) -> None:
        if prompt_mask.dim() != 2 or not 1 <= prompt_mask.shape[1] <= self.capacity:
            raise ValueError(
                f"`prompt_mask` must be [batch, 1 to {self.capacity}], got shape {tuple(prompt_mask.shape)}"
            )
        if prompt_mask.device != self.length.device:
            raise ValueError(
                f"`prompt_mask` must be on {self.length.device}, the device of the mesh, got {prompt_mask.device}"
            )
