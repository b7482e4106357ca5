"""Measure the host time of a call of attention, beside PyTorch's own: small shapes, so that the GPU waits.

    python benchmarks/overhead.py --device cuda

Microseconds of the host for one call, of calls in a row; the least of `--rounds`, in which the ops take turns. In
compiled code the calls are the layers of a step. Each layer attends to its own keys and values, with the output of the
layer before, and all have one mask. The time is that of the step, in the default mode of `torch.compile`, divided by
the number of layers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from support import results
from support.command_line import arguments

import tatten

Call = Callable[[], object]
SDPA, COMPILED_SDPA = "F.scaled_dot_product_attention", "F.scaled_dot_product_attention, compiled"
MASKED_SDPA = f"{COMPILED_SDPA}, attn_mask"
COMPILED, MASKED = "decode_attention, compiled", "decode_attention, compiled, attn_mask"


def host_us(call: Call, calls: int) -> float:
    """Return the microseconds of one of `calls` calls in a row.

    The calls are few and small, so that the host never waits for the GPU.
    """
    calls = max(1, calls)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def calls_of(batch: int, kv_len: int) -> dict[str, Call]:
    """Return the ops as a model calls them: 32 query heads, 8 kv heads of 128, bfloat16, one query each."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    query, (key, value) = randn(batch, 32, 1, 128), (randn(batch, 8, kv_len, 128) for _ in "kv")
    prefix = [randn(1, 8, kv_len, 128) for _ in "kv"]
    lens = torch.full((batch,), kv_len, device="cuda")
    mask = (torch.arange(kv_len, device="cuda") < kv_len - 100).expand(batch, 1, 1, -1)
    blocks = torch.ops.tatten.block_mask(mask)
    out, lse = torch.randn(4, batch, 32, 128, device="cuda"), torch.randn(4, batch, 32, device="cuda")
    op = torch.ops.tatten.decode_attention.default
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    decode, both = tatten.decode_attention, ([prefix[0], key], [prefix[1], value])
    return {
        "decode_attention": lambda: decode(query, key, value, provider="triton"),
        "decode_attention, kv_lens": lambda: decode(query, key, value, kv_lens=lens),
        "decode_attention, attn_mask": lambda: decode(query, key, value, attn_mask=mask),
        "the same, as a compiled graph calls it": lambda: op(query, key, value, mask, None, None, blocks),
        "bifurcated_attention, two segments": lambda: tatten.bifurcated_attention(query, *both),
        "merge_states": lambda: tatten.merge_states(out, lse),
        SDPA: lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True),
        "the same, attn_mask": lambda: F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True),
        "cuDNN's op": lambda: cudnn(query, key, value, None, True, 0.0, False, False),
        "flash's op, heads packed": lambda: flash(query.view(batch, 8, 4, 128), key, value),
        "torch.add": lambda: torch.add(query, query),
    }


def compiled_calls_of(batch: int, kv_len: int, layers: int) -> dict[str, Call]:
    """Return steps of `layers` layers: plain, and as with a static cache, whose mask all layers share."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    query = randn(batch, 32, 1, 128)
    caches = [(randn(batch, 8, kv_len, 128), randn(batch, 8, kv_len, 128)) for _ in range(layers)]
    mask = (torch.arange(kv_len, device="cuda") < kv_len - 100).expand(batch, 1, 1, -1)

    def compiled(attend: Callable[..., torch.Tensor], backend: str, *masks: torch.Tensor) -> Call:
        def step(x: torch.Tensor, *masks: torch.Tensor) -> torch.Tensor:
            for key, value in caches:
                x = attend(x, key, value, *masks)
            return x

        run = torch.compile(step, backend=backend, dynamic=False)
        return lambda: run(query, *masks)

    def sdpa(x: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *masks: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, key, value, *masks, enable_gqa=True)

    def decode(x: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return tatten.decode_attention(x, key, value, provider="triton")

    return {
        COMPILED: compiled(decode, "tatten"),
        COMPILED_SDPA: compiled(sdpa, "inductor"),
        MASKED: compiled(sdpa, "tatten", mask),
        MASKED_SDPA: compiled(sdpa, "inductor", mask),
    }


def main() -> None:
    parser = arguments(__doc__, ["cuda"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--kv-len", type=int, default=1024)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--layers", type=int, default=32, help="calls in a compiled step")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a GPU: on a CPU the host computes, too")
        return
    with torch.inference_mode():
        calls = calls_of(args.batch, args.kv_len)
        steps = compiled_calls_of(args.batch, args.kv_len, args.layers)
        took = dict.fromkeys((*calls, *steps), math.inf)
        for call in (*calls.values(), *steps.values()):
            call()  # compiles
        for _ in range(args.rounds):
            for name, call in {**calls, **steps}.items():
                at_once = args.layers if name in steps else 1
                took[name] = min(took[name], host_us(call, args.calls // at_once) / at_once)
    beside = {COMPILED: COMPILED_SDPA, COMPILED_SDPA: COMPILED_SDPA, MASKED: MASKED_SDPA, MASKED_SDPA: MASKED_SDPA}
    rows = [{"call": name, "us": us, "over_sdpa": us / took[beside.get(name, SDPA)]} for name, us in took.items()]
    for row in rows:
        print(f"{row['call']:52s} {row['us']:6.1f} us  {row['over_sdpa']:5.2f} of SDPA")
    if args.json:
        results.write(args.json, args.device, rows, batch=args.batch, kv_len=args.kv_len, layers=args.layers)


if __name__ == "__main__":
    main()
