"""The private PyTorch APIs that we rest on, each used in one file: if one moves, this says which."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true


def test_passes_symbolic() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.ones(3, 4))
    assert isinstance(x, FakeTensor)
    assert torch._C._is_alias_of(x, x.view(-1)[2:])
    assert not torch._C._is_alias_of(x, x.clone())
    env = ShapeEnv()
    size = env.create_unbacked_symint()
    assert size.node.maybe_as_int() is None
    assert size.node.hint is None
    assert statically_known_true(size == size)


def test_ops_cpu() -> None:
    q = torch.randn(1, 2, 3, 8)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q, 0.0, False, attn_mask=None)
    assert out.shape == q.shape
    assert lse.shape == (1, 2, 3)
    torch.testing.assert_close(lse, (q @ q.transpose(2, 3) * 8**-0.5).logsumexp(-1))
