"""The backend as users see it: its name, modes, options, caches and resets."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairs import pairs
from slow import slow_after
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

import tatten
from tatten import backend
from tatten.ops import moved
from tatten.ops.cuda import gpu
from tatten.ops.inductor import options as inductor_options
from tatten.options import decode_options
from tatten.passes import large_results
from tatten.passes.reasons import Reason

pytestmark = pytest.mark.drawn(5)


def step(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def inputs(length: int = 9):
    torch.manual_seed(0)
    mask = torch.rand(2, 1, 1, length) > 0.3
    return torch.randn(2, 4, 1, 8), torch.randn(2, 2, length, 8), torch.randn(2, 2, length, 8), mask


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()


def test_is_found_by_name() -> None:
    assert "tatten" in torch.compiler.list_backends()


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "options, dynamic, fullgraph",
    slow_after(
        6,
        pairs(
            [None, {"inner": "aot_eager"}, {"inner": "eager"}, {"max_autotune": False}],
            [None, False, True],
            [False, True],
        ),
    ),
    ids=str,
)
def test_compiles(options, dynamic, fullgraph: bool) -> None:
    fn = torch.compile(step, backend="tatten", options=options, dynamic=dynamic, fullgraph=fullgraph)
    for length in (9, 10, 11):
        args = inputs(length)
        torch.testing.assert_close(fn(*args), step(*args))
    assert counters["tatten"]["rewritten"] >= 1
    assert counters["tatten"]["declined"] == 0


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes(mode: str) -> None:
    args = inputs()
    torch.testing.assert_close(torch.compile(step, backend="tatten", mode=mode)(*args), step(*args))
    assert counters["tatten"]["rewritten"] == 1


@pytest.mark.parametrize(
    ("kwargs", "error", "says"),
    [
        ({"options": {"iner": "eager"}}, ValueError, ["iner", "inner, max_q_len"]),
        ({"options": {"inner": "onnx"}}, ValueError, ["`inner`", "'aot_eager'", "'inductor'", "'onnx'"]),
        ({"options": {"inner": "tatten"}}, ValueError, ["`inner` must be one of", "got 'tatten'"]),
        ({"options": ["max_q_len"]}, TypeError, ["`options` must be a dict, got list"]),
        ({"options": {"inner": 3}}, TypeError, ["`inner`", "got 3"]),
        ({"options": {"max_q_len": 0}}, ValueError, ["`max_q_len`", "at least 1", "got 0"]),
        ({"options": {"max_q_len": "8"}}, TypeError, ["`max_q_len`", "int", "got '8'"]),
        ({"options": {"batch_invariant": 1}}, TypeError, ["`batch_invariant`", "bool", "got 1"]),
        ({"options": {"max_autotune": "yes"}}, TypeError, ["max_autotune", "inner, max_q_len, batch_invariant"]),
        ({"options": {"inner": "eager", "max_autotune": True}}, ValueError, ["max_autotune", "'eager'"]),
        ({"options": {"inner": "torch_tensorrt"}}, ImportError, ["`inner` 'torch_tensorrt'", "can't be imported"]),
        ({"mode": "fastest"}, ValueError, ["`mode`", "'fastest'", "reduce-overhead"]),
    ],
)
def test_bad_options(kwargs: dict, error: type[Exception], says: list[str]) -> None:
    with pytest.raises(BackendCompilerFailed) as raised:
        torch.compile(step, backend="tatten", **kwargs)(*inputs())
    inner = raised.value.inner_exception
    assert type(inner) is error
    for part in says:
        assert part in str(inner)


def test_reset_compiles_again() -> None:
    fn = torch.compile(step, backend="tatten", options={"inner": "eager"})
    for _ in range(2):
        fn(*inputs())
        torch._dynamo.reset()
    assert counters["tatten"]["rewritten"] == 2


def test_no_recompiles_as_the_cache_grows() -> None:
    """Two graphs: the first length, and then all others."""
    fn = torch.compile(step, backend="tatten", options={"inner": "aot_eager"})
    for length in range(9, 30):
        fn(*inputs(length))
    assert counters["stats"]["unique_graphs"] == 2
    assert counters["tatten"]["rewritten"] == 2


def test_inference_mode() -> None:
    with torch.inference_mode():
        args = inputs()
        torch.testing.assert_close(torch.compile(step, backend="tatten")(*args), step(*args))
    assert counters["tatten"]["rewritten"] == 1


def test_gradients_flow_through_what_is_left() -> None:
    q, k, v, mask = inputs()
    q.requires_grad_()
    with tatten.recording() as report:
        torch.compile(step, backend="tatten")(q, k, v, mask).sum().backward()
    assert [finding.decline.reason for finding in report.declined] == [Reason.REQUIRES_GRAD]
    want = q.grad.clone()
    q.grad = None
    step(q, k, v, mask).sum().backward()
    torch.testing.assert_close(want, q.grad)


WARM = textwrap.dedent(
    """
    import torch, tatten, json
    from torch._dynamo.utils import counters
    import torch.nn.functional as F
    def step(q, k, v, mask):
        return F.scaled_dot_product_attention(q + 1, k, v, attn_mask=mask, enable_gqa=True)
    query, (key, value) = torch.randn(2, 16, 1, 64), torch.randn(2, 2, 2, 4096, 64)  # a rewrite pays
    args = query, key, value, torch.rand(2, 1, 1, 4096) > 0.3
    with torch.no_grad(), tatten.recording() as report:
        out = torch.compile(step, backend="tatten")(*args)
        torch.testing.assert_close(out, step(*args))
    found = {name: counters[group][name] for group, name in (
        ("inductor", "fxgraph_cache_hit"), ("aot_autograd", "autograd_cache_hit"), ("tatten", "rewritten"))}
    print(json.dumps(found | {"reported": len(report.rewritten)}))
    """
)


@pytest.mark.slow
def test_warm_caches_hit_and_the_report_is_still_filled(tmp_path) -> None:
    import json
    import os

    script = tmp_path / "step.py"
    script.write_text(WARM)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    runs = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, script], env=env, capture_output=True, text=True, timeout=300, check=True
        )
        runs.append(json.loads(done.stdout.strip().splitlines()[-1]))
    assert runs[0] == {"fxgraph_cache_hit": 0, "autograd_cache_hit": 0, "rewritten": 1, "reported": 1}
    assert runs[1] == {"fxgraph_cache_hit": 1, "autograd_cache_hit": 1, "rewritten": 1, "reported": 1}


@pytest.mark.drawn(1, "imports of a fresh interpreter")
def test_import_is_light() -> None:
    """`import tatten` loads neither Triton, transformers nor Inductor, and queries no device."""
    heavy = ["triton", "transformers", "torch._inductor.compile_fx"]
    code = f"import sys, tatten; print([module for module in {heavy} if module in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.gpu
def test_reduce_overhead_on_a_gpu() -> None:
    args = [x.cuda() for x in inputs(300)]
    fn = torch.compile(step, backend="tatten", mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(fn(*args), step(*args))
            args[3] = torch.rand(2, 1, 1, 300, device="cuda") > 0.5
    assert counters["inductor"]["cudagraph_skips"] == 0
    torch._dynamo.reset()


@pytest.mark.gpu
def test_one_captured_graph_serves_any_length() -> None:
    q, k, v, _ = (x.cuda() for x in inputs(700))
    lens = torch.tensor([700, 1], device="cuda")
    tatten.decode_attention(q, k, v, kv_lens=lens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tatten.decode_attention(q, k, v, kv_lens=lens)
    for new in ([3, 400], [0, 700], [65, 64]):
        lens.copy_(torch.tensor(new))
        graph.replay()
        assert torch.equal(out, tatten.decode_attention(q, k, v, kv_lens=lens))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "batch, dynamic, note", [(8, None, "2 linear layers in 2"), (8, True, "1 linear layer in 1"), (1, None, "")]
)
def test_option_decode_replaces_linear_layers_on_hopper(batch: int, dynamic: bool | None, note: str) -> None:
    """The layer of 2048 outputs is read in parts, and therefore left for a dynamic number of rows."""

    def layer(x, key, value, mask, down, up):
        query = F.linear(x, down).view(-1, 16, 1, 128)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return F.linear(out.flatten(1), up)

    torch.manual_seed(0)
    shapes = [(batch, 4096), *[(batch, 4, 4096, 128)] * 2, (2048, 4096), (8192, 2048)]
    args = [(torch.randn(*shape, device="cuda") * 0.1).bfloat16() for shape in shapes]
    args.insert(3, torch.rand(batch, 1, 1, 4096, device="cuda") > 0.9)
    for x in args[:4] if dynamic else ():
        torch._dynamo.mark_dynamic(x, 0)
    with tatten.recording() as report:
        got = torch.compile(layer, backend="tatten", options={"decode": True}, fullgraph=True)(*args)
    assert (note in str(report)) if note else ("linear layer" not in str(report))
    torch.testing.assert_close(got, layer(*args), rtol=2**-6, atol=2**-8)


@pytest.mark.slow
def test_first_compiles_in_several_threads() -> None:
    """PyTorch's lookup of a backend is not thread-safe; our entry point is."""
    script = """
        import threading, torch
        errors, start = [], threading.Barrier(4)
        def work():
            try:
                start.wait()
                torch.compile(torch.neg, backend="tatten", options={"inner": "eager"})(torch.ones(1))
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert not errors, errors
    """
    run = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_what_the_entry_point_rests_on() -> None:
    """`register_backend(None, name=...)` registers nothing, and a loaded entry point may be None."""
    from torch._dynamo import list_backends, register_backend
    from torch._dynamo.backends.registry import lookup_backend

    from tatten import entry_point
    from tatten.backend import tatten

    assert callable(register_backend(None, name="nobody"))
    assert "nobody" not in list_backends(None)
    assert entry_point.backend is None
    assert lookup_backend("tatten") is tatten


