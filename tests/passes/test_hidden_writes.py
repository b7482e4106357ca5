"""Writes that no name shows, names that are not PyTorch's, and tensors that move: equal to eager, one by one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graphs import capture
from torch.testing._internal.two_tensor import TwoTensor

from tatten.passes import Declined, Rewritten, rewrite
from tatten.passes.reasons import Reason

sdpa = F.scaled_dot_product_attention
HQ, S, D = 4, 16, 8
ROWS = torch.arange(S)
NUMBERS = torch.arange(4.0 * S * D)
OFFSETS = torch.tensor([0, 4, S])
MASK = torch.ones(1, 1, 1, S, dtype=torch.bool)


def both(fn, *args):
    """The results of eager and tatten, and the arguments after them; in one graph, since a second one starts afresh."""
    torch._dynamo.reset()
    results = []
    for f in (fn, torch.compile(fn, backend="tatten", options={"inner": "eager"}, fullgraph=True)):
        mine = [x.clone() for x in args]
        with torch.no_grad():
            results.append((f(*mine), *mine))
    return results


def assert_as_eager(fn, *args):
    eager, ours = both(fn, *args)
    torch.testing.assert_close(ours, eager)


WRITES = {
    "embedding": lambda w: F.embedding(ROWS, w, max_norm=0.5),
    "embedding_bag": lambda w: F.embedding_bag(ROWS.view(2, 8), w, max_norm=0.5),
    "batch_norm": lambda w: F.batch_norm(NUMBERS.view(4, -1), w.view(-1), torch.ones(S * D), training=True),
    "torch.batch_norm": lambda w: torch.batch_norm(
        NUMBERS.view(4, -1), None, None, w.view(-1), torch.ones(S * D), True, 0.1, 1e-5, False
    ),
    "instance_norm": lambda w: F.instance_norm(NUMBERS.view(1, -1, 4), w.view(-1), torch.ones(S * D)),
    "numpy": lambda w: w.numpy().fill(0.0),
    "numpy setitem": lambda w: w.numpy().__setitem__(0, 5.0),
    "data": lambda w: w.data.zero_(),
    "foreach": lambda w: torch._foreach_mul_([w], 0.5),
    "setitem of the class": lambda w: torch.Tensor.__setitem__(w, 0, 1.0),
    "method of the class": lambda w: torch.Tensor.zero_(w),
    "packet": lambda w: torch.ops.aten.zero_(w),
    "out": lambda w: torch.mul(w, 2, out=w),
    "outs": lambda w: torch.max(NUMBERS.view(4, S, D), 0, out=(w, torch.zeros(S, D, dtype=torch.int64))),
    "out of an overload": lambda w: torch.ops.aten.mul.out(w, w, out=w),
    "normalize": lambda w: F.normalize(w, out=w),
    "special": lambda w: torch.special.expit(w, out=w),
    "inplace": lambda w: F.silu(w, inplace=True),
    "init": lambda w: torch.nn.init.constant_(w, 0.5),
    "another view": lambda w: w.view(-1)[8:].copy_(torch.ones(S * D - 8)),
    "custom op": lambda w: torch.ops.tatten_test.fill(w),
    "vmap": lambda w: torch.vmap(lambda x: x.mul_(0.5))(w),
    "nested vmap": lambda w: torch.vmap(torch.vmap(lambda x: x.mul_(0.5)))(w),
    "jagged": lambda w: torch.nested.nested_tensor_from_jagged(w, OFFSETS).mul_(0.5),
    "subclass": lambda w: TwoTensor(w, w.clone()).mul_(0.5),
}


@pytest.fixture(scope="module", autouse=True)
def custom_ops():
    with torch.library._scoped_library("tatten_test", "DEF") as library:
        library.define("fill(Tensor(a!) x) -> ()")
        library.define("clone(Tensor x) -> Tensor")
        library.define("to(Tensor x, float factor) -> Tensor")
        library.define("repeat_interleave(Tensor x, int repeats, int dim) -> Tensor")
        library.impl("fill", lambda x: [None, x.fill_(0.5)][0], "CPU")
        library.impl("clone", lambda x: x.flip(2).contiguous(), "CPU")
        library.impl("to", lambda x, factor: x * factor, "CPU")
        library.impl("repeat_interleave", lambda x, n, dim: x.repeat(1, n, 1, 1) * 2, "CPU")
        library.impl("fill", lambda x: None, "Meta")
        library.impl("clone", torch.empty_like, "Meta")
        library.impl("to", lambda x, factor: torch.empty_like(x), "Meta")
        library.impl("repeat_interleave", lambda x, n, dim: x.repeat(1, n, 1, 1), "Meta")
        yield


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", WRITES)
def test_keys_that_were_copied_before_a_write(name: str) -> None:
    def fn(q, w):
        keys = w.view(1, 1, S, D).expand(1, HQ, S, D).contiguous()
        WRITES[name](w)
        return sdpa(q, keys, keys, MASK)

    torch.manual_seed(0)
    q, w = torch.randn(1, HQ, 1, D), torch.randn(S, D) * 3
    written = w.clone()
    WRITES[name](written)
    assert not torch.equal(written, w)
    assert_as_eager(fn, q, w)


READS = {
    "embedding": lambda w: F.embedding(ROWS, w),
    "normalize": lambda w: F.normalize(w),
    "softmax": lambda w: F.softmax(w, dim=-1),
    "silu": lambda w: F.silu(w),
    "layer_norm": lambda w: F.layer_norm(w, (D,)),
    "dropout": lambda w: F.dropout(w, 0.1, training=False),
    "pad": lambda w: F.pad(w, (0, 1)),
    "data": lambda w: w.data + 1,
    "attribute": lambda w: w.mT @ w,
    "float": lambda w: w.float().half().type(torch.float64),
    "special": lambda w: torch.special.softmax(w, 0),
    "linalg": lambda w: torch.linalg.norm(w),
    "einsum": lambda w: torch.einsum("sd,td->st", w, w),
    "split": lambda w: torch.split(w, 4)[1] + w.split(4)[0],
    "packet": lambda w: torch.ops.aten.index_select(w, 0, ROWS),
    "numpy": lambda w: torch.from_numpy(w.numpy() + 1),
    "size": lambda w: torch.zeros(w.size(0), w.numel()),
    "vmap": lambda w: torch.vmap(lambda x: x + 1)(w),
    "write to another in vmap": lambda w: torch.vmap(lambda x: x.mul_(2))(w + 1),
    "write to another in a subclass": lambda w: TwoTensor(w + 1, w + 2).mul_(2).a,
    "write to another that is jagged": lambda w: (
        torch.nested.nested_tensor_from_jagged(w + 1, OFFSETS).mul_(2).values()
    ),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", READS)
def test_keys_that_were_copied_before_a_read(name: str) -> None:
    def fn(q, w):
        keys = w.view(1, 1, S, D).expand(1, HQ, S, D).contiguous()
        return READS[name](w), sdpa(q, keys, keys, MASK)

    args = torch.randn(1, HQ, 1, D), torch.randn(S, D)
    (finding,) = rewrite(capture(fn, *args)).findings
    assert isinstance(finding, Rewritten), finding


OUTS = {
    "cat": lambda k, out: torch.cat([k] * HQ, dim=1, out=out),
    "concat": lambda k, out: torch.concat([k] * HQ, dim=1, out=out),
    "segments": lambda k, out: torch.cat(
        [k[:, :, :1], k[:, :, 1:]], dim=2, out=out.view(-1)[: k.numel()].view_as(k)
    ).expand(-1, HQ, -1, -1),
    "stack": lambda k, out: torch.stack([k] * HQ, dim=1, out=out[:, :, None]).flatten(1, 2),
    "index_select": lambda k, out: torch.index_select(k, 1, torch.zeros(HQ, dtype=torch.int64), out=out),
}


@pytest.mark.parametrize("name", OUTS)
def test_out_is_written(name: str) -> None:
    def fn(q, k, kb, vb):
        return sdpa(q, OUTS[name](k, kb), OUTS[name](k, vb), MASK)

    torch.manual_seed(0)
    buffers = torch.zeros(2, HQ, S, D), torch.zeros(2, HQ, S, D)
    assert_as_eager(fn, torch.randn(2, HQ, 1, D), torch.randn(2, 1, S, D), *buffers)


def contiguous(x):
    return x.flip(2)


torch.compiler.allow_in_graph(contiguous)

NAMESAKES = {
    "clone": lambda k: torch.ops.tatten_test.clone.default(k.repeat_interleave(2, 1)),
    "to": lambda k: torch.ops.tatten_test.to.default(k.repeat_interleave(2, 1), 3.0),
    "repeat_interleave": lambda k: torch.ops.tatten_test.repeat_interleave.default(k, 2, 1),
    "contiguous": lambda k: contiguous(k.repeat_interleave(2, 1)),
}


@pytest.mark.parametrize("name", NAMESAKES)
def test_namesakes_of_ops(name: str) -> None:
    def fn(q, k, mask):
        return sdpa(q, NAMESAKES[name](k), NAMESAKES[name](k), mask)

    torch.manual_seed(0)
    assert_as_eager(fn, torch.randn(2, HQ, 1, D), torch.randn(2, 2, S, D), (ROWS < 5)[None, None, None])


def test_a_tensor_that_moves() -> None:
    """Fake tensors tell what they are at the end of the graph: then `w` is `other`, and `keys` are none of its."""

    def fn(q, w, other):
        stored = w.view(1, 1, S, D)
        keys = stored.expand(1, HQ, S, D).contiguous()
        w.mul_(2)
        w.data = other
        return sdpa(q, keys, keys, MASK)

    args = torch.randn(1, HQ, 1, D), torch.randn(S, D), torch.randn(S, D)
    assert_as_eager(fn, *args)
    (finding,) = rewrite(capture(fn, *args)).findings
    assert isinstance(finding, Declined)
    assert finding.decline.reason is Reason.WRITTEN


def keys_reshaped(q, stored, other):
    stored = stored + 1
    keys = stored.view(1, 1, S, D).expand(1, HQ, S, D)
    stored.transpose_(0, 1)
    return sdpa(q, keys, keys, MASK)


def others_reshaped(q, stored, other):
    """Tensors that are reshaped in place, before or after, that keys do not depend on."""
    keys = stored.view(1, 1, S, D).expand(1, HQ, S, D)
    positions = other + 1
    positions.unsqueeze_(0)
    return (sdpa((q + 1).detach_(), keys, keys, MASK) * 2).squeeze_(2) + positions.mean()


def result_reshaped(q, stored, other):
    keys = stored.view(1, 1, S, D).expand(1, HQ, S, D)
    return sdpa(q, keys, keys, MASK).squeeze_(2)


RESHAPED = [(keys_reshaped, Declined), (result_reshaped, Declined), (others_reshaped, Rewritten)]


@pytest.mark.parametrize(("fn", "kind"), RESHAPED)
def test_tensors_that_are_reshaped_in_place(fn, kind: type) -> None:
    def args():
        torch.manual_seed(0)
        return torch.randn(1, HQ, 1, D), torch.randn(S, D), torch.randn(S, D)

    (finding,) = rewrite(capture(fn, *args())).findings
    assert isinstance(finding, kind)
    assert_as_eager(fn, *args())


def test_schemas_that_tell_less_than_the_op_does() -> None:
    """PyTorch's own list of writes that schemas hide has just those that we read off the names of arguments."""
    untold = set()
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::") and any(x.name.startswith("running_") for x in schema.arguments):
            info = torch._C._SchemaInfo(schema)
            for i, x in enumerate(schema.arguments):
                mutable = info.is_mutable(torch._C._SchemaArgument(torch._C._SchemaArgType.input, i))
                if mutable and not (x.alias_info is not None and x.alias_info.is_write):
                    untold.add(x.name)
    assert untold == {"running_mean", "running_var"}


@pytest.mark.parametrize("name", ["vmap", "subclass"])
def test_a_mask_that_is_written_between_two_calls(name: str) -> None:
    """The layers do not share their masks."""

    def fn(q, k, m, shift):
        first, second = (sdpa(q, k, k, shift.masked_fill(m, -1e4)) for _ in range(2))
        WRITES[name](shift)
        return first, second, sdpa(q, k, k, shift.masked_fill(m, -1e4))

    torch.manual_seed(0)
    assert_as_eager(fn, torch.randn(1, HQ, 1, D), torch.randn(1, HQ, S, D), MASK & (ROWS > 9), torch.randn(1, S) * 9)
