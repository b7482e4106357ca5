"""One decode step of a Llama with a static cache, as `generate` runs it: Inductor and tatten side by side.

    python benchmarks/static_cache.py --device cpu       # a Llama of about 100M parameters
    python benchmarks/static_cache.py --device cuda      # 8 layers of Llama-3.1-8B

Both get the same weights, cache and mask (a bool input `[batch, 1, 1, max_cache_len]`, as `generate` passes it), and
take turns. On a GPU each step is a captured CUDA graph. The byte floor is the traffic a step can't avoid: each weight
once and each used key and value once, at the best rate of a plain read or copy in the same run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from support import models, results
from support.command_line import arguments, machine
from support.static_step import measure_step
from support.timing import read_rate
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Row:
    """A shape of the grid, in which `used` of `max_cache_len` slots hold keys."""

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    max_cache_len: int
    used: int
    dtype: str = "float32"
    padded: bool = False  # sequence b begins with 4 * b slots of padding


def cpu_grid() -> list[Row]:
    shapes = [
        (4, 16, 4, 64, 8192, 1000),
        (4, 8, 2, 128, 8192, 1000),
        (4, 16, 4, 64, 8192, 8191),
        (1, 16, 4, 64, 8192, 1000),
        (1, 16, 4, 64, 8192, 8191),
        (4, 16, 16, 64, 8192, 1000),
        (4, 16, 16, 64, 8192, 8191),
        (1, 16, 16, 64, 8192, 8191),
        (1, 16, 16, 64, 1024, 1023),
        (1, 16, 4, 64, 256, 255),
    ]
    padded = [(16, 16, 16, 64, 256, 200), (16, 16, 4, 64, 1024, 500)]
    return [
        *(Row(*shape, dtype) for dtype in ("float32", "bfloat16") for shape in shapes),
        *(Row(*shape, dtype, padded=True) for dtype in ("float32", "bfloat16") for shape in padded),
    ]


def cuda_grid() -> list[Row]:
    shapes = [(1, 32768, 32000), (8, 16384, 16000), (8, 16384, 1000), (32, 4096, 4000)]
    return [Row(batch, 32, 8, 128, length, used, "bfloat16") for batch, length, used in shapes]


def build(row: Row, device: str) -> PreTrainedModel:
    sizes = {"num_hidden_layers": 8}
    if device == "cpu":
        hidden = row.q_heads * row.head_dim
        sizes |= {"hidden_size": hidden, "intermediate_size": 11 * hidden // 4, "head_dim": row.head_dim}
        sizes |= {"num_attention_heads": row.q_heads, "num_key_value_heads": row.kv_heads}
        sizes |= {"vocab_size": 16000, "tie_word_embeddings": True}
    return models.build(models.shape("llama", **sizes), device, getattr(torch, row.dtype))


def measure(row: Row, device: str, rate: float, repeats: int) -> dict[str, float]:
    model = build(row, device)
    floor = {"floor_ms": models.floor_bytes(model, row.batch, row.used) / rate * 1e3}
    return asdict(row) | measure_step(model, row, device, repeats) | floor


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs="*", help="which rows of the grid, by number; default: all")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()

    grid = cpu_grid() if args.device == "cpu" else cuda_grid()
    rate = read_rate(args.device)
    print(f"{machine(args.device)}, {rate / 1e9:.1f} GB/s")
    print(
        "row dtype    batch heads   D   cache   used | inductor   tatten    floor ms | speedup  vs floor | logit errors"
    )
    rows_so_far = []
    for i, row in enumerate(grid):
        if args.rows and i not in args.rows:
            continue
        r = measure(row, args.device, rate, args.repeats)
        rows_so_far.append(r)
        shape = f"{row.batch:5} {row.q_heads:2}/{row.kv_heads:<2} {row.head_dim:4} {row.max_cache_len:7} {row.used:6}"
        times = f"{r['inductor_ms']:8.2f} {r['tatten_ms']:8.2f} {r['floor_ms']:8.2f}   "
        ratios = f"{r['inductor_ms'] / r['tatten_ms']:6.2f}x {r['tatten_ms'] / r['floor_ms']:9.2f}x"
        errors = f"{r['inductor_error']:.1e} {r['tatten_error']:.1e}"
        print(f"{i:3} {row.dtype:8} {shape} | {times} | {ratios} | {errors}", flush=True)
    if args.json:
        results.write(args.json, args.device, rows_so_far, bytes_per_second=rate)


if __name__ == "__main__":
    main()