def test_option_decode_computes_the_same_on_a_cpu() -> None:
    fn = torch.compile(step, backend="tatten", options={"decode": True})
    args = inputs()
    torch.testing.assert_close(fn(*args), step(*args))


@pytest.mark.parametrize(
    "options, linears, counters",
    [({}, False, False), ({"decode": True}, True, True), ({"decode": True, "max_autotune": True}, False, True)],
    ids=str,
)
def test_option_decode_replaces_linear_layers_and_joins_counters(
    options: dict[str, object], linears: bool, counters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`max_autotune` chooses the kernels of linear layers instead."""
    asked: list[tuple[bool, bool]] = []
    original = backend.rewrite

    def spy(*args: Any, **kwargs: Any) -> Any:
        asked.append((kwargs["linears"], kwargs["counters"]))
        return original(*args, **kwargs)

    monkeypatch.setattr(backend, "rewrite", spy)
    torch.compile(lambda x: x + 1, backend="tatten", options=options)(torch.ones(3))
    assert asked == [(linears, counters)]


def test_option_decode_sets_inductors_options_for_graphs_with_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own options win, and a graph without attention is compiled as it would be without the option."""
    used: list[dict[str, object]] = []
    original = backend.inner_compiler

    def spy(name: str, mode: str | None, options: dict[str, object]) -> object:
        used.append(options)
        return original(name, mode, {})

    monkeypatch.setattr(backend, "inner_compiler", spy)
    monkeypatch.setattr(
        backend,
        "decode_options",
        lambda device, tunes, combines: {
            "coordinate_descent_tuning": tunes,
            "combo_kernels": combines,
            "max_autotune": False,
        },
    )
    torch.compile(step, backend="tatten", options={"decode": True, "max_autotune": True})(*inputs())
    assert used[-1] == {"coordinate_descent_tuning": False, "combo_kernels": True, "max_autotune": True}
    with monkeypatch.context() as patch:
        patch.setattr(large_results, "MOST_ELEMENTS", 1)
        torch._dynamo.reset()
        torch.compile(step, backend="tatten", options={"decode": True})(*inputs())
    assert used[-1] == {"coordinate_descent_tuning": False, "combo_kernels": False, "max_autotune": False}
    weight = torch.randn(8, 8)
    torch.compile(lambda *args: F.linear(step(*args)[:1, :1], weight), backend="tatten", options={"decode": True})(
        *inputs()
    )
    # A product of one row is left.
    assert used[-1] == {"coordinate_descent_tuning": True, "combo_kernels": False, "max_autotune": False}
    for name, tunes in (("coordinate_descent_tuning", True), ("coordinate-descent-tuning", False)):
        torch._dynamo.reset()
        torch.compile(step, backend="tatten", options={"decode": True, name: tunes})(*inputs())
        assert used[-1]["combo_kernels"] != tunes  # kernels that the user tunes are not combined
    torch.compile(lambda x: x + 1, backend="tatten", options={"decode": True})(torch.ones(3))
    assert used[-1] == {}


@pytest.mark.parametrize(
    "options, text",
    [
        ({"decode": 1}, "option `decode` must be a bool, got 1"),
        ({"decode": True, "batch_invariant": True}, "option `decode` must be False with `batch_invariant`, got True"),
        (
            {"decode": True, "inner": "eager"},
            "option `decode` needs `inner` to be 'inductor', got 'eager'",
        ),
    ],
    ids=["type", "batch_invariant", "inner"],
)
def test_option_decode_refuses(options: dict[str, object], text: str) -> None:
    with pytest.raises(BackendCompilerFailed, match=text):
        torch.compile(step, backend="tatten", options=options)(*inputs())


@pytest.mark.parametrize("tunes", [False, True])
@pytest.mark.parametrize("combines", [False, True])
def test_options_of_a_decode_step(tunes: bool, combines: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor knows all of them."""
    choices = {"tunes": tunes, "combines": combines}
    assert decode_options(torch.device("cpu"), **choices) == {}
    tuned = {"coordinate_descent_tuning": True} if tunes else {}
    combined = {"combo_kernels": True, "combo_kernels_pointwise_only": True} if combines else {}
    for early, expected in ((False, tuned), (True, tuned | {"triton.enable_pdl": True} | combined)):
        monkeypatch.setattr(gpu, "has_early_launches", lambda device, early=early: early)
        options = decode_options(torch.device("cuda"), **choices)
        assert options == expected
        assert {*options} <= {*torch._inductor.list_options()}


def test_an_option_that_inductor_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `combo_kernels_pointwise_only`, reductions would be combined, too."""
    monkeypatch.setattr(inductor_options, "config", SimpleNamespace(combo_kernels=False))
    monkeypatch.setattr(moved, "_notes", {})
    monkeypatch.setattr(gpu, "has_early_launches", lambda device: True)
    assert decode_options(torch.device("cuda"), tunes=False, combines=True) == {"triton.enable_pdl": True}
    assert "torch._inductor.config.combo_kernels_pointwise_only is not as" in moved.moved_notes()[0]
