"""Measure which provider decodes fastest, by the number of (sequence, kv head) pairs and of keys, and write the table.

    python benchmarks/calibrate.py --write

Each cell is a batch of one query for each of four query heads per kv head, head_dim 128, bfloat16; a captured CUDA
graph of calls on as many copies of K and V as exceed the L2 cache. Another kernel than ours is only chosen where it is
more than `MARGIN` faster, so that noise decides nothing. FlashAttention-3 is asked for where it is installed; where a
table names it and it is not, ours computes.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from pathlib import Path

import torch
from support.timing import as_graph, in_turns, seconds

import tatten

MARGIN = 1.01
PROVIDERS = {"T": "triton", "C": "cudnn", "F": "flash"}
if importlib.util.find_spec("flash_attn_interface"):
    PROVIDERS["A"] = "fa3"
HEADER = '''"""Which provider decodes fastest: written by `python benchmarks/calibrate.py --write` on {device}."""

# Rows: 1, 2, 4, ... (sequence, kv head) pairs. Columns: 256, 512, ... keys. T triton, C cudnn, F flash, A fa3.
REGIMES = (
{rows})
'''


def fastest(pairs: int, kv_len: int, pool: torch.Tensor, rounds: int) -> tuple[str, dict[str, float]]:
    """The letter of the provider for a cell, and what each took in microseconds."""
    kv_heads = min(8, pairs)
    shape = pairs // kv_heads, kv_heads, kv_len, 128
    size = math.prod(shape)
    copies = max(1, min(12, math.ceil(2e8 / (4 * size))))
    views = pool[: 2 * copies * size].view(copies, 2, *shape)
    query = torch.randn(shape[0], 4 * kv_heads, 1, 128, device=pool.device, dtype=pool.dtype)
    graphs = {}
    for letter, provider in PROVIDERS.items():

        def step(provider: str = provider) -> torch.Tensor:
            outs = [tatten.decode_attention(query, k, v, provider=provider) for k, v in views]
            return outs[-1]

        step()
        graphs[letter] = as_graph(step)
        graphs[letter]()
    median = in_turns(graphs, rounds, lambda _, graph: seconds(graph, "cuda", 2) * 1e6 / copies)
    best = min(median, key=lambda letter: median[letter])
    return ("T" if median["T"] <= MARGIN * median[best] else best), median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-gb", type=float, default=8.0, help="cells of more keys and values copy their neighbour")
    parser.add_argument("--write", action="store_true", help="write ops/cuda/tuning/regimes.py")
    args = parser.parse_args()
    pool = torch.randn(int(args.max_gb * 1e9) // 2, device=args.device, dtype=torch.bfloat16)
    rows: list[str] = []
    for pairs in (1 << i for i in range(11)):
        row = ""
        for kv_len in (256 << i for i in range(10)):
            if 4 * 128 * pairs * kv_len > args.max_gb * 1e9:
                row += row[-1]
                continue
            letter, times = fastest(pairs, kv_len, pool, args.rounds)
            row += letter
            shown = " ".join(f"{PROVIDERS[name]} {us:.1f}" for name, us in times.items())
            print(f"{pairs:5} pairs {kv_len:7} keys: {letter}  {shown}", flush=True)
        rows.append(row)
    text = HEADER.format(device=torch.cuda.get_device_name(), rows="".join(f'    "{row}",\n' for row in rows))
    print(text)
    if args.write:
        (Path(__file__).parent.parent / "ops" / "regimes.py").write_text(text)


if __name__ == "__main__":
    main()
