"""Tokens of `generate` by wall clock, as a user waits for them: Inductor and tatten, in each mode of torch.compile.

    python benchmarks/generate.py --device cuda                       # 32 layers of Llama-3.1-8B; minutes of compiling
    python benchmarks/generate.py --device cuda --layers 4 --batch 1 --modes default cpp_wrapper
    python benchmarks/generate.py --device cuda --models gpt_oss deepseek_v3 --layers 2 8 --batch 1 8 --paired
    python benchmarks/generate.py --device cpu                        # a tiny model, to try the code

Models have the shapes of Llama-3.1-8B, Gemma-2-9b, gpt-oss-20b with all of its experts, and DeepSeek-V3 with small
dense MLPs, and as many layers as are asked for. Each number of layers is measured with each batch, or, with `--paired`,
the first with the first and so on. A static cache has `--capacity` slots, of which a prompt fills `--used`.

A time is that of one more token: the difference of two calls, one of which generates more. Both wait for the GPU at
every token, as `generate` does to see whether it is done. Calls take turns. `compile` is the time of the first call
less that of a later one, with empty caches on disk. The floor is each weight and each used key and value
once, at the rate of a plain read; of experts, as many as are picked.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby, product
from pathlib import Path
from unittest.mock import patch

import torch
from support import models, results
from support.command_line import arguments, machine
from support.timing import clock, in_turns, more_tokens_ms, read_rate
from torch._inductor.utils import clear_caches
from transformers import CompileConfig, PreTrainedModel, StaticCache

from tatten.integrations.transformers import cache_kwargs

BACKENDS = "inductor", "tatten"
MODES = {
    "default": {"mode": "default"},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "cpp_wrapper": {"mode": None, "options": {"cpp_wrapper": True}},
}
FEW, MANY = 4, 36  # tokens of the two calls


def generator(
    model: PreTrainedModel, prompt: torch.Tensor, capacity: int, backend: str, mode: str
) -> Callable[[int], torch.Tensor]:
    """Return a function that generates a number of tokens after the prompt, and returns them."""
    config = CompileConfig(backend=backend, **MODES[mode])
    config._compile_all_devices = True
    cache = StaticCache(model.config, max_cache_len=capacity)

    def generate(tokens: int) -> torch.Tensor:
        cache.reset()
        options = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        return model.generate(prompt, **cache_kwargs(cache), compile_config=config, **options)[:, prompt.shape[1] :]

    return generate


@contextmanager
def caches_in(folder: Path) -> Iterator[None]:
    """Keep Dynamo's and Inductor's caches in the folder within this block."""
    with patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(folder), TRITON_CACHE_DIR=str(folder / "triton")):
        yield


def first_call(
    model: PreTrainedModel, prompt: torch.Tensor, backend: str, mode: str, args: argparse.Namespace, folder: Path
) -> tuple[Callable[[int], torch.Tensor], float]:
    """Return a function that generates a number of tokens, caching in the folder, and the seconds of its first call."""
    torch._dynamo.reset()
    clear_caches()  # those of Inductor in memory
    model._last_compile_config = None  # `generate` keeps on the model what it compiled, and how
    generate = generator(model, prompt, args.capacity, backend, mode)
    with caches_in(folder):
        seconds = clock(lambda: generate(FEW), args.device)
    compiled = model._compiled_call, model._last_compile_config

    def again(tokens: int) -> torch.Tensor:
        model._compiled_call, model._last_compile_config = compiled
        with caches_in(folder):
            return generate(tokens)

    return again, seconds


def measure(model: PreTrainedModel, batch: int, mode: str, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return milliseconds of a token and seconds of compilation, by backend."""
    device = args.device
    prompt = torch.randint(1, model.config.vocab_size, (batch, args.used), device=device)

    with tempfile.TemporaryDirectory() as folder:
        calls, first = {}, {}
        for backend in BACKENDS:
            calls[backend], first[backend] = first_call(model, prompt, backend, mode, args, Path(folder) / backend)
        for call in calls.values():
            call(MANY)  # before the second backend, Dynamo has dropped what the first one had compiled
        took = in_turns(calls, args.rounds, lambda _, call: more_tokens_ms(call, FEW, MANY, device))
        again_s = {name: clock(lambda call=call: call(FEW), device) for name, call in calls.items()}
    return {"token_ms": took, "compile_s": {name: first[name] - again_s[name] for name in BACKENDS}}


def rows(args: argparse.Namespace, rate: float) -> Iterator[dict[str, object]]:
    """Yield the row of each model, number of layers, batch and mode, as soon as it is measured."""
    tiny, dtype = args.device == "cpu", torch.float32 if args.device == "cpu" else torch.bfloat16
    once = models.build(models.shape("llama", tiny=True), args.device, dtype)
    measure(once, 1, "default", args)  # loads what the first row would load for all
    pick = zip if args.paired else product
    for name in args.models:
        for layers, cells in groupby(pick(args.layers, args.batch), lambda cell: cell[0]):
            model = models.build(models.shape(name, tiny, num_hidden_layers=layers), args.device, dtype)
            for (_, batch), mode in product(cells, args.modes):
                r = measure(model, batch, mode, args)
                ms, row = r["token_ms"], {"model": name, "batch": batch, "mode": mode, "layers": layers}
                floor = models.floor_bytes(model, batch, args.used) / rate * 1e3
                row |= {"capacity": args.capacity, "used": args.used, **r, "floor_ms": floor}
                yield row | {"ratio": ms["tatten"] / ms["inductor"]}
            del model
            gc.collect()
            torch.cuda.empty_cache()


def parse() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=["llama"], choices=list(models.SHAPES))
    parser.add_argument("--layers", type=int, nargs="*", help="default: 32; on a CPU 1")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8])
    parser.add_argument(
        "--paired", action="store_true", help="pair --layers with --batch: the first with the first, and so on"
    )
    parser.add_argument("--capacity", type=int)
    parser.add_argument("--used", type=int)
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    small = args.device == "cpu"
    args.layers = args.layers or [1 if small else 32]
    args.capacity, args.used = args.capacity or (128 if small else 8192), args.used or (16 if small else 1000)
    if args.paired and len(args.layers) != len(args.batch):
        parser.error(f"--paired needs as many --layers as --batch, got {args.layers} and {args.batch}")
    return args


def main() -> None:
    args = parse()
    rate = read_rate(args.device)
    print(f"{machine(args.device)}, {rate / 1e9:.1f} GB/s; {args.capacity} slots, {args.used} used")
    print(
        "model       layers batch mode            | inductor   tatten    floor ms | tatten/inductor | compile s", end=""
    )
    print(" inductor tatten")
    rows_so_far = []
    with torch.no_grad():
        for r in rows(args, rate):
            rows_so_far.append(r)
            ms, s = r["token_ms"], r["compile_s"]
            print(
                f"{r['model']:11} {r['layers']:6} {r['batch']:5} {r['mode']:15} | {ms['inductor']:8.2f} "
                f"{ms['tatten']:8.2f} {r['floor_ms']:8.2f}    | {r['ratio']:15.3f} | {s['inductor']:18.1f} "
                f"{s['tatten']:6.1f}",
                flush=True,
            )
            if args.json:
                results.write(args.json, args.device, rows_so_far, bytes_per_second=rate)


if __name__ == "__main__":
    main()
