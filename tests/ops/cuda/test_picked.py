"""The kernels for calls with `indices`, in Triton's interpreter: within a derived bound of float64."""

from __future__ import annotations

import os

import pytest
import torch
from fuzz import settings
from hypothesis import assume, given
from hypothesis import strategies as st
from op_bounds import assert_within_bound
from op_calls import row_groups
from picked_calls import PickedCall, draw_picked_call
from poison import fresh_memory_is_poison
from slow import slow_but
from torch import Tensor

from tatten.ops.call import DECODE, LATENT, AttentionCall, KeyValue
from tatten.ops.kernel_signatures import bifurcated_call, decode_call, latent_call
from tatten.ops.picks import without_duplicates
from tatten.ops.sizes import ceil_div

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs where no GPU is")


def described(drawn: PickedCall) -> tuple[AttentionCall, dict]:
    """The call below the schema, without duplicates, and the dense inputs with the same answer."""
    inputs, dense = drawn.inputs()
    inputs.pop("distinct_indices")

    def distinct(indices: Tensor | None, key: Tensor) -> Tensor | None:
        n = ceil_div(key.shape[2], drawn.index_block)
        return indices if indices is None else without_duplicates(indices, n)

    if "keys" in inputs:
        rows = inputs.pop("rows")
        keys = inputs["keys"]
        inputs["row_groups"] = [row_groups(inputs["query"], *x) for x in zip(keys, rows, strict=True)]
        inputs["indices"] = [distinct(*x) for x in zip(inputs["indices"], keys, strict=True)]
        return bifurcated_call(**inputs), dense
    inputs["indices"] = distinct(inputs["indices"], inputs.get("key", inputs.get("latent")))
    return (latent_call if "latent" in inputs else decode_call)(**inputs), dense


@st.composite
def calls(draw: st.DrawFn, latents: bool) -> PickedCall:
    return draw_picked_call(lambda options: draw(st.sampled_from(options)), latents, tiny=True)


@pytest.mark.parametrize("latents", [False, True])
@pytest.mark.parametrize("n", slow_but([10], [10, 200]))
def test_random_calls(n: int, latents: bool) -> None:
    @settings(n)
    @given(calls(latents), st.sampled_from([None, 1, 2, 3]))
    def test(drawn: PickedCall, tiles: int | None) -> None:
        """`tiles`: those of a split; None leaves the number to the plan."""
        from tatten.ops.cuda.heuristics import Tiles
        from tatten.ops.cuda.picked import Split, plan_picked

        assume(drawn.expanded.dtype != torch.float64)  # which the reference computes
        call, dense = described(drawn)
        split = None
        if tiles is not None:
            keys = max(
                x.key.shape[2] if x.indices is None else x.indices.shape[3] * call.index_block for x in call.segments
            )
            split = Split(tiles, max(1, ceil_div(keys, 16 * tiles)))
        with fresh_memory_is_poison():
            out, lse = plan_picked(call, Tiles(16, 16, 4, 2), split)(call)
        parts = drawn.parts + (1 if split is None else split.splits)
        assert_within_bound(out, lse, dense, parts, out_dtype=call.out_dtype)

    test()


@pytest.mark.parametrize("latents", [False, True])
def test_tiles_do_not_depend_on_the_batch_where_bits_must_not(latents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from tatten.ops.cuda import picked

    monkeypatch.setattr(picked, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(picked, "has_large_shared_memory", lambda device: True)

    def chosen(batch: int) -> object:
        heads, kv_heads, dim = (128, 1, 512) if latents else (32, 4, 128)
        query = torch.empty(batch, heads, 1, dim, dtype=torch.bfloat16, device="meta")
        keys = torch.empty(batch, kv_heads, 9000, dim, dtype=torch.bfloat16, device="meta")
        picks = torch.empty(batch, 1, 1, 2048, dtype=torch.int32, device="meta")
        stored = KeyValue(keys, keys, indices=picks)
        call = AttentionCall(LATENT if latents else DECODE, query, (stored,), 0.1, batch_invariant=True)
        tiles = picked.picked_tiles(call, stored)
        return tiles, picked.split_picks(call, stored, tiles)

    assert chosen(1) == chosen(2) == chosen(64)
