"""Project the measured times of one node to a cluster: an alpha-beta model, and a PROJECTION to nodes of 8 GPUs.

    python benchmarks/project_cluster.py --merge tree_merge.json --attention tree_vs_ring.json

`tree_merge.py` and `tree_vs_ring.py` write the files with --json. Nothing that is printed was measured on a
cluster, and each line says so.

A step of communication takes `alpha` seconds for each round, and `beta` for each byte that a rank sends. Both are
fitted to the measured 2, 4 and 8 GPUs: for the merge inside a node, and for the hops of the ring, which hide the
attention that goes on meanwhile. Attention to a rank's own shard gets the same form, in bytes of K and V. Nothing was
measured between nodes; the defaults are

    400 Gb/s for each GPU     InfiniBand NDR: section 6 of the paper (arXiv 2408.04093)
    2.7 and 14 us a round     NCCL's own model of a network round, small messages (LL) and large ones (Simple)
    6.6 us a collective       the same, to begin with: `hwLat` and `baseLat` of its src/graph/tuning.cc, which PyTorch
                              copies into torch/_inductor/comm_analysis.py (2.13.0)

The tree merges inside each node, then across nodes by one packed all-gather between the GPUs of one place: in
ceil(log2 nodes) rounds, or in nodes - 1 as a ring does it. The ring goes through all GPUs, and every hop waits for the
slowest link. The paper reports close to 8 times for 128 GPUs and 5.12M tokens, with a ring of its own.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from support import results
from support.results import ResultsError, need, select

from tatten.ops.distributed.push_layout import plan_push

Point = tuple[float, float, float]
NODE = 8


def fit(points: Sequence[Point]) -> tuple[float, float]:
    """Fit `(alpha, beta)` of `seconds = alpha * rounds + beta * bytes`, by least squares of the relative errors.

    Args:
        points: `(rounds, bytes, seconds)` of each measurement.

    Raises:
        ValueError: fewer than two points, points that are all in proportion, or times that fall with size.
    """
    rounds, sizes, seconds = torch.tensor(points, dtype=torch.float64).reshape(-1, 3).T
    unit = sizes.max().item() if len(points) else 0.0
    if len(points) < 2 or unit <= 0 or not (seconds > 0).all():
        raise ValueError(f"`points` must be at least two, with bytes and seconds above 0, got {list(points)}")
    a = torch.stack((rounds, sizes / unit), dim=1) / seconds[:, None]
    if torch.linalg.matrix_rank(a) < 2:
        raise ValueError(f"`points` must have at least two ratios of rounds to bytes, got {list(points)}")
    alpha, beta = torch.linalg.lstsq(a, torch.ones_like(seconds)[:, None], driver="gelsd").solution.flatten().tolist()
    if alpha < 0 or beta < 0:
        raise ValueError(f"alpha and beta of `points` must not be negative, got {alpha:.3g} s and {beta / unit:.3g} s")
    return alpha, beta / unit


@dataclass(frozen=True)
class Line:
    """A fitted model, and its largest relative error at the points it was fitted to."""

    alpha: float
    beta: float
    worst: float

    @staticmethod
    def through(points: Sequence[Point]) -> Line:
        alpha, beta = fit(points)
        return Line(alpha, beta, max(abs((alpha * r + beta * b) / s - 1) for r, b, s in points))

    def seconds(self, rounds: float, size: float) -> float:
        return self.alpha * rounds + self.beta * size

    def __str__(self) -> str:
        rate = f"{1 / self.beta / 1e9:.1f} GB/s" if self.beta else "no time for bytes"
        return f"alpha {self.alpha * 1e6:.2f} us, beta {rate}, at most {self.worst:.0%} off what was measured"


def sent(strategy: str, ranks: int, rows: int, head_dim: int) -> tuple[float, float]:
    """Return the rounds, and the bytes a rank sends, to merge `rows` rows in a node: bfloat16 `out`, float32 `lse`."""
    others, payload = ranks - 1, rows * (2 * head_dim + 4)
    if strategy == "push":
        two = plan_push(torch.Size((rows, head_dim)), 2, ranks, False, 1).gather
        return (2, 2 * others / ranks * payload) if two else (1, others * payload)
    if strategy == "all_gather":
        return others, others * payload
    return 6 * others, 2 * others / ranks * rows * 4 * (head_dim + 2)  # three, in float32, each a ring of two passes


def merge_points(path: Path, strategy: str, head_dim: int) -> list[Point]:
    """Return rounds, bytes and seconds of each merge that `tree_merge.py` measured."""
    merges = select(path, ("ranks", "rows", "us"))
    need(path, (row["us"] for row in merges), (strategy,))
    if len({(row["ranks"], row["rows"]) for row in merges}) < len(merges):
        raise ResultsError(f"{path} has several merges of the same ranks and rows")
    return [(*sent(strategy, row["ranks"], row["rows"], head_dim), row["us"][strategy] / 1e6) for row in merges]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--merge", type=Path, required=True, help="JSON of tree_merge.py")
    parser.add_argument("--attention", type=Path, required=True, help="JSON of tree_vs_ring.py, with latencies")
    parser.add_argument("--strategy", default="push", choices=["push", "all_gather", "all_reduce"])
    parser.add_argument(
        "--ring", default="ring", choices=["ring", "ring_eager"], help="the arm that is taken as the ring"
    )
    parser.add_argument("--tokens", type=int, default=5_120_000)
    parser.add_argument("--nodes", nargs="*", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--network-gbits", type=float, default=400, help="for each GPU")
    parser.add_argument("--network-us", type=float, default=2.7, help="a round of small messages")
    parser.add_argument("--network-bulk-us", type=float, default=14, help="a round of large messages")
    parser.add_argument("--network-base-us", type=float, default=6.6, help="the start of a collective")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()

    shape_keys = "batch", "q_heads", "kv_heads", "head_dim"
    latencies = select(args.attention, ("ranks", "length", "us", *shape_keys), section="latency")
    shapes = {tuple(row[key] for key in shape_keys) for row in latencies}
    if len(shapes) > 1:
        raise ResultsError(f"{args.attention} has several shapes {shape_keys}: {sorted(shapes)}")
    ((batch, q_heads, kv_heads, head_dim),) = shapes
    token_bytes = 2 * batch * kv_heads * head_dim * 2  # K and V in bfloat16

    def shard(row: dict) -> float:
        return row["length"] / row["ranks"] * token_bytes

    need(args.attention, (row["us"] for row in latencies), ("local", args.ring))
    local = Line.through([(1, shard(row), row["us"]["local"] / 1e6) for row in latencies])
    ring = Line.through(
        [(row["ranks"] - 1, (row["ranks"] - 1) * shard(row), row["us"][args.ring] / 1e6) for row in latencies]
    )
    merge = Line.through(merge_points(args.merge, args.strategy, head_dim))

    def say(text: str) -> None:
        print(f"PROJECTION  {text}")

    say(f"{args.tokens} tokens, batch {batch}, heads {q_heads}/{kv_heads}, head_dim {head_dim}, nodes of {NODE} GPUs")
    for path in (args.merge, args.attention):
        sizes = sorted({row["ranks"] for row in select(path, ("ranks",))})
        say(f"{path.name} was measured on {', '.join(map(str, sizes))} GPUs")
    say(f"fitted: {args.strategy} merge in a node: {merge}")
    say(f"fitted: a hop of the ring in a node: {ring}")
    say(f"fitted: local attention: {local}")
    say(
        f"assumed between nodes: {args.network_gbits:g} Gb/s a GPU, {args.network_base_us:g} us a collective and "
        f"{args.network_us:g} us a round, {args.network_bulk_us:g} us of large messages"
    )
    say("nodes GPUs |  local us  merge us  across: log2, ring |   tree us: log2, ring |      ring us | ring / tree")
    second_per_byte = 8e-9 / args.network_gbits
    payload = batch * q_heads * (2 * head_dim + 4)
    rows = []
    for nodes in args.nodes:
        gpus = nodes * NODE
        shard_bytes = args.tokens / gpus * token_bytes
        attention = local.seconds(1, shard_bytes)
        inside = merge.seconds(*sent(args.strategy, NODE, batch * q_heads, head_dim))
        rounds = math.ceil(math.log2(nodes)), nodes - 1
        across = [
            (args.network_base_us + x * args.network_us) / 1e6 + (nodes - 1) * payload * second_per_byte if x else 0.0
            for x in rounds
        ]
        tree = [attention + inside + x for x in across]
        hop = ring.seconds(1, shard_bytes)
        if nodes > 1:
            hop = max(hop, args.network_bulk_us / 1e6 + shard_bytes * second_per_byte)
        around = (gpus - 1) * hop
        us = [x * 1e6 for x in (attention, inside, *across, *tree, around)]
        say(
            f"{nodes:5} {gpus:4} | {us[0]:9.1f} {us[1]:9.1f} {us[2]:12.1f} {us[3]:6.1f} | {us[4]:15.1f} {us[5]:7.1f} |"
            f" {us[6]:12.1f} | {around / tree[0]:6.0f} {around / tree[1]:5.0f}"
        )
        names = "local", "merge", "across_log2", "across_ring", "tree_log2", "tree_ring", "ring"
        rows.append({"nodes": nodes, "gpus": gpus, "tokens": args.tokens, "us": dict(zip(names, us, strict=True))})
    if args.json:
        results.write(args.json, "cpu", rows, projection=True)


if __name__ == "__main__":
    try:
        main()
    except ResultsError as error:
        raise SystemExit(str(error)) from None
