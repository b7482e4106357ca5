"""Tokens per second of transformers' `generate_batch` on tatten's pages, beside FlashAttention-3 and SDPA.

    python benchmarks/generate_batch.py --device cuda --settings a               # three processes, minutes each
    python benchmarks/generate_batch.py --device cuda --settings b --only tatten fork --limit 200
    python benchmarks/generate_batch.py --device cuda --settings gemma3 gpt_oss --layers 12
    python benchmarks/generate_batch.py --section host                            # the host's part of a step, on a CPU
    python benchmarks/generate_batch.py --device cpu --only tatten sdpa           # tiny models, to try the code

Models have random weights and the shapes of `benchmarks/support/models.py`, or fewer `--layers`:

    a        Llama-3.1-8B: 64 prompts of 512 to 4096 tokens, 128 new tokens of each, greedy
    b        Llama-3.1-8B: 4 prompts of 4096 tokens, 16 samples of each of 256 tokens
    gemma3   Gemma-3-12b, with the prompts of a
    gpt_oss  gpt-oss-20b, with the prompts of a

`fa3` is FlashAttention-3 of vLLM's wheel (benchmarks/support/flash_pages.py), and `sdpa` what transformers does without
FlashAttention: gpt-oss has no SDPA, and its `sdpa` is `paged|eager`, with 256 tokens in a batch. `fork` draws the
samples from a fork of a `SharedPrefixCache` in `generate`, compiled by tatten. `tatten_compiled` and `fa3_compiled`
have decode steps that transformers compiles with Inductor (`default_compile_level=1`). Those of `tatten_decode` are
compiled by `backend="tatten"` with the option `decode`, but without tuning. Each candidate runs in a process of its
own, which is killed after `--limit` seconds.

The first call makes the manager, captures graphs and compiles: `first_call_s`. Then a call with other prompts of the
same lengths takes `seconds` until its last token, the median of `--rounds`. `step_ms` is the time of a decode step of
all sequences, and `host_ms` the host's part of any step, both medians. `alike` says how many tokens of a greedy text
are those of the first candidate, on average: rounding in 16 bits parts them at some point.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from support import models, peers, results
from support.batch_settings import HOST, SETTINGS, Setting, check_version, setting
from support.command_line import arguments, first_line, machine
from transformers import PreTrainedModel

NOT_BY_DEFAULT = "tatten_decode"  # compiles for minutes
CANDIDATES = "tatten", "tatten_compiled", NOT_BY_DEFAULT, "fa3", "fa3_compiled", "sdpa", "fork"
EAGER_TOKENS = 256  # of a batch under `paged|eager`, which stores a score for each of its tokens and each key
COMPARED = 32  # tokens of each greedy text
Row = dict[str, Any]


def reason_to_leave_out(name: str, what: Setting, device: str) -> str | None:
    if name == "fork" and what.samples == 1:
        return "nothing is shared"
    if name.startswith("fa3") and device == "cuda" and peers.fa3() is None:
        return "no FlashAttention-3: it is for Hopper, and TATTEN_PEERS names the folder with vLLM's _vllm_fa3_C"
    return None


def build(what: Setting, args: argparse.Namespace) -> PreTrainedModel:
    tiny, dtype = args.device == "cpu", torch.float32 if args.device == "cpu" else torch.bfloat16
    changes = {"num_hidden_layers": args.layers} if args.layers else {}
    if what.model == "llama" and not tiny:
        changes["vocab_size"] = 128256
    return models.build(models.shape(what.model, tiny, **changes), args.device, dtype)


def attend_with(name: str, model: PreTrainedModel) -> None:
    """Set a model's attention to that of a candidate."""
    if name == "tatten":
        import tatten.integrations.transformers  # noqa: F401 registers it

        model.set_attn_implementation("tatten")
    elif name == "fa3":
        from support import flash_pages

        flash_pages.use(model)
    else:
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "paged|eager")


