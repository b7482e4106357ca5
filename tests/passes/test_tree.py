"""The tree pass: SDPA over DTensors whose sequence is sharded becomes local attention and a merge for each mesh dim."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import TestCase
from graphs import capture, listing
from ranks import run_ranks
from slow import slow_after, slow_but
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.fx import Graph, GraphModule, Node

import tatten
from tatten.passes.masks import same_view
from tatten.passes.reasons import Reason
from tatten.passes.rewrite import Declined, Rewritten, rewrite

pytestmark = pytest.mark.drawn(2, "DTensors")

R, S0, S1, S2, S3 = Replicate(), Shard(0), Shard(1), Shard(2), Shard(3)
B, HQ, HKV, S, D = 2, 4, 2, 8, 16


def tensors(batch: int = B, q_len: int = 1, length: int = S) -> list[Tensor]:
    """query, key, value and a bool mask, the same on all ranks."""
    rng = torch.Generator().manual_seed(5)
    shapes = (B, HQ, q_len, D), (batch, HKV, length, D), (batch, HKV, length, D)
    mask = torch.rand(B, 1, q_len, length, generator=rng) > 0.3
    return [*(torch.randn(shape, generator=rng) for shape in shapes), mask]


def repeat_kv(x: Tensor, n: int = HQ // HKV) -> Tensor:
    batch, heads, length, dim = x.shape
    return x[:, :, None].expand(batch, heads, n, length, dim).reshape(batch, heads * n, length, dim)


def place(mesh: DeviceMesh, *placed: tuple[Tensor, Sequence[Any]]) -> list[Tensor]:
    return [distribute_tensor(x, mesh, placements) for x, placements in placed]


def two_layers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    x = F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), attn_mask=mask) + 1
    return F.scaled_dot_product_attention(x, repeat_kv(k), repeat_kv(v), attn_mask=mask) * 2


def one_layer(q: Any, k: Any, v: Any, mask: Any = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def shared_rows(q: Any, k: Any, v: Any, mask: Any) -> Tensor:
    keys, values = (x.expand(B, -1, -1, -1) for x in (k, v))
    return one_layer(q, keys, values, mask)


def stored_by_length(q: Any, k: Any, v: Any, mask: Any) -> Tensor:
    """Keys and values are `[batch, length, heads, head_dim]` until their heads are repeated."""
    n = HQ // HKV
    keys, values = (x[:, :, :, None].expand(B, S, HKV, n, D).reshape(B, S, HQ, D).transpose(1, 2) for x in (k, v))
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def shared_keys(q: Any, k: Any, v: Any, mask: Any) -> Tensor:
    """Keys share a row, but values do not: only their heads are read where they are stored."""
    keys = repeat_kv(k[:1].expand(B, -1, -1, -1))
    return F.scaled_dot_product_attention(q, keys, repeat_kv(v), attn_mask=mask)


def local_result(q: Any, k: Any, v: Any) -> Tensor:
    return one_layer(q, k, v).to_local() + 1


CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...], dict[str, Any]]] = {
    "two layers": (two_layers, (2,), {"q": [R], "kv": [S2], "mask": [S3]}),
    "grid": (one_layer, (2, 2), {"q": [R, R], "kv": [S2, S2], "mask": None}),
    "heads": (one_layer, (2, 2), {"q": [S1, R], "kv": [S1, S2], "mask": [R, S3]}),
    "replicated mask": (one_layer, (2,), {"q": [R], "kv": [S2], "mask": [R]}),
    "shared rows": (shared_rows, (2,), {"q": [R], "kv": [S2], "mask": [S3], "batch": 1}),
    "stored by length": (stored_by_length, (2,), {"q": [R], "kv": [S1], "mask": [S3], "by length": True}),
    "shared keys": (shared_keys, (2,), {"q": [R], "kv": [S2], "mask": [S3]}),
}


def arguments(case: str) -> tuple[Callable[..., Any], list[Any]]:
    tatten.enable_dtensor_sdpa()
    fn, shape, how = CASES[case]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
    q, k, v, mask = tensors(how.get("batch", B))
    if how.get("by length"):
        k, v = (x.transpose(1, 2).contiguous() for x in (k, v))
    args = place(mesh, (q, how["q"]), (k, how["kv"]), (v, how["kv"]))
    return fn, args if how["mask"] is None else [*args, *place(mesh, (mask, how["mask"]))]


def rewritten(case: str) -> tuple[str, list[tuple[str, str]]]:
    fn, args = arguments(case)
    gm = capture(fn, *args)
    report = rewrite(gm)
    findings = [(x.op, x.note) for x in report.findings if isinstance(x, Rewritten)]
    groups = {group.group_name: f"group_{i}" for i, group in enumerate(_groups(args[0].device_mesh))}
    text = listing(gm)
    for name, short in groups.items():
        text = text.replace(f"'{name}'", short)
    return text, findings


def _groups(mesh: DeviceMesh) -> list[Any]:
    return [mesh.get_group(dim) for dim in range(mesh.ndim)]


class TestGraphs(TestCase):
    """Rewritten graphs of rank 1."""

    def test_layers_share_the_mask(self) -> None:
        graph, findings = run_ranks(2, rewritten, "two layers")[1]
        assert findings == [("tatten.decode_attention.default", "local, then merged over mesh dim 'inner'")] * 2
        self.assertExpectedInline(
            graph,
            """\
