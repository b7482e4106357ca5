"""One decode step of a Llama with a static cache in a package of AOTInductor: as exported, and rewritten by tatten.

    python benchmarks/aoti.py
    python benchmarks/aoti.py --device cuda

Beside the packages runs the same step under `torch.compile(backend="tatten")` with `cpp_wrapper`. All have the same
weights and cache, in buffers, and take turns. The packages are made in a temporary folder, which takes minutes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from support import results
from support.command_line import arguments, machine
from support.errors import relative_error
from support.timing import in_turns, seconds
from torch import Tensor
from torch.export import ExportedProgram
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

import tatten

Step = Callable[..., Tensor]


@dataclass(frozen=True)
class Row:
    """A shape of the grid, in which `used` of `max_cache_len` slots hold keys."""

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    max_cache_len: int
    used: int
    layers: int = 4


GRIDS = {
    "cpu": [Row(4, 16, 4, 64, 8192, 1000), Row(1, 16, 4, 64, 8192, 1000), Row(4, 16, 4, 64, 8192, 8191)],
    "cuda": [Row(4, 32, 8, 128, 8192, 1000), Row(1, 32, 8, 128, 8192, 1000), Row(4, 32, 8, 128, 8192, 8191)],
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def build(row: Row, device: str) -> TorchExportableModuleWithStaticCache:
    hidden = row.q_heads * row.head_dim
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=row.layers,
        num_attention_heads=row.q_heads,
        num_key_value_heads=row.kv_heads,
        head_dim=row.head_dim,
        vocab_size=16000,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval().requires_grad_(False).to(device, DTYPES[device])
    model.generation_config = GenerationConfig(use_cache=True, cache_implementation="static")
    module = TorchExportableModuleWithStaticCache(model, batch_size=row.batch, max_cache_len=row.max_cache_len)
    for name, buffer in module.named_buffers():
        if name.startswith(("key_cache", "value_cache")):
            buffer.normal_()
    return module


def package(program: ExportedProgram, path: Path) -> Step:
    archive = torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return torch._inductor.aoti_load_package(archive)


def steps(row: Row, device: str, folder: Path) -> dict[str, Step]:
    module = build(row, device)
    inputs = inputs_of(row, device)
    program = torch.export.export(module, (), inputs, strict=True)
    rewritten = tatten.rewrite(program).run_decompositions(tatten.decompositions())
    compiled = torch.compile(module, backend="tatten", options={"cpp_wrapper": True}, dynamic=False)
    return {
        "tatten": package(rewritten, folder / "tatten.pt2"),
        "inductor": package(program, folder / "inductor.pt2"),
        "compiled": compiled,
        "eager": module,
    }


def inputs_of(row: Row, device: str) -> dict[str, Tensor]:
    tokens = torch.arange(1, row.batch + 1, device=device).unsqueeze(1)
    return {"input_ids": tokens, "cache_position": torch.tensor([row.used - 1], device=device)}


def measure(row: Row, device: str, repeats: int) -> dict[str, float]:
    torch._dynamo.reset()
    inputs = inputs_of(row, device)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        packages = steps(row, device, Path(folder))
        expected = packages.pop("eager")(**inputs)
        outs = {name: step(**inputs) for name, step in packages.items()}
        errors = {name: relative_error(out, expected) for name, out in outs.items()}
        for step in packages.values():
            step(**inputs)
        took = in_turns(packages, repeats, lambda _, step: seconds(lambda: step(**inputs), device))
    return {
        **asdict(row),
        **{f"{name}_error": error for name, error in errors.items()},
        **{f"{name}_ms": value * 1e3 for name, value in took.items()},
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs="*", help="which rows of the grid, by number; default: all")
    parser.add_argument("--repeats", type=int, default=21)
    args = parser.parse_args()

    print(machine(args.device))
    print("milliseconds of a step  |  packages          | compiled |          tatten's package over | largest")
    print("batch heads cache  used | inductor    tatten |   tatten | Inductor's     the compiled step | error")
    rows_so_far = []
    for i, row in enumerate(GRIDS[args.device]):
        if args.rows and i not in args.rows:
            continue
        r = measure(row, args.device, args.repeats)
        rows_so_far.append(r)
        shape = f"{row.batch:5} {row.q_heads}/{row.kv_heads:<2} {row.max_cache_len:5} {row.used:5}"
        times = f"{r['inductor_ms']:8.2f}  {r['tatten_ms']:8.2f} | {r['compiled_ms']:8.2f}"
        ratios = f"{r['tatten_ms'] / r['inductor_ms']:10.2f} {r['tatten_ms'] / r['compiled_ms']:21.2f}"
        error = max(r[f"{name}_error"] for name in ("tatten", "inductor", "compiled"))
        print(f"{shape} | {times} | {ratios} | {error:.1e}", flush=True)
    if args.json:
        results.write(args.json, args.device, rows_so_far)


if __name__ == "__main__":
    main()
