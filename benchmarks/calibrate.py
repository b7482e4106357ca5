"""Measure which provider decodes fastest on this GPU, by (sequence, kv head) pairs and keys, and write its module.

    python benchmarks/calibrate.py --write

Each cell is a batch of one query for each of four query heads per kv head, head_dim 128, bfloat16: a captured CUDA
graph of calls on as many copies of K and V as exceed the L2 cache. A provider other than Triton is named only where it
is faster by more than `MARGIN`, so that noise decides nothing. FlashAttention's packages are measured where they are
installed and take the cells; where a table names one that is not installed, Triton computes.

For a GPU without a module the two rates, of reads and of products, are measured too. An existing module keeps its
rates.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from support.timing import as_graph, in_turns, product_rate, read_rate, seconds

import tatten
from tatten.ops.cuda import tuning
from tatten.ops.cuda.flash_attn import PACKAGES
from tatten.ops.cuda.providers import unsupported_reason
from tatten.ops.cuda.workload import Workload

MARGIN = 1.01
PROVIDERS = ("triton", "cudnn", "flash", *PACKAGES)
RATES = '''"""Measurements of an {device}."""

from tatten.ops.cuda.gpu_rates import GpuRates

DEVICE, CAPABILITY = "{device}", {capability}

RATES = GpuRates({rates})  # names the fields that differ from an H200's

'''
TABLE = """\
# For each number of (sequence, kv head) pairs, the number of keys from which on a provider is the fastest, as
# `python benchmarks/calibrate.py --write` measured it.
FASTEST = {{
{rows}
}}
"""


def fastest(pairs: int, kv_len: int, pool: torch.Tensor, rounds: int) -> tuple[str, dict[str, float]]:
    """Return the fastest provider of a cell, and the microseconds of each."""
    kv_heads = min(8, pairs)
    shape = pairs // kv_heads, kv_heads, kv_len, 128
    size = math.prod(shape)
    copies = max(1, min(12, math.ceil(2e8 / (4 * size))))
    views = pool[: 2 * copies * size].view(copies, 2, *shape)
    query = torch.randn(shape[0], 4 * kv_heads, 1, 128, device=pool.device, dtype=pool.dtype)
    graphs = {}
    work = Workload.of(query, *views[0])
    for provider in PROVIDERS:
        if unsupported_reason(provider, work):
            continue

        def step(provider: str = provider) -> torch.Tensor:
            outs = [tatten.decode_attention(query, k, v, provider=provider) for k, v in views]
            return outs[-1]

        step()
        graphs[provider] = as_graph(step)
        graphs[provider]()
    median = in_turns(graphs, rounds, lambda _, graph: seconds(graph, "cuda", 2) * 1e6 / copies)
    best = min(median, key=lambda provider: median[provider])
    return ("triton" if median["triton"] <= MARGIN * median[best] else best), median


def table_text(fastest_by_pairs: dict[int, dict[int, str]]) -> str:
    """Return the end of the module: the table, in which neighbouring cells of one provider share an entry."""
    rows = []
    for pairs, row in fastest_by_pairs.items():
        lengths = sorted(row)
        starts = [n for i, n in enumerate(lengths) if i == 0 or row[n] != row[lengths[i - 1]]]
        entries = ", ".join(f'{n}: "{row[n]}"' for n in starts)
        rows.append(f"    {pairs}: {{{entries}}},")
    return TABLE.format(rows="\n".join(rows))


def rates_text(device: str, capability: tuple[int, int], rates: dict[str, float]) -> str:
    """Return the beginning of a new module: its rates."""
    shown = ", ".join(f"{name}={rate:.2g}".replace("e+0", "e") for name, rate in rates.items())
    return RATES.format(device=device, capability=capability, rates=shown)


def with_table(module: str, table: str) -> str:
    """Return the text of a module with its table replaced."""
    return module.partition(table[: table.index("FASTEST")])[0] + table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-gb", type=float, default=8.0, help="cells of more keys and values copy their neighbour")
    parser.add_argument("--write", action="store_true", help="write the GPU's module in ops/cuda/tuning")
    args = parser.parse_args()
    pool = torch.randn(int(args.max_gb * 1e9) // 2, device=args.device, dtype=torch.bfloat16)
    fastest_by_pairs: dict[int, dict[int, str]] = {}
    for pairs in (1 << i for i in range(11)):
        row = fastest_by_pairs[pairs] = {}
        for kv_len in (256 << i for i in range(10)):
            if 4 * 128 * pairs * kv_len > args.max_gb * 1e9:
                row[kv_len] = row[kv_len // 2]
                continue
            row[kv_len], times = fastest(pairs, kv_len, pool, args.rounds)
            shown = " ".join(f"{name} {us:.1f}" for name, us in times.items())
            print(f"{pairs:5} pairs {kv_len:7} keys: {row[kv_len]:6}  {shown}", flush=True)
    device = torch.cuda.get_device_name()
    path = Path(tuning.__file__).parent / f"{tuning.module_name(device)}.py"
    rates = {
        "read_bytes_per_us": read_rate("cuda") / 1e6,
        "product_flops_per_us": product_rate("cuda", torch.bfloat16) / 1e6,
    }
    measured = rates_text(device, torch.cuda.get_device_capability(), rates)
    text = with_table(path.read_text() if path.exists() else measured, table_text(fastest_by_pairs))
    print(text)
    if args.write:
        path.write_text(text)


if __name__ == "__main__":
    main()