to_local = to_local(l_mask_)
to_local_1 = to_local(l_q_)
to_local_2 = to_local(l_k_)
to_local_3 = to_local(l_v_)
block_mask_default = block_mask.default(to_local)
decode_attention_default = decode_attention.default(to_local_1, to_local_2, to_local_3, to_local, None, None, block_mask_default)
getitem_4 = getitem(decode_attention_default, 0)
getitem_5 = getitem(decode_attention_default, 1)
tree_merge_default = tree_merge.default(getitem_4, getitem_5, group_0, 2, 1, 'all_gather')
getitem_6 = getitem(tree_merge_default, 0)
from_local = from_local(getitem_6)
x = add(from_local, 1)
to_local_4 = to_local(x)
decode_attention_default_1 = decode_attention.default(to_local_4, to_local_2, to_local_3, to_local, None, None, block_mask_default)
getitem_7 = getitem(decode_attention_default_1, 0)
getitem_8 = getitem(decode_attention_default_1, 1)
tree_merge_default_1 = tree_merge.default(getitem_7, getitem_8, group_0, 2, 1, 'all_gather')
getitem_9 = getitem(tree_merge_default_1, 0)
from_local_1 = from_local(getitem_9)
mul = mul(from_local_1, 2)
return (mul)""",
        )

    def test_dims_of_a_mesh_are_merged_one_after_the_other(self) -> None:
        graph, findings = run_ranks(4, rewritten, "grid")[1]
        assert findings[0][1] == "local, then merged over mesh dims 'inner', 'outer'"
        self.assertExpectedInline(
            graph,
            """\
to_local = to_local(l_q_)
to_local_1 = to_local(l_k_)
to_local_2 = to_local(l_v_)
decode_attention_default = decode_attention.default(to_local, to_local_1, to_local_2, None, None, None, None)
getitem = getitem(decode_attention_default, 0)
getitem_1 = getitem(decode_attention_default, 1)
tree_merge_default = tree_merge.default(getitem, getitem_1, group_1, 2, 1, 'all_gather')
getitem_2 = getitem(tree_merge_default, 0)
getitem_3 = getitem(tree_merge_default, 1)
tree_merge_default_1 = tree_merge.default(getitem_2, getitem_3, group_0, 2, 0, 'all_gather')
getitem_4 = getitem(tree_merge_default_1, 0)
from_local = from_local(getitem_4)
return (from_local)""",
        )

    def test_heads_on_one_dim_and_the_sequence_on_another(self) -> None:
        graph, _ = run_ranks(4, rewritten, "heads")[1]
        self.assertExpectedInline(
            graph,
            """\
