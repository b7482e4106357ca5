"""Merging the attention states of all ranks: three all-reduces, one all-gather, or one kernel over symmetric memory.

    torchrun --nproc-per-node 8 benchmarks/tree_merge.py --device cuda
    torchrun --nproc-per-node 2 benchmarks/tree_merge.py --device cuda --rows 65536 524288  # as in a prefill
    torchrun --nproc-per-node 2 benchmarks/tree_merge.py --device cpu        # gloo, without push

    all_reduce  Algorithm 3 of Tree Attention (arXiv 2408.04093), as `tree_attn_decode` of ring-attention-pytorch does
                it: the maximum of the lse, then the sums of denominators and, in float32, numerators
    all_gather  out and lse of all ranks in one collective, then one merge (compiled)
    push        tatten.tree_merge, strategy "push"

Rows are queries times heads, of 128 numbers in bfloat16. Each arm is checked against float64 before it is timed; on
GPUs it is a captured CUDA graph of several merges. Arms take turns. Of each turn the slowest rank counts, and the
median of all turns is shown, in microseconds per merge.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

import torch
import torch.distributed as dist
from support import results
from support.command_line import arguments, machine
from support.timing import as_graph, in_turns, seconds
from support.together import Ranks, join, say
from torch import Tensor

import tatten
from tatten.ops.states import merge

ROWS = {"cuda": (32, 256, 1024, 4096), "cpu": (32, 256)}
HEADS, DIM = 32, 128
MERGES = {"cuda": 20, "cpu": 1}  # in a graph
AT_MOST = {(8, 32): 7.0, (8, 256): 9.0, (8, 4096): 40.0, (2, 32): 5.0}  # us for push, by ranks and rows
AT_LEAST = {"all_reduce": 7.0, "all_gather": 4.0}  # times faster, at 8 ranks and up to 256 rows

State = tuple[Tensor, Tensor]


def all_reduce(out: Tensor, lse: Tensor) -> State:
    largest = lse.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    denominator = (lse - largest).exp()
    numerator = out.float() * denominator.unsqueeze(-1)
    dist.all_reduce(denominator)
    dist.all_reduce(numerator)
    return (numerator / denominator.unsqueeze(-1)).to(out.dtype), largest + denominator.log()


class AllGather:
    """A merge after one collective over rows of bytes, `out` and then lse of each rank, in preallocated memory."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        n, size = dist.get_world_size(), out.nbytes
        self.packed, self.all = (
            torch.empty(rows, size + lse.nbytes, dtype=torch.uint8, device=out.device) for rows in (1, n)
        )
        self.parts, self.states = self.views(self.packed, out, lse), self.views(self.all, out, lse)
        self.merge = torch.compile(merge) if out.is_cuda else merge

    @staticmethod
    def views(packed: Tensor, out: Tensor, lse: Tensor) -> State:
        parts = packed[:, : out.nbytes].view(out.dtype), packed[:, out.nbytes :].view(lse.dtype)
        return parts[0].unflatten(1, out.shape), parts[1].unflatten(1, lse.shape)

    def __call__(self, out: Tensor, lse: Tensor) -> State:
        self.parts[0].copy_(out.unsqueeze(0))
        self.parts[1].copy_(lse.unsqueeze(0))
        dist.all_gather_into_tensor(self.all, self.packed)
        return self.merge(*self.states)


def push(out: Tensor, lse: Tensor) -> State:
    return tatten.tree_merge(out, lse, dist.group.WORLD, strategy="push")


def prepare(arm: Callable[[Tensor, Tensor], State], states: State, merges: int) -> Callable[[], object]:
    """Return a step of several merges, after a check of its result."""
    out, lse = (x[dist.get_rank()] for x in states)

    def step() -> list[State]:
        return [arm(out, lse) for _ in range(merges)]

    run = step
    if out.is_cuda:
        for _ in range(2):
            arm(out, lse)
        torch.cuda.synchronize()
        run = as_graph(step)
    want = merge(states[0].double(), states[1].double())
    for got in run():
        torch.testing.assert_close(got[0].double(), want[0], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(got[1].double(), want[1], atol=1e-4, rtol=1e-4)
    return run


def measure(rows: int, arms: list[str], ranks: Ranks, rounds: int, repeats: int) -> dict[str, float]:
    n, device, merges = ranks.size, ranks.device, MERGES[ranks.device]
    rng = torch.Generator().manual_seed(rows)
    shape = n, rows // HEADS, HEADS, 1
    states = (
        torch.randn(*shape, DIM, generator=rng).to(device, torch.bfloat16),
        torch.randn(*shape, generator=rng).to(device),
    )
    functions = {"all_reduce": lambda: all_reduce, "all_gather": lambda: AllGather(states[0][0], states[1][0])}
    functions["push"] = lambda: push
    steps = {arm: prepare(functions[arm](), states, merges) for arm in arms}

    def slowest(arm: str, step: Callable[[], object]) -> float:
        dist.barrier(ranks.group)
        step()  # after the barrier: the GPU is busy while the host launches the timed step
        return ranks.largest(seconds(step, device, repeats) / merges * 1e6)

    return in_turns(steps, rounds, slowest)


def verdicts(n: int, rows: int, us: dict[str, float]) -> list[str]:
    """Return a line for each bound: whether it is met."""
    lines = []
    if (n, rows) in AT_MOST:
        most = AT_MOST[n, rows]
        lines.append(f"push at most {most:g} us: {'yes' if us['push'] <= most else 'NO'}")
    for arm, times in AT_LEAST.items():
        least = times if n == 8 and rows <= 256 else 1.0
        lines.append(f"{least:g}x of {arm}: {'yes' if us[arm] >= least * us['push'] else 'NO'}")
    return lines


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs="*", help=f"multiples of {HEADS}; default: {ROWS}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=20, help="of a step in each turn")
    args = parser.parse_args()
    if any(rows < HEADS or rows % HEADS for rows in args.rows or ()):
        parser.error(f"--rows must be multiples of {HEADS}, got {args.rows}")

    device = args.device
    join(device, datetime.timedelta(minutes=10))
    ranks = Ranks(dist.get_world_size(), device)
    n = ranks.size
    arms = ["all_reduce", "all_gather", *(["push"] if device == "cuda" else [])]
    json_rows = []
    say(f"{n} x {machine(device)}; us per merge, slowest rank")
    say(f"{'rows':>5} |", *(f"{arm:>10}" for arm in arms))
    with torch.no_grad():
        for rows in args.rows or ROWS[device]:
            us = measure(rows, arms, ranks, args.rounds, args.repeats)
            json_rows.append({"ranks": n, "rows": rows, "us": us})
            verdict_lines = verdicts(n, rows, us) if "push" in us else []
            say(f"{rows:5} |", *(f"{us[arm]:10.1f}" for arm in arms), " ", "; ".join(verdict_lines))
    if args.json and ranks.rank == 0:
        results.write(args.json, device, json_rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
