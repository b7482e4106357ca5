"""Measure the host time of a call of an op in compiled code: called by Inductor's code, or launched by it.

    python benchmarks/launches.py --device cuda

Microseconds of the host for one of `--calls` calls in a step, with the memory for it, in the default mode of
`torch.compile`; the median of `--rounds`, in which both take turns. Shapes are small, so that the GPU waits, which is
checked. With `backend="inductor"` the code calls the op. With `backend="tatten"` it launches the op's kernels: those in
Triton like Inductor's own, and calls with a kernel in Gluon by `tatten.ops.cuda.prepared`. Both return the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from overhead import host_us
from support import results
from support.command_line import arguments, machine
from support.timing import in_turns
from torch import Tensor

import tatten

Call = Callable[[Tensor], Tensor]
BACKENDS = {"called": "inductor", "launched": "tatten"}
STEPS = 100  # in a row


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def decode() -> tuple[Call, Tensor]:
    """Return calls of 32 query heads, 8 kv heads of 128, and a mask whose blocks are found once for all calls."""
    kv, (mask, blocks) = (randn(1, 8, 256, 128), randn(1, 8, 256, 128)), padding()
    op = torch.ops.tatten.decode_attention.default
    return lambda q: op(q, *kv, mask, block_mask=blocks)[0], randn(1, 32, 1, 128)


def latents(heads: int, dtype: torch.dtype) -> tuple[Call, Tensor]:
    """Return calls in the shapes of DeepSeek-V3, with a mask like that of `decode`."""
    rope, latent, key_rope = randn(1, heads, 1, 64), randn(1, 1, 256, 512), randn(1, 1, 256, 64)
    mask, blocks = padding()
    query = randn(1, heads, 1, 512).to(dtype)
    op, options = torch.ops.tatten.latent_attention.default, {"scale": 192**-0.5, "out_dtype": torch.float32}
    return lambda q: op(q, rope, latent, key_rope, mask, block_mask=blocks, **options)[0], query


def prefix() -> tuple[Call, Tensor]:
    """Return calls of 64 sequences with a shared prefix, of 8 query heads and a kv head of 128."""
    (k, v), (k2, v2) = [(randn(n, 1, length, 128), randn(n, 1, length, 128)) for n, length in ((1, 2048), (64, 64))]
    return lambda q: tatten.bifurcated_attention(q, [k, k2], [v, v2])[0], randn(64, 8, 1, 128)


def padding() -> tuple[Tensor, Tensor]:
    mask = (torch.arange(256, device="cuda") < 200).expand(1, 1, 1, -1)
    return mask, torch.ops.tatten.block_mask(mask)


def project() -> tuple[Call, Tensor]:
    """Return products of sums over latents and the values' weight, for 16 heads."""
    weight = randn(16, 128, 512)
    return lambda x: torch.ops.tatten.project_heads(x, weight), torch.randn(1, 16, 1, 512, device="cuda")


CASES: dict[str, Callable[[], tuple[Call, Tensor]]] = {
    "decode_attention": decode,
    "project_heads": project,
    "bifurcated_attention, a long prefix": prefix,
    "latent_attention, 128 heads": lambda: latents(128, torch.bfloat16),
    "latent_attention, 16 heads, queries in float32": lambda: latents(16, torch.float32),
}


def measure(call: Call, x: Tensor, calls: int, rounds: int) -> dict[str, float]:
    """Return the microseconds of a call, `called` and `launched`."""

    def step(x: Tensor) -> list[Tensor]:
        return [call(x) for _ in range(calls)]

    torch._dynamo.reset()
    steps = {name: torch.compile(step, backend=backend, dynamic=False) for name, backend in BACKENDS.items()}
    want = call(x)
    for name, run in steps.items():
        if not all(torch.equal(y, want) for y in run(x)):
            raise ArithmeticError(f"{name}: launched and called results must have the same bits")

    def call_us(name: str, run: Callable[[Tensor], object]) -> float:
        run(x)
        torch.cuda.synchronize()
        start = time.perf_counter()
        took = host_us(lambda: run(x), STEPS)
        torch.cuda.synchronize()
        if (time.perf_counter() - start) * 1e6 > 1.1 * took * STEPS:
            raise RuntimeError(f"{name}: the host waited for the GPU")
        return took / calls

    return in_turns(steps, rounds, call_us)


def main() -> None:
    parser = arguments(__doc__, ["cuda"])
    parser.add_argument("--calls", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a GPU: on a CPU the host computes, too")
        return
    print(f"{machine(args.device)}\n{'op':48}  called  launched us | launched/called")
    rows = []
    with torch.no_grad():
        for name, make in CASES.items():
            us = measure(*make(), args.calls, args.rounds)
            rows.append({"call": name, "us": us, "ratio": us["launched"] / us["called"]})
            print(f"{name:48} {us['called']:7.1f} {us['launched']:12.1f} | {rows[-1]['ratio']:15.2f}", flush=True)
    if args.json:
        results.write(args.json, args.device, rows)


if __name__ == "__main__":
    main()