to_local = to_local(l_mask_)
to_local_1 = to_local(l_q_)
to_local_2 = to_local(l_k_)
to_local_3 = to_local(l_v_)
block_mask_default = block_mask.default(to_local)
decode_attention_default = decode_attention.default(to_local_1, to_local_2, to_local_3, to_local, None, None, block_mask_default)
getitem = getitem(decode_attention_default, 0)
getitem_1 = getitem(decode_attention_default, 1)
tree_merge_default = tree_merge.default(getitem, getitem_1, group_1, 2, 1, 'all_gather')
getitem_2 = getitem(tree_merge_default, 0)
from_local = from_local(getitem_2)
return (from_local)""",
        )

    def test_a_replicated_mask_is_cut(self) -> None:
        graph, _ = run_ranks(2, rewritten, "replicated mask")[1]
        self.assertExpectedInline(
            graph,
            """\
to_local = to_local(l_mask_)
narrow = narrow(to_local, 3, 4, 4)
to_local_1 = to_local(l_q_)
to_local_2 = to_local(l_k_)
to_local_3 = to_local(l_v_)
block_mask_default = block_mask.default(narrow)
decode_attention_default = decode_attention.default(to_local_1, to_local_2, to_local_3, narrow, None, None, block_mask_default)
getitem = getitem(decode_attention_default, 0)
getitem_1 = getitem(decode_attention_default, 1)
tree_merge_default = tree_merge.default(getitem, getitem_1, group_0, 2, 1, 'all_gather')
getitem_2 = getitem(tree_merge_default, 0)
from_local = from_local(getitem_2)
return (from_local)""",
        )

    def test_rows_that_sequences_share(self) -> None:
        graph, findings = run_ranks(2, rewritten, "shared rows")[1]
        assert findings[0][0] == "tatten.bifurcated_attention.default"
        self.assertExpectedInline(
            graph,
            """\
to_local = to_local(l_mask_)
to_local_1 = to_local(l_q_)
to_local_2 = to_local(l_k_)
to_local_3 = to_local(l_v_)
block_mask_default = block_mask.default(to_local, 1)
bifurcated_attention_default = bifurcated_attention.default(to_local_1, [to_local_2], [to_local_3], [to_local], [block_mask_default], None)
getitem = getitem(bifurcated_attention_default, 0)
getitem_1 = getitem(bifurcated_attention_default, 1)
tree_merge_default = tree_merge.default(getitem, getitem_1, group_0, 2, 1, 'all_gather')
getitem_2 = getitem(tree_merge_default, 0)
from_local = from_local(getitem_2)
return (from_local)""",
        )

    def test_views_are_of_local_parts(self) -> None:
        graph, _ = run_ranks(2, rewritten, "stored by length")[1]
        self.assertExpectedInline(
            graph,
            """\
to_local = to_local(l_mask_)
to_local_1 = to_local(l_q_)
to_local_2 = to_local(l_k_)
to_local_3 = to_local(l_v_)
permute = permute(to_local_2, 0, 2, 1, 3)
permute_1 = permute(to_local_3, 0, 2, 1, 3)
block_mask_default = block_mask.default(to_local)
decode_attention_default = decode_attention.default(to_local_1, permute, permute_1, to_local, None, None, block_mask_default)
getitem_2 = getitem(decode_attention_default, 0)
getitem_3 = getitem(decode_attention_default, 1)
tree_merge_default = tree_merge.default(getitem_2, getitem_3, group_0, 2, 1, 'all_gather')
getitem_4 = getitem(tree_merge_default, 0)
from_local = from_local(getitem_4)
return (from_local)""",
        )

    def test_keys_that_are_shared_beside_values_that_are_not(self) -> None:
        graph, findings = run_ranks(2, rewritten, "shared keys")[1]
        assert [op for op, _ in findings] == ["tatten.decode_attention.default"]
        assert findings[0][1].startswith("local, then merged over mesh dim 'inner'; not bifurcated [segments]: ")
        self.assertExpectedInline(
            graph,
            """\
