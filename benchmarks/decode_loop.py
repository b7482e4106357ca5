"""Milliseconds of a token of `generate` with `decode_loop`, beside `generate` alone, Inductor, and bare replays.

    python benchmarks/decode_loop.py --device cuda                     # 32 layers of Llama-3.1-8B; minutes of compiling
    python benchmarks/decode_loop.py --device cuda --layers 2 --batch 1 --only loop generate_tatten
    python benchmarks/decode_loop.py --device cuda --batch 1 --only loop_assisted --first-call-limit 200
    python benchmarks/decode_loop.py --device cuda --batch 8 --only loop loop_sampled loop_streamed
    python benchmarks/decode_loop.py --device cuda --section start --only loop_untuned loop loop_autotuned
    python benchmarks/decode_loop.py --device cpu                      # a tiny model, to try the code

A time is that of one more token by wall clock: the difference of two calls, one of which generates more. Calls take
turns. Weights are random, but the text repeats itself. `replay` is the time of the captured step alone, replayed
without a loop. `loop_lookup` checks seven drafts of prompt lookup in each step, and `loop_assisted` seven of a draft
model, which has a sixteenth of the layers and the same shapes: `drafts` has the tokens and the milliseconds of their
steps. `first_call_s` is the first call with nothing on disk that was compiled before, and `compile_s` its part in which
code was generated and compiled; tuning is in the rest of it. `loop_*` after `loop` find its kernels on disk. A
candidate whose first call takes longer than `--first-call-limit` is left out. `gpt_fast` is the loop of gpt-fast, which
is left out without the folder `--gpt-fast`; it samples, in CUDA graphs of Inductor, and has the same weights. The floor
is each weight and each used key and value once, at the rate of a plain read. `loop_cublas` is `loop` without
the ops of tatten that compute linear layers of few rows. `loop_tuned` is `loop` with Inductor's option
`coordinate_descent_tuning`, and `loop_uncombined` without `combo_kernels`.

`--section start` measures the seconds until a new process has the first two tokens of one sequence, prefill and
compiling included: of a first process, and of a second one that finds on disk what the first has compiled.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support import gpt_fast, models, results
from support.command_line import arguments, machine
from support.repeating import draft_of, repeats
from support.starts import FIRST, starts
from support.timing import TookTooLong, at_most, clock, in_turns, more_tokens_ms, read_rate
from torch._dynamo.utils import compile_times
from transformers import CompileConfig, PreTrainedModel, StaticCache

from tatten.integrations.transformers import DecodeLoop, cache_kwargs
from tatten.options import decode_options

FEW, MANY = 8, 136  # tokens of the two calls
DRAFTS = 7  # of a step of `DRAFTING`, which therefore generates 8 times as many tokens in as many steps
DRAFTING = "loop_lookup", "loop_assisted"
WARPS = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1}
CANDIDATES = (
    "generate_inductor",
    "generate_tatten",
    "generate_tuned",
    "loop",
    "loop_sampled",
    "loop_streamed",
    "loop_lookup",
    "loop_assisted",
    "loop_untuned",
    "loop_autotuned",
    "loop_cublas",
    "loop_tuned",
    "loop_uncombined",
    "loop_inductor",
    "gpt_fast",
)


class Streamer:
    """A streamer that counts tokens."""

    tokens = 0

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.numel()

    def end(self) -> None:
        pass


def candidate(
    name: str, model: PreTrainedModel, prompt: torch.Tensor, capacity: int, shared: DecodeLoop
) -> tuple[Callable, DecodeLoop | None]:
    """Return a function that generates a number of tokens after the prompt, and its loop."""
    device = prompt.device
    fixed: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    loop = None
    if name.startswith("generate"):
        cache = StaticCache(model.config, max_cache_len=capacity)
        options = {"triton.cudagraphs": True, "decode": True} if name == "generate_tuned" else None
        config = CompileConfig(
            backend="inductor" if name == "generate_inductor" else "tatten",
            mode=None if options else "reduce-overhead",
            options=options,
        )
        config._compile_all_devices = True
        fixed |= {"compile_config": config, **cache_kwargs(cache)}
    else:
        loop = shared if name in ("loop", "loop_sampled", "loop_streamed", *DRAFTING) else DecodeLoop()
        fixed |= {"custom_generate": loop, "cache_implementation": "static", "max_cache_len": capacity}
        tuned = decode_options(device, tunes=True, combines=False)
        compiling: dict[str, tuple[str, dict[str, Any]]] = {
            "loop_untuned": ("tatten", {"decode": False}),
            "loop_autotuned": ("tatten", {"max_autotune": True}),
            "loop_tuned": ("tatten", {"coordinate_descent_tuning": True}),
            "loop_uncombined": ("tatten", {"combo_kernels": False}),
            "loop_cublas": ("tatten", {"decode": False, **tuned}),
            "loop_inductor": ("inductor", tuned),
        }
        if name in compiling:
            backend, options = compiling[name]
            fixed["compile_config"] = CompileConfig(backend=backend, mode=None, options=options)
        if name == "loop_sampled":
            fixed |= WARPS
        if name == "loop_lookup":
            fixed["prompt_lookup_num_tokens"] = DRAFTS
        if name == "loop_assisted":
            fixed |= {"assistant_model": draft_of(model), "num_assistant_tokens": DRAFTS}

    def generate(tokens: int) -> torch.Tensor:
        if "custom_generate" not in fixed:
            cache.reset()
        more = {"streamer": Streamer()} if name == "loop_streamed" else {}
        result = model.generate(prompt, max_new_tokens=tokens, **fixed, **more)
        assert loop is None or loop.reason is None, loop.reason
        return result

    return generate, loop


def replay_ms(loop: DecodeLoop, model: PreTrainedModel) -> float | None:
    """Return the milliseconds of a replay of the first step that the loop captured, the greedy one."""
    step = next(x for x in loop._steps[model].values() if x.state.noise is None and x.state.limit is None)
    graph, state = step.runner._graph, step.state
    if graph is None:
        return None
    moving = [state.length, state.position, *(layer.cumulative_length for layer in step.cache.layers)]
    before = [x.clone() for x in moving]

    def restart() -> None:
        for x, value in zip(moving, before, strict=True):
            x.copy_(value)

    times = []
    for _ in range(5):
        restart()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(32):
            graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 32 * 1e3)
    return sorted(times)[2]


def compile_seconds() -> float:
    """Return the seconds that Dynamo and the backends have spent on all graphs of this process."""
    seconds = dict(zip(*compile_times("csv", aggregate=True), strict=True))
    return float(seconds.get("_compile.compile_inner", 0))


@dataclass
class Prepared:
    """A candidate after its first call, with the seconds of that call and the part of them spent compiling."""

    call: Callable[[int], object]
    loop: DecodeLoop | None
    first_call_s: float
    compile_s: float


def prepared(
    name: str, model: PreTrainedModel, prompt: torch.Tensor, shared: DecodeLoop, args: argparse.Namespace
) -> Prepared:
    """Run a candidate for the first time. Raise TookTooLong at the limit of that call."""
    model._last_compile_config = None  # `generate` keeps on the model what it compiled, and how
    if name == "gpt_fast":
        call, loop = gpt_fast.decoder(args.gpt_fast, model, *prompt.shape, args.capacity), None
    else:
        call, loop = candidate(name, model, prompt, args.capacity, shared)
    before = compile_seconds()
    with at_most(args.first_call_limit):
        first = clock(lambda: call(FEW), args.device)
    compiled = getattr(model, "_compiled_call", None), model._last_compile_config

    def again(tokens: int) -> object:
        model._compiled_call, model._last_compile_config = compiled
        return call(tokens)

    return Prepared(again, loop, first, compile_seconds() - before)


def reason_to_leave_out(name: str, model: PreTrainedModel, batch: int, args: argparse.Namespace) -> str | None:
    if name == "gpt_fast":
        return gpt_fast.reason_against(args.gpt_fast, model)
    return "drafts are those of one sequence" if batch > 1 and name in DRAFTING else None


def measure(model: PreTrainedModel, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    start = torch.randint(model.config.vocab_size // 32, (batch, 1), device=args.device) * 32
    prompt = start + torch.arange(args.used, device=args.device) % 32
    run: dict[str, Prepared] = {}
    left_out: dict[str, str] = {}
    shared = DecodeLoop()  # of the candidates that compile alike
    torch._dynamo.reset()
    for name in args.only:
        reason = reason_to_leave_out(name, model, batch, args)
        try:
            if reason is None:
                run[name] = x = prepared(name, model, prompt, shared, args)
                print(f"  {name}: first call {x.first_call_s:.1f} s, {x.compile_s:.1f} s of it compiling", flush=True)
        except TookTooLong as error:
            reason = f"its first call {error}"
        if reason is not None:
            left_out[name] = reason
            print(f"  {name}: left out, {reason}", flush=True)
    calls = {name: x.call for name, x in run.items()}
    many = {name: FEW + (MANY - FEW) * (DRAFTS + 1 if name in DRAFTING else 1) for name in calls}
    for name, call in calls.items():
        call(many[name])
    ms = in_turns(calls, args.rounds, lambda name, call: more_tokens_ms(call, FEW, many[name], args.device))
    row: dict[str, Any] = {"token_ms": ms, "left_out": left_out}
    row |= {field: {name: getattr(x, field) for name, x in run.items()} for field in ("first_call_s", "compile_s")}
    row["drafts"] = {}
    for name in DRAFTING:
        if name in run and (loop := run[name].loop) is not None:
            steps = []
            for tokens in (FEW, many[name]):
                calls[name](tokens)
                steps.append(loop.launched_steps - (loop.ahead if args.device == "cuda" else 0))
            a_step = (many[name] - FEW) / (steps[1] - steps[0])
            row["drafts"][name] = {"tokens_per_step": a_step, "step_ms": ms[name] * a_step}
    if "gpt_fast" in run:
        row["gpt_fast_model"] = gpt_fast.version(args.gpt_fast)
    if "loop" in run and args.device == "cuda":
        row["replay_ms"] = replay_ms(shared, model)
    return row


def first_tokens(model: PreTrainedModel, args: argparse.Namespace) -> None:
    """Print the seconds of a candidate's first call, of one step, in a process that `starts` started."""
    prompt = torch.arange(args.used, device=args.device)[None] % 32
    call, _ = candidate(args.only[0], model, prompt, args.capacity, DecodeLoop())
    print(f"{FIRST}{clock(lambda: call(2), args.device)}", flush=True)


