"""FlashAttention's packages on a GPU, each where it is installed and takes the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flash_attn_packages import PACKAGES
from torch import Tensor

from tatten.ops.cuda.providers import unsupported_reason
from tatten.ops.cuda.workload import Workload, needs_of
from tatten.ops.kernel_signatures import decode_call
from tatten.ops.reference import attention_reference, decode_attention_reference

pytestmark = pytest.mark.gpu

LENGTHS = (0, 1, 2, 64, 129, 900)  # of 900 keys: none, fewer than there are queries, on and off the edge of a tile
VARIANTS = {
    "plain": {},
    "window": {"window": 70},
    "window of one": {"window": 1},
    "window of all": {"window": 5000},
    "soft cap": {"softcap": 20.0},
    "sinks": {"sinks": torch.linspace(-2, 3, 8)},
    "sinks in a window": {"window": 70, "sinks": torch.linspace(-2, 3, 8)},
}


def tensors(q_len: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    shapes = (6, 8, q_len, 128), (6, 2, 900, 128), (6, 2, 900, 128)
    generator = torch.Generator("cuda").manual_seed(q_len)
    return [torch.randn(shape, dtype=dtype, device="cuda", generator=generator) for shape in shapes]


@pytest.mark.parametrize("with_lens", [False, True])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("provider", PACKAGES)
def test_equals_decode_attention(provider: str, variant: dict[str, Any], q_len: int, with_lens: bool) -> None:
    query, key, value = tensors(q_len)
    kv_lens = torch.tensor(LENGTHS, device="cuda") if with_lens else None
    variant = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in variant.items()}
    call = decode_call(query, key, value, None, kv_lens, **variant)
    reason = unsupported_reason(provider, Workload.of(query, key, value, needs_of(call)))
    if reason is not None:
        pytest.skip(reason)
    out, lse = torch.ops.tatten.decode_attention(query, key, value, kv_lens=kv_lens, **variant, provider=provider)
    want = attention_reference(call)
    capped = "softcap" in variant  # tanh.approx.f32 is off by 2^-11
    torch.testing.assert_close(out.double(), want[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), want[1], atol=2e-2 if capped else 1e-3, rtol=1e-3)
    if kv_lens is not None:
        assert (out[0] == 0).all()


@pytest.mark.parametrize("provider", PACKAGES)
def test_one_graph_serves_all_lengths(provider: str) -> None:
    """Lengths stay on the device: a captured CUDA graph follows them."""
    query, key, value = tensors(1)
    reason = unsupported_reason(provider, Workload.of(query, key, value, ("lengths",)))
    if reason is not None:
        pytest.skip(reason)
    kv_lens = torch.tensor(LENGTHS, device="cuda")

    def attend() -> tuple[Tensor, Tensor]:
        return torch.ops.tatten.decode_attention(query, key, value, kv_lens=kv_lens, provider=provider)

    attend()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend()
    for lengths in (LENGTHS, LENGTHS[::-1], (900,) * 6):
        kv_lens.copy_(torch.tensor(lengths))
        graph.replay()
        want = decode_attention_reference(query, key, value, None, kv_lens)
        torch.testing.assert_close(out.double(), want[0], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse.double(), want[1], atol=1e-3, rtol=1e-3)