getitem = getitem(l_k_, slice(None, 1, None))
expand = expand(getitem, 2, -1, -1, -1)
to_local = to_local(l_mask_)
to_local_1 = to_local(l_q_)
to_local_2 = to_local(expand)
to_local_3 = to_local(l_v_)
block_mask_default = block_mask.default(to_local)
decode_attention_default = decode_attention.default(to_local_1, to_local_2, to_local_3, to_local, None, None, block_mask_default)
getitem_3 = getitem(decode_attention_default, 0)
getitem_4 = getitem(decode_attention_default, 1)
tree_merge_default = tree_merge.default(getitem_3, getitem_4, group_0, 2, 1, 'all_gather')
getitem_5 = getitem(tree_merge_default, 0)
from_local = from_local(getitem_5)
return (from_local)""",
        )


def peeled() -> tuple[bool, bool, float]:
    """Return whether the local output goes straight to those who asked for it, and its error."""
    tatten.enable_dtensor_sdpa()
    mesh = init_device_mesh("cpu", (2,))
    q, k, v, _ = tensors()
    args = place(mesh, (q, [R]), (k, [S2]), (v, [S2]))
    gm = capture(local_result, *args)
    rewrite(gm)
    text = listing(gm)
    have = torch.compile(local_result, backend="tatten", options={"inner": "eager"})(*args)
    error = (have - 1 - one_layer(q, k, v)).abs().max().item()
    return "from_local" in text, text.count("= to_local(") == 3, error


def test_no_dtensor_is_made_for_its_local_part() -> None:
    for made, only_arguments, error in run_ranks(2, peeled):
        assert not made
        assert only_arguments
        assert error < 1e-5


def sliced_masks() -> int:
    """Count the nodes that find spans where each of two layers cuts its columns from the mask of all positions."""
    tatten.enable_dtensor_sdpa()
    mesh = init_device_mesh("cpu", (2,))
    q, k, v, mask = tensors()
    query, key, value = place(mesh, (q, [R]), (k, [S2]), (v, [S2]))

    def layer(q: Tensor, mask: Tensor) -> Any:
        columns = DTensor.from_local(mask[..., 1::2], mesh, [S3], run_check=False)
        return one_layer(q, key, value, columns)

    gm = capture(lambda q, mask: layer(layer(q, mask), mask), query, mask)
    rewrite(gm)
    return len(gm.graph.find_nodes(op="call_function", target=torch.ops.tatten.block_mask.default))


def test_a_mask_that_each_layer_slices_is_looked_at_once() -> None:
    assert run_ranks(2, sliced_masks) == [1, 1]


def test_only_equal_views_are_one_mask() -> None:
    """A list copies, and what is copied may be written before the next one is."""
    graph = capture(lambda x: (x[None, 2:], x[None, 2:], x[None, 1:], x[[0, 1]], x[[0, 1]]), torch.ones(3)).graph
    views = [same_view(node) for node in graph.find_nodes(op="call_function", target=operator.getitem)]
    assert [views.index(view) for view in views] == [0, 0, 2, 3, 4]


def compiled(case: str, inner: str) -> float:
    """The largest difference from one process in float64."""
    fn, args = arguments(case)
    torch._dynamo.reset()
    have = torch.compile(fn, backend="tatten", fullgraph=True, options={"inner": inner})(*args)
    want = fn(*(x.full_tensor() if x.dtype == torch.bool else x.full_tensor().double() for x in args))
    have = have.full_tensor() if isinstance(have, DTensor) else have
    return (have.double() - want).abs().max().item()


@pytest.mark.parametrize("case", slow_but(["two layers", "heads"], CASES))
def test_result(case: str) -> None:
    assert max(run_ranks(4 if "grid" in case or "heads" in case else 2, compiled, case, "aot_eager")) < 1e-5


@pytest.mark.slow
def test_inductor() -> None:
    assert max(run_ranks(2, compiled, "two layers", "inductor", seconds=300)) < 1e-5


def collectives(case: str) -> list[str]:
    """The collectives of the graph that AOTAutograd makes of the rewritten one, in order."""
    from torch._dynamo.backends.common import aot_autograd

    fn, args = arguments(case)
    found: list[str] = []

    def collect(gm: GraphModule, _: Any) -> Any:
        found.extend(str(x.target) for x in gm.graph.nodes if "c10d" in str(x.target) and "wait" not in str(x.target))
        return gm.forward

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Any:
        rewrite(gm)
        return aot_autograd(fw_compiler=collect)(gm, example_inputs)

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, fullgraph=True)(*args)
    return found


@pytest.mark.parametrize(
    "case, merges", slow_after(1, [("two layers", 2), ("grid", 2), ("heads", 1), ("shared rows", 1)])
)
def test_collectives(case: str, merges: int) -> None:
    for found in run_ranks(4 if case in ("grid", "heads") else 2, collectives, case):
        assert found == ["_c10d_functional.all_gather_into_tensor.default"] * merges


def growing() -> tuple[int, float]:
    """Count the graphs that several lengths take, and measure the largest error."""
    tatten.enable_dtensor_sdpa()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("kv",))

    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        keys, values = (DTensor.from_local(x, mesh, [S2], run_check=False) for x in (k, v))
        columns = DTensor.from_local(mask, mesh, [S3], run_check=False)
        out = one_layer(DTensor.from_local(q, mesh, [R], run_check=False), keys, values, columns)
        assert isinstance(out, DTensor)
        return out.to_local()

    torch._dynamo.reset()
    step = torch.compile(fn, backend="tatten", fullgraph=True, dynamic=True, options={"inner": "aot_eager"})
    errors = []
    with tatten.recording() as report:
        for length in (10, 14, 22):
            q, k, v, mask = tensors(length=length)
            local = [x.chunk(2, dim=dim)[dist.get_rank()].contiguous() for x, dim in ((k, 2), (v, 2), (mask, 3))]
            want = one_layer(q, k, v, mask)
            errors.append((step(q, *local) - want).abs().max().item())
    assert all(isinstance(x, Rewritten) for graph in report.graphs for x in graph.findings)
    return len(report.graphs), max(errors)


def test_lengths_are_dynamic() -> None:
    for graphs, error in run_ranks(2, growing):
        assert graphs == 1
        assert error < 1e-5


def with_other_batches() -> tuple[list[str], float]:
    """Why calls are left, and the largest error, where the batch of DTensors that are inputs changes."""
    mesh = init_device_mesh("cpu", (2,))
    tatten.enable_dtensor_sdpa()
    torch._dynamo.reset()
    step = torch.compile(one_layer, backend="tatten", options={"inner": "aot_eager"})
    errors = []
    with tatten.recording() as report, torch.no_grad():
        for batch in (2, 3, 5):
            q, k, v, mask = (x[:1].expand(batch, -1, -1, -1).contiguous() for x in tensors())
            sharded = place(mesh, (q, [R]), (k, [S2]), (v, [S2]), (mask, [S3]))
            errors.append((step(*sharded).full_tensor() - one_layer(q, k, v, mask)).abs().max().item())
    assert report.rewritten
    return [str(x.decline) for x in report.declined], max(errors)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="PyTorch has no rule for SDPA over DTensors on a CPU")
def test_batches_of_inputs_are_dynamic() -> None:
    """Each of the DTensors has a symbol of its own for its batch."""
    for left, error in run_ranks(2, with_other_batches):
        assert left == []
        assert error < 1e-5


def difference(fn: Callable[..., Any], *args: Any, **how: Any) -> float:
    """Between the compiled function and the function."""
    torch._dynamo.reset()
    have = torch.compile(fn, backend="tatten", fullgraph=True, options={"inner": "aot_eager"}, **how)(*args)
    have, want = (x.full_tensor() if isinstance(x, DTensor) else x for x in (have, fn(*args)))
    return (have - want).abs().max().item()


def one_mask_cut_in_two_ways() -> float:
    """Layers whose keys are sharded over other dims of the mesh need other columns of a mask that they share."""
    tatten.enable_dtensor_sdpa()
    mesh = init_device_mesh("cpu", (2, 2))
    q, k, v, mask = tensors()
    args = place(mesh, (q, [R, R]), (mask, [R, R]), (k, [S2, R]), (v, [S2, R]), (k, [R, S2]), (v, [R, S2]))
    return difference(lambda q, m, k, v, k2, v2: one_layer(one_layer(q, k, v, m), k2, v2, m), *args)


def a_copy_of_the_mask() -> float:
    """Indexing by a list copies: a later write to the mask is not in the copy."""
    tatten.enable_dtensor_sdpa()
    mesh = init_device_mesh("cpu", (2,))
    q, k, v, _ = tensors()
    query, key, value = place(mesh, (q, [R]), (k, [S2]), (v, [S2]))
    bias = torch.rand(B, 1, 1, S // 2)

    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        bias = bias.clone()
        out = one_layer(q, k, v, DTensor.from_local(bias[[1, 0]], mesh, [S3], run_check=False))
        bias.add_(torch.arange(S // 2) * 3.0)
        return one_layer(out, k, v, DTensor.from_local(bias[[1, 0]], mesh, [S3], run_check=False))

    return difference(fn, query, key, value, bias)


def strides_that_memory_does_not_have() -> float:
    """DTensors keep the strides of what they were made of; their local parts may be dense all the same."""
    tatten.enable_dtensor_sdpa()
    mesh = init_device_mesh("cpu", (2,))
    q, k, v, _ = tensors()
    filled = place(mesh, *((torch.zeros(1, 1, 1, 1).expand(x.shape), [S2]) for x in (k, v)))
    for x, whole in zip(filled, (k, v), strict=True):
        x.to_local().copy_(whole.chunk(2, dim=2)[dist.get_rank()])
    with torch.inference_mode():  # without it such strides lead PyTorch to its math, which tatten refuses
        return difference(one_layer, *place(mesh, (q, [R])), *filled)


def a_cut_that_leaves_a_rank_nothing() -> float:
    tatten.enable_dtensor_sdpa()
    mesh = init_device_mesh("cpu", (4,))
    q, k, v, mask = tensors(length=9)
    args = place(mesh, (q, [R]), (k, [S2]), (v, [S2]), (mask, [R]))
    return max(difference(one_layer, *args, dynamic=dynamic) for dynamic in (True, False))


def a_view_that_rests_on_strides_of_sdpa() -> float:
    tatten.enable_dtensor_sdpa()
    mesh = init_device_mesh("cpu", (2,))
    q, k, v, _ = tensors(q_len=3)

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Any = one_layer(q, k, v)
        return out.to_local().transpose(1, 2).view(B, 3, HQ * D)

    return difference(fn, *place(mesh, (q, [R]), (k, [S2]), (v, [S2])))


@pytest.mark.parametrize(
    "n, case",
    slow_but(
        [(2, a_copy_of_the_mask)],
        [
            (4, one_mask_cut_in_two_ways),
            (2, a_copy_of_the_mask),
            (2, strides_that_memory_does_not_have),
            (4, a_cut_that_leaves_a_rank_nothing),
            (2, a_view_that_rests_on_strides_of_sdpa),
        ],
    ),
)
def test_compiled_as_eager(n: int, case: Callable[[], float]) -> None:
    assert max(run_ranks(n, case)) < 1e-5


def by_hand(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
    """Return the finding for a call with these arguments, without tracing it."""
    graph = Graph()

    def placeholder(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(name)
        node.meta["example_value"] = value
        return node

    args = tuple(placeholder(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    kwargs = {name: placeholder(name, x) for name, x in kwargs.items()}
    node: Node = graph.call_function(F.scaled_dot_product_attention, args, kwargs)
    node.meta["example_value"] = q
    graph.output(node)
    return rewrite(GraphModule(torch.nn.Module(), graph)).findings[0]


def reasons() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("kv",))
    q, k, v, mask = tensors()
    query, key, value, columns = place(mesh, (q, [R]), (k, [S2]), (v, [S2]), (mask, [S3]))
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "none": ((query, key, value), {"attn_mask": columns}),
        "query": ((*place(mesh, (q, [S2])), key, value), {}),
        "value": ((query, key, *place(mesh, (v, [R]))), {}),
        "replicated": ((query, *place(mesh, (k, [R]), (v, [R]))), {}),
        "mask": ((query, key, value), {"attn_mask": place(mesh, (mask, [S0]))[0]}),
        "q_len": ((*place(mesh, (torch.zeros(B, HQ, 17, D), [R])), key, value), {}),
        "causal": ((query, key, value), {"is_causal": True}),
        "dropout": ((query, key, value), {"dropout_p": 0.5}),
    }
    found = {name: by_hand(*args, enable_gqa=True, **kwargs) for name, (args, kwargs) in calls.items()}
    return {name: x.decline.reason.value if isinstance(x, Declined) else None for name, x in found.items()}


def test_declines() -> None:
    assert run_ranks(2, reasons)[0] == {
        "none": None,
        "query": Reason.PLACEMENT.value,
        "value": Reason.PLACEMENT.value,
        "replicated": Reason.PLACEMENT.value,
        "mask": Reason.PLACEMENT.value,
        "q_len": Reason.Q_LEN.value,
        "causal": Reason.IS_CAUSAL.value,
        "dropout": Reason.DROPOUT.value,
    }


def written_between() -> tuple[list[str], bool]:
    """Keys whose heads are repeated before their local part is written must not be read where they are stored.

    Returns the reasons, and whether the graph stayed as it was.
    """
    tatten.enable_dtensor_sdpa()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("kv",))
    q, k, v, _ = tensors()
    query, key, value = place(mesh, (q, [R]), (k, [S2]), (v, [S2]))

    def fn(q: Any, k: Any, v: Any) -> Tensor:
        keys, values = repeat_kv(k), repeat_kv(v)
        k.to_local().zero_()
        return F.scaled_dot_product_attention(q, keys, values).to_local()

    gm = capture(fn, query, key, value)
    before = listing(gm)
    reasons = [x.decline.reason.value for x in rewrite(gm).findings if isinstance(x, Declined)]
    return reasons, listing(gm) == before


def test_a_write_to_the_local_part_is_seen() -> None:
    assert run_ranks(2, written_between)[0] == ([Reason.WRITTEN.value], True)


def mask_written_between() -> list[float]:
    """The error of two calls whose mask, a slice along its sharded dim, is gathered anew after a write."""
    tatten.enable_dtensor_sdpa()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("kv",))
    q, k, v, _ = tensors()
    whole = torch.randn(B, 1, 1, k.shape[2] + 4)

    def fn(q: Any, k: Any, v: Any, mask: Any) -> tuple[Tensor, Tensor]:
        first = F.scaled_dot_product_attention(q, k, v, mask[..., : k.shape[2]], enable_gqa=True)
        mask.mul_(3)
        second = F.scaled_dot_product_attention(q, k, v, mask[..., : k.shape[2]], enable_gqa=True)
        return first.to_local(), second.to_local()

    def placed() -> list[Any]:
        return place(mesh, (q, [R]), (k, [S2]), (v, [S2]), (whole.clone(), [S3]))

    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(fn, backend="tatten", options={"inner": "eager"})(*placed())
        want = fn(*placed())
    return [float((x - y).abs().max()) for x, y in zip(got, want, strict=True)]


def test_a_slice_that_is_gathered_is_no_view() -> None:
    for errors in run_ranks(2, mask_written_between):
        assert max(errors) < 1e-5, errors
