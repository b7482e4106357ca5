"""The linear layers of a decoder layer for few rows: `tatten::skinny_linear` and cuBLAS.

    python benchmarks/skinny_linear.py --device cuda
    python benchmarks/skinny_linear.py --device cuda --parts 1 2 4     # numbers of parts beside the chosen one

Layers that read one input are a group: query, key and value; the output of attention; gate and up; down. `cublas` calls
`linear` for each layer, and `tatten` the op for each group, in as many parts as the pass chooses. A norm of the first
result follows both, as in a decode step: it sums the parts, and may be launched early. Results are checked against
float64.

A captured CUDA graph cycles through copies of the weights that together exceed the L2. Candidates take turns, and
medians are shown, in microseconds of a group with its norm. The floor is each weight once, at the best rate at which
PyTorch reads or copies.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from support import results
from support.command_line import arguments, machine
from support.decode_cases import L2
from support.timing import as_graph, in_turns, microseconds, read_rate
from torch import Tensor

from tatten.ops.skinny_linear import choose_parts

Group = tuple[tuple[int, ...], int]  # output features of each layer, and input features
Call = Callable[[Tensor, list[Tensor]], list[Tensor]]


def groups(hidden: int, query: int, key: int, inner: int) -> dict[str, Group]:
    """Return the groups of a decoder layer, by name."""
    attention = {"query, key, value": ((query, key, key), hidden), "output": ((hidden,), query)}
    return attention | {"gate, up": ((inner, inner), hidden), "down": ((hidden,), inner)}


MODELS = {
    "Llama-3.1-8B": groups(4096, 4096, 1024, 14336),
    "Llama-3.2-3B": groups(3072, 3072, 1024, 8192),
    "Llama-3.2-1B": groups(2048, 2048, 512, 8192),
    "Qwen3-0.6B": groups(1024, 2048, 1024, 3072),
    "Gemma-3-12b": groups(3840, 4096, 2048, 15360),
    "gpt-oss-20b": {"query, key, value": ((4096, 512, 512), 2880), "output": ((2880,), 4096)},
}


@triton.jit
def _norm_kernel(product, out, rows, N: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    column = tl.arange(0, BLOCK)
    x = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        row = (part * rows + tl.program_id(0)).to(tl.int64)
        x += tl.load(product + row * N + column, mask=column < N, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x) / N + 1e-6)
    tl.store(out + tl.program_id(0) * N + column, x.to(tl.bfloat16), mask=column < N)


def norm(product: Tensor, out: Tensor) -> None:
    """Normalise rows of `[parts, rows, n]`, summed over parts."""
    parts, rows, n = product.shape
    block = triton.next_power_of_2(n)
    options = {"num_warps": 8, "launch_pdl": True}
    _norm_kernel[(rows,)](product, out, rows, N=n, PARTS=parts, BLOCK=block, **options)


def by_cublas(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [F.linear(x, w).unsqueeze(0) for w in weights]


def by_op(x: Tensor, weights: list[Tensor], parts: int) -> list[Tensor]:
    dtype = torch.float32 if parts > 1 else x.dtype
    return torch.ops.tatten.skinny_linear.default(x, weights, parts, dtype)


def check(name: str, products: list[Tensor], x: Tensor, weights: list[Tensor]) -> None:
    """Raise unless the products are right up to their rounding."""
    for got, weight in zip(products, weights, strict=True):
        want = x.double() @ weight.double().T
        off = ((got.double().sum(0) - want).abs().max() / want.abs().max()).item()
        if not off < 2**-8:
            raise ArithmeticError(f"{name} is wrong: off by {off:.1e} of the largest number, allowed {2**-8:.1e}")


def measure(group: Group, rows: int, more_parts: list[int], rounds: int) -> dict[str, Any]:
    outs, n_in = group
    n_bytes, chosen = 2 * sum(outs) * n_in, choose_parts(outs, n_in)
    copies = 2 + 2 * L2["cuda"] // n_bytes
    x = torch.randn(rows, n_in, device="cuda").bfloat16()
    weights = [[torch.randn(n, n_in, device="cuda").bfloat16() * n_in**-0.5 for n in outs] for _ in range(copies)]
    out = torch.empty(rows, outs[0], device="cuda", dtype=torch.bfloat16)
    calls: dict[str, Call] = {"cublas": by_cublas, "tatten": functools.partial(by_op, parts=chosen)}
    calls |= {f"{n} parts": functools.partial(by_op, parts=n) for n in more_parts if n != chosen}
    graphs = {}
    for name, call in calls.items():
        check(name, call(x, weights[0]), x, weights[0])

        def step(call: Call = call) -> Tensor:
            for w in weights:
                norm(call(x, w)[0], out)
            return out

        step()
        graphs[name] = as_graph(step)
    times = in_turns(graphs, rounds, lambda _, step: microseconds(step, "cuda", copies, 4))
    return {"bytes": n_bytes, "parts": chosen, "us": times}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[2, 8, 16, 32, 64])
    parser.add_argument("--model", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--parts", type=int, nargs="*", default=[], help="other numbers of parts to measure")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    rate = read_rate("cuda")
    print(f"{machine('cuda')}, {rate / 1e9:.1f} GB/s", flush=True)
    table = []
    with torch.no_grad():
        for model, n_rows in itertools.product(args.model, args.rows):
            for name, group in MODELS[model].items():
                row = {"model": model, "group": name, "rows": n_rows, **measure(group, n_rows, args.parts, args.rounds)}
                row["floor_us"] = row["bytes"] / rate * 1e6
                table.append(row)
                us = row["us"]
                others = "".join(f"  {key} {us[key]:.1f}" for key in us if key.endswith("parts"))
                print(
                    f"{model:13}{n_rows:3} rows  {name:17} x{row['parts']}  floor {row['floor_us']:5.1f}  cublas "
                    f"{us['cublas']:5.1f}  tatten {us['tatten']:5.1f} us  {us['tatten'] / us['cublas']:.3f}{others}",
                    flush=True,
                )
                if args.json:
                    results.write(args.json, args.device, table, bytes_per_second=rate)


if __name__ == "__main__":
    main()
