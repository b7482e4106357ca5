"""Tiles of the kernel for linear layers of one row: the times of all, beside the one that `one_row_tile` chooses.

    python benchmarks/one_row_tiles.py                       # widths of published models
    python benchmarks/one_row_tiles.py --features 4096 14336

A tile has rows of a weight and input features; a program with some warps computes the sums of the tile's rows. For each
number of input features there are two weights: one with as many rows as features, and one with six times as many, like
gate and up. Beyond 5120 features there is one weight with a third as many rows, like down. A captured CUDA graph
launches the kernel for copies of the weight that together exceed the L2, each launch early. Candidates take turns, and
medians are shown in microseconds. The floor is the weight once, at the best rate at which PyTorch reads or copies. Up
to 14 processes first compile the kernels.
"""

from __future__ import annotations

import argparse
import itertools
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from support import results
from support.command_line import arguments, machine
from support.decode_cases import L2
from support.timing import as_graph, in_turns, microseconds, read_rate
from torch import Tensor

from tatten.ops.cuda.skinny_linear import Tile, one_row_launch, one_row_tile
from tatten.ops.sizes import power_of_2

FEATURES = 896, 1024, 1536, 2048, 2560, 2880, 3072, 3584, 4096, 4864, 5120, 6144, 8192, 9728, 12288, 14336, 18944, 28672
WIDE = 5120  # input features: layers with more of them are like down
ELEMENTS = range(8, 65)  # of a weight, for a thread
SHOWN = 6


def tiles(features: int) -> list[Tile]:
    """Return the tiles that are measured, the chosen one among them."""
    product = itertools.product((1, 2, 4), (512, 1024, 2048, 4096, 8192), (2, 4, 8))
    return [x for x in product if x[1] <= power_of_2(features) and x[0] * x[1] // (32 * x[2]) in ELEMENTS]


def heights(features: int) -> tuple[int, ...]:
    """Return the rows of the weights that are measured: multiples of 8."""
    return (features // 24 * 8,) if features > WIDE else (features, 6 * features)


def launch(weights: list[Tensor], x: Tensor, product: Tensor, tile: Tile) -> Tensor:
    run = one_row_launch(x, [weights[0].shape[0]], tile)
    for weight in weights:
        run(x, weight, None, None, product, None, None)
    return product


def compile_one(features: int, height: int, tile: Tile) -> None:
    """Compile the kernel of a tile, which Triton keeps on disk."""
    x, weight, product = (torch.empty(n, device="cuda", dtype=torch.bfloat16) for n in (features, height, height))
    launch([weight.new_empty(height, features)], x, product, tile)


def measure(features: int, height: int, rounds: int) -> dict[str, Any]:
    n_bytes = 2 * height * features
    x = torch.randn(features, device="cuda").bfloat16()
    weights = [torch.randn(height, features, device="cuda").bfloat16() for _ in range(2 + 2 * L2["cuda"] // n_bytes)]
    product, graphs = torch.empty(height, device="cuda", dtype=torch.bfloat16), {}
    want = weights[0].double() @ x.double()
    for tile in tiles(features):
        off = (launch(weights[:1], x, product, tile).double() - want).abs().max() / want.abs().max()
        if not off < 2**-8:
            raise ArithmeticError(f"tile {tile} is wrong for {height} x {features}: off by {off:.1e} of the largest")

        def step(tile: Tile = tile) -> Tensor:
            return launch(weights, x, product, tile)

        graphs[str(tile)] = as_graph(step)
    us = in_turns(graphs, rounds, lambda _, replay: microseconds(replay, "cuda", len(weights), 4))
    return {"features": features, "rows": height, "bytes": n_bytes, "us": us}


def main() -> None:
    parser = arguments(__doc__, ("cuda",))
    parser.add_argument("--features", type=int, nargs="*", default=FEATURES)
    parser.add_argument("--rounds", type=int, default=3)
    args: argparse.Namespace = parser.parse_args()
    shapes = [(features, height) for features in args.features for height in heights(features)]
    with ProcessPoolExecutor(max(1, min(14, os.cpu_count() or 1)), get_context("spawn")) as pool:
        jobs = [pool.submit(compile_one, *shape, tile) for shape in shapes for tile in tiles(shape[0])]
        for job in jobs:
            job.result()
    torch.manual_seed(0)
    rate, rows = read_rate("cuda"), []
    print(f"{machine('cuda')}, {rate / 1e9:.1f} GB/s", flush=True)
    for shape in shapes:
        row = measure(*shape, args.rounds)
        row["floor_us"] = row["bytes"] / rate * 1e6
        rows.append(row)
        us, chosen = row["us"], str(one_row_tile(shape[0]))
        best = sorted(us, key=us.__getitem__)
        print(
            f"{shape[1]:6} x {shape[0]:5}  floor {row['floor_us']:.2f}  chosen {chosen} {us[chosen]:.2f} us, "
            f"{us[chosen] / us[best[0]]:.3f} of the best  "
            + "  ".join(f"{tile} {us[tile]:.2f}" for tile in best[:SHOWN]),
            flush=True,
        )
        if args.json:
            results.write(args.json, args.device, rows, bytes_per_second=rate)


if __name__ == "__main__":
    main()