def measure(name: str, what: Setting, args: argparse.Namespace) -> Row:
    """Return the figures of one candidate, measured in this process."""
    from support import batches, forked

    model = build(what, args)
    seeds, host_ms = range(1, args.rounds + 1), None
    start = time.perf_counter()
    if name == "fork":
        fork = forked.Forked(model, what)
        fork.draw(0)
        first = time.perf_counter() - start
        drawn, pool = [fork.draw(seed) for seed in seeds], fork.pool_bytes
    else:
        attention, _, compiling = name.partition("_")
        attend_with(attention, model)
        eager = model.config._attn_implementation == "paged|eager" and args.device == "cuda"
        tokens = args.batch_tokens or (EAGER_TOKENS if eager else None)
        manager = batches.make_manager(model, what, tokens, compiling)
        batches.draw(model, what, 0)
        first, pool = time.perf_counter() - start, batches.pool_bytes(manager)
        with batches.host_times(manager) as host:
            drawn = [batches.draw(model, what, seed) for seed in seeds]
        host_ms = host.ms("prepare") + host.ms("update")
        model.destroy_cached_continuous_batching_manager()
    seconds = statistics.median(x.seconds for x in drawn)
    steps = [x.step_ms for x in drawn if x.step_ms is not None]
    row: Row = {"candidate": name, "seconds": seconds, "tokens_per_second": what.new_tokens / seconds}
    row |= {"step_ms": statistics.median(steps) if steps else None, "first_call_s": first}
    row |= {"host_ms": host_ms, "weight_bytes": sum(p.nbytes for p in model.parameters()), "pool_bytes": pool}
    row["peak_bytes"] = torch.cuda.max_memory_allocated() if args.device == "cuda" else None
    row["layers"] = model.config.num_hidden_layers
    row["texts"] = [tokens[:COMPARED] for tokens in drawn[0].tokens] if what.samples == 1 else None
    return row


