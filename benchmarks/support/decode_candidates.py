"""Random data of one of `decode.py`'s shapes, and the kernels that attend to it, each checked against float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import tatten
from support import peers
from support.decode_cases import Shape
from support.errors import relative_error
from support.timing import as_graph


class Problem:
    """Random queries, and `copies` of K and V, which lie one after the other in `pool`."""

    def __init__(self, shape: Shape, pool: tuple[Tensor, Tensor]) -> None:
        self.shape, self.pool = shape, pool
        device = pool[0].device
        self.copies = shape.copies(device.type)
        self.q = torch.randn(
            self.copies, shape.batch, shape.q_heads, 1, shape.head_dim, device=device, dtype=torch.bfloat16
        )
        self.lengths = torch.tensor(shape.lengths, dtype=torch.int32, device=device)
        self.mask = torch.arange(shape.capacity, device=device) < self.lengths[:, None, None, None]
        self.bias = torch.where(self.mask, 0.0, torch.finfo(torch.bfloat16).min).bfloat16()
        self.starts = {
            "packed": [0, *torch.tensor(shape.lengths).cumsum(0).tolist()],
            "pages": [0, *(-(-torch.tensor(shape.lengths) // peers.PAGE) * peers.PAGE).cumsum(0).tolist()],
        }
        self.exact = functools.cache(self._exact)

    def kv(self, layout: str, copy: int) -> tuple[Tensor, Tensor]:
        """Return one copy in a layout; all layouts view the same numbers, as different keys and values."""
        s = self.shape
        length = s.lengths[0] if layout == "exact" else s.capacity
        shape = {"packed": (-1, s.kv_heads, s.head_dim), "pages": (-1, peers.PAGE, s.kv_heads, s.head_dim)}.get(
            layout, (s.batch, s.kv_heads, length, s.head_dim)
        )
        size = s.size * length // s.capacity
        keys, values = (x[copy * s.size :][:size].view(shape) for x in self.pool)
        return keys, values

    def _exact(self, layout: str, copy: int, sequence: int) -> Tensor:
        """Return attention of one sequence in float64, `[q_heads, head_dim]`."""
        s, length = self.shape, self.shape.lengths[sequence]

        def of_sequence(x: Tensor) -> Tensor:
            if layout not in self.starts:
                return x[sequence, :, :length].double()
            start = self.starts[layout][sequence]
            return x.view(-1, s.kv_heads, s.head_dim)[start : start + length].transpose(0, 1).double()

        keys, values = map(of_sequence, self.kv(layout, copy))
        q = self.q[copy, sequence].double().view(s.kv_heads, -1, s.head_dim)
        scores = q @ keys.transpose(1, 2) * s.head_dim**-0.5
        return (scores.softmax(-1) @ values).flatten(0, 1)

    def error(self, layout: str, copy: int, out: Tensor) -> float:
        """Return the largest relative error of the first, last and longest sequence; NaN if any number of `out` is."""
        s = self.shape
        out = out.reshape(s.batch, s.q_heads, s.head_dim).double()
        if out.isnan().any():
            return math.nan
        sample = {0, s.batch - 1, s.lengths.index(max(s.lengths))}
        exact = {b: self.exact(layout, copy, b) for b in sample}
        return max(relative_error(out[b], x) for b, x in exact.items())


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def candidates(p: Problem) -> dict[str, tuple[str, Callable[[], Attention | None]]]:
    """Return for each the layout of its KV, and a maker of its attention of `q` `[batch, q_heads, 1, d]`, k and v."""
    s = p.shape
    by_length = {"kv_lens": p.lengths}
    options = {"ragged": by_length, "invariant": by_length, "static": {"attn_mask": p.mask}}.get(s.section, {})
    mask = p.mask if options else None

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tatten.decode_attention(q, k, v, **options)

    def triton(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tatten.decode_attention(q, k, v, provider="triton", **options)

    def invariant(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tatten.decode_attention(q, k, v, batch_invariant=True, **options)

    def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tatten.decode_attention(q, k, v, attn_mask=p.bias)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    def layer(mask: Tensor) -> Attention:
        """Attend as in a layer of a compiled model: the mask's blocks were found once for all layers."""
        ops = torch.ops.tatten
        block_mask = ops.block_mask(mask)
        return lambda q, k, v: ops.decode_attention(q, k, v, mask, None, None, block_mask)[0]

    def fa3(splits: int = 0) -> Attention | None:
        kernel = peers.fa3()
        cu_q = torch.arange(s.batch + 1, dtype=torch.int32, device=p.q.device)
        cu_k = torch.tensor(p.starts["packed"], dtype=torch.int32, device=p.q.device)
        longest = max(s.lengths)
        return kernel and (lambda q, k, v: kernel(q.squeeze(2), k, v, cu_q, cu_k, 1, longest, splits)[0])

    def batch(tensor_cores: bool) -> Attention | None:
        if s.head_dim != 128:  # each head_dim is compiled anew
            return None
        kernel = peers.flashinfer_paged(s.lengths, s.q_heads, s.kv_heads, s.head_dim, p.q.dtype, tensor_cores)
        return kernel and (lambda q, k, v: kernel(q.squeeze(2), k, v))

    def one() -> Attention | None:
        kernel = peers.flashinfer_single() if s.batch == 1 and s.head_dim == 128 else None
        return kernel and (lambda q, k, v: kernel(q[0, :, 0], k, v))

    return {
        "auto": ("slots", lambda: ours),
        "triton": ("slots", lambda: triton),
        "invariant": ("slots", lambda: invariant),
        "layer": ("slots", lambda: layer(p.mask)),
        "bias": ("slots", lambda: biased),
        "bias_layer": ("slots", lambda: layer(p.bias)),
        "exact": ("exact", lambda: tatten.decode_attention),
        "sdpa": ("slots", lambda: sdpa),
        "cudnn": ("slots", peers.cudnn),
        "cudnn_packed": ("slots", peers.cudnn_packed),
        "flash": ("slots", peers.flash),
        "fa3": ("packed", fa3),
        "fa3_8": ("packed", lambda: fa3(8)),
        "fa3_32": ("packed", lambda: fa3(32)),
        "fi": ("pages", lambda: batch(False)),
        "fi_tc": ("pages", lambda: batch(True)),
        "fi_one": ("packed", one),
    }


def prepare(p: Problem, layout: str, make: Callable[[], Attention | None]) -> tuple[Callable[[], object], int, float]:
    """Return a step to time, the number of its calls, and its error; raise if it does not run, or is wrong."""
    attention = make()
    if attention is None:
        raise RuntimeError("not installed, or not for this shape")
    inputs = [(p.q[i], *p.kv(layout, i)) for i in range(p.copies)]
    inputs *= max(1, min(8 // p.copies, (2 << 30) // p.shape.kv_bytes))  # a short step has many calls

    def step() -> list[Tensor]:
        return [attention(*x) for x in inputs]

    if p.q.is_cuda:
        for _ in range(2):
            attention(*inputs[0])
        torch.cuda.synchronize()
        step = as_graph(step)
        for out in step():
            out.fill_(math.nan)
    outs = step()
    last = p.copies - 1
    error = max(p.error(layout, 0, outs[0]), p.error(layout, last, outs[last]), key=lambda x: (math.isnan(x), x))
    if not error < 1e-2:
        raise ArithmeticError(f"wrong: relative error {error:.1e}, allowed 1e-2")
    return step, len(inputs), error
