"""Small decode steps on a CPU: 8 layers over caches of 16 to 512 slots that share a mask, beside Inductor.

    python benchmarks/small_calls.py                                      # the whole grid: about an hour
    python benchmarks/small_calls.py --dtypes float32 --head-dims 64      # a quarter of it
    python benchmarks/small_calls.py --jobs 14                            # the whole grid, in 14 processes side by side

A step is eight calls of `F.scaled_dot_product_attention` with a bool mask `[batch, 1, 1, slots]`, as `generate` passes
it, after heads are repeated as transformers does. "quarter" has a quarter of the slots in use, "ragged"
another number of them for each sequence. The clock is the CPU time of one thread, so that other processes count less;
both backends take turns, and the least time of each is shown. Results are held to float64. A step whose calls are left
as they are is Inductor's own code, and is not measured.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from support import results
from support.command_line import arguments, machine
from torch import Tensor

import tatten

LAYERS = 8
SLOTS = (16, 33, 64, 128, 256, 512)
HEADS = ((8, 8), (8, 2), (32, 8), (4, 4))
ASKED = 1.05
BURST_SECONDS = 1e-3


@dataclass(frozen=True)
class Shape:
    """A compiled step."""

    dtype: str
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    slots: int


def step(query: Tensor, caches: list[tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
    for key, value in caches:
        batch, kv_heads, slots, head_dim = key.shape
        repeats = query.shape[1] // kv_heads
        if repeats > 1:
            wide = (batch, kv_heads, repeats, slots, head_dim)
            key, value = (x[:, :, None].expand(wide).reshape(batch, -1, slots, head_dim) for x in (key, value))
        query = F.scaled_dot_product_attention(query, key, value, mask)
    return query


def masks(shape: Shape) -> dict[str, Tensor]:
    """Return masks by the use of slots."""
    places, lengths = torch.arange(shape.slots), torch.arange(1, shape.batch + 1) * shape.slots // shape.batch
    used = {"all": torch.tensor([shape.slots]), "quarter": torch.tensor([shape.slots // 4])}
    if shape.batch > 1:
        used["ragged"] = lengths
    return {name: (places < n[:, None]).expand(shape.batch, -1)[:, None, None].contiguous() for name, n in used.items()}


def compiled(backend: str, inputs: tuple[object, ...]) -> tuple[Callable[..., Tensor], bool]:
    """Return the compiled step, and whether its calls were rewritten."""
    torch._dynamo.reset()
    with tatten.recording() as report:
        fn = torch.compile(step, backend=backend, dynamic=False)
        fn(*inputs)
    return fn, bool(report.rewritten)


def least_us(fns: dict[str, Callable[..., Tensor]], inputs: tuple[object, ...], rounds: int) -> dict[str, float]:
    """Return the least microseconds of a call of each, in bursts that take turns."""
    least = dict.fromkeys(fns, float("inf"))
    calls = 1
    for i in range(rounds + 1):
        for name, fn in fns.items():
            start = time.thread_time()
            for _ in range(calls):
                fn(*inputs)
            us = (time.thread_time() - start) / calls * 1e6
            least[name] = min(least[name], us) if i else us
        if i == 0:
            calls = max(1, int(BURST_SECONDS * 1e6 / min(least.values())))
    return least


def measure(shape: Shape, rounds: int) -> list[dict[str, Any]]:
    """Return rows by the use of slots; none if the calls are left as they are."""
    torch.manual_seed(0)
    dtype = getattr(torch, shape.dtype)
    query = torch.randn(shape.batch, shape.q_heads, 1, shape.head_dim).to(dtype)
    sizes = (shape.batch, shape.kv_heads, shape.slots, shape.head_dim)
    caches = [(torch.randn(sizes).to(dtype), torch.randn(sizes).to(dtype)) for _ in range(LAYERS)]
    by_use = masks(shape)
    first = (query, caches, by_use["all"])
    ours, rewritten = compiled("tatten", first)
    if not rewritten:
        return []
    inductors, _ = compiled("inductor", first)
    rows = []
    for used, mask in by_use.items():
        inputs = (query, caches, mask)
        exact = step(query.double(), [(k.double(), v.double()) for k, v in caches], mask)
        errors = {
            name: float((f(*inputs) - exact).abs().max()) for name, f in (("tatten", ours), ("inductor", inductors))
        }
        if errors["tatten"] > 2 * errors["inductor"] + torch.finfo(dtype).eps:
            raise ArithmeticError(f"{shape}: errors of tatten must be at most twice Inductor's, got {errors}")
        us = least_us({"inductor": inductors, "tatten": ours}, inputs, rounds)
        ratio = us["tatten"] / us["inductor"]
        rows.append({**asdict(shape), "used": used, "us": us, "ratio": ratio})
    return rows


def measure_in_process(shape: Shape, rounds: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    with torch.no_grad():
        return measure(shape, rounds)


def main() -> None:
    parser = arguments(__doc__, devices=("cpu",))
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 2, 8])
    parser.add_argument("--head-dims", nargs="*", type=int, default=[64, 128])
    parser.add_argument("--slots", nargs="*", type=int, default=SLOTS)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1, help="processes, each of which measures shapes on one core")
    args = parser.parse_args()
    print(f"{machine(args.device)}, least CPU time of one thread, microseconds of a step of {LAYERS} layers")
    print("dtype    batch heads  dim slots used    | inductor   tatten | ratio")
    rows: list[dict[str, Any]] = []
    left: list[dict[str, Any]] = []
    grid = itertools.product(args.dtypes, args.batches, HEADS, args.head_dims, args.slots)
    shapes = [Shape(dtype, batch, *heads, head_dim, slots) for dtype, batch, heads, head_dim, slots in grid]
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as processes:
        for x, measured in zip(
            shapes, processes.map(measure_in_process, shapes, [args.rounds] * len(shapes)), strict=True
        ):
            name = f"{x.dtype:8} {x.batch:5} {x.q_heads:2}/{x.kv_heads:<2} {x.head_dim:4} {x.slots:5}"
            if not measured:
                left.append(asdict(x))
                print(f"{name}         | left as it is", flush=True)
            for r in measured:
                rows.append(r)
                us = r["us"]
                print(
                    f"{name} {r['used']:7} |{us['inductor']:9.1f} {us['tatten']:8.1f} | {r['ratio']:5.2f}", flush=True
                )
    worst = max((r["ratio"] for r in rows), default=0.0)
    above = sum(r["ratio"] > ASKED for r in rows)
    print(f"  {len(left)} of {len(shapes)} steps are left as they are")
    print(f"  {above} of {len(rows)} rows above {ASKED}, the worst {worst:.2f}: {'NO' if above else 'yes'}")
    if args.json:
        results.write(
            args.json,
            args.device,
            rows,
            layers=LAYERS,
            clock="CPU time of one thread, least of a row's rounds",
            left=left,
        )


if __name__ == "__main__":
    main()
