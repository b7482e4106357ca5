"""The linear layers of a decoder layer for few rows: `tatten::skinny_linear`, cuBLAS and Inductor.

    python benchmarks/skinny_linear.py --device cuda
    python benchmarks/skinny_linear.py --device cuda --parts 1 2 4     # numbers of parts beside the chosen one
    python benchmarks/skinny_linear.py --device cuda --rows 8 --dtype float16
    python benchmarks/skinny_linear.py --device cuda --rows 1          # beside kernels that Inductor writes and tunes

Layers that read one input are a group: query, key and value; the output of attention; gate and up; down. One model has
its head as well, and one has biases. `cublas` calls `linear` for each layer, and `joined` once for all layers of a
group, whose weights are concatenated beforehand. `tatten` calls the op for each group, in as many parts as the pass
chooses. With one row, `inductor` compiles the group with the options that a decode step has, which turn calls of cuBLAS
into tuned kernels. Each result is then read by a kernel of its own, as in a decode step, which may be launched early.
It sums parts, adds the bias of tatten's result, and rounds. (In a step of one row, Inductor computes some of the next
ops in the kernel of a layer.) Results are checked against float64.

A captured CUDA graph cycles through copies of the weights that together exceed the L2. Candidates take turns, and
medians are shown, in microseconds of a group with those kernels. The floor is each weight once, at the best rate at
which PyTorch reads or copies.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from tatten.options import decode_options

Group = tuple[tuple[int, ...], int]  # output features of each layer, and input features


def groups(hidden: int, query: int, key: int, inner: int) -> dict[str, Group]:
    """Return the groups of a decoder layer, by name."""
    attention = {"query, key, value": ((query, key, key), hidden), "output": ((hidden,), query)}
    return attention | {"gate, up": ((inner, inner), hidden), "down": ((hidden,), inner)}


MODELS = {
    "Llama-3.1-8B": groups(4096, 4096, 1024, 14336) | {"head": ((128256,), 4096)},
    "Llama-3.2-3B": groups(3072, 3072, 1024, 8192),
    "Llama-3.2-1B": groups(2048, 2048, 512, 8192),
    "Qwen3-0.6B": groups(1024, 2048, 1024, 3072),
    "Qwen2.5-0.5B": groups(896, 896, 128, 4864),
    "Gemma-3-12b": groups(3840, 4096, 2048, 15360),
    "gpt-oss-20b": {"query, key, value": ((4096, 512, 512), 2880), "output": ((2880,), 4096)},
}
BIASED = {"gpt-oss-20b"}
ONE_ROW = {"Qwen2.5-0.5B"}  # with several rows, weights as small as these are left to cuBLAS
BLOCK = 1024


@dataclass(frozen=True)
class Layers:
    """The layers of a group: weights, biases or nothing, and all weights and biases in one."""

    weights: list[Tensor]
    biases: list[Tensor]
    joined_weight: Tensor
    joined_bias: Tensor | None


Call = Callable[[Tensor, Layers], Sequence[Tensor]]


@triton.jit
def _read_kernel(
    product, bias, out, part_stride, row_stride, N: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        at = product + part * part_stride + tl.program_id(0) * row_stride + column
        x += tl.load(at, mask=column < N, other=0.0).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)
    tl.store(out + tl.program_id(0) * N + column, x.to(out.dtype.element_ty), mask=column < N)


def read(product: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write the sum of `[parts, rows, n]` over parts, and of a bias, to `[rows, n]`."""
    parts, rows, n = product.shape
    strides = product.stride()[:2]
    _read_kernel[rows, triton.cdiv(n, BLOCK)](
        product, bias, out, *strides, N=n, PARTS=parts, BLOCK=BLOCK, launch_pdl=True
    )


