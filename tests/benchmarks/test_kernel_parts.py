"""The parts of a sparse layer's step, told by the shapes with which its kernels are launched."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from support import indexed_layer
from support.indexed_layer import Row
from support.kernel_parts import Shapes, part_of

B, S = 8, 131072
LATENT, ROPE, INDEX = (B, 1, S, 512), (B, 1, S, 64), (B, S, 128)
SCORES, PICKABLE, MASK = (B, 1, 64, S), (B, 1, S), (B, 1, 1, S)


@pytest.mark.parametrize(
    ("part", "kernel", "op", "shapes", "picked"),
    [
        ("projections", "nvjet_tst_8x64", "aten::mm", [(B, 7168), (7168, 1536)], False),
        ("projections", "triton_red_fused_mm_t_3", "triton_red_fused_mm_t_3", [(1, 7168), (7168, 576)], False),
        ("projections", "void gemv2T_kernel_val<int>", "aten::bmm", [(128, B, 128), (128, 128, 512)], False),
        ("projections", "_project_heads_kernel", "_project_heads_kernel_0", [(B, 128, 1, 512), (128, 512, 128)], True),
        ("indexer", "triton_poi_fused__to_copy_4", "triton_poi_fused__to_copy_4", [INDEX, (B, 128, S)], False),
        ("indexer", "sm80_xmma_gemm_f32f32", "aten::bmm", [(B, 64, 128), (B, 128, S)], False),
        ("indexer", "triton_poi_fused_mul_relu_5", "triton_poi_fused_mul_relu_5", [SCORES], False),
        ("indexer", "triton_poi_fused_masked_fill_6", "triton_poi_fused_masked_fill_6", [PICKABLE, MASK], False),
        ("indexer", "_index_scores_kernel", "_index_scores_kernel_0", [(B, 1, 64, 128), INDEX], False),
        ("top-k", "radixFindKthValues", "aten::topk", [PICKABLE], False),
        ("attention", "nvjet_tst_256x128", "aten::mm", [(B * S, 512), (512, 32768)], False),
        ("attention", "triton_poi_fused_copy_7", "triton_poi_fused_copy_7", [ROPE, (B, 128, S, 192)], False),
        ("attention", "triton_poi_fused_index_copy_2", "triton_poi_fused_index_copy_2", [(B, 512), LATENT], False),
        ("attention", "triton_poi_fused_scatter_8", "triton_poi_fused_scatter_8", [(B, 1, 2048), PICKABLE], True),
        ("attention", "fmha_cutlassF_bf16", "aten::_efficient_attention_forward", [(B, 1, 128, 192)], True),
        ("attention", "_picked_kernel", "_picked_kernel_0", [(B, 128, 1, 512), LATENT, ROPE], True),
        ("attention", "_combine_kernel", "_combine_kernel_0", [(B, 128, 16, 512)], True),
        ("other", "triton_red_fused_mean_rsqrt_0", "triton_red_fused_mean_rsqrt_0", [(B, 1, 7168)], False),
    ],
)
def test_parts(part: str, kernel: str, op: str, shapes: Shapes, picked: bool) -> None:
    widths = indexed_layer.widths(indexed_layer.config("cuda"), Row(B, S))
    assert part_of(kernel, [op, "step"], shapes, widths, picked) == part
