"""Attention of many queries by PyTorch's flash kernels, with its lse: the private PyTorch API of `many_queries.py`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tatten.ops import many_queries
from tatten.ops.cuda import providers
from tatten.ops.many_queries import attend_many, unsupported_reason
from tatten.ops.reference import decode_attention_reference


def tensors(q_len: int, kv_len: int, dtype: torch.dtype, dim: int = 16, device: str = "cpu") -> tuple[Tensor, ...]:
    shapes = (8, q_len), (2, kv_len), (2, kv_len)
    return tuple(torch.randn(2, *shape, dim, device=device, dtype=torch.float64).to(dtype) for shape in shapes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("q_len, kv_len, causal", [(70, 70, True), (1, 1, True), (70, 33, False), (1, 40, False)])
def test_state(dtype: torch.dtype, q_len: int, kv_len: int, causal: bool) -> None:
    """It takes fewer kv heads than query heads, and strides of a model, and of a cache that is not full."""
    query, key, value = tensors(q_len + 1, kv_len + 3, dtype)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)[:, :, 1:]
    key, value = key[:, :, :kv_len], value[:, :, 2:-1]
    out, lse = attend_many(query, key, value, causal, 0.3)
    assert (out.dtype, lse.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril() if causal else None
    want_out, want_lse = decode_attention_reference(query, key, value, attn_mask=mask, scale=0.3)
    tolerance = {"rtol": 0, "atol": {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]}
    torch.testing.assert_close(out.double(), want_out, **tolerance)
    torch.testing.assert_close(lse.double(), want_lse, **tolerance)


@pytest.mark.parametrize("hopper, dim", [(True, 128), (True, 256), (False, 64)])
@pytest.mark.parametrize("q_len, kv_len, causal", [(70, 70, True), (70, 33, False)])
def test_kernels_on_cuda(
    monkeypatch: pytest.MonkeyPatch, hopper: bool, dim: int, q_len: int, kv_len: int, causal: bool
) -> None:
    """PyTorch's shape functions show which kernel is called, and that it takes kv heads as they are."""
    called = []
    monkeypatch.setattr(many_queries, "has_cudnn_decode", lambda device: hopper)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)

    class Calls(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            called.append(func.__name__.split(".")[0])
            return func(*args, **(kwargs or {}))

    with FakeTensorMode():
        query, key, value = tensors(q_len, kv_len, torch.bfloat16, dim, "cuda")
        with Calls():
            out, lse = attend_many(query, key, value, causal, None)
    assert called[0] == f"_scaled_dot_product_{'cudnn' if hopper and dim == 128 else 'flash'}_attention"
    assert (out.shape, lse.shape) == (query.shape, query.shape[:3])
    assert lse.dtype == torch.float32


def test_one_query_is_not_left_to_a_cudnn_that_decodes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "capability", lambda device: (10, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    with FakeTensorMode():
        assert not many_queries._takes_cudnn(tensors(1, 33, torch.bfloat16, 128, "cuda")[0])
        assert many_queries._takes_cudnn(tensors(70, 33, torch.bfloat16, 128, "cuda")[0])


@pytest.mark.parametrize(
    "device, dtype, dim, value_dim, says",
    [
        ("cpu", torch.float32, 16, 24, "they take one head_dim, not 16 for keys and 24 for values"),
        ("cuda", torch.float32, 16, 16, "on CUDA they take float16 and bfloat16, not torch.float32"),
        ("cuda", torch.bfloat16, 20, 20, "on CUDA they take a head_dim up to 256 in eights, not 20"),
        ("cuda", torch.bfloat16, 512, 512, "on CUDA they take a head_dim up to 256 in eights, not 512"),
        ("meta", torch.bfloat16, 16, 16, "they take CPU and CUDA tensors, not meta"),
    ],
)
def test_unsupported(device: str, dtype: torch.dtype, dim: int, value_dim: int, says: str) -> None:
    with FakeTensorMode():
        query, value = (torch.empty(1, 1, 4, d, dtype=dtype, device=device) for d in (dim, value_dim))
        assert unsupported_reason(query, value) == says
        with pytest.raises(NotImplementedError, match=says):
            attend_many(query, query, value, True, None)


def test_queries_and_values_of_several_dtypes_are_not_supported() -> None:
    """As under autocast, where rotary embeddings leave queries and keys in float32."""
    query, value = torch.randn(1, 1, 4, 16), torch.randn(1, 1, 4, 16, dtype=torch.bfloat16)
    says = "they take one dtype, not torch.float32 for queries and torch.bfloat16 for values"
    with pytest.raises(NotImplementedError, match=says):
        attend_many(query, query, value, True, None)
