"""Scores of an indexer's keys, for sparse attention: as models write them, and by `tatten.index_scores`.

    python benchmarks/indexer.py --device cuda
    OMP_NUM_THREADS=1 python benchmarks/indexer.py     # on a CPU, one sequence

Index keys have 128 dims, as those of DeepSeek-V3.2. Candidates, each checked against float64:

    eager       products of all heads in float32, relu, weighted sum, mask, as transformers writes them
    inductor    the same under `torch.compile`
    tatten      `index_scores`
    quarter     `index_scores` under a mask that leaves the first quarter of the keys
    topk        2048 picks of the scores by `torch.topk`
    unsorted    the same by `torch.topk(sorted=False)`
    top_picks   the same by `tatten::top_picks`

On a GPU a captured CUDA graph cycles through calls whose keys together exceed the L2. All candidates take turns, and
medians are shown. The floor is each stored key once, at the best rate at which PyTorch reads or copies. `differ` is the
number of picks of the first sequence that float64 would not make: `inductor` / `tatten`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from support import results
from support.command_line import arguments, first_line, machine
from support.decode_cases import L2
from support.timing import as_graph, in_turns, microseconds, read_rate
from torch import Tensor

import tatten
from tatten.ops.reference import index_scores_reference

PICKS, DIM, SCALE = 2048, 128, 128**-0.5
SELECTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "topk": lambda scores: scores.topk(PICKS).indices,
    "unsorted": lambda scores: scores.topk(PICKS, sorted=False).indices,
    "top_picks": lambda scores: torch.ops.tatten.top_picks.default(scores, PICKS),
}
CANDIDATES = ("eager", "inductor", "tatten", "quarter", *SELECTIONS)
Call = dict[str, Tensor]  # the arguments of `index_scores` that are tensors


@dataclass(frozen=True)
class Shape:
    """One call of a decode step; `keys` is the dtype of the stored keys."""

    batch: int
    length: int
    heads: int
    q_length: int = 1
    keys: str = "bfloat16"

    @property
    def key_bytes(self) -> int:
        return self.batch * self.length * DIM * getattr(torch, self.keys).itemsize


def shapes(device: str) -> list[Shape]:
    k = 1024
    if device == "cpu":
        return [Shape(1, n * k, heads) for n in (32, 128) for heads in (64, 32)]
    base = [Shape(batch, n * k, heads) for batch in (1, 8) for n in (32, 128) for heads in (64, 32)]
    base += [Shape(16, 128 * k, 64), Shape(64, 8 * k, 64)]
    return [*base, Shape(1, 128 * k, 64, q_length=4), Shape(1, 128 * k, 64, keys="float8_e4m3fn")]


def written(query: Tensor, key: Tensor, weights: Tensor, attn_mask: Tensor, key_scale: Tensor | None = None) -> Tensor:
    """Score keys as transformers' deepseek_v32 does."""
    wide = key.float() if key_scale is None else key.float() * key_scale
    scores = torch.relu(torch.matmul(query.float(), wide.transpose(1, 2).unsqueeze(1)) * SCALE)
    scores = torch.matmul(weights.unsqueeze(2), scores).squeeze(2)
    return scores.masked_fill(~attn_mask, float("-inf"))


def by_op(call: Call) -> Tensor:
    return tatten.index_scores(**call, scale=SCALE)


