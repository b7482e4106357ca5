"""Check that the ranks that share a cache make the same calls: otherwise attention would mix their texts.

A few integers describe a call on a cache, and all ranks gather them. Every rank sees the same table, so either all of
them raise or none does. `agree` does the same on the host, for calls before the first token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tatten.caches.interleaved import Interleaved
from tatten.caches.prompts import Prompts
from tatten.caches.selection import Selection
from tatten.ops.distributed.host_exchange import exchange_among

PROMPT, FORK, SELECT = 1, 2, 3
ARGUMENTS = {PROMPT: "`key`, `prompt_mask` and `prompt_lens`", FORK: "`n` and `capacity`", SELECT: "`indices`"}
FACTS, SHOWN = 8, 4  # integers that describe a call, and indices of a selection among them
PROJECTIONS = 4
TOLERANCE = 0.03  # of the norm of a token's keys: well above the rounding of bfloat16, well below other tokens' keys


class Agreement:
    """A comparison of the ranks' calls on one cache, its forks and its selections. It can't be captured in a graph."""

    def __init__(self, layout: Interleaved, prompts: Prompts):
        self._layout, self._mesh = layout, layout.mesh
        self._device = torch.device(layout.mesh.device_type)
        hashes = [fingerprint(tensor) for tensor in prompts.arguments.values()]
        self._prompts = (hashes or [torch.zeros(1, dtype=torch.int64)])[0].to(self._device)
        self._unchecked: Tensor | None = None  # the first table in which ranks disagree, or the last table

    def check_prompt(self, key: Tensor, start: int) -> None:
        """Raise ValueError unless all ranks add the same tokens to the prompts.

        Shapes, masks and lengths have to be equal. Keys may differ by rounding.

        Args:
            key: the keys of the tokens in the first layer.
            start: position of the first token.
        """
        shape = (*key.shape, 0, 0, 0, 0)[:4]
        self._gather_facts(PROMPT, start, *shape, 0, last=self._prompts)
        self.settle()
        if key.dim() != 4 or not key.numel():
            return
        table = self._gather(_projections(key), self._layout.sequence_dims)
        wide = torch.promote_types(key.dtype, torch.float32)
        norm = torch.linalg.vector_norm(key, dim=(1, 3), dtype=wide)[..., None]
        differs = ((table - table[0]).abs() > TOLERANCE * norm).any(-1).flatten(1)
        if differs.any():
            first = int(differs.any(0).int().argmax())
            prompt, token = divmod(first, key.shape[2])
            ranks = zip(self._layout.global_ranks(self._layout.sequence_dims), differs[:, first].tolist(), strict=True)
            raise ValueError(
                "prompts must be the same on all ranks that share a sequence, got others on ranks "
                f"{[rank for rank, rank_differs in ranks if rank_differs]} from token {start + token} of prompt "
                f"{prompt} on"
            )

    def check_fork(self, n: object, capacity: object, batch: int, used: int) -> None:
        """Raise ValueError unless all ranks fork with the same arguments."""
        self._gather_facts(FORK, *(x if isinstance(x, int) else -1 for x in (n, capacity)), batch, used)
        self.settle()

    def check_selection(self, selection: Selection | None, batch: int) -> None:
        """Compare the ranks' selections from `batch` sequences.

        Raises ValueError at once if the host knows the indices, and otherwise when `settle` is called.

        Args:
            selection: this rank's selection, or None if its indices are invalid.
            batch: the number of sequences.
        """
        if selection is None:
            self._gather_facts(SELECT, batch, -1)
            self._unchecked = None
            return
        indices = selection.on(self._device)
        shown = F.pad(indices[:SHOWN], (0, SHOWN - min(SHOWN, len(indices))), value=-1)
        self._gather_facts(SELECT, batch, len(indices), last=torch.cat([shown, fingerprint(indices)]))
        if selection.host_indices is not None:
            self.settle()

    def settle(self) -> None:
        """Raise ValueError if ranks disagree on a call. Waits for the device if a call was not yet checked."""
        table, self._unchecked = self._unchecked, None
        rows = [] if table is None else [tuple(row) for row in table.tolist()]
        if len(set(rows)) > 1:
            kinds = {row[0] for row in rows}
            name = ARGUMENTS[kinds.pop()] if len(kinds) == 1 else "calls"
            raise _disagreement(name, self._layout, [_describe(row) for row in rows])

    def _gather_facts(self, *facts: int, last: Tensor | None = None) -> None:
        """Gather the facts of a call from all ranks; `last` are the facts that only the device knows."""
        host_facts = torch.tensor(facts, device=self._device)
        row = host_facts if last is None else torch.cat([host_facts, last])
        table = self._gather(F.pad(row, (0, FACTS - len(row))), self._layout.sharing_dims)
        if self._unchecked is not None:
            table = torch.where((self._unchecked == self._unchecked[0]).all(), table, self._unchecked)
        self._unchecked = table

    def _gather(self, tensor: Tensor, dims: Sequence[int]) -> Tensor:
        """Return the tensors of the ranks along these mesh dims, `[ranks, ...]`, in order of their coordinates."""
        shape = tensor.shape
        for dim in reversed(dims):
            gathered = tensor.new_empty(self._mesh.size(dim), *tensor.shape)
            dist.all_gather(list(gathered), tensor.contiguous(), group=self._mesh.get_group(dim))
            tensor = gathered
        return tensor.reshape(-1, *shape)


def agree(layout: Interleaved, names: str, describe: Callable[[], str]) -> None:
    """Raise unless all ranks that share a cache describe their arguments alike. This is a collective on the host.

    Args:
        names: the arguments, for messages.
        describe: checks and describes the arguments. An error that it raises on one rank makes all ranks raise.

    Raises:
        ValueError, TypeError, NotImplementedError: as `describe` does.
        ValueError: ranks disagree.
        RuntimeError: a rank did not come in time; the message names it.
    """
    local_error: Exception | None = None
    try:
        description = describe()
    except (ValueError, TypeError, NotImplementedError) as error:
        local_error, description = error, f"{type(error).__name__} ({error})"
    descriptions = exchange_among(layout.global_ranks(layout.sharing_dims), f"to agree on {names}", description)
    if local_error is not None:
        raise local_error
    if len(set(descriptions)) > 1:
        raise _disagreement(names, layout, descriptions)


def _disagreement(names: str, layout: Interleaved, calls: Sequence[str]) -> ValueError:
    """Return the error that names each different call with its ranks; `calls` are in the order of the ranks."""
    ranks_of_call: dict[str, list[int]] = {}
    for rank, call in zip(layout.global_ranks(layout.sharing_dims), calls, strict=True):
        ranks_of_call.setdefault(call, []).append(rank)
    return ValueError(
        f"{names} must be the same on all ranks that share a cache, got "
        f"{' and '.join(f'{call} on ranks {ranks}' for call, ranks in ranks_of_call.items())}"
    )


def fingerprint(values: Tensor) -> Tensor:
    """Return a 64-bit hash of integers or bools and of their order, int64 `[1]`, on their device."""
    values = values.flatten()
    if values.dtype == torch.bool:  # eight bools in each integer
        values = F.pad(values.to(torch.uint8), (0, -len(values) % 8)).view(torch.int64)
    mixed = values.to(torch.int64) + torch.arange(1, len(values) + 1, device=values.device) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):  # as splitmix64 does
        mixed = (mixed ^ (mixed >> shift)) * factor
    return (mixed ^ (mixed >> 31)).sum().reshape(1)


def _projections(key: Tensor) -> Tensor:
    """Project each token's keys onto a few fixed directions, float32 `[batch, tokens, directions]`."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(key.shape[1], key.shape[3], PROJECTIONS, generator=generator)
    plain = key if key.dtype.itemsize > 1 else key.to(torch.bfloat16)
    return (plain @ directions.to(plain)).float().sum(1)


def _describe(row: Sequence[int]) -> str:
    kind, *facts = row
    if kind == PROMPT:
        return f"keys of shape {tuple(facts[1:5])} from token {facts[0]} on (prompts {_short(facts[6])})"
    if kind == FORK:
        return f"fork({facts[0]}, {facts[1]}) of {facts[2]} sequences with {facts[3]} tokens since the last fork"
    if facts[1] < 0:
        return f"other things than indices of {facts[0]} sequences"
    shown = [str(index) for index in facts[2 : 2 + min(SHOWN, facts[1])]]
    if facts[1] <= SHOWN:
        return f"[{', '.join(shown)}]"
    return f"[{', '.join(shown)}, ...] ({facts[1]} indices, {_short(facts[2 + SHOWN])})"


def _short(fingerprint: int) -> str:
    """Return the low 32 bits of a fingerprint as text, or "whole" for prompts without a mask or lengths."""
    return f"#{fingerprint % 2**32:08x}" if fingerprint else "whole"
