"""Print the launches that the ops plan on a made-up GPU for random calls, one line of JSON each.

For changes that must not change a launch: run it before and after, and compare the outputs.

    python tests/support/planned_launches.py > before.txt         # an H200
    python tests/support/planned_launches.py a100 > before.txt
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import fake_h200
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

GPUS = {  # names, compute capabilities and multiprocessors
    "h200": ("NVIDIA H200", (9, 0), 132),
    "h100": ("NVIDIA H100 80GB HBM3", (9, 0), 132),
    "a100": ("NVIDIA A100-SXM4-80GB", (8, 0), 108),
    "l40s": ("NVIDIA L40S", (8, 9), 142),
    "b200": ("NVIDIA B200", (10, 0), 148),
}
SEED, EACH = 0, 500  # calls of each op, and as many over shared keys without masks
FLOATS = torch.bfloat16, torch.float16, torch.float32
Calls = Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]  # the name of an op, with its arguments


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


class Draw(random.Random):
    """Draws operands of calls; each kind of operand has the same chance."""

    def mask(self, batch: int, heads: int, q_len: int, kv_len: int) -> Tensor | None:
        shapes = (1, 1, 1), (batch, 1, 1), (1, heads, 1), (batch, 1, q_len), (batch, heads, q_len)
        dtype = self.choice((torch.bool, torch.bool, torch.float32))
        return self.choice((None, empty(*self.choice(shapes), kv_len, dtype=dtype)))

    def blocks(self, mask: Tensor | None, rows: int, kv_len: int) -> Tensor | None:
        if mask is None or self.random() < 0.5:
            return None
        return empty(self.choice((1, rows)), -(-kv_len // 64) + 1, 2, dtype=torch.int64)

    def variant(self, heads: int, window: bool = True) -> dict[str, Any]:
        variant: dict[str, Any] = {}
        if window and self.random() < 0.3:
            variant["window"] = self.choice((1, 100, 10**9))
        if self.random() < 0.2:
            variant["softcap"] = 3.0
        if self.random() < 0.2:
            variant["sinks"] = empty(heads, dtype=torch.float32)
        return variant


def decode_calls(draw: Draw) -> Calls:
    for _ in range(EACH):
        dtype, batch, kv_heads, group = draw.choice(FLOATS), draw.choice((1, 2, 8, 33)), draw.choice((1, 2, 8)), 4
        q_len, kv_len = draw.choice((1, 1, 3, 16)), draw.choice((0, 1, 64, 512, 700, 4096, 40000))
        dim = draw.choice((16, 64, 128, 128, 256))
        stored = draw.choice((dtype, dtype, torch.int8, torch.float8_e4m3fn))
        key, value = (empty(batch, kv_heads, kv_len, dim, dtype=stored) for _ in "kv")
        if draw.random() < 0.3:
            key, value = (empty(batch, kv_len, kv_heads, dim, dtype=stored).transpose(1, 2) for _ in "kv")
        variant = draw.variant(kv_heads * group)
        if stored != dtype:
            variant["key_scale"] = draw.choice((None, empty(kv_heads, dtype=torch.float32)))
        variant |= draw.choice(({}, {"provider": "triton"}, {"batch_invariant": True}))
        mask = draw.mask(batch, kv_heads * group, q_len, kv_len)
        lens = draw.choice((None, None, empty(batch, dtype=torch.int32)))
        scale, blocks = draw.choice((None, 0.3, -1.0)), draw.blocks(mask, batch, kv_len)
        query = empty(batch, kv_heads * group, q_len, dim, dtype=dtype)
        yield "decode_attention", (query, key, value, mask, lens, scale, blocks), variant


def bifurcated_calls(draw: Draw, plain: bool) -> Calls:
    for _ in range(EACH):
        dtype, kv_heads, group, dim = draw.choice(FLOATS), draw.choice((1, 8)), draw.choice((1, 4, 8)), 128
        q_len, batch = draw.choice((1, 1, 3)), draw.choice((64, 256, 1024))
        rows = draw.choice(((1, batch), (1, 8, 64), (4, batch), (1, 2, 8, 16, batch), (batch, 1), (2, 4)))
        variant = draw.variant(kv_heads * group, window=not plain)
        if rows[-1] == batch and draw.random() < 0.3:
            variant["batch_invariant"] = True
        keys, masks, blocks, groups = [], [], [], []
        for row in rows:
            kv_len = draw.choice((5, 32, 64, 128, 300, 4000))
            indexed = not plain and row != batch and draw.random() < 0.3
            mask = None if plain else draw.mask(batch, kv_heads * group, q_len, kv_len)
            keys.append(empty(row, kv_heads, kv_len, dim, dtype=dtype))
            masks.append(mask)
            blocks.append(draw.blocks(mask, row, kv_len))
            groups.append(empty(4, batch + 1, dtype=torch.int32) if indexed else None)
        query = empty(batch, kv_heads * group, q_len, dim, dtype=dtype)
        yield "bifurcated_attention", (query, keys, keys, masks, blocks, draw.choice((None, 0.3)), groups), variant


def latent_calls(draw: Draw) -> Calls:
    for _ in range(EACH):
        batch, heads, q_len = draw.choice((1, 2, 40, 3000)), draw.choice((1, 16, 17, 128)), draw.choice((1, 1, 3))
        kv_len, rank, width = draw.choice((1, 64, 700, 40000)), draw.choice((512, 512, 256)), draw.choice((64, 64, 0))
        dtype = draw.choice((torch.bfloat16, torch.bfloat16, torch.float16))
        query = empty(batch, heads, q_len, rank, dtype=draw.choice((dtype, torch.float32)))
        ropes = [empty(batch, n, length, width, dtype=dtype) for n, length in ((heads, q_len), (1, kv_len))]
        latent = empty(batch, 1, kv_len, rank, dtype=dtype)
        mask = draw.mask(batch, heads, q_len, kv_len)
        lens = draw.choice((None, None, empty(batch, dtype=torch.int32)))
        variant = draw.variant(heads) if draw.random() < 0.3 else {}
        variant |= {"scale": 0.3, "block_mask": draw.blocks(mask, batch, kv_len)}
        variant |= draw.choice(({}, {}, {"out_dtype": torch.float32}, {"batch_invariant": True}))
        query_rope, key_rope = ropes if width else (None, None)
        yield "latent_attention", (query, query_rope, latent, key_rope, mask, lens), variant


def shown(x: Any) -> Any:
    """Describe what a launch takes: layouts of tensors, blocks of TMA descriptors, and numbers."""
    if isinstance(x, (tuple, list)):
        return [shown(y) for y in x]
    if isinstance(x, Tensor):
        return str(x.dtype), list(x.shape), list(x.stride())
    return list(x.block_shape) if hasattr(x, "block_shape") else x


def planned(implementation: Callable[..., Any], args: Any, options: Any, how: dict[str, Any]) -> Any:
    """Return the launches of a call, or the error that it raises."""
    from tatten.ops.cuda.recording import record

    try:
        recorder, result = record(implementation, *args, **how, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    rows = [
        (launch.kernel.__name__, launch.grid, launch.options, launch.arguments, shown(tensors))
        for launch, tensors in recorder.launches
    ]
    return rows, shown(result), recorder.without_tma


def main() -> None:
    gpu, capability, sms = GPUS[sys.argv[1] if len(sys.argv) > 1 else "h200"]
    fake_h200.install()
    vars(torch.cuda).update(get_device_name=lambda device: gpu, get_device_capability=lambda device: capability)
    with FakeTensorMode(allow_non_fake_inputs=True):
        from tatten.ops import cuda
        from tatten.ops.cuda.recording import Gluon
        from tatten.ops.library import cuda_implementations

        for module in (
            importlib.import_module(f"{cuda.__name__}.{x.name}") for x in pkgutil.iter_modules(cuda.__path__)
        ):
            vars(module).update(
                {"multiprocessors": lambda device: sms, "on_device_of": lambda x, run, *args: run(*args)}
            )
        implementations = {
            op.name().split("::")[1]: implementation for op, implementation in cuda_implementations().items()
        }
        draw = Draw(SEED)
        calls = decode_calls(draw), bifurcated_calls(draw, False), bifurcated_calls(draw, True), latent_calls(draw)
        for name, args, options in (call for some in calls for call in some):
            how = {"gluon": draw.choice((*Gluon, Gluon.LAUNCHED)), "tma": draw.random() < 0.5}
            print(json.dumps((name, planned(implementations[name], args, options, how)), default=str))


if __name__ == "__main__":
    main()
