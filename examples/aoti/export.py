"""Export the decode step of a Llama with a static cache, rewrite it, and package it for C++ by AOTInductor.

    python examples/aoti/export.py decode.pt2

The package needs neither tatten nor Python: `main.cpp` decodes with it. The model has random weights: nothing is
downloaded. The tokens of the package are compared with those of the model in eager mode.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

import tatten

FIRST = 7  # the token that decoding starts with, here and in main.cpp
SLOTS = 4096  # of the cache; tatten leaves attention to much shorter ones as it is


def build(layers: int, max_cache_len: int) -> TorchExportableModuleWithStaticCache:
    """Return a module of one token and its position, whose buffers are the cache."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=1000,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.generation_config = GenerationConfig(use_cache=True, cache_implementation="static")
    return TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=max_cache_len)


def export(module: torch.nn.Module) -> torch.export.ExportedProgram:
    """Return the program of the module with tatten's attention, as aten ops."""
    example = {"input_ids": torch.zeros(1, 1, dtype=torch.long), "cache_position": torch.zeros(1, dtype=torch.long)}
    # With strict=False the cache would not be buffers, but constants that are written to.
    program = torch.export.export(module, (), example, strict=True)
    with tatten.recording() as report:
        program = tatten.rewrite(program)
    print(report)
    return program.run_decompositions(tatten.decompositions())


def decode(step: Callable[..., torch.Tensor], new_tokens: int) -> list[int]:
    tokens = [FIRST]
    for position in range(new_tokens):
        logits = step(input_ids=torch.tensor([tokens[-1:]]), cache_position=torch.tensor([position]))
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", help="path of the package, which ends in .pt2")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--max-cache-len", type=int, default=SLOTS)
    parser.add_argument("--new-tokens", type=int, default=16)
    args = parser.parse_args()

    module = build(args.layers, args.max_cache_len)
    with torch.no_grad():
        program = export(module)
        print("packaging, which takes a minute or two ...", flush=True)
        path = torch._inductor.aoti_compile_and_package(program, package_path=args.package)
        expected = decode(module, args.new_tokens)
        tokens = decode(torch._inductor.aoti_load_package(path), args.new_tokens)
    print("eager  ", *expected)
    print("package", *tokens)
    if tokens != expected:
        raise SystemExit("tokens: DIFFERENT")
    print("tokens: identical")


if __name__ == "__main__":
    main()
