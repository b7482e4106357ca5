"""`tatten::top_picks` on CUDA: four passes over the scores that count, and one that writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tatten.ops.cuda.allocation import Dense, allocate
from tatten.ops.cuda.gpu import has_early_launches
from tatten.ops.cuda.launcher import Launch, by_layout, on_device_of
from tatten.ops.sizes import ceil_div, power_of_2
from tatten.ops.top_picks import check_top_picks
from tatten.ops.validation import check_no_grad

LEAST_BLOCK, MOST_BLOCK = 256, 4096  # scores that a program has at a time
MOST_CHUNKS = 64  # chunks of a row: each program adds up the counts of all of them
PROGRAMS = 128  # about the programs of a launch: one for each SM, as more of them add up more counts


def top_picks(scores: Tensor, k: int) -> Tensor:
    check_no_grad("top_picks", scores=scores)  # a plan may stem from tensors without gradients
    return on_device_of(scores, plan_top_picks(scores, k), scores)


@dataclass(frozen=True)
class TopPicks:
    """Computes the op for scores of the layout that it was planned for.

    Attributes:
        passes: the launches that count.
        write: the launch that writes the indices.
        writes: the result, the counts, and the bits of the k-th largest score that are known after each pass.
    """

    passes: tuple[Launch, ...]
    write: Launch
    writes: tuple[Dense, ...]

    def __call__(self, scores: Tensor) -> Tensor:
        out, counts, known_bits = allocate(scores, *self.writes)
        rows = scores.flatten(0, -2) if scores.dim() > 2 else scores
        for launch in self.passes:
            launch(rows, counts, known_bits)
        self.write(rows, counts, known_bits, out)
        return out


@by_layout
def plan_top_picks(scores: Tensor, k: int) -> Callable[[Tensor], Tensor]:
    check_top_picks(scores, k)
    n, states = scores.shape[-1], scores.shape[:-1]
    rows = scores.numel() // n
    if rows == 0:
        return lambda scores: scores.new_empty((*states, k), dtype=torch.int32)

    from tatten.ops.cuda.combine import INTERPRETED
    from tatten.ops.cuda.kernels.top_picks import PASSES, VALUES, _count_scores_kernel, _write_picks_kernel

    chunk_size = ceil_div(n, min(MOST_CHUNKS, ceil_div(PROGRAMS, rows)))
    block = min(MOST_BLOCK, max(LEAST_BLOCK, power_of_2(chunk_size)))
    blocks = ceil_div(chunk_size, block)
    chunks = ceil_div(n, block * blocks)
    flat = scores.flatten(0, -2) if scores.dim() > 2 else scores
    pdl = not INTERPRETED and has_early_launches(scores.device)
    options = {"num_warps": 8, "launch_pdl": pdl}
    arguments = {
        "row_stride": flat.stride(0) if flat.dim() > 1 else 0,
        "stride": flat.stride(-1),
        "n": n,
        "k": k,
        "chunks": chunks,
        "CHUNKS": power_of_2(chunks),
        "BLOCK": block,
        "BLOCKS": blocks,
        "PDL": pdl,
    }
    grid = (rows * chunks,)
    return TopPicks(
        tuple([Launch(_count_scores_kernel, grid, options, PASS=i, **arguments) for i in range(PASSES)]),
        Launch(_write_picks_kernel, grid, options, **arguments),
        (
            Dense.of((*states, k), torch.int32),
            Dense.of((rows, PASSES, chunks, VALUES), torch.int32),
            Dense.of((rows, PASSES, 2), torch.int32),
        ),
    )
