"""A KV cache for sequences that share a prefix, which is stored once: prefill, fork n ways, and fork again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tatten.caches.arguments import check_positive
from tatten.caches.base import BaseCache
from tatten.caches.layer import Layer, is_captured
from tatten.caches.layers import fork_layers, select_layers, used_slots
from tatten.caches.prompts import Prompts
from tatten.caches.refill import refill

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class SharedPrefixCache(BaseCache):
    """Keys and values of all layers. A new cache is filled by a prefill, then forked.

    Each step gets its `positions` and `mask`, and passes the new keys and values of each layer to `update`. After a
    fork all shapes are fixed and lengths are on the device. A step compiles once and can be captured in a CUDA graph.
    It waits for the device only in eager mode, to check the capacity. A cache stays usable after a fork or a selection,
    and forks are independent of each other.

    Args:
        num_layers: layers of the model.
        prompt_mask: bool `[G, P]`, True for real tokens and False for padding, on either side; None for no padding.
            P is the length of the prompts. The prefill may leave out their last tokens.
        prompt_lens: int32 or int64 `[G]`, instead of a mask, for prompts of unequal length: the number of tokens of
            each prompt that take part. Positions continue from there. All tokens before the first fork belong to the
            prompts.
        mesh: a mesh with named dims, on the device of keys and values, that contains this rank; None for one device.
            A mesh shards prefix and suffixes over the sequence: among the n ranks that share a sequence, rank `p % n`
            stores position p. All ranks must pass the same prompts, forks and selections, which is checked.
        sequence, heads: names of dims of the mesh, as for `tatten.ShardedKVCache`.
        device: the device of `mask` and `positions` for the prefill; later the device of the keys is used. Default:
            the device of `prompt_mask` or `prompt_lens`, or torch's default.

    Raises:
        ValueError, TypeError: an argument is invalid.

    Examples:
        >>> import torch, tatten
        >>> import torch.nn.functional as F
        >>> cache = tatten.SharedPrefixCache(num_layers=1)
        >>> keys, values = cache.update(0, *torch.randn(2, 1, 8, 100, 64))  # the prefill of one prompt, in each layer
        >>> samples = cache.fork(4, capacity=256)  # 4 sequences for each prompt, 256 new tokens for each
        >>> mask, positions = samples.mask(), samples.positions()  # once per step
        >>> keys, values = samples.update(0, *torch.randn(2, 4, 8, 1, 64))  # in each layer
        >>> out = F.scaled_dot_product_attention(torch.randn(4, 8, 1, 64), keys, values, mask)
        >>> best = samples.select([3, 3, 0])  # three sequences: two that go on from 3, one from 0
        >>> best.batch_size
        3
    """

    def __init__(
        self,
        num_layers: int,
        prompt_mask: Tensor | None = None,
        device: torch.device | str | None = None,
        *,
        prompt_lens: Tensor | None = None,
        mesh: DeviceMesh | None = None,
        sequence: str | Sequence[str] = "kv",
        heads: str | None = None,
    ):
        check_positive("num_layers", num_layers)
        self.prompts = Prompts(prompt_mask, prompt_lens)
        self.device = self.prompts.device if device is None else device
        if mesh is not None:
            from tatten.caches.agreement import Agreement  # imports DTensor, which takes seconds
            from tatten.caches.interleaved import Interleaved, placements
            from tatten.dtensor_sdpa import enable_dtensor_sdpa

            self.layout = Interleaved(mesh, placements(mesh, sequence, heads))
            self.agreement = Agreement(self.layout, self.prompts)
            self.device = torch.device(mesh.device_type)
            enable_dtensor_sdpa()
        elif heads is not None:
            raise ValueError(f"`heads` must name a dim of `mesh`, got {heads!r} without a mesh")
        self.layers = [Layer(self.layout, agreement=self.agreement, is_first=i == 0) for i in range(num_layers)]

    @property
    def length(self) -> int:
        """Number of tokens of each sequence, read on the host. Raises ValueError in the middle of a step."""
        return used_slots(self.layers, "length") + self.layers[0].prefix_length if self.batch_size else 0

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens to a layer, and return all keys and values of the layer.

        Args:
            layer: 0 to num_layers - 1.
            key, value: `[batch, kv_heads, q_len, head_dim]`; head_dim may differ between them.

        Returns:
            `(keys, values)`, `[batch, kv_heads, total, head_dim]` with `total` as in `mask`. Over a mesh they are
            DTensors sharded over the sequence, except for the first tokens, which are returned unchanged.

        Raises:
            IndexError: there is no such layer.
            ValueError, TypeError: the tensors do not fit each other, the cache, its capacity or the prompts. Nothing
                has been written.
        """
        kv_layer = self._layer(layer)
        if not kv_layer.static and key.dim() == 4:
            self._check_prompt(kv_layer, key)
        return kv_layer.append(key, value)

    def fork(self, n: int, capacity: int, into: SharedPrefixCache | None = None) -> SharedPrefixCache:
        """Make a cache with `n` children of each sequence: child i of sequence j is sequence `j * n + i`.

        All tokens so far become the shared prefix, without a copy. Reads the number of used slots on the host.

        Args:
            n: children of each sequence.
            capacity: number of tokens that each child can add.
            into: a fork of the same shapes that is no longer needed. The prefix is copied into its memory, and `into`
                is returned as the new fork: graphs that were captured over it stay valid. This also overwrites the
                cache that `into` was forked from, and other forks of that cache.

        Raises:
            ValueError, TypeError: `n` or `capacity` is not an int of at least 1, the call comes before the prefill or
                in the middle of a step, one of `prompt_lens` exceeds the prefill, or `into` does not fit. Nothing has
                been written.
        """
        used = used_slots(self.layers, "fork")
        if self.agreement is not None:
            self.agreement.check_fork(n, capacity, self.batch_size, used)
        check_positive("n", n)
        check_positive("capacity", capacity)
        if not self.layers[0].static:  # the first fork
            self.prompts.check_lens(self.layers[0].prefix_length)
        self._check_into(into)
        layers = fork_layers(self.layers, n, capacity, used)
        if into is None:
            for layer in layers:
                layer.allocate()
            into = self._with_layers(layers, self.prompts.map(torch.clone))
        else:
            refill(into.layers, into.prompts, layers, self.prompts)
        for layer in self.layers:
            layer.frozen = max(layer.frozen, used)
        return into

    def select(self, indices: Sequence[int] | Tensor, into: SharedPrefixCache | None = None) -> SharedPrefixCache:
        """Make a cache of the sequences `indices`, in that order. A sequence may occur several times.

        Copies the suffixes and never a prefix: each sequence remembers the row of a prefix that it reads. Finished
        sequences can be dropped as soon as the others fit the next smaller batch of, say, 128, 96 and 64:

            cache = cache.select(finished.argsort(stable=True)[:96])  # bool [batch]; one graph for each batch size

        With `into`, a graph that was captured over an earlier selection stays valid: it reads the prefixes, rows and
        suffixes of the new selection.

        Args:
            indices: ints, or an integer tensor with one dimension. The values of a tensor on an accelerator are never
                read on the host, and not checked. If the host knows the indices, and each remaining row of a prefix is
                read by the same number of consecutive sequences, the new cache keeps only these rows, as a view.
            into: a selection of the same shapes that is no longer needed, as for `fork`. It must have rows for each
                prefix for which the new selection has rows. It has them if its sequences did not read equal blocks.

        Raises:
            IndexError: there is no such sequence.
            ValueError: `indices` is empty or has another number of dimensions, or `into` does not fit or is passed
                before a fork. Nothing has been written.
            TypeError: `indices` holds something other than integers, or `into` is not a cache.
        """
        selection = self._selection(indices)
        self._check_into(into)
        if into is not None and not self.layers[0].static:
            raise ValueError("`into` must be None for a selection before a fork, which has no suffix")
        layers, kept = select_layers(self.layers, selection, narrow=into is None)
        prompts = self._selected_prompts(selection, kept)
        if into is None:
            return self._with_layers(layers, prompts)
        refill(into.layers, into.prompts, layers, prompts)
        return into

    def crop(self, tokens: int) -> None:
        """Remove the last `tokens` tokens of each sequence, in place, such as drafts that were not accepted.

        Raises:
            ValueError: `tokens` is negative, or more than came since this cache was forked from another and since the
                last fork from it. Not checked while a graph is captured.
            TypeError: `tokens` is not an int.
        """
        if tokens == 0 and not isinstance(tokens, bool):  # some loops do this at each step, and should not wait
            return
        check_positive("tokens", tokens)
        last = self.layers[-1]
        if not (last.static and is_captured(last.length)):
            used = used_slots(self.layers, "crop") if last.static else last.prefix_length
            if tokens > used - last.frozen:
                raise ValueError(
                    f"`tokens` must be at most {used - last.frozen}, the tokens since the last fork, got {tokens}"
                )
        for layer in self.layers:
            layer.crop(tokens)

    def _check_into(self, into: object) -> None:
        if into is not None and not isinstance(into, SharedPrefixCache):
            raise TypeError(f"`into` must be a SharedPrefixCache, got {type(into).__name__}")
        if into is not None and into.layout.sharding != self.layout.sharding:
            raise ValueError(f"`into` must be sharded as {self.layout.sharding}, got {into.layout.sharding}")

    def _check_prompt(self, layer: Layer, key: Tensor) -> None:
        """Raise ValueError unless the keys of a prefill fit the other layers and the prompts."""
        if not layer.segments and self.batch_size not in (0, key.shape[0]):
            raise ValueError(f"`key` must have batch {self.batch_size}, as in layer 0, got {key.shape[0]}")
        self.prompts.check(key, layer.prefix_length)

    def _with_layers(self, layers: list[Layer], prompts: Prompts) -> SharedPrefixCache:
        cache = copy.copy(self)
        cache.layers, cache.prompts = layers, prompts
        return cache
