"""The linear layers of a decoder for one row with all ops around them: `tatten::fused_linear` and separate launches.

    python benchmarks/fused_linear.py                       # models of 0.6 to 70 billion parameters
    python benchmarks/fused_linear.py --model Llama-3.2-1B --only separate fused not_ahead

A chain of decoder layers without attention: norm; query, key and value; output and residual; norm; gate, up and
activation; down and residual. The query stands in for the result of attention. `separate` has
`tatten::skinny_linear` for the layers that read one input, and kernels of Inductor for the other ops. `fused` calls
`tatten::fused_linear` for all of them, and `not_ahead` does so without `prefetch`. `gates`, `norms` and `residuals`
call it for one kind of op alone, and `sandwich` for norms and gates. All are compiled by `backend="tatten"` with the
option `decode`, and checked against float64.

A captured CUDA graph runs the chain, whose weights together exceed the L2. Candidates take turns, and medians are
shown, in microseconds of a layer. The floor is each weight once, at the best rate at which PyTorch reads or copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from support import results
from support.command_line import arguments, machine
from support.decode_cases import L2
from support.timing import as_graph, in_turns, microseconds, read_rate
from torch import Tensor

BF16, EPS = torch.bfloat16, 1e-5
MODELS = {  # hidden size, widths of query and of key, inner size
    "Qwen3-0.6B": (1024, 2048, 1024, 3072),
    "Llama-3.2-1B": (2048, 2048, 512, 8192),
    "Qwen3-1.7B": (2048, 2048, 1024, 6144),
    "Llama-3.2-3B": (3072, 3072, 1024, 8192),
    "Qwen3-4B": (2560, 4096, 1024, 9728),
    "Llama-3.1-8B": (4096, 4096, 1024, 14336),
    "Qwen3-14B": (5120, 5120, 1024, 17408),
    "Llama-3.1-70B": (8192, 8192, 1024, 28672),
}
FUSED = {
    "separate": frozenset[str](),
    "gates": frozenset({"gate", "prefetch"}),
    "norms": frozenset({"norm", "prefetch"}),
    "residuals": frozenset({"residual", "prefetch"}),
    "sandwich": frozenset({"norm", "gate", "prefetch"}),
    "not_ahead": frozenset({"norm", "gate", "residual"}),
    "fused": frozenset({"norm", "gate", "residual", "prefetch"}),
}


@dataclass(frozen=True)
class Layer:
    """The weights of a layer: of its norms, of the groups that read one input, and of down."""

    norms: tuple[Tensor, Tensor]
    attention: list[Tensor]
    output: list[Tensor]
    gates: list[Tensor]
    down: list[Tensor]


def draw(sizes: tuple[int, int, int, int], device: str) -> Layer:
    hidden, query, key, inner = sizes

    def weight(n_out: int, n_in: int) -> Tensor:
        return (torch.randn(n_out, n_in, device=device) * n_in**-0.5).to(BF16)

    norms = [1 + 0.1 * torch.randn(hidden, device=device).to(BF16) for _ in range(2)]
    attention = [weight(n, hidden) for n in (query, key, key)]
    gates = [weight(inner, hidden) for _ in range(2)]
    return Layer((norms[0], norms[1]), attention, [weight(hidden, query)], gates, [weight(hidden, inner)])


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """The RMS norm as transformers writes it."""
    exact = x.float()
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * exact.to(x.dtype)


def linear(
    x: Tensor,
    weights: list[Tensor],
    fuses: frozenset[str],
    *,
    norm: Tensor | None = None,
    gate: bool = False,
    residual: Tensor | None = None,
) -> list[Tensor]:
    """Compute layers that read one input. The ops in `fuses` are part of their launch, and others are separate."""
    inside: dict[str, Any] = {}
    if norm is not None and "norm" in fuses:
        inside |= {"norm_weight": norm, "eps": EPS}
    elif norm is not None:
        x = normed(x, norm)
    inside |= {"gate": "silu"} if gate and "gate" in fuses else {}
    inside |= {"residual": residual} if residual is not None and "residual" in fuses else {}
    if inside:
        out = torch.ops.tatten.fused_linear.default(x, weights, prefetch="prefetch" in fuses, **inside)
    else:
        out = [y.squeeze(0) for y in torch.ops.tatten.skinny_linear.default(x, weights)]
    if gate and "gate" not in fuses:
        out = [F.silu(out[0]) * out[1]]
    if residual is not None and "residual" not in fuses:
        out = [residual + out[0]]
    return out


def chain(fuses: frozenset[str], x: Tensor, layers: list[Layer]) -> Tensor:
    for layer in layers:
        query, _, _ = linear(x, layer.attention, fuses, norm=layer.norms[0])
        (x,) = linear(query, layer.output, fuses, residual=x)
        (inner,) = linear(x, layer.gates, fuses, norm=layer.norms[1], gate=True)
        (x,) = linear(inner, layer.down, fuses, residual=x)
    return x


def in_float64(x: Tensor, layers: list[Layer]) -> Tensor:
    x = x.double()
    for layer in layers:
        n = F.rms_norm(x, x.shape[-1:], layer.norms[0].double(), EPS)
        x = x + F.linear(F.linear(n, layer.attention[0].double()), layer.output[0].double())
        n = F.rms_norm(x, x.shape[-1:], layer.norms[1].double(), EPS)
        gate, up = (F.linear(n, weight.double()) for weight in layer.gates)
        x = x + F.linear(F.silu(gate) * up, layer.down[0].double())
    return x


def measure(sizes: tuple[int, int, int, int], names: list[str], rounds: int) -> dict[str, Any]:
    hidden, query, key, inner = sizes
    n_bytes = 2 * (hidden * (query + 2 * key) + query * hidden + 3 * hidden * inner)
    n_layers = max(4, 2 + 2 * L2["cuda"] // n_bytes)
    layers = [draw(sizes, "cuda") for _ in range(n_layers)]
    x = torch.randn(1, 1, hidden, device="cuda").to(BF16)
    want, graphs, errors = in_float64(x, layers), dict[str, Callable[[], Tensor]](), dict[str, float]()
    for name in names:
        torch._dynamo.reset()
        step = torch.compile(
            functools.partial(chain, FUSED[name]), backend="tatten", options={"decode": True}, fullgraph=True
        )
        got = step(x, layers)
        errors[name] = ((got - want).abs().max() / want.abs().max()).item()
        if not errors[name] < 2**-5:
            raise ArithmeticError(f"{name} is off by {errors[name]:.1e} of the largest number, allowed {2**-5:.1e}")
        graphs[name] = as_graph(functools.partial(step, x, layers))
    us = in_turns(graphs, rounds, lambda _, replay: microseconds(replay, "cuda", n_layers, 4))
    return {"layers": n_layers, "bytes": n_bytes, "us": us, "error": errors}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--only", nargs="*", choices=list(FUSED), default=list(FUSED))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    rate = read_rate("cuda")
    print(f"{machine('cuda')}, {rate / 1e9:.1f} GB/s", flush=True)
    table = []
    with torch.no_grad():
        for model in args.model:
            row = {"model": model, **measure(MODELS[model], args.only, args.rounds)}
            row["floor_us"] = row["bytes"] / rate * 1e6
            table.append(row)
            us = row["us"]
            times = "".join(f"  {name} {us[name]:.2f} ({us[name] / row['floor_us']:.3f})" for name in us)
            print(f"{model:14} floor {row['floor_us']:.2f}{times} us", flush=True)
            if args.json:
                results.write(args.json, args.device, table, bytes_per_second=rate)


if __name__ == "__main__":
    main()
