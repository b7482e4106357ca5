"""Requests that arrive and are cancelled at random under continuous batching: tokens, pages and memory are checked.

    python benchmarks/soak.py                                        # 1,000 requests in 10 minutes, on a CPU
    python benchmarks/soak.py --model gemma3_text --minutes 5        # sliding layers, whose pages are rings
    python benchmarks/soak.py --requests 200 --minutes 2 --samples 3 # each request is forked
    python benchmarks/soak.py --requests 30 --minutes 0.1 --attention sdpa

A tiny model has a pool for about six of its requests, and batches of 64 tokens. Requests come in bursts, with prompts
of up to 120 tokens that may share their first pages, and ask for up to 40 tokens, half of them as a stream. A quarter
is cancelled after up to two seconds: before the request is admitted, in the middle of it, or when it has ended.

The run fails if a token differs from greedy `generate`, a request is lost that was not cancelled, a page is not free at
the end, or the resident memory grows: by a line through its samples after the first third, more than `--growth` MiB.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from support import models, results
from support.batch_settings import check_version
from support.command_line import arguments, machine
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

PAGE, BLOCKS, BATCH_TOKENS = 16, 64, 64
TEXTS, LONGEST, MOST_NEW = 60, 120, 40
CANCELLED = 1 / 4
PATIENCE = 120.0  # seconds after the last arrival


@dataclass(frozen=True)
class Request:
    """When a request arrives and is cancelled, in seconds, and its text, tokens and streaming."""

    arrives: float
    cancelled: float | None
    text: int
    new: int
    streaming: bool


@dataclass
class Soaked:
    """The outcome of a run: counts of outputs, faults, and the resident memory by second."""

    finished: int = 0
    cancelled: int = 0
    streamed: int = 0
    faults: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """The MiB by which memory grew after the first third of the time, on the line of least squares."""
        start = len(self.seconds) // 3
        x, y = torch.tensor(self.seconds[start:]).double(), torch.tensor(self.resident[start:]).double()
        if len(x) < 3:
            return 0.0
        slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
        return float(slope * (x[-1] - x[0]) / 2**20)


def requests(n: int, minutes: float, seed: int) -> list[Request]:
    """Draw requests in bursts of up to twelve, evenly over the time."""
    rng, drawn_requests = random.Random(seed), []
    while len(drawn_requests) < n:
        arrives = rng.uniform(0, 60 * minutes)
        for _ in range(min(rng.randint(1, 12), n - len(drawn_requests))):
            cancelled = arrives + rng.uniform(0, 2) if rng.random() < CANCELLED else None
            text, new = rng.randrange(TEXTS), rng.randint(1, MOST_NEW)
            drawn_requests.append(Request(arrives, cancelled, text, new, rng.random() < 0.5))
    return sorted(drawn_requests, key=lambda x: x.arrives)


def texts(vocabulary: int, seed: int) -> list[list[int]]:
    """Draw prompts of 3 to 120 tokens; two thirds begin with one of four system prompts of 20 to 50."""
    rng = random.Random(seed)

    def some(n: int) -> list[int]:
        return [rng.randrange(1, vocabulary) for _ in range(n)]

    systems = [some(n) for n in (20, 32, 48, 50)]
    return [(rng.choice(systems) if i % 3 else []) + some(rng.randint(3, LONGEST - 50)) for i in range(TEXTS)]


@torch.no_grad()
def greedy(model: PreTrainedModel, prompts: Sequence[list[int]], todo: Sequence[Request]) -> dict[int, list[int]]:
    """Return the tokens of each text that is requested, as many as any request wants."""
    model.set_attn_implementation("eager")
    most: dict[int, int] = {}
    for x in todo:
        most[x.text] = max(x.new, most.get(x.text, 0))
    fixed = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    inputs = {text: torch.tensor([prompts[text]]) for text in most}
    return {
        text: model.generate(inputs[text], max_new_tokens=new, **fixed)[0, inputs[text].shape[1] :].tolist()
        for text, new in most.items()
    }


def check(output: Any, request: Request, expected: Mapping[int, list[int]]) -> str | None:
    """Return the fault of an output, or None: a finished one has all tokens of its request, another one some."""
    tokens, right = output.generated_tokens, expected[request.text][: request.new]
    if output.error is not None:
        return f"error {output.error}"
    if tokens != right[: len(tokens)]:
        return f"got {tokens}, expected {right}"
    if output.is_finished() and len(tokens) != request.new:
        return f"got {len(tokens)} tokens of {request.new}"
    return None


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pages_in_use(cache: Any) -> int:
    """Return the sectors in use after the pages that are kept for later prefixes were dropped."""
    cache.evict_cached_blocks()
    cache.pool.try_to_free_sectors()
    return int(cache.num_sectors - cache.pool.num_free_sectors)


@torch.no_grad()
def soak(model: PreTrainedModel, attention: str, todo: Sequence[Request], samples: int, seed: int) -> Soaked:
    prompts = texts(model.config.vocab_size, seed)
    expected = greedy(model, prompts, todo)
    model.set_attn_implementation(attention)
    generation = GenerationConfig(max_new_tokens=MOST_NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    generation.num_return_sequences = samples  # its check would refuse equal samples, but those can be compared
    manager = model.init_continuous_batching(
        generation_config=generation,
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=BLOCKS, max_batch_tokens=BATCH_TOKENS, auto_switch_to_flash=False
        ),
    )
    outcome, sent = Soaked(), {}
    arriving = list(reversed(todo))
    cancelling: list[tuple[float, str]] = []
    missing: set[str] = set()  # outputs of requests that are not cancelled

    def receive(timeout: float) -> None:
        output = manager.get_result(timeout=timeout)
        if output is None:
            return
        parent = output.request_id.split("__child")[0]
        fault = check(output, sent[parent], expected)
        if fault is not None and len(outcome.faults) < 20:
            outcome.faults.append(f"{output.request_id}, {sent[parent]}: {fault}")
        outcome.streamed += not output.is_finished()
        outcome.finished += output.is_finished()
        if output.is_finished():
            missing.discard(output.request_id)

    manager.start()
    begin = time.perf_counter()
    while (arriving or cancelling or missing) and manager.is_running():
        now = time.perf_counter() - begin
        while arriving and arriving[-1].arrives <= now:
            request = arriving.pop()
            name = manager.add_request(
                prompts[request.text], max_new_tokens=request.new, streaming=request.streaming, eos_token_id=-1
            )
            sent[name] = request
            if request.cancelled is None:
                missing |= {name, *(f"{name}__child#{i}" for i in range(samples - 1))}
            else:
                cancelling.append((request.cancelled, name))
        for at, name in [x for x in cancelling if x[0] <= now]:
            manager.cancel_request(name)
            cancelling.remove((at, name))
            outcome.cancelled += 1
        if now >= len(outcome.seconds):
            outcome.seconds.append(now)
            outcome.resident.append(resident_bytes())
        if now > todo[-1].arrives + PATIENCE:
            outcome.faults.append(f"lost: {sorted(missing)[:20]}")
            break
        receive(timeout=0.02)
    cache = manager.batch_processor.cache
    manager.stop(block=True, timeout=60, keep_for_next_session=True)
    while not manager.output_router.output_queue.empty():
        receive(timeout=0.02)
    if missing:
        outcome.faults.append(f"without an end: {sorted(missing)[:20]}")
    if in_use := pages_in_use(cache):
        outcome.faults.append(f"{in_use} of {cache.num_sectors} sectors are in use")
    model.destroy_cached_continuous_batching_manager()
    return outcome


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, devices=["cpu"])
    parser.add_argument("--model", default="llama", choices=["llama", "gemma2", "gemma3_text", "gpt_oss"])
    parser.add_argument("--attention", default="tatten")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--samples", type=int, default=1, help="sequences of each request, which are forks of one")
    parser.add_argument("--growth", type=float, default=8.0, help="MiB; default: 8")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse()
    check_version()
    if args.attention == "tatten":
        import tatten.integrations.transformers  # noqa: F401 registers it
    torch.set_num_threads(1)
    print(f"{machine(args.device)}; {args.requests} requests in {args.minutes:g} minutes", flush=True)
    model = models.build(models.shape(args.model, tiny=True), args.device, torch.float32)
    start = time.perf_counter()
    outcome = soak(model, args.attention, requests(args.requests, args.minutes, args.seed), args.samples, args.seed)
    row = {"model": args.model, "attention": args.attention, "requests": args.requests, "samples": args.samples}
    row |= {"seconds": time.perf_counter() - start, "finished": outcome.finished, "cancelled": outcome.cancelled}
    row |= {"streamed": outcome.streamed, "growth_mib": outcome.growth, "resident_bytes": max(outcome.resident)}
    row["faults"] = outcome.faults
    print(
        f"{args.model}, {args.attention}: {outcome.finished} outputs finished, {outcome.cancelled} requests cancelled, "
        f"{outcome.streamed} streamed tokens; {max(outcome.resident) / 2**20:.0f} MiB resident, "
        f"grew by {outcome.growth:.2f}"
    )
    if args.json:
        results.write(args.json, args.device, [row])
    if outcome.growth > args.growth:
        outcome.faults.append(f"memory grew by {outcome.growth:.1f} MiB")
    if outcome.faults:
        raise SystemExit("\n".join(outcome.faults))


if __name__ == "__main__":
    main()
