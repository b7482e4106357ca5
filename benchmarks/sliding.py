"""Full caches of sliding windows: shifting them by a token, compiled by tatten and by Inductor.

    python benchmarks/sliding.py --device cuda
    python benchmarks/sliding.py

The code is that of `StaticSlidingWindowLayer` of transformers, for the keys of four layers in one compiled function,
and the time is that of one of these layers. On a GPU the functions are captured CUDA graphs. Both take turns, medians
are shown, and afterwards the caches hold the same bits. The floor is the bytes of a cache, once read and once written,
at the best rate at which PyTorch reads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from support import results
from support.command_line import arguments, machine
from support.timing import as_graph, in_turns, microseconds, read_rate
from torch import Tensor

LAYERS = 4
BATCHES = {"cuda": (1, 8, 32), "cpu": (1, 4)}
SHAPES = ((8, 128, 64), (4, 1024, 256), (8, 4096, 128))  # kv heads, slots, head_dim


def move(caches: list[Tensor], new: Tensor) -> Tensor:
    for cache in caches:
        moved = cache.roll(-1, dims=-2)
        moved[:, :, torch.tensor([-1], dtype=torch.int64, device=cache.device)] = new
        cache.copy_(moved)
    return new + 1


def measure(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, rounds: int) -> dict[str, object]:
    torch.manual_seed(0)
    batch, heads, _, head_dim = shape
    new = torch.randn(batch, 1, heads, head_dim, device=device).to(dtype).transpose(1, 2)
    steps: dict[str, Callable[[], Tensor]] = {}
    caches = {}
    for backend in ("inductor", "tatten"):
        torch.manual_seed(1)
        layers = caches[backend] = [torch.randn(shape, device=device).to(dtype) for _ in range(LAYERS)]
        torch._dynamo.reset()
        compiled = torch.compile(move, backend=backend, dynamic=False)

        def step(compiled=compiled, layers=layers) -> Tensor:
            return compiled(layers, new)

        for _ in range(3):
            step()
        steps[backend] = step if device == "cpu" else as_graph(step)
    us = in_turns(steps, rounds, lambda _, f: microseconds(f, device, LAYERS))
    if not all(map(torch.equal, *caches.values())):
        raise ArithmeticError(f"the caches of {shape} differ")
    row = {"shape": list(shape), "dtype": str(dtype)[6:], "bytes": caches["tatten"][0].nbytes, "us": us}
    return {**row, "faster": us["inductor"] / us["tatten"]}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    rate = read_rate(args.device)
    print(f"{machine(args.device)}, reads {rate / 1e9:.1f} GB/s, microseconds of a layer's keys")
    print("batch heads slots  dim dtype        MB | inductor    tatten     floor | speedup")
    rows = []
    with torch.no_grad():
        for shape in ((batch, *rest) for batch in BATCHES[args.device] for rest in SHAPES):
            for dtype in (torch.float32, torch.bfloat16) if args.device == "cpu" else (torch.bfloat16,):
                row = measure(shape, dtype, args.device, args.rounds)
                row["floor_us"] = 2 * row["bytes"] / rate * 1e6
                b, h, s, d = shape
                print(f"{b:5} {h:5} {s:5} {d:4} {row['dtype']:8} {row['bytes'] / 1e6:7.1f} |", end=" ")
                print(f"{row['us']['inductor']:8.1f} {row['us']['tatten']:9.1f} {row['floor_us']:9.1f} |", end=" ")
                print(f"{row['faster']:6.2f}x", flush=True)
                rows.append(row)
    if args.json:
        results.write(args.json, args.device, rows, bytes_per_second=rate)


if __name__ == "__main__":
    main()
