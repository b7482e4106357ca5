"""The choice of a provider for decode attention on CUDA: the table, their limits, and no fallback from a named one."""

from __future__ import annotations

import importlib
from itertools import product
from math import log2
from pathlib import Path
from typing import Any

import pytest
import torch
from provider_calls import provider_of_op
from torch import Tensor

from tatten.ops.cuda import dispatch as cuda
from tatten.ops.cuda import providers, tuning
from tatten.ops.cuda.gpu_rates import GpuRates
from tatten.ops.cuda.providers import choose_provider, unsupported_reason
from tatten.ops.cuda.tuning import Tuning, gpu_rates, module_name, round_log2, tuning_of, tunings
from tatten.ops.cuda.workload import Workload
from tatten.ops.kernel_signatures import decode_kernel

# 1, 2 and 4 pairs; 256, 512 and 1024 keys
TABLE = Tuning(
    "a GPU",
    (9, 0),
    {
        1: {256: "triton", 512: "cudnn", 1024: "flash"},
        2: {256: "cudnn", 1024: "triton"},
        4: {256: "flash"},
    },
)
NAMES = ("triton", "cudnn", "flash", "fa2", "fa3", "fa4")
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
decode_on_cuda = decode_kernel(cuda.attention)


def tensors(
    batch: int = 2,
    q_heads: int = 8,
    kv_heads: int = 2,
    q_len: int = 1,
    kv_len: int = 1024,
    dim: int = 128,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:
    """Make query, key and value without data: the choice needs none."""
    shapes = (q_heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, value_dim or dim)
    query, key, value = (torch.empty(batch, *shape, dtype=dtype, device="meta") for shape in shapes)
    return query, key, value


def work(plain: bool = True, **sizes: Any) -> Workload:
    return Workload.of(*tensors(**sizes), () if plain else ("mask",))


def use_table(monkeypatch: pytest.MonkeyPatch, provider: str) -> None:
    """Have a table that names one provider for all sizes."""
    monkeypatch.setattr(providers, "tuning_of", lambda *_: Tuning("a GPU", (9, 0), {1: {256: provider}}))


@pytest.mark.parametrize("table", tunings(), ids=lambda table: table.device)
def test_each_table_is_whole(table: Tuning) -> None:
    """Rows are for powers of two from 1 on; each begins at 256 keys and names providers."""
    assert list(table.fastest) == [1 << i for i in range(len(table.fastest))]
    for row in table.fastest.values():
        assert next(iter(row)) == 256
        assert list(row) == sorted(1 << round_log2(keys) for keys in row)
        assert set(row.values()) <= set(NAMES)


def test_a_table_is_where_its_device_says() -> None:
    for table in tunings():
        module = importlib.import_module(f"tatten.ops.cuda.tuning.{module_name(table.device)}")
        assert table.device == module.DEVICE


@pytest.fixture
def calibrate(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("calibrate")


@pytest.mark.parametrize("table", tunings(), ids=lambda table: table.device)
def test_a_module_ends_in_the_table_that_calibrate_writes(table: Tuning, calibrate: Any) -> None:
    lengths = [256 << i for i in range(10)]
    found = {pairs: {n: table.provider(pairs, n) for n in lengths} for pairs in table.fastest}
    written = (Path(tuning.__file__).parent / f"{module_name(table.device)}.py").read_text()
    assert calibrate.with_table(written, calibrate.table_text(found)) == written
    other = calibrate.with_table(written, calibrate.table_text({1: {256: "flash"}}))
    assert other.startswith(written[: written.index("FASTEST")]), "the rates stay"
    assert other.endswith('FASTEST = {\n    1: {256: "flash"},\n}\n')


def test_calibrate_writes_a_new_module(calibrate: Any) -> None:
    rates = {"read_bytes_per_us": 1.916e6, "product_flops_per_us": 3.1e8}
    written = calibrate.rates_text("NVIDIA X", (9, 0), rates) + calibrate.table_text({1: {256: "triton"}})
    module: dict[str, Any] = {}
    exec(written, module)
    assert (module["DEVICE"], module["CAPABILITY"], module["FASTEST"]) == ("NVIDIA X", (9, 0), {1: {256: "triton"}})
    assert module["RATES"] == GpuRates(read_bytes_per_us=1.9e6, product_flops_per_us=3.1e8)


@pytest.mark.parametrize(
    "device, name",
    [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100_80gb_hbm3"), ("NVIDIA A100-SXM4-80GB", "a100_sxm4_80gb")],
)
def test_the_name_of_a_module(device: str, name: str) -> None:
    assert module_name(device) == name


def test_a_gpu_has_its_own_table_or_borrows_one_of_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Tuning(name, capability, {}) for name, capability in {"B": (10, 0), "A": (8, 0), "H": (9, 0)}.items()]
    made.append(Tuning("NVIDIA H200", (9, 0), {}))
    monkeypatch.setattr(tuning, "tunings", lambda: tuple(made))
    choose = tuning_of.__wrapped__
    assert choose("A", (9, 0)).device == "A"
    assert choose("H", (9, 0)).device == "H"
    assert choose("other", (9, 0)).device == "NVIDIA H200"
    assert choose("", (9, 0)).device == "NVIDIA H200"
    assert choose("other", (8, 9)).device == "A"
    assert choose("other", (10, 3)).device == "B"
    assert choose("other", (12, 0)) is None, "Blackwell for desktops has other kernels than that for servers"
    assert choose("other", (7, 5)) is None


def test_a_gpu_has_the_rates_of_its_module_or_borrows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """An architecture without a module has an H200's rates; so have plans without a GPU, which are for Hopper."""
    rates = {"B": GpuRates(read_bytes_per_us=7.0e6), "NVIDIA H200": GpuRates(waves=8)}
    made = Tuning("B", (10, 0), {}, rates["B"]), Tuning("NVIDIA H200", (9, 0), {}, rates["NVIDIA H200"])
    monkeypatch.setattr(tuning, "tunings", lambda: made)
    monkeypatch.setattr(tuning, "tuning_of", tuning_of.__wrapped__)

    def rates_of(device: str, capability: tuple[int, int]) -> GpuRates:
        monkeypatch.setattr(tuning, "device_name", lambda _: device)
        monkeypatch.setattr(tuning, "capability", lambda _: capability)
        return gpu_rates.__wrapped__(torch.device("cuda"))

    assert rates_of("B", (10, 0)) == rates_of("other", (10, 3)) == rates["B"]
    assert rates_of("other", (9, 0)) == rates_of("", (9, 0)) == rates["NVIDIA H200"]
    assert rates_of("other", (8, 0)) == GpuRates()


@pytest.mark.parametrize("table", tunings(), ids=lambda table: table.device)
def test_every_size_has_a_provider(table: Tuning) -> None:
    for pairs in (0, 1, 3, 100, 10**6):
        for kv_len in (0, 1, 256, 5000, 10**8):
            assert table.provider(pairs, kv_len) in NAMES


def test_a_borrowed_table_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    use_table(monkeypatch, "cudnn")
    monkeypatch.setattr(providers, "device_name", lambda device: "")
    assert providers.table_note(work()) == ""  # there is no GPU to borrow for
    monkeypatch.setattr(providers, "device_name", lambda device: "another GPU")
    assert providers.table_note(work()) == "provider table measured on a GPU, borrowed for another GPU"
    for asks_none in (work(plain=False), work(dtype=torch.float32), work(q_len=5)):
        assert providers.table_note(asks_none) == ""
    monkeypatch.setattr(providers, "device_name", lambda device: "a GPU")
    assert providers.table_note(work()) == ""


def test_triton_decodes_on_an_architecture_without_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "device_name", lambda device: "NVIDIA X1")
    monkeypatch.setattr(providers, "capability", lambda device: (99, 0))
    for pairs, kv_len in product((1, 64, 1024), (256, 4096, 131072)):
        assert choose_provider(work(batch=pairs, kv_heads=1, kv_len=kv_len)) == "triton"
    assert providers.table_note(work()) == "no provider table for NVIDIA X1, nor for another GPU of its architecture"
    assert providers.table_note(work(plain=False)) == ""


WRONG_VERSIONS, RIGHT_VERSIONS = (91900, 92000, 92400, 92500), (None, 90100, 91801, 92401, 92501, 92600)


@pytest.mark.parametrize("major", [8, 9, 10, 11, 12])
@pytest.mark.parametrize("version", [*WRONG_VERSIONS, *RIGHT_VERSIONS])
def test_cudnn_kernels_that_decode_wrong_are_refused(
    version: int | None, major: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch 2.15 refuses the same ones: pytorch/pytorch#194927."""
    use_table(monkeypatch, "cudnn")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(providers, "capability", lambda device: (major, 0))
    wrong = version in WRONG_VERSIONS and major in (10, 11)
    reason = unsupported_reason("cudnn", work())
    assert ("wrong results" in reason and str(version) in reason) if wrong else reason is None
    assert choose_provider(work()) == ("triton" if wrong else "cudnn")
    assert unsupported_reason("cudnn", work(q_len=5)) is None, "only the kernel for one query is wrong"
    assert unsupported_reason("flash", work()) is None
    if wrong:
        with pytest.raises(NotImplementedError, match=r"`provider` 'cudnn' can't compute this: .*wrong results"):
            decode_on_cuda(*tensors(), provider="cudnn")


def test_the_nearest_power_of_two() -> None:
    assert round_log2(0) == 0
    for n in [*range(1, 3000), 2**31 - 1, 2**40 + 1]:
        assert abs(log2(n) - round_log2(n)) <= 0.5 + 1e-9, n


@pytest.mark.parametrize(
    "pairs, kv_len, provider",
    [
        (1, 256, "triton"),
        (1, 512, "cudnn"),
        (1, 1024, "flash"),
        (2, 256, "cudnn"),
        (2, 512, "cudnn"),
        (2, 1024, "triton"),
        (4, 512, "flash"),
        (1, 0, "triton"),
        (1, 362, "triton"),
        (1, 363, "cudnn"),  # 256 * sqrt(2) is 362.04
        (3, 1, "flash"),
        (10**6, 10**9, "flash"),
        (2, 10**9, "triton"),
    ],
)
def test_the_nearest_cell(pairs: int, kv_len: int, provider: str) -> None:
    assert TABLE.provider(pairs, kv_len) == provider


@pytest.mark.parametrize(
    "provider, shape, says",
    [
        ("cudnn", {}, None),
        ("flash", {}, None),
        ("flash", {"dim": 256}, None),
        ("cudnn", {"dtype": torch.float16, "dim": 72, "q_len": 5}, None),
        ("cudnn", {"dim": 256}, "up to 128 in eights, not 256 and 256"),
        ("flash", {"dim": 264}, "up to 256"),
        ("flash", {"dim": 100}, "in eights"),
        ("flash", {"dim": 64, "value_dim": 128}, "not 64 and 128"),
        ("flash", {"dtype": torch.float32}, "not torch.float32"),
        ("cudnn", {"dtype": torch.float64}, "not torch.float64"),
        ("cudnn", {"kv_len": 0}, "at least one"),
    ],
)
def test_what_a_provider_cannot_compute(provider: str, shape: dict, says: str | None) -> None:
    reason = unsupported_reason(provider, work(**shape))
    assert reason is None if says is None else says in reason
    assert "no mask" in unsupported_reason(provider, work(plain=False, **shape))


def test_float8_needs_a_gpu_that_converts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    query, *kv = tensors()
    kv = [x.to(torch.float8_e4m3fn) for x in kv]
    float8 = Workload.of(query, *kv)
    assert unsupported_reason("triton", float8) is None
    assert "float8" in unsupported_reason("cudnn", float8)
    monkeypatch.setattr(providers, "has_float8", lambda device: False)
    assert "from compute capability 8.9 on" in unsupported_reason("triton", float8)
    assert unsupported_reason("triton", Workload.of(query, *(x.to(torch.int8) for x in kv))) is None
    assert unsupported_reason("triton", work(plain=False)) is None


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("provider", ["cudnn", "flash"])
def test_strided_head_dims_are_declined(provider: str, which: int) -> None:
    given = list(tensors(dim=64, kv_len=64, q_len=64))
    given[which] = given[which].mT
    assert "dense" in unsupported_reason(provider, Workload.of(*given))


@pytest.mark.parametrize("provider", ["triton", "cudnn", "flash"])
def test_the_fastest_is_one_that_can(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_table(monkeypatch, provider)
    assert choose_provider(work()) == provider
    assert choose_provider(work(dim=256)) == ("flash" if provider == "flash" else "triton")
    for shape in ({"dtype": torch.float32}, {"kv_len": 0}, {"dim": 100}, {"q_len": 5}, {"q_heads": 64}):
        assert choose_provider(work(**shape)) == "triton"
    assert choose_provider(work(plain=False)) == "triton"
    assert choose_provider(work(dtype=torch.float64)) == "reference"


@pytest.mark.parametrize("provider", ["cudnn", "flash"])
@pytest.mark.parametrize(
    "name, given",
    [
        ("mask", {"attn_mask": torch.empty(2, 1, 1, 1024, dtype=torch.bool, device="meta")}),
        ("lengths", {"kv_lens": torch.empty(2, dtype=torch.int64, device="meta")}),
        ("window", {"window": 5}),
        ("soft cap", {"softcap": 1.0}),
        ("sinks", {"sinks": torch.empty(8, device="meta")}),
        ("scale that is 0 or less", {"scale": -1.0}),
    ],
)
def test_what_is_named_and_cannot_is_an_error(provider: str, name: str, given: dict) -> None:
    with pytest.raises(NotImplementedError, match=f"`provider` '{provider}' can't compute this: .*{name}"):
        decode_on_cuda(*tensors(), **given, provider=provider)


@pytest.mark.parametrize("provider", ["cudnn", "flash"])
def test_what_is_named_does_not_fall_back_for_a_shape(provider: str) -> None:
    for shape in ({"dim": 100}, {"dtype": torch.float32}, {"dtype": torch.float64}, {"kv_len": 0}):
        with pytest.raises(NotImplementedError, match=provider):
            decode_on_cuda(*tensors(**shape), provider=provider)


@pytest.mark.parametrize("fastest", ["cudnn", "flash"])
def test_auto_asks_the_table_and_a_name_does_not(fastest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_table(monkeypatch, fastest)
    assert provider_of_op(*tensors()) == fastest
    for name in ("cudnn", "flash"):
        assert provider_of_op(*tensors(), provider=name) == name


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
EXTRAS: list[dict[str, Any]] = [
    {},
    {"attn_mask": torch.empty(2, 1, 1, 1024, dtype=torch.bool, device="meta")},
    {"kv_lens": torch.empty(2, dtype=torch.int64, device="meta")},
    {"window": 5},
    {"scale": 0.0},
]


@pytest.mark.parametrize("extras", EXTRAS, ids=lambda extras: next(iter(extras), "plain"))
@pytest.mark.parametrize("fastest", ["triton", "cudnn", "flash"])
def test_the_op_runs_what_is_chosen(fastest: str, extras: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    use_table(monkeypatch, fastest)
    for dtype, dim, q_len in product(DTYPES, (64, 80, 100, 128, 192, 256), (1, 5)):
        chosen = choose_provider(work(plain=not extras, dtype=dtype, dim=dim, q_len=q_len))
        assert provider_of_op(*tensors(dtype=dtype, dim=dim, q_len=q_len), **extras) == chosen
