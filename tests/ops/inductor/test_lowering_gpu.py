"""On a GPU: what Inductor launches itself gives bit for bit what the ops give, in each mode.

Its kernels have their sizes as constants, and another assembler: PyTorch's wheels bring a ptxas of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from slow import slow_but
from torch import Tensor
from torch._inductor.utils import run_and_get_code

pytestmark = pytest.mark.gpu
ops = torch.ops.tatten
MODES = {"default": None, "reduce-overhead": None, "cpp_wrapper": {"cpp_wrapper": True}}


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def kv(*shape: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)


def plain() -> tuple:
    return ops.decode_attention.default, (randn(2, 32, 1, 128), *kv(2, 8, 3000, 128)), {}


def short_and_whole() -> tuple:
    return (
        ops.decode_attention.default,
        (randn(1, 4, 2, 64, dtype=torch.float16), *kv(1, 4, 16, 64, dtype=torch.float16)),
        {},
    )


def odd_dims() -> tuple:
    return ops.decode_attention.default, (randn(3, 6, 3, 80), randn(3, 2, 1001, 80), randn(3, 2, 1001, 40)), {}


def lengths() -> tuple:
    lens = torch.tensor([0, 17, 4096], device="cuda", dtype=torch.int32)
    return ops.decode_attention.default, (randn(3, 32, 1, 128), *kv(3, 8, 4096, 128), None, lens), {}


def bool_mask() -> tuple:
    mask = torch.arange(4096, device="cuda") < torch.tensor([1000, 4000], device="cuda")[:, None, None, None]
    return ops.decode_attention.default, (randn(2, 32, 1, 128), *kv(2, 8, 4096, 128), mask), {}


def bool_mask_of_queries() -> tuple:
    mask = torch.rand(2, 1, 3, 700, device="cuda") < 0.5
    return ops.decode_attention.default, (randn(2, 8, 3, 128), *kv(2, 8, 700, 128), mask), {}


def bias() -> tuple:
    return ops.decode_attention.default, (randn(2, 8, 1, 64), *kv(2, 8, 700, 64), randn(1, 8, 1, 700)), {}


def variant() -> tuple:
    given = {"window": 900, "softcap": 30.0, "sinks": randn(32, dtype=torch.float32)}
    return ops.decode_attention.default, (randn(2, 32, 1, 128), *kv(2, 8, 4096, 128)), given


def float8() -> tuple:
    key, value = (x.to(torch.float8_e4m3fn) for x in kv(2, 8, 2048, 128))
    given = {"key_scale": randn(8, dtype=torch.float32).abs(), "value_scale": randn(8, dtype=torch.float32)}
    return ops.decode_attention.default, (randn(2, 32, 1, 128), key, value), given


def three_segments() -> tuple:
    segments = [kv(n, 8, length, 64) for n, length in ((1, 1000), (2, 77), (8, 300))]
    keys, values = map(list, zip(*segments, strict=True))
    return ops.bifurcated_attention.default, (randn(8, 8, 1, 64), keys, values, [None] * 3, [None] * 3), {}


def capped_segments() -> tuple:
    (k, v), (k2, v2), sinks = kv(1, 8, 1000, 64), kv(8, 8, 300, 64), randn(8, dtype=torch.float32)
    args = randn(8, 8, 1, 64), [k, k2], [v, v2], [None] * 2, [None] * 2
    return ops.bifurcated_attention.default, args, {"softcap": 30.0, "sinks": sinks}


def masked_segments() -> tuple:
    (k, v), (k2, v2) = kv(2, 8, 500, 64), kv(8, 8, 300, 64)
    mask = torch.rand(8, 1, 1, 300, device="cuda") < 0.5
    return ops.bifurcated_attention.default, (randn(8, 8, 1, 64), [k, k2], [v, v2], [None, mask], [None] * 2), {}


def rows() -> tuple:
    (k, v), (k2, v2) = kv(3, 8, 500, 64), kv(7, 8, 300, 64)
    groups = ops.row_groups.default(torch.tensor([0, 2, 2, 0, 0, 2, 2], device="cuda", dtype=torch.int32), 3, 1)
    return (
        ops.bifurcated_attention.default,
        (randn(7, 8, 1, 64), [k, k2], [v, v2], [None] * 2, [None] * 2, None, [groups, None]),
        {},
    )


def find_rows() -> tuple:
    return ops.row_groups.default, (torch.randint(5, (40,), device="cuda", dtype=torch.int32), 5, 4), {}


def find_shared_pages() -> tuple:
    table, lens = torch.randint(3, (9, 40), device="cuda").int(), torch.randint(640, (9,), device="cuda")
    return ops.shared_pages.default, (table, lens, 3, 16, 1), {}


def find_blocks() -> tuple:
    return ops.block_mask.default, (torch.rand(2, 1, 1, 4096, device="cuda") < 0.01,), {}


def merge() -> tuple:
    return ops.merge_states.default, (randn(4, 2, 8, 1, 64), randn(4, 2, 8, 1, dtype=torch.float32)), {}


def project() -> tuple:
    weight = randn(16, 256, 512).narrow(1, 128, 128)
    return ops.project_heads.default, (randn(3, 16, 2, 512, dtype=torch.float32), weight), {}


def index_scores() -> tuple:
    given = {"scale": 0.1, "attn_mask": torch.rand(3, 1, 4001, device="cuda") < 0.5}
    weights = randn(3, 2, 64, dtype=torch.float32)
    return ops.index_scores.default, (randn(3, 2, 64, 128), randn(3, 4001, 128), weights), given


def latents(heads: int, q_len: int, *, masked: bool = True, unrounded: bool = False) -> tuple:
    query, query_rope = randn(2, heads, q_len, 512), randn(2, heads, q_len, 64)
    latent, key_rope = randn(2, 1, 3000, 576).split((512, 64), -1)
    mask = torch.rand(2, 1, 1, 3000, device="cuda") < 0.9 if masked else None
    given = query.float() if unrounded else query, query_rope, latent, key_rope, mask
    return ops.latent_attention.default, given, {"scale": 0.07, "out_dtype": torch.float32}


def many_latent_queries() -> tuple:
    return latents(128, 1)


def chunk_of_latent_queries() -> tuple:
    return latents(40, 3, masked=False)


def few_latent_queries() -> tuple:
    return latents(16, 1, unrounded=True)


def long_prefix() -> tuple:
    (k, v), (k2, v2) = kv(1, 2, 8000, 128), kv(128, 2, 100, 128)
    args = randn(128, 16, 1, 128), [k, k2], [v, v2], [None] * 2, [None] * 2
    return ops.bifurcated_attention.default, args, {}


def large() -> tuple:
    return ops.decode_attention.default, (randn(64, 32, 1, 128), *kv(64, 8, 2048, 128)), {}


IN_GLUON = [many_latent_queries, chunk_of_latent_queries, few_latent_queries, long_prefix]  # on Hopper
CASES = [
    *IN_GLUON, large,
    plain, short_and_whole, odd_dims, lengths, bool_mask, bool_mask_of_queries, bias, variant, float8, three_segments,
    capped_segments, masked_segments, rows, find_rows, find_shared_pages, find_blocks, merge,
    project, index_scores,
]  # fmt: skip


# A C++ compiler takes most of a minute for each, so that `make test-gpu` has a case for each kind of lowering.
FAST_IN_CPP = (variant, masked_segments, find_rows, project, many_latent_queries)
BITWISE = [(case, mode) for case in CASES for mode in MODES]


@pytest.mark.parametrize(
    "case, mode", slow_but([(x, mode) for x, mode in BITWISE if mode != "cpp_wrapper" or x in FAST_IN_CPP], BITWISE)
)
def test_bitwise(case: Callable[[], tuple], mode: str) -> None:
    torch.manual_seed(0)
    op, args, kwargs = case()
    first, *rest = args

    def twice(first: Tensor) -> tuple[Tensor, ...]:
        """Two calls, so that memory is used again; the second depends on the first."""
        a = op(first, *rest, **kwargs)
        a = a if isinstance(a, tuple) else (a,)
        b = (
            op(first + 0 * a[0].flatten()[0].to(first.dtype).nan_to_num(), *rest, **kwargs)
            if first.is_floating_point()
            else a
        )
        return (*a, *(b if isinstance(b, tuple) else (b,)))

    torch._dynamo.reset()
    options = MODES[mode]
    compiled = torch.compile(
        twice, backend="tatten", mode=None if options else mode, options=options, dynamic=False, fullgraph=True
    )
    with torch.no_grad():
        want = twice(first)
        got, code = run_and_get_code(compiled, first)
        for _ in range(3):
            got = compiled(first)
    # Triton sums the weights of a row in the layout in which it loads the mask, if each query has a row of its own: by
    # fours where it knows the strides.
    ulp = 2 * torch.finfo(torch.bfloat16).eps if case is bool_mask_of_queries else 0
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=ulp, atol=0, equal_nan=True)
    in_gluon = case in IN_GLUON and torch.cuda.get_device_capability() == (9, 0)
    by_tma = case is large and torch.cuda.get_device_capability() >= (9, 0)
    if (in_gluon or by_tma) and options is None:
        assert "= PreparedCall(" in code[0]
    if not in_gluon or options is None:  # C++ calls the op
        assert "torch.ops.tatten" not in code[0].split("def call")[-1]
        assert "tatten::" not in code[0]


CACHED = """
import sys
import torch
from torch._dynamo.utils import counters

torch.manual_seed(0)
q, q_rope, c, k_rope = (torch.randn(2, n, m, w, device="cuda", dtype=torch.bfloat16) for n, m, w in (
    (128, 1, 512), (128, 1, 64), (1, 3000, 512), (1, 3000, 64)
))

def attend(q):
    return torch.ops.tatten.latent_attention.default(q, q_rope, c, k_rope, scale=0.07)[0]

with torch.no_grad():
    got = torch.compile(attend, backend="tatten")(q)
assert torch.equal(got, attend(q))
print("hits", counters["inductor"]["fxgraph_cache_hit"])
"""


def test_another_process_runs_the_code(tmp_path: Path) -> None:
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for hits in (0, 1):
        run = subprocess.run(
            [sys.executable, "-c", CACHED], capture_output=True, text=True, timeout=200, check=False, env=env
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout.split() == ["hits", str(hits)]
