"""Record the figures of docs/benchmarks/: each benchmark in turn, each with a time limit, into one folder of JSON.

    python benchmarks/record.py one                   # all that one GPU measures, in at most 65 minutes
    python benchmarks/record.py two                   # what two GPUs measure, in at most 25 minutes
    python benchmarks/record.py eight                 # the merge on the eight GPUs of a node, in at most 2 minutes
    python benchmarks/record.py h100                  # what is said of an H100, in at most 53 minutes
    python benchmarks/record.py batches               # generate_batch on an H100, in at most 48 minutes
    python benchmarks/record.py cpu                   # what is said of a CPU, in at most 89 minutes
    python benchmarks/record.py one --steps lean_paper decode_grid --out folder
    python benchmarks/record.py two --quick           # the same on a CPU with tiny shapes, to try the plumbing

A step that fails, is killed at its limit, or no longer fits leaves the other steps' figures and its own older ones.
The steps that matter most come first. `make plots` then draws the figures, and `make bench-verify RUN=folder` says
which claims they do not support.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Step:
    """A command whose figures go to `<name>.json`."""

    name: str
    command: str
    minutes: float
    quick: str | None = None  # the command on a CPU; None where only a GPU can run it
    ranks: int = 1


def pages_steps(suffix: str = "") -> list[Step]:
    """Return the steps about pages, which are recorded on an H100 and, with a suffix, on an H200."""
    shared = "shared_pages.py --device cuda --section shared finding --rounds 5"
    return [
        Step(f"paged{suffix}", "paged.py --device cuda --rounds 5", 2, "paged.py --section nine --rounds 1"),
        Step(f"shared_pages{suffix}", shared, 2.5, "shared_pages.py --section finding --rounds 1"),
        Step(f"mixed{suffix}", "mixed.py --device cuda --rounds 5", 1, "mixed.py --rounds 1"),
    ]


STEPS = {
    "one": [
        Step("decode_nine", "decode.py --device cuda --section nine", 1.5, "decode.py --section nine --rounds 1"),
        Step("decode_ragged", "decode.py --device cuda --section ragged", 1.5, "decode.py --section ragged --rounds 1"),
        Step("static_cache", "static_cache.py --device cuda", 3, "static_cache.py --rows 9 --repeats 1"),
        Step(
            "generate",
            "generate.py --device cuda --layers 32 --batch 1 --modes default reduce-overhead",
            5,
            "generate.py --batch 1 --modes default --rounds 1",
        ),
        Step(
            "generate_cpp_wrapper",
            "generate.py --device cuda --layers 32 --batch 1 --modes cpp_wrapper --rounds 2",
            5.5,
            "generate.py --batch 1 --modes default --rounds 1",
        ),
        Step(
            "generate_batch8",
            "generate.py --device cuda --layers 32 --batch 8 --modes default cpp_wrapper --rounds 3",
            7,
            "generate.py --batch 8 --modes default --rounds 1",
        ),
        Step(
            "generate_architectures",
            "generate.py --device cuda --models llama gemma2 gpt_oss deepseek_v3 --layers 2 8 --batch 1 8 --paired "
            "--modes default reduce-overhead --rounds 2",
            9.5,
            "generate.py --models llama gemma2 gpt_oss deepseek_v3 --batch 2 --modes default --rounds 1",
        ),
        Step(
            "generate_two_layers",
            "generate.py --device cuda --models llama --layers 2 --batch 1 --modes reduce-overhead --rounds 8",
            1,
            "generate.py --models llama --layers 1 --batch 1 --modes default --rounds 1",
        ),
        Step("shared_prefix", "shared_prefix.py --device cuda", 4, "shared_prefix.py --rows 16 17 --rounds 1"),
        Step("float8", "float8.py --device cuda", 2),
        Step("quantised", "quantised.py --device cuda --layers 16 --rounds 2", 6, "quantised.py --rounds 1"),
        Step("overhead", "overhead.py --device cuda", 1),
        *pages_steps("_h200"),
        Step(
            "paged_padded_h200",
            "paged.py --device cuda --section padded --rounds 5",
            1,
            "paged.py --section padded --rounds 1",
        ),
        Step(
            "shared_ragged_h200",
            "shared_pages.py --device cuda --section ragged --rounds 5",
            1,
            "shared_pages.py --section ragged --rounds 1",
        ),
        Step(
            "decode_loop_h200",
            "decode_loop.py --device cuda --batch 1 --only loop loop_sampled loop_lookup --first-call-limit 150",
            5,
            "decode_loop.py --batch 1 --only loop --rounds 1",
        ),
        Step(
            "one_row_linear_h200",
            "skinny_linear.py --device cuda --rows 1 --model Llama-3.1-8B Llama-3.2-1B Qwen3-0.6B Qwen2.5-0.5B "
            "--rounds 3",
            3,
        ),
        Step(
            "decode_loop_600m_h200",
            "decode_loop.py --device cuda --model qwen3_600m --batch 1 --only loop --first-call-limit 150",
            1,
            "decode_loop.py --model qwen3_600m --batch 1 --only loop --rounds 1",
        ),
        Step("fused_linear_h200", "fused_linear.py --device cuda --rounds 3", 3),
        Step("one_row_tiles", "one_row_tiles.py", 2),
        Step(
            "few_rows_linear_h200",
            "skinny_linear.py --device cuda --rows 2 8 64 --model Llama-3.1-8B Llama-3.2-1B Qwen3-0.6B --rounds 3",
            2,
        ),
        Step("gathers_cuda", "gathers.py --device cuda", 2, "gathers.py --rounds 1"),
        Step(
            "shared_chunks",
            "shared_pages.py --device cuda --section chunk",
            1.5,
            "shared_pages.py --section chunk --rounds 1",
        ),
        Step("aoti_cuda", "aoti.py --device cuda --rows 0", 4, "aoti.py --rows 1 --repeats 1"),
        Step(
            "decode_invariant",
            "decode.py --device cuda --section invariant",
            1,
            "decode.py --section invariant --rounds 1",
        ),
        Step("decode_static", "decode.py --device cuda --section static", 1.5, "decode.py --section static --rounds 1"),
        Step(
            "best_of_n",
            "best_of_n.py --device cuda --variants with",
            3,
            "best_of_n.py --n 1 2 --layers 1 --context 64 --repeats 1 --variants with",
        ),
        Step(
            "rollouts",
            "rollouts.py --device cuda",
            6,
            "rollouts.py --prompts 2 --prompt-len 20 --samples 2 --new-tokens 4",
        ),
        Step(
            "lean_paper",
            "lean_paper.py --device cuda --figures 7a 9",
            1.5,
            "lean_paper.py --figures 7a 9 --rounds 1",
        ),
        Step(
            "prefix_groups",
            "prefix_trees.py --device cuda --section groups",
            1.5,
            "prefix_trees.py --section groups --rounds 1",
        ),
        Step(
            "prefix_trees",
            "prefix_trees.py --device cuda --section pat fasttree",
            5,
            "prefix_trees.py --section pat fasttree --rounds 1",
        ),
        Step("latent_kernel", "latent.py --device cuda --section kernel", 2, "latent.py --section kernel --rounds 1"),
        Step(
            "latent_product", "latent.py --device cuda --section product", 1.5, "latent.py --section product --rounds 1"
        ),
        Step("latent_step", "latent.py --device cuda --section step", 4),
        Step("written_out", "written_out.py --device cuda", 8, "written_out.py --section step --rounds 1"),
        Step(
            "encoder_decoder",
            "encoder_decoder.py --device cuda --layers 8 --batch 1 8",
            6,
            "encoder_decoder.py --rounds 1",
        ),
        Step(
            "encoder_decoder_loop",
            "encoder_decoder_loop.py --device cuda --models whisper-large-v3",
            5,
            "encoder_decoder_loop.py --models whisper-large-v3 --rounds 1",
        ),
        Step(
            "eager_step",
            "eager_step.py --device cuda --batch 1 8 --queries 1",
            4,
            "eager_step.py --layers 1 --batch 1 --queries 1 --rounds 1",
        ),
        Step("latent_generate", "latent.py --device cuda --section generate", 4, "latent.py --section generate"),
        Step("latent_rounding", "latent.py --device cuda --section rounding", 1, "latent.py --section rounding"),
        Step("decode_grid", "decode.py --device cuda --section grid", 4, "decode.py --section grid --rounds 1"),
    ],
    "two": [
        Step("tree_merge", "tree_merge.py --device cuda", 1.5, "tree_merge.py --rounds 1 --repeats 2", 2),
        Step(
            "tree_latency",
            "tree_vs_ring.py --device cuda --section latency",
            2,
            "tree_vs_ring.py --section latency --rounds 1",
            2,
        ),
        Step("tree_bytes", "tree_vs_ring.py --device cuda --section bytes", 1, "tree_vs_ring.py --section bytes", 2),
        Step(
            "tree_table1",
            "tree_vs_ring.py --device cuda --section table1 --lengths 131072",
            3,
            "tree_vs_ring.py --section table1 --trials 1",
            2,
        ),
        Step(
            "sharded_prefix",
            "sharded_prefix.py --device cuda --section op",
            1.5,
            "sharded_prefix.py --section op --rounds 1",
            2,
        ),
        Step(
            "sharded_step",
            "sharded_prefix.py --device cuda --section step",
            3,
            "sharded_prefix.py --section step --rounds 1",
            2,
        ),
        Step(
            "latent_sharded",
            "latent.py --device cuda --section sharded",
            2,
            "latent.py --section sharded --rounds 1",
            2,
        ),
        Step(
            "prefill",
            "prefill.py --device cuda --section prompt --rounds 2",
            4,
            "prefill.py --section prompt --rounds 1",
            2,
        ),
        Step("prefill_long", "prefill.py --device cuda --section long", 7, "prefill.py --section long", 2),
    ],
    "eight": [
        Step("tree_merge_8", "tree_merge.py --device cuda", 1.5, "tree_merge.py --rounds 1 --repeats 2", 8),
    ],
    "h100": [
        Step(
            "latent_kernel_h100",
            "latent.py --device cuda --section kernel",
            2,
            "latent.py --section kernel --rounds 1",
        ),
        Step("launches", "launches.py --device cuda", 1.5),
        *pages_steps(),
        Step("sparse_kernel", "sparse.py --device cuda", 3, "sparse.py --rounds 1"),
        Step("sparse_layer", "sparse_layer.py --device cuda", 4, "sparse_layer.py --rounds 1"),
        Step("indexer", "indexer.py --device cuda", 2, "indexer.py --rounds 1"),
        Step("skinny_linear", "skinny_linear.py --device cuda --rows 2 8 64 --rounds 3", 2),
        Step(
            "decode_loop_lookup",
            "decode_loop.py --device cuda --batch 1 --only loop loop_lookup --first-call-limit 150",
            6,
            "decode_loop.py --batch 1 --only loop loop_lookup --rounds 1",
        ),
        Step(
            "decode_loop_batch8",
            "decode_loop.py --device cuda --batch 8 --only loop loop_cublas loop_inductor --first-call-limit 150",
            7,
            "decode_loop.py --batch 2 --only loop --rounds 1",
        ),
        Step(
            "decode_loop_sampled",
            "decode_loop.py --device cuda --batch 1 --only loop loop_sampled loop_streamed loop_inductor gpt_fast "
            "--gpt-fast /tmp/gpt-fast --first-call-limit 150",
            8,
            "decode_loop.py --batch 1 --only loop loop_sampled --rounds 1",
        ),
        Step(
            "decode_loop_gpt_fast",
            "decode_loop.py --device cuda --batch 1 --only loop gpt_fast --gpt-fast /tmp/gpt-fast "
            "--first-call-limit 380",
            6,
            "decode_loop.py --batch 1 --only loop gpt_fast --rounds 1",
        ),
        Step(
            "decode_loop_start",
            "decode_loop.py --device cuda --section start --only loop_untuned loop",
            6,
            "decode_loop.py --section start --only loop_untuned",
        ),
    ],
    "batches": [
        Step(
            name,
            f"generate_batch.py --device cuda --settings {settings} --rounds 1 --limit {limit}",
            minutes,
            f"generate_batch.py --settings {settings.split()[0]} --only {tiny} --rounds 1",
        )
        for name, settings, limit, minutes, tiny in (
            ("generate_batch_a", "a --only tatten_compiled fa3 tatten", 220, 8, "tatten"),
            (
                "generate_batch_c",
                "gemma3 gpt_oss --only sdpa tatten --prompts 16 --batch-tokens 1024 --new-tokens 64 --layers 12",
                110,
                8,
                "sdpa",
            ),
            (
                "generate_batch_a_sdpa",
                "a --only tatten sdpa --batch-tokens 1024 --new-tokens 64 --layers 12",
                110,
                4,
                "sdpa",
            ),
            ("generate_batch_compiled", "b --only tatten_compiled fa3 fork tatten", 240, 10, "tatten_compiled"),
            ("generate_batch_compiled_peers", "b --only tatten tatten_compiled fa3 fa3_compiled", 170, 8, "tatten"),
            ("generate_batch_decode", "b --only tatten_decode fa3 tatten_compiled fork", 240, 10, "tatten_decode"),
        )
    ],
    "cpu": [
        Step(
            "static_cache_cpu",
            "static_cache.py --device cpu --rows 0 2 3 6 8 10 12 22",
            12,
            "static_cache.py --rows 9 --repeats 1",
        ),
        Step(
            "small_calls",
            "small_calls.py --jobs 2 --head-dims 64 --batches 1 8",
            15,
            "small_calls.py --dtypes float32 --batches 1 --head-dims 64 --slots 16 --rounds 2",
        ),
        Step(
            "shared_prefix_cpu",
            "shared_prefix.py --device cpu --rows 0 2 4 6 8 10 12 14",
            12,
            "shared_prefix.py --rows 16 17 --rounds 1",
        ),
        Step("latent_cpu", "latent.py --section step", 8, "latent.py --section step --rounds 1"),
        Step("sliding_cpu", "sliding.py", 1, "sliding.py --rounds 1"),
        Step("aoti", "aoti.py", 8, "aoti.py --rows 1 --repeats 1"),
        Step("paged_cpu", "paged.py --device cpu --section gathered short", 8, "paged.py --section short --rounds 1"),
        Step("gathers", "gathers.py", 2, "gathers.py --rounds 1"),
        Step(
            "generate_batch_host",
            "generate_batch.py --section host",
            3,
            "generate_batch.py --section host --only sdpa",
        ),
        Step("soak", "soak.py", 12, "soak.py --requests 20 --minutes 0.05"),
        Step(
            "soak_rings",
            "soak.py --model gemma3_text --samples 2 --requests 500 --minutes 5",
            8,
            "soak.py --model gemma3_text --samples 2 --requests 20 --minutes 0.05",
        ),
    ],
}
MINUTES = {"one": 64.5, "two": 25.0, "eight": 2.0, "h100": 53.0, "batches": 48.0, "cpu": 89.0}


def line(step: Step, quick: bool, path: Path) -> list[str]:
    script, *options = ((step.quick if quick else step.command) or "").split()
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(step.ranks)]
    return [sys.executable, *torchrun * (step.ranks > 1), str(HERE / script), *options, "--json", str(path)]


def run(command: list[str], seconds: float) -> str:
    """Run a command in its own process group; returns `recorded`, or what went wrong and the end of its output."""
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = f"failed with exit status {child.wait(seconds)}"
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # ranks as well
            child.wait()
            status = f"killed after {seconds:.0f} s"
        if child.returncode == 0:
            return "recorded"
        output.seek(0)
        return "\n".join([status, *("    " + x.rstrip() for x in output.readlines()[-15:])])


def record(step: Step, quick: bool, out: Path, deadline: float) -> str:
    """Run a step, and move its figures to `out` if it ended well."""
    if quick and step.quick is None:
        return "needs a GPU"
    left = deadline - time.monotonic()
    if left < 15:
        return "skipped: no time left"
    with tempfile.TemporaryDirectory(dir=out) as folder:
        path = Path(folder) / "figures.json"
        status = run(line(step, quick, path), min(60 * step.minutes, left))
        if status == "recorded":
            if not path.is_file():
                return "failed: it wrote no figures"
            path.replace(out / f"{step.name}.json")
        return status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine", choices=list(STEPS))
    parser.add_argument("--steps", nargs="*", help="which steps, by name; default: all")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results; with --quick a folder that is removed")
    parser.add_argument("--minutes", type=float, help="for all steps together")
    parser.add_argument("--quick", action="store_true", help="tiny shapes on a CPU")
    args = parser.parse_args()
    steps = [step for step in STEPS[args.machine] if not args.steps or step.name in args.steps]
    unknown = set(args.steps or ()) - {step.name for step in steps}
    if unknown:
        parser.error(f"--steps must be of {', '.join(x.name for x in STEPS[args.machine])}, got {', '.join(unknown)}")

    deadline = time.monotonic() + 60 * (args.minutes or MINUTES[args.machine])
    with tempfile.TemporaryDirectory() as removed:
        out = args.out or (Path(removed) if args.quick else HERE / "results")
        out.mkdir(parents=True, exist_ok=True)
        statuses = []
        for step in steps:
            start = time.monotonic()
            statuses.append(record(step, args.quick, out, deadline))
            print(f"{step.name:18} {time.monotonic() - start:4.0f} s  {statuses[-1]}", flush=True)
    if any(status not in ("recorded", "needs a GPU") for status in statuses):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