def measure_host(name: str, args: argparse.Namespace) -> Row:
    """Return the host's milliseconds for each step of 64 sequences of 4096 tokens, by part; no forward is computed."""
    from support import batches

    what = HOST[args.device]
    model = build(what, args)
    attend_with(name, model)
    with batches.host_times(batches.without_a_forward(model, what, args.batch_tokens)) as host:
        batches.draw(model, what, 0)
    model.destroy_cached_continuous_batching_manager()
    decoding = {part: times[-what.new // 2 :] for part, times in host.parts.items()}
    ms = {part: statistics.median(times) * 1e3 for part, times in decoding.items()}
    return {"candidate": name, "host_ms": sum(ms.values()), "parts_ms": ms}


def in_a_process(name: str, which: str, args: argparse.Namespace) -> Row | str:
    """Return the row of a candidate that is measured in a process of its own, or the reason why there is none."""
    options = ["--device", args.device, "--settings", which, "--only", name, "--rounds", str(args.rounds)]
    for option in ("layers", "prompts", "new_tokens", "batch_tokens"):
        if (value := getattr(args, option)) is not None:
            options += ["--" + option.replace("_", "-"), str(value)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        command = [sys.executable, __file__, "--section", args.section, *options, "--row", str(path)]
        try:
            status = subprocess.run(command, timeout=args.limit).returncode
        except subprocess.TimeoutExpired:
            return f"took longer than {args.limit:g} s"
        if path.is_file():
            row_or_reason: Row | str = json.loads(path.read_text())
            return row_or_reason
        return f"its process ended with exit status {status}"


def write_row(args: argparse.Namespace) -> None:
    """Measure one candidate, in a process that `in_a_process` started."""
    (which,), (name,) = args.settings, args.only
    try:
        if args.section == "host":
            row: Row | str = measure_host(name, args)
        else:
            row = measure(name, setting(args.device, which, args.prompts, args.new_tokens), args)
    except Exception as error:
        args.row.write_text(json.dumps(first_line(error)))
        raise
    args.row.write_text(json.dumps(row))


def alike(texts: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """Return the mean number of leading tokens that are the same."""

    def same(a: Sequence[int], b: Sequence[int]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))

    return statistics.mean(same(a, b) for a, b in zip(texts, others, strict=True))


def show(which: str, row: Row, first: Row) -> None:
    def cell(value: float | None, width: int, digits: int = 1) -> str:
        return " " * (width - 1) + "-" if value is None else f"{value:{width}.{digits}f}"

    gib = "".join(cell(row[x] and row[x] / 2**30, 8, 2) for x in ("weight_bytes", "pool_bytes", "peak_bytes"))
    print(
        f"{which:8} {row['candidate']:8} | {row['tokens_per_second']:9.1f} "
        f"{row['tokens_per_second'] / first['tokens_per_second']:6.2f} {row['seconds']:8.2f} "
        f"{cell(row['step_ms'], 8, 2)} {cell(row['host_ms'], 8, 2)} {row['first_call_s']:8.1f} {gib} "
        f"{cell(row['alike'], 6)}",
        flush=True,
    )


def throughput(args: argparse.Namespace) -> None:
    print(f"{machine(args.device)}; limit of a candidate {args.limit:g} s")
    print("setting  candidate|  tokens/s  ratio  seconds  step ms  host ms  first s GiB: weights pool peak  alike")
    rows: list[Row] = []
    for which in args.settings:
        what = setting(args.device, which, args.prompts, args.new_tokens)
        measured: list[Row] = []
        for name in args.only:
            row = reason_to_leave_out(name, what, args.device) or in_a_process(name, which, args)
            if isinstance(row, str):
                rows.append({"setting": which, "candidate": name, "left_out": row})
                print(f"{which:8} {name:8} | left out: {row}", flush=True)
            else:
                texts = row["texts"]
                row["alike"] = alike(texts, (measured or [row])[0]["texts"]) if texts else None
                measured.append(row)
                show(which, row, measured[0])
                rows.append({"setting": which, **asdict(what), **{k: v for k, v in row.items() if k != "texts"}})
            if args.json:
                results.write(args.json, args.device, rows)


def host(args: argparse.Namespace) -> None:
    what = HOST[args.device]
    print(f"{machine(args.device)}; {what.prompts} sequences of {what.longest} tokens, without the model")
    print("candidate | host ms of a step: prepare, launch, update")
    rows: list[Row] = []
    for name in args.only:
        row = in_a_process(name, "a", args)
        if isinstance(row, str):
            row = {"candidate": name, "left_out": row}
            print(f"{name:9} | left out: {row['left_out']}", flush=True)
        else:
            print(f"{name:9} | {row['host_ms']:8.2f}: {', '.join(f'{x:.2f}' for x in row['parts_ms'].values())}")
        rows.append(row)
        if args.json:
            results.write(args.json, args.device, rows)


def parse() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--section", default="throughput", choices=["throughput", "host"])
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS["cuda"]), choices=list(SETTINGS["cuda"]))
    parser.add_argument(
        "--only", nargs="*", choices=CANDIDATES, help=f"default: all but {NOT_BY_DEFAULT}; of the host tatten and sdpa"
    )
    parser.add_argument("--layers", type=int, help="default: those of the published model; on a CPU 2")
    parser.add_argument("--prompts", type=int, help="default: those of the setting")
    parser.add_argument("--new-tokens", type=int, help="default: those of the setting")
    parser.add_argument("--batch-tokens", type=int, help="most tokens of a batch; default: those of transformers")
    parser.add_argument("--rounds", type=int, default=2, help="calls after the first one")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds of a candidate's process; default: 180")
    parser.add_argument("--row", type=Path, help="measure one candidate in this process, and write its row here")
    args = parser.parse_args()
    default = ["tatten", "sdpa"] if args.section == "host" else [x for x in CANDIDATES if x != NOT_BY_DEFAULT]
    args.only = args.only or default
    return args


def main() -> None:
    args = parse()
    check_version()
    if args.row:
        write_row(args)
    elif args.section == "host":
        host(args)
    else:
        throughput(args)


if __name__ == "__main__":
    main()