def parse() -> argparse.Namespace:
    parser = arguments(__doc__)
    sections = "token", "start", "first_tokens"
    parser.add_argument("--section", default="token", choices=sections, help="start runs first_tokens in processes")
    parser.add_argument("--model", default="llama", choices=list(models.SHAPES))
    parser.add_argument("--layers", type=int, help="default: all; on a CPU 1")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--capacity", type=int)
    parser.add_argument("--used", type=int)
    parser.add_argument("--only", nargs="*", default=list(CANDIDATES), choices=CANDIDATES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gpt-fast", type=Path, help="folder with gpt-fast's model.py and generate.py")
    parser.add_argument("--first-call-limit", type=float, default=240.0, help="seconds; default: 240")
    args = parser.parse_args()
    small = args.device == "cpu"
    args.layers = args.layers or (1 if small else models.SHAPES[args.model]["num_hidden_layers"])
    args.capacity, args.used = args.capacity or (2048 if small else 8192), args.used or (16 if small else 1000)
    return args


def record_starts(args: argparse.Namespace) -> None:
    rows = []
    for row in starts(Path(__file__), args):
        rows.append(row)
        if args.json:
            results.write(args.json, args.device, rows)


def build(args: argparse.Namespace) -> PreTrainedModel:
    tiny, dtype = args.device == "cpu", torch.float32 if args.device == "cpu" else torch.bfloat16
    return models.build(models.shape(args.model, tiny, num_hidden_layers=args.layers), args.device, dtype)


def main() -> None:
    args = parse()
    if args.section == "start":
        record_starts(args)
        return
    if args.section == "first_tokens":
        with torch.no_grad():
            first_tokens(build(args), args)
        return
    rate = read_rate(args.device)
    print(f"{machine(args.device)}, {rate / 1e9:.1f} GB/s; {args.capacity} slots, {args.used} used", flush=True)
    rows = []
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR", folder)
        model = build(args)
        repeats(model)
        for batch in args.batch:
            floor = models.floor_bytes(model, batch, args.used + (FEW + MANY) // 2) / rate * 1e3
            row = {"model": args.model, "layers": args.layers, "batch": batch, "capacity": args.capacity}
            row |= {"used": args.used, **measure(model, batch, args), "floor_ms": floor}
            rows.append(row)
            print(f"{args.model}, {args.layers} layers, batch {batch}: floor {floor:.3f} ms")
            for name, ms in {**row["token_ms"], "replay": row.get("replay_ms")}.items():
                if ms is not None:
                    print(f"  {name:20} {ms:8.3f} ms  {ms / floor:6.3f} x the floor", flush=True)
            for name, step in row["drafts"].items():
                print(f"  {name}: {step['tokens_per_step']:.2f} tokens in {step['step_ms']:.3f} ms")
            if args.json:
                results.write(args.json, args.device, rows, bytes_per_second=rate)


if __name__ == "__main__":
    main()
