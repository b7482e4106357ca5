"""Decode attention of keys and values in float8, beside the same in 16 bits and beside upcasting them for SDPA.

    python benchmarks/float8.py --device cuda

One query for each sequence. `float8` is `tatten.decode_attention` with factors for each head, `16 bits` the same on
keys and values in the dtype of the query, `upcast` is SDPA after `key.to(dtype) * scale` under `torch.compile`, as a
PyTorch user would write it. Captured CUDA graphs cycle through copies that exceed the L2 cache, and take turns; medians
in microseconds. The floor is each key and value in float8 once, at the best rate of a plain read or copy.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from support import results
from support.command_line import arguments, machine
from support.timing import as_graph, in_turns, microseconds, read_rate
from torch import Tensor

import tatten

SHAPES = [  # batch, query heads, kv heads, keys, head_dim
    (1, 32, 8, 131072, 128),
    (8, 32, 8, 16384, 128),
    (64, 64, 8, 4096, 128),
    (32, 32, 32, 4096, 128),
    (8, 32, 8, 16384, 64),
    (8, 32, 8, 1024, 128),
]


@torch.compile(dynamic=False)
def upcast(query: Tensor, key: Tensor, value: Tensor, key_scale: Tensor, value_scale: Tensor) -> Tensor:
    key, value = (x.to(query.dtype) * f[:, None, None] for x, f in ((key, key_scale), (value, value_scale)))
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def measure(shape: tuple[int, int, int, int, int], dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Return the microseconds of each candidate, after a check of those of float8 against float64."""
    torch._dynamo.reset()
    batch, q_heads, kv_heads, kv_len, dim = shape
    copies = max(1, min(12, -(-300_000_000 // (2 * batch * kv_heads * kv_len * dim))))
    query = torch.randn(batch, q_heads, 1, dim, device="cuda", dtype=dtype)
    wide = torch.randn(copies, 2, batch, kv_heads, kv_len, dim, device="cuda", dtype=dtype)
    narrow = wide.to(torch.float8_e4m3fn)
    scales = [torch.rand(kv_heads, device="cuda") + 0.5 for _ in "kv"]
    half = [x.to(dtype) for x in scales]
    named = {"key_scale": scales[0], "value_scale": scales[1]}

    def float8(k: Tensor, v: Tensor) -> Tensor:
        return tatten.decode_attention(query, k, v, **named)

    runs = {
        "float8": (narrow, float8),
        "16 bits": (wide, lambda k, v: tatten.decode_attention(query, k, v)),
        "upcast": (narrow, lambda k, v: upcast(query, k, v, *half)),
    }
    k, v = (x[-1:].double() * f[:, None, None] for x, f in zip(narrow[0], scales, strict=True))
    want = F.scaled_dot_product_attention(query[-1:].double(), k, v, enable_gqa=True)
    graphs = {}
    for name, (pool, attend) in runs.items():
        if pool is narrow:
            error = (attend(*pool[0])[-1:].double() - want).norm() / want.norm()
            if not error < 2e-2:
                raise ArithmeticError(f"{name} is wrong: relative error {error:.1e}, allowed 2e-2")

        def step(pool: Tensor = pool, attend=attend) -> Tensor:
            return [attend(*kv) for kv in pool][-1]

        step()
        graphs[name] = as_graph(step)
    return in_turns(graphs, rounds, lambda _, graph: microseconds(graph, "cuda", copies, repeats=3))


def main() -> None:
    parser = arguments(__doc__, ["cuda"])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a GPU: on a CPU float8 is upcast before anything is computed")
        return
    rate = read_rate("cuda")
    print(f"{machine(args.device)}, reads {rate / 1e12:.3f} TB/s")
    rows = []
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float16):
            for shape in SHAPES:
                us = measure(shape, dtype, args.rounds)
                batch, _, kv_heads, kv_len, dim = shape
                us["floor"] = 2 * batch * kv_heads * kv_len * dim / rate * 1e6
                names = "batch", "q_heads", "kv_heads", "keys", "head_dim"
                rows.append({**dict(zip(names, shape, strict=True)), "dtype": str(dtype)[6:], "us": us})
                cells = "  ".join(f"{name} {x:7.1f}" for name, x in us.items())
                print(
                    f"{shape!s:26} {str(dtype)[6:]:8}  {cells}  {us['float8'] / us['16 bits']:.2f} of 16 bits",
                    flush=True,
                )
                torch.cuda.empty_cache()
    if args.json:
        results.write(args.json, args.device, rows, bytes_per_second=rate)


if __name__ == "__main__":
    main()