def linears(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    pairs = itertools.zip_longest(weights, biases)  # all layers have biases, or none has
    return [F.linear(x, weight, bias).unsqueeze(0) for weight, bias in pairs]


def by_cublas(x: Tensor, layers: Layers) -> Sequence[Tensor]:
    return linears(x, layers.weights, layers.biases)


def by_joined(x: Tensor, layers: Layers) -> Sequence[Tensor]:
    products = F.linear(x, layers.joined_weight, layers.joined_bias)
    return products.unsqueeze(0).split([w.shape[0] for w in layers.weights], -1)


def by_inductor() -> Call:
    """Return `by_cublas`, compiled as a decode step is without tatten."""
    torch._dynamo.reset()
    options = decode_options(torch.device("cuda"), tunes=True, combines=False)
    compiled = torch.compile(linears, options=options, dynamic=False)
    return lambda x, layers: compiled(x, layers.weights, layers.biases)


def by_op(x: Tensor, layers: Layers, parts: int) -> Sequence[Tensor]:
    dtype = torch.float32 if parts > 1 or layers.biases else x.dtype
    products: list[Tensor] = torch.ops.tatten.skinny_linear.default(x, layers.weights, parts, dtype)
    return products


def step(call: Call, x: Tensor, layers: Layers, adds_biases: bool, outs: list[Tensor]) -> list[Tensor]:
    """Compute the layers of a group, and read each result."""
    biases = layers.biases if adds_biases and layers.biases else [None] * len(outs)
    for product, bias, out in zip(call(x, layers), biases, outs, strict=True):
        read(product, bias, out)
    return outs


def check(name: str, results: list[Tensor], x: Tensor, layers: Layers) -> None:
    """Raise unless the results are right up to their rounding."""
    for got, want in zip(results, by_cublas(x.double(), in_float64(layers)), strict=True):
        off = ((got.double() - want[0]).abs().max() / want.abs().max()).item()
        if not off < 2**-8:
            raise ArithmeticError(f"{name} is wrong: off by {off:.1e} of the largest number, allowed {2**-8:.1e}")


def in_float64(layers: Layers) -> Layers:
    weights, biases = ([y.double() for y in z] for z in (layers.weights, layers.biases))
    return Layers(weights, biases, layers.joined_weight, layers.joined_bias)


def draw(group: Group, biased: bool, dtype: torch.dtype) -> Layers:
    outs, n_in = group
    weight = (torch.randn(sum(outs), n_in, device="cuda") * n_in**-0.5).to(dtype)
    bias = torch.randn(sum(outs), device="cuda").to(dtype) if biased else None
    weights = [w.clone() for w in weight.split(outs)]
    return Layers(weights, [b.clone() for b in bias.split(outs)] if bias is not None else [], weight, bias)


def measure(group: Group, biased: bool, rows: int, args: argparse.Namespace) -> dict[str, Any]:
    outs, n_in = group
    n_bytes, chosen = 2 * sum(outs) * n_in, choose_parts(outs, n_in, rows)
    copies, dtype = 2 + 2 * L2["cuda"] // n_bytes, getattr(torch, args.dtype)
    x = torch.randn(rows, n_in, device="cuda").to(dtype)
    models = [draw(group, biased, dtype) for _ in range(copies)]
    results = [torch.empty(rows, n, device="cuda", dtype=dtype) for n in outs]
    calls: dict[str, Call] = {"cublas": by_cublas, **({"joined": by_joined} if len(outs) > 1 else {})}
    calls |= {"inductor": by_inductor()} if rows == 1 else {}
    calls |= {"tatten": functools.partial(by_op, parts=chosen)}
    calls |= {f"{n} parts": functools.partial(by_op, parts=n) for n in args.parts if n != chosen}
    graphs = {}
    for name, call in calls.items():
        adds_biases = name not in ("cublas", "joined", "inductor")
        check(name, step(call, x, models[0], adds_biases, results), x, models[0])

        def steps(call: Call = call, adds_biases: bool = adds_biases) -> list[Tensor]:
            for layers in models:
                step(call, x, layers, adds_biases, results)
            return results

        graphs[name] = as_graph(steps)
    times = in_turns(graphs, args.rounds, lambda _, step: microseconds(step, "cuda", copies, 4))
    return {"dtype": args.dtype, "biases": biased, "bytes": n_bytes, "parts": chosen, "us": times}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[2, 8, 16, 32, 64])
    several = [model for model in MODELS if model not in ONE_ROW]
    parser.add_argument("--model", nargs="*", choices=list(MODELS), default=several)
    parser.add_argument("--parts", type=int, nargs="*", default=[], help="other numbers of parts to measure")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    rate = read_rate("cuda")
    print(f"{machine('cuda')}, {rate / 1e9:.1f} GB/s", flush=True)
    table = []
    with torch.no_grad():
        for model, n_rows in itertools.product(args.model, args.rows):
            for name, group in MODELS[model].items():
                row = {"model": model, "group": name, "rows": n_rows}
                row |= measure(group, model in BIASED, n_rows, args)
                row["floor_us"] = row["bytes"] / rate * 1e6
                table.append(row)
                us = row["us"]
                times = "".join(f"  {key} {us[key]:.1f}" for key in us)
                print(
                    f"{model:13}{n_rows:3} rows  {name:17} x{row['parts']}  floor {row['floor_us']:.1f}{times} us  "
                    f"{us['tatten'] / us['cublas']:.3f}",
                    flush=True,
                )
                if args.json:
                    results.write(args.json, args.device, table, bytes_per_second=rate)


if __name__ == "__main__":
    main()
