"""One step of decode attention, ours beside the kernels of `peers.py`, on random bfloat16 data.

    python benchmarks/decode.py --device cuda --section nine       # or grid, ragged, static; default: all
    python benchmarks/decode.py --device cpu                       # tiny shapes against SDPA

    nine    the shapes of KV that models have
    grid    batch 1 to 128 x length 1k to 64k x four pairs of heads
    ragged  lengths that differ: ours with `kv_lens`, the peers on packed tokens or pages, SDPA with the mask that it
            needs at the longest length
    static  a cache of which 1/16 is used, with a bool mask, against a cache of exactly that length; `layer` gets what
            the mask leaves, as the layers of a compiled model do, the others find it in each call; `bias` and
            `bias_layer` have a bias of `finfo.min` on the unused slots instead

`auto` is `tatten.decode_attention`, `triton` the same with that provider; `fi` is FlashInfer's batch decode, `fi_tc`
the same on tensor cores, and `fi_one` its decode of one request (--flashinfer). On a GPU each candidate is a captured
CUDA graph of several calls, in which it goes round copies of K and V that the L2 cannot hold. Before it is timed, it is
held to float64 on a sample of sequences. The candidates take turns, and medians are shown in microseconds per call. The
floor is each key and value once, at the best rate at which PyTorch reads or copies in the same run.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import peers
import torch
import torch.nn.functional as F
from timing import as_graph, seconds
from torch import Tensor

import tatten

OURS = ("auto", "triton")
UNIFORM = *OURS, "cudnn", "cudnn_packed", "flash", "fa3", "fi", "fi_tc", "fi_one"
COLUMNS = {
    "cuda": {
        "nine": UNIFORM,
        "grid": UNIFORM,
        "ragged": (*OURS, "sdpa", "fa3", "fa3_8", "fa3_32", "fi", "fi_tc"),
        "static": (*OURS, "layer", "bias", "bias_layer", "exact", "sdpa"),
    },
    "cpu": {
        "nine": ("auto", "sdpa"),
        "grid": ("auto", "sdpa"),
        "ragged": ("auto", "sdpa"),
        "static": ("auto", "layer", "bias", "bias_layer", "exact", "sdpa"),
    },
}
L2 = {"cuda": 200 << 20, "cpu": 8 << 20}  # bytes of KV of which the cache keeps nothing that is of use


@dataclass(frozen=True)
class Shape:
    """Sequences of these lengths, in a cache of `capacity` slots for each."""

    section: str
    name: str
    q_heads: int
    kv_heads: int
    lengths: tuple[int, ...]
    capacity: int
    head_dim: int = 128

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def kv_bytes(self) -> int:
        return 4 * sum(self.lengths) * self.kv_heads * self.head_dim

    def copies(self, device: str) -> int:
        return -(-L2[device] // self.kv_bytes)

    @property
    def size(self) -> int:
        """Numbers in the keys of one copy."""
        return self.batch * self.kv_heads * self.capacity * self.head_dim


def uniform(section: str, batch: int, q_heads: int, kv_heads: int, length: int, head_dim: int = 128) -> Shape:
    return Shape(section, f"{length}", q_heads, kv_heads, (length,) * batch, length, head_dim)


def ragged(name: str, lengths: list[int], q_heads: int = 32, kv_heads: int = 8) -> Shape:
    return Shape("ragged", name, q_heads, kv_heads, tuple(lengths), -(-max(lengths) // peers.PAGE) * peers.PAGE)


def static(batch: int, used: int, q_heads: int = 32, kv_heads: int = 8) -> Shape:
    return Shape("static", f"{used} of {16 * used}", q_heads, kv_heads, (used,) * batch, 16 * used)


def log_uniform(batch: int, low: int, high: int) -> list[int]:
    x = torch.rand(batch, generator=torch.Generator().manual_seed(batch))
    return (low * (high / low) ** x).int().tolist()


def cuda_shapes() -> list[Shape]:
    k = 1024
    nine = [
        (1, 32, 8, 4 * k, 128),
        (1, 32, 8, 32 * k, 128),
        (1, 32, 8, 128 * k, 128),
        (16, 32, 8, 8 * k, 128),
        (64, 32, 8, 2 * k, 128),
        (128, 64, 8, 4 * k, 128),
        (1, 56, 56, 64 * k, 64),
        (4, 32, 32, 8 * k, 128),
        (8, 32, 1, 16 * k, 128),
    ]
    middle = torch.randint(1638, 16 * k + 1, (32,), generator=torch.Generator().manual_seed(0)).tolist()
    one_long = [128 * k] + [k] * 31
    return [
        *(uniform("nine", *shape) for shape in nine),
        *(
            uniform("grid", batch, *heads, length)
            for heads in ((32, 8), (64, 8), (32, 32), (8, 1))
            for batch in (1, 8, 32, 128)
            for length in (k, 4 * k, 16 * k, 64 * k)
        ),
        ragged("log-uniform 1k to 64k", log_uniform(32, k, 64 * k)),
        ragged("uniform 1.6k to 16k", middle),
        ragged("one 128k and 31 of 1k", one_long),
        ragged("log-uniform 1k to 64k", log_uniform(8, k, 64 * k)),
        ragged("one 128k and 31 of 1k", one_long, 64),
        *(static(batch, used) for batch in (1, 8, 32) for used in (k, 4 * k)),
    ]


def cpu_shapes() -> list[Shape]:
    return [
        uniform("nine", 2, 8, 2, 512, 64),
        uniform("nine", 1, 4, 4, 1024),
        *(uniform("grid", batch, 8, 2, length) for batch in (1, 4) for length in (128, 512)),
        ragged("log-uniform 64 to 1k", log_uniform(8, 64, 1024), 8, 2),
        ragged("one 2k and 3 of 64", [2048, 64, 64, 64], 8, 2),
        *(static(batch, 64, 8, 2) for batch in (1, 4)),
    ]


class Problem:
    """Random queries, and `copies` of K and V, which lie one after the other in `pool`."""

    def __init__(self, shape: Shape, pool: tuple[Tensor, Tensor]) -> None:
        self.shape, self.pool = shape, pool
        device = pool[0].device
        self.copies = shape.copies(device.type)
        self.q = torch.randn(
            self.copies, shape.batch, shape.q_heads, 1, shape.head_dim, device=device, dtype=torch.bfloat16
        )
        self.lengths = torch.tensor(shape.lengths, dtype=torch.int32, device=device)
        self.mask = torch.arange(shape.capacity, device=device) < self.lengths[:, None, None, None]
        self.bias = torch.where(self.mask, 0.0, torch.finfo(torch.bfloat16).min).bfloat16()
        self.starts = {
            "packed": [0, *torch.tensor(shape.lengths).cumsum(0).tolist()],
            "pages": [0, *(-(-torch.tensor(shape.lengths) // peers.PAGE) * peers.PAGE).cumsum(0).tolist()],
        }
        self.exact = functools.cache(self._exact)

    def kv(self, layout: str, copy: int) -> tuple[Tensor, Tensor]:
        """One copy, as the kernel wants it; the numbers are the same for all, their meaning is not."""
        s = self.shape
        length = s.lengths[0] if layout == "exact" else s.capacity
        shape = {"packed": (-1, s.kv_heads, s.head_dim), "pages": (-1, peers.PAGE, s.kv_heads, s.head_dim)}.get(
            layout, (s.batch, s.kv_heads, length, s.head_dim)
        )
        size = s.size * length // s.capacity
        keys, values = (x[copy * s.size :][:size].view(shape) for x in self.pool)
        return keys, values

    def _exact(self, layout: str, copy: int, sequence: int) -> Tensor:
        """`[q_heads, head_dim]` in float64."""
        s, length = self.shape, self.shape.lengths[sequence]

        def own(x: Tensor) -> Tensor:
            if layout not in self.starts:
                return x[sequence, :, :length].double()
            start = self.starts[layout][sequence]
            return x.view(-1, s.kv_heads, s.head_dim)[start : start + length].transpose(0, 1).double()

        keys, values = map(own, self.kv(layout, copy))
        q = self.q[copy, sequence].double().view(s.kv_heads, -1, s.head_dim)
        scores = q @ keys.transpose(1, 2) * s.head_dim**-0.5
        return (scores.softmax(-1) @ values).flatten(0, 1)

    def error(self, layout: str, copy: int, out: Tensor) -> float:
        """The largest relative error of the first, the last and the longest sequence; NaN if any number of all is."""
        s = self.shape
        out = out.reshape(s.batch, s.q_heads, s.head_dim).double()
        if out.isnan().any():
            return math.nan
        sample = {0, s.batch - 1, s.lengths.index(max(s.lengths))}
        exact = {b: self.exact(layout, copy, b) for b in sample}
        return max(((out[b] - x).norm() / x.norm()).item() for b, x in exact.items())


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def candidates(p: Problem) -> dict[str, tuple[str, Callable[[], Attention | None]]]:
    """For each the layout of its KV, and what makes its attention of `q` `[batch, q_heads, 1, d]`, k and v."""
    s = p.shape
    given = {"ragged": {"kv_lens": p.lengths}, "static": {"attn_mask": p.mask}}.get(s.section, {})
    mask = p.mask if given else None

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tatten.decode_attention(q, k, v, **given)

    def triton(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tatten.decode_attention(q, k, v, provider="triton", **given)

    def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tatten.decode_attention(q, k, v, attn_mask=p.bias)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    def layer(mask: Tensor) -> Attention:
        """As in a layer of a compiled model: what the mask leaves was found once for all of them."""
        ops = torch.ops.tatten
        block_mask = ops.block_mask(mask)
        return lambda q, k, v: ops.decode_attention(q, k, v, mask, None, None, block_mask)[0]

    def fa3(splits: int = 0) -> Attention | None:
        kernel = peers.fa3()
        cu_q = torch.arange(s.batch + 1, dtype=torch.int32, device=p.q.device)
        cu_k = torch.tensor(p.starts["packed"], dtype=torch.int32, device=p.q.device)
        longest = max(s.lengths)
        return kernel and (lambda q, k, v: kernel(q.squeeze(2), k, v, cu_q, cu_k, 1, longest, splits)[0])

    def batch(tensor_cores: bool) -> Attention | None:
        if s.head_dim != 128:  # each head_dim is compiled anew
            return None
        kernel = peers.flashinfer_paged(s.lengths, s.q_heads, s.kv_heads, s.head_dim, p.q.dtype, tensor_cores)
        return kernel and (lambda q, k, v: kernel(q.squeeze(2), k, v))

    def one() -> Attention | None:
        kernel = peers.flashinfer_single() if s.batch == 1 and s.head_dim == 128 else None
        return kernel and (lambda q, k, v: kernel(q[0, :, 0], k, v))

    return {
        "auto": ("slots", lambda: ours),
        "triton": ("slots", lambda: triton),
        "layer": ("slots", lambda: layer(p.mask)),
        "bias": ("slots", lambda: biased),
        "bias_layer": ("slots", lambda: layer(p.bias)),
        "exact": ("exact", lambda: tatten.decode_attention),
        "sdpa": ("slots", lambda: sdpa),
        "cudnn": ("slots", peers.cudnn),
        "cudnn_packed": ("slots", peers.cudnn_packed),
        "flash": ("slots", peers.flash),
        "fa3": ("packed", fa3),
        "fa3_8": ("packed", lambda: fa3(8)),
        "fa3_32": ("packed", lambda: fa3(32)),
        "fi": ("pages", lambda: batch(False)),
        "fi_tc": ("pages", lambda: batch(True)),
        "fi_one": ("packed", one),
    }


def prepare(p: Problem, layout: str, make: Callable[[], Attention | None]) -> tuple[Callable[[], object], int, float]:
    """A step to time, the number of its calls, and its error; an exception if it does not run, or is wrong."""
    attention = make()
    if attention is None:
        raise RuntimeError("not installed, or not for this shape")
    inputs = [(p.q[i], *p.kv(layout, i)) for i in range(p.copies)]
    inputs *= max(1, min(8 // p.copies, (2 << 30) // p.shape.kv_bytes))  # many calls of what is short

    def step() -> list[Tensor]:
        return [attention(*x) for x in inputs]

    if p.q.is_cuda:
        for _ in range(2):
            attention(*inputs[0])
        torch.cuda.synchronize()
        step = as_graph(step)
        for out in step():
            out.fill_(math.nan)
    outs = step()
    last = p.copies - 1
    error = max(p.error(layout, 0, outs[0]), p.error(layout, last, outs[last]), key=lambda x: (math.isnan(x), x))
    if not error < 1e-2:
        raise ArithmeticError(f"wrong: relative error {error:.1e}")
    return step, len(inputs), error


def attempt(*args: object) -> tuple[Callable[[], object], int, float] | str:
    """`prepare`, or why not."""
    try:
        return prepare(*args)
    except Exception as e:  # whatever a peer may raise
        return f"{type(e).__name__}: {(str(e).strip() or '-').splitlines()[0]}"


def microseconds(step: Callable[[], object], device: str, calls: int, repeats: int) -> float:
    step()  # the GPU is busy while the host goes on
    return seconds(step, device, repeats) / calls * 1e6


def measure(p: Problem, names: list[str], device: str, rounds: int) -> dict[str, object]:
    found = candidates(p)
    tried = {name: attempt(p, *found[name]) for name in names}
    ready = {name: x for name, x in tried.items() if not isinstance(x, str)}
    once = {name: microseconds(step, device, 1, 1) for name, (step, _, _) in ready.items()}
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(rounds):
        for name, (step, calls, _) in ready.items():
            times[name].append(microseconds(step, device, calls, max(1, min(50, int(2e3 / once[name])))))
    return {
        "us": {name: statistics.median(x) for name, x in times.items()},
        "errors": {name: error for name, (_, _, error) in ready.items()},
        "left_out": {name: x for name, x in tried.items() if isinstance(x, str)},
    }


def read_rate(device: str) -> float:
    """Bytes per second: the best of a sum, a maximum, and a copy of which both sides count."""
    x = torch.randn(1 << (26 if device == "cpu" else 30), device=device)
    runs = (x.sum, x.nbytes), (x.amax, x.nbytes), (x.clone, 2 * x.nbytes)
    return max(size * 1e6 / microseconds(run, device, 1, 3) for run, size in runs for _ in range(5))


def geomean(ratios: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def bars(section: str, rows: list[dict]) -> dict[str, tuple[float, float]]:
    """What is asked of a section's rows: a figure, and its bound."""
    ratios = [r["ratio"] for r in rows if r["ratio"]]
    small = [r["ratio"] for r in rows if r["ratio"] and r["kv_mb"] < 64]
    if not ratios:
        return {}
    if section == "static":
        layers = [r["us"]["layer"] / r["us"]["exact"] for r in rows if {"layer", "exact"} <= r["us"].keys()]
        found = {"largest ratio to the exact length, the mask's list found in the call": (max(ratios), 1.3)}
        return found | ({"and found before, for all layers": (max(layers), 1.3)} if layers else {})
    limits = (1.0, 0.93) if section == "ragged" else (1.03, 0.9)
    found = {
        "largest ratio to the best peer": (max(ratios), limits[0]),
        "geometric mean": (geomean(ratios), limits[1]),
    }
    if section == "ragged":
        masked = [r["us"]["auto"] / r["us"]["sdpa"] for r in rows if {"auto", "sdpa"} <= r["us"].keys()]
        found |= {"largest ratio to SDPA with a mask": (max(masked), 1 / 1.6)} if masked else {}
    else:
        found |= {"largest ratio where KV is under 64 MB": (max(small), 0.75)} if small else {}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--section", nargs="*", default=["nine", "grid", "ragged", "static"], choices=COLUMNS["cpu"])
    parser.add_argument("--only", type=lambda x: x.split(","), help="which candidates, with commas; default: all")
    parser.add_argument("--flashinfer", action="store_true", help="FlashInfer also, which compiles for some minutes")
    parser.add_argument("--max-gb", type=float, default=40, help="leave out rows with a larger cache")
    parser.add_argument("--floor-tbs", type=float, help="TB/s of the floor; default: measured")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()

    device = args.device
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    measured = read_rate(device)
    rate = args.floor_tbs * 1e12 if args.floor_tbs else measured
    print(f"{name}, torch {torch.__version__}, reads {measured / 1e12:.3f} TB/s, floor at {rate / 1e12:.3f} TB/s")
    shapes = [s for s in (cuda_shapes() if device == "cuda" else cpu_shapes()) if s.section in args.section]
    shapes = [s for s in shapes if 4 * s.size <= args.max_gb * 1e9]
    pool = max(s.size * s.copies(device) for s in shapes)
    keys, values = (torch.randn(pool, device=device, dtype=torch.bfloat16) for _ in range(2))
    results: list[dict] = []
    asked: dict[str, dict[str, tuple[float, float]]] = {}
    with torch.no_grad():
        for section in args.section:
            columns = [c for c in COLUMNS[device][section] if not args.only or c in args.only]
            columns = [c for c in columns if args.flashinfer or not c.startswith("fi")]
            against = ["exact"] if section == "static" else [c for c in columns if c not in OURS]
            print(
                f"\n{section}\nbatch  heads    D  {'lengths':>21}    KV MB |", *(f"{c:>8.8}" for c in columns), end=""
            )
            print("    floor | auto/best peer  auto/floor")
            for shape in (s for s in shapes if s.section == section):
                r = measure(Problem(shape, (keys, values)), columns, device, args.rounds)
                us, floor = r["us"], shape.kv_bytes / rate * 1e6
                best = min((c for c in against if c in us), key=us.get, default=None)
                ratio = us["auto"] / us[best] if best and "auto" in us else None
                r = {
                    **asdict(shape),
                    "kv_mb": shape.kv_bytes / 1e6,
                    "floor_us": floor,
                    "best": best,
                    "ratio": ratio,
                    **r,
                }
                results.append(r)
                what = f"{shape.batch:5} {f'{shape.q_heads}/{shape.kv_heads}':>6} {shape.head_dim:4}  {shape.name:>21}"
                cells = (f"{us[c]:8.1f}" if c in us else f"{'-':>8}" for c in columns)
                print(f"{what} {r['kv_mb']:8.1f} |", *cells, f"{floor:8.1f} |", end="")
                print(f" {ratio:5.2f} {best:>8.8}" if ratio else f" {'-':>5} {'':8}", end="")
                print(f" {us['auto'] / floor:11.2f}" if "auto" in us else f" {'-':>11}", flush=True)
                if device == "cuda":
                    torch.cuda.empty_cache()
            rows = [r for r in results if r["section"] == section]
            asked[section] = bars(section, rows)
            for what, (figure, bound) in asked[section].items():
                print(
                    f"  {what}: {figure:.3f}", end="\n" if device == "cpu" else f", at most {bound:.3f} is asked for: "
                )
                if device == "cuda":
                    print("yes" if figure <= bound else "NO")
            for c in columns:
                reasons = [r["left_out"][c] for r in rows if c in r["left_out"]]
                if reasons:
                    print(f"  {c} left out of {len(reasons)} rows: {', '.join(dict.fromkeys(reasons))}")
    if args.json:
        figures = {"device": name, "bytes_per_second": rate, "rows": results, "bars": asked}
        args.json.write_text(json.dumps(figures, indent=1))
    if any(c in r["left_out"] for r in results for c in (*OURS, "exact")):
        raise SystemExit("of ours, something did not run or is wrong")


if __name__ == "__main__":
    main()
