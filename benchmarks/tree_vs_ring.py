"""The figures of Tree Attention (arXiv 2408.04093), measured: one query over a KV that is sharded over ranks.

    torchrun --nproc-per-node 8 benchmarks/tree_vs_ring.py --device cuda                 # all, on 2, 4 and 8 GPUs
    torchrun --nproc-per-node 8 benchmarks/tree_vs_ring.py --device cuda --heads 16 16   # heads of the paper's figures
    torchrun --nproc-per-node 4 benchmarks/tree_vs_ring.py --device cpu                  # tiny shapes, gloo

    latency   microseconds of one attention, by length and ranks (the paper's figure of absolute times, section 6.1)
    memory    the most memory at a time on a rank, beside equations 8 and 9
    bytes     what a rank sends, counted where collectives are called, beside equations 10 and 14
    table1    Llama-3.1-8B shapes with random weights: prefill and 10 tokens (Table 1)

`local` is attention to a rank's own shard and nothing else; `tree:*` merges its state by `tatten.tree_merge` with that
strategy; `ring` is `ring.py`, and `ring_home` the same where the shards travel the full circle in place, as the
equations count. All use the same local kernel. On a GPU each is a captured CUDA graph, the ring is timed in eager mode
as well, and inputs rotate through more memory than the L2 holds. Times are those of the slowest rank; medians. Before
it is timed each is checked against float64.

The formulas have the paper's symbols: b is the batch, t the keys of a rank, p the number of ranks, and n_h the number
of query heads. The paper has one d. Here d is n_h * head_dim for tensors in the shape of the query, and
kv heads * head_dim for keys and values.

Table 1 times "10 tokens with prefill". The ring's prefill is a ring where each rank has an early and a late chunk, so
that all are equally busy; the trees' is `cache.prefill`, where each has every n-th token, of a model of transformers
over the same weights. In the paper's code both arms have the same. Each is timed once for its arms, which start from
the cache that it left. New tokens are stored on one rank in turn.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from support import results
from support.command_line import arguments, device_name
from support.sharded_llama import Sizes
from support.together import Ranks, join, say
from support.tree_sections import latency, memory, wire
from support.tree_table1 import table1

SECTIONS = {"latency": latency, "memory": memory, "bytes": wire, "table1": table1}
K = 1024
LENGTHS = {
    "cuda": {
        "latency": [32 * K, 64 * K, 128 * K, 256 * K, 512 * K, 1024 * K],
        "memory": [64 * K, 256 * K],
        "bytes": [32 * K, 128 * K, 512 * K, 1024 * K],
        "table1": [32 * K, 64 * K, 128 * K, 256 * K],
    },
    "cpu": {
        "latency": [K, 4 * K],
        "memory": [K, 4 * K],
        "bytes": [32 * K // 64, 128 * K // 64, 512 * K // 64, 1024 * K // 64],
        "table1": [256, 512],
    },
}


def sessions(args: argparse.Namespace) -> Iterator[Ranks]:
    """Yield groups of the first 2, 4, ... ranks, on the ranks that belong to them; the others wait."""
    for size in args.ranks:
        ranks = Ranks(size, args.device)
        if ranks.rank < size:
            yield ranks
        dist.barrier()


def parse() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--section", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--ranks", nargs="*", type=int, help="sizes of groups; default: powers of two up to all ranks")
    parser.add_argument("--strategies", nargs="*", help="of tree_merge; default: all that the device has")
    parser.add_argument("--heads", nargs=2, type=int, metavar=("QUERY", "KV"), help="default: 32 8, on a CPU 8 2")
    parser.add_argument(
        "--lengths", nargs="*", type=int, help="of the context, for all sections; default: each its own"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--trials", type=int, default=3, help="of table 1; the paper made 10")
    parser.add_argument("--new-tokens", type=int, default=10)
    parser.add_argument("--layers", type=int, help="default: 32, on a CPU 2")
    parser.add_argument("--hidden", type=int, help="of the model; default: 4096, on a CPU 256; the rest scales with it")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    args.dtype = torch.bfloat16
    args.strategies = args.strategies or ["all_reduce", "all_gather", *(["push"] if cuda else [])]
    args.heads = args.heads or ([32, 8] if cuda else [8, 2])
    hidden = args.hidden or (4096 if cuda else 256)
    args.sizes = Sizes(
        layers=args.layers or (32 if cuda else 2),
        hidden=hidden,
        intermediate=hidden * 7 // 2,
        q_heads=hidden // 128 if cuda else hidden // 32,
        kv_heads=max(1, hidden // 512) if cuda else hidden // 128,
        head_dim=128 if cuda else 32,
        vocabulary=128256 if cuda else 512,
    )
    lengths = LENGTHS[args.device]
    args.lengths = {name: args.lengths or lengths[name] for name in SECTIONS}
    return args


def main() -> None:
    args = parse()
    join(args.device, datetime.timedelta(minutes=30))  # ranks that a group leaves out wait for it
    world = dist.get_world_size()
    args.ranks = args.ranks or [1 << i for i in range(1, world.bit_length())] or [1]
    bad = [n for n in args.ranks if not 1 <= n <= world]
    if bad:
        raise SystemExit(f"--ranks must be from 1 to {world}, got {bad}")
    name = device_name(args.device) + (" a rank" if args.device == "cpu" else "")
    say(f"{name}, torch {torch.__version__}, {world} processes, heads {args.heads[0]}/{args.heads[1]}")
    start = time.perf_counter()
    rows: list[dict] = []
    with torch.no_grad():
        for ranks in sessions(args):
            for section in args.section:
                rows += SECTIONS[section](ranks, args)
                if args.device == "cuda":
                    torch.cuda.empty_cache()
    say(f"{time.perf_counter() - start:.0f} s")
    if args.json and dist.get_rank() == 0:
        results.write(args.json, args.device, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