def calls(s: Shape, device: str) -> list[Call]:
    """Return inputs of several calls, more in total than the cache holds."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(s.batch, *shape, device=device)

    drawn_calls: list[Call] = []
    for _ in range(-(-L2[device] // s.key_bytes)):
        call = {
            "query": randn(s.q_length, s.heads, DIM).bfloat16(),
            "key": randn(s.length, DIM).to(getattr(torch, s.keys)),
            "weights": randn(s.q_length, s.heads) * s.heads**-0.5,
            "attn_mask": torch.ones(s.batch, 1, s.length, dtype=torch.bool, device=device),
        }
        if call["key"].itemsize == 1:
            call["key_scale"] = torch.rand(s.batch, s.length, 1, device=device)
        drawn_calls.append(call)
    return drawn_calls


def picks_that_differ(scores: Tensor, call: Call) -> int:
    """Count picks of the first sequence that float64 would not make; raise unless its scores are right."""
    want = index_scores_reference(**{name: x[:1] for name, x in call.items()}, scale=SCALE)
    first = scores[:1].double()
    if not torch.equal(first.isinf(), want.isinf()):
        raise ArithmeticError("wrong: other keys are masked")
    finite = want.isfinite()
    off = ((first - want)[finite].norm() / want[finite].norm()).item()
    if not off < 1e-5:
        raise ArithmeticError(f"wrong: relative error {off:.1e}, allowed 1e-5")
    picked = torch.zeros_like(want, dtype=torch.bool).scatter(2, want.topk(PICKS).indices, True)
    return int((~picked.gather(2, scores[:1].topk(PICKS).indices)).sum())


def measure(s: Shape, device: str, rate: float, rounds: int) -> dict[str, Any]:
    """Return a row of the results; `rate` is bytes per second."""
    inputs, left_out, differ = calls(s, device), {}, {}
    torch.compiler.reset()
    compiled = torch.compile(written, dynamic=False)
    scored = [by_op(call) for call in inputs]
    quarter = [{**call, "attn_mask": call["attn_mask"].clone()} for call in inputs]
    for call in quarter:
        call["attn_mask"][..., s.length // 4 :] = False
    run: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
        "eager": (lambda call: written(**call), inputs),
        "inductor": (lambda call: compiled(**call), inputs),
        "tatten": (by_op, inputs),
        "quarter": (by_op, quarter),
        **{name: (select, scored) for name, select in SELECTIONS.items()},
    }
    steps: dict[str, Callable[[], object]] = {}
    for name, (score, inputs_of_calls) in run.items():
        repeated = inputs_of_calls * -(-4 // len(inputs_of_calls))  # at least 4: launching a graph takes time, too

        def step(score: Callable[[Any], Any] = score, repeated: list[Any] = repeated) -> Any:
            for x in repeated:
                out = score(x)
            return out

        try:
            if name not in SELECTIONS:
                differ[name] = picks_that_differ(score(inputs_of_calls[0]), inputs_of_calls[0])
            step()
            steps[name] = as_graph(step) if device == "cuda" else step
        except (RuntimeError, ArithmeticError) as error:  # no memory, or no compiler
            left_out[name] = first_line(error)
    n = len(inputs) * -(-4 // len(inputs))
    us = in_turns(steps, rounds, lambda _, step: microseconds(step, device, n))
    return {**asdict(s), "us": us, "bytes_us": s.key_bytes / rate * 1e6, "differ": differ, "left_out": left_out}


@torch.inference_mode()
def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--floor-tbs", type=float, help="TB/s of the floor; default: measured")
    args = parser.parse_args()
    rate = args.floor_tbs * 1e12 if args.floor_tbs else read_rate(args.device)
    print(f"{machine(args.device)}, floor at {rate / 1e9:.1f} GB/s")
    print("batch  length heads queries keys          |", *(f"{c:>9}" for c in CANDIDATES), end="")
    print(" us |    floor us | tatten/floor inductor/tatten | differ")
    rows = []
    for shape in shapes(args.device):
        r = measure(shape, args.device, rate, args.rounds)
        rows.append(r)
        us, floor = r["us"], r["bytes_us"]
        print(f"{shape.batch:5} {shape.length:7} {shape.heads:5} {shape.q_length:7} {shape.keys:13} |", end=" ")
        print(*(f"{us[c]:9.1f}" if c in us else f"{'-':>9}" for c in CANDIDATES), end="    ")
        ratio = f"{us['inductor'] / us['tatten']:15.2f}" if "inductor" in us else f"{'-':>15}"
        print(f"| {floor:11.1f} | {us['tatten'] / floor:12.2f} {ratio} |", end=" ")
        print("/".join(str(r["differ"].get(c, "-")) for c in ("inductor", "tatten")), flush=True)
        if args.device == "cuda":
            torch.cuda.empty_cache()
    for name in CANDIDATES:
        for reason in dict.fromkeys(r["left_out"][name] for r in rows if name in r["left_out"]):
            print(f"  {name} left out: {reason}")
    if args.json:
        results.write(args.json, args.device, rows, bytes_per_second=rate)


if __name__ == "__main__":
    main()
