"""Attention that models write out: a layer's in several forms, and steps of gpt-oss and Gemma 2, beside Inductor.

    python benchmarks/written_out.py --device cuda --section layer    # or step; default: both
    python benchmarks/written_out.py --section layer    # on a CPU, where tatten leaves it to Inductor: to try the code

    layer    attention of a layer with 32 heads for 8 kv heads of width 128, in four forms, over a static cache that is
             full or an eighth full: `torch.compile` with tatten and with Inductor of four layers that share
             a mask, as those of a model do, and a fourth of their time
    step     one compiled step with a static cache of 4 layers of gpt-oss-20b's and Gemma-2-9b's shapes; on a CPU of 2
             layers with next to no experts, MLP or vocabulary

On a GPU both are captured CUDA graphs. They are checked against float64 (layers) or float32 (steps) in eager mode, they
take turns, and medians are shown. The floor is each key and value in use, and each weight, once at the best rate at
which PyTorch reads; it is measured in the same run.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

import torch
from support import results, written_out_forms, written_out_models
from support.command_line import arguments, machine
from support.errors import relative_error
from support.timing import as_graph, in_turns, microseconds, read_rate
from torch import Tensor


def layer(args: argparse.Namespace) -> list[dict]:
    print("form       dtype    batch  keys  used | inductor    tatten     floor us | speedup | errors of both")
    rows = []
    for case in written_out_forms.cases(args.device, args.forms):
        r = measure_layer(case, args)
        rows.append(r)
        print(f"{case.form:10} {case.dtype:8} {case.batch:5} {case.keys:5} {case.used:5} |", end=" ")
        print(f"{r['inductor_us']:8.1f} {r['tatten_us']:9.1f} {r['floor_us']:12.1f} | {r['faster']:6.2f}x |", end=" ")
        print(f"{r['inductor_error']:.1e} {r['tatten_error']:.1e}", flush=True)
    slowest = min(r["faster"] for r in rows)
    print(f"  the slowest row: {slowest:.2f}, at least 0.98 is asked for: {'yes' if slowest >= 0.98 else 'NO'}")
    return rows


def measure_layer(case: written_out_forms.Case, args: argparse.Namespace) -> dict:
    inputs = written_out_forms.inputs(case, args.device)
    fn = written_out_forms.layers(written_out_forms.FORMS[case.form])
    exact = fn(*(x.double() for x in inputs))
    steps, errors = {}, {}
    for backend in ("tatten", "inductor"):
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend=backend, dynamic=False)

        def step(compiled=compiled) -> Tensor:
            return compiled(*inputs)

        for _ in range(3):
            out = step()
        errors[backend] = relative_error(out.double(), exact)
        steps[backend] = step if args.device == "cpu" else as_graph(step)
    calls = written_out_forms.LAYERS
    took = in_turns(steps, args.rounds, lambda _, f: microseconds(f, args.device, calls, args.repeats))
    return {
        "section": "layer",
        **asdict(case),
        "floor_us": case.bytes() / args.rate * 1e6,
        "faster": took["inductor"] / took["tatten"],
        **{f"{name}_us": x for name, x in took.items()},
        **{f"{name}_error": x for name, x in errors.items()},
    }


def step(args: argparse.Namespace) -> list[dict]:
    print("model   batch  slots  used | inductor    tatten     floor ms | speedup | logit errors of both")
    rows = []
    for row in written_out_models.rows(args.device):
        r = written_out_models.step(row, args.device, args.rate, args.rounds)
        rows.append(r)
        print(f"{row.model:8} {row.batch:4} {row.slots:6} {row.used:5} |", end=" ")
        print(f"{r['inductor_ms']:8.2f} {r['tatten_ms']:9.2f} {r['floor_ms']:12.3f} | {r['faster']:6.2f}x |", end=" ")
        print(f"{r['inductor_error']:.1e} {r['tatten_error']:.1e}", end=" ")
        print(f"at least {row.at_least} is asked for: {'yes' if r['faster'] >= row.at_least else 'NO'}", flush=True)
        if args.device == "cuda":
            torch.cuda.empty_cache()
    return rows


SECTIONS = {"layer": layer, "step": step}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--section", nargs="*", default=list(SECTIONS), choices=list(SECTIONS))
    forms = list(written_out_forms.FORMS)
    parser.add_argument("--forms", nargs="*", default=forms, choices=forms, help="of layers")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=10, help="calls in a row that are timed together")
    args = parser.parse_args()
    args.rate = read_rate(args.device)
    print(f"{machine(args.device)}, reads {args.rate / 1e9:.1f} GB/s")
    rows: list[dict] = []
    with torch.no_grad():
        for section in args.section:
            print(f"\n{section}")
            rows += SECTIONS[section](args)
    if args.json:
        results.write(args.json, args.device, rows, bytes_per_second=args.rate)


if __name__ == "__main__":
    main()
