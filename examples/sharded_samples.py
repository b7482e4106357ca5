"""Draw samples of one prompt that is stored once, sharded over ranks: the tokens of one process.

    torchrun --nproc-per-node 2 examples/sharded_samples.py
    torchrun --nproc-per-node 2 examples/sharded_samples.py --device cuda --dtype bfloat16 --prompt-len 65536
    python examples/sharded_samples.py

Each rank stores every n-th token of the prompt and of each sample. The states of the ranks are merged once per layer.
With `--device cuda`, where `generate` compiles the step, a rank reads its share of the prompt once for all samples.
Then the best samples go on, in an irregular selection that copies no part of the prompt. The model is a Llama with
random weights: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

from tatten.integrations.transformers import SharedPrefixCache, cache_kwargs


def connect(device: str) -> DeviceMesh:
    """Return a mesh of all ranks of torchrun, each with a GPU of its own on "cuda", or of this process alone."""
    backend = "gloo" if device == "cpu" else "nccl"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return DeviceMesh.from_group(dist.group.WORLD, device, mesh_dim_names=("kv",))


def build(args: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=16000,
        max_position_embeddings=1 << 20,
        eos_token_id=None,
        attn_implementation="tatten",
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(args.device, args.dtype).eval()


def sample(model: LlamaForCausalLM, prompt: Tensor, cache: SharedPrefixCache, args: argparse.Namespace) -> Tensor:
    """Draw `args.samples` samples with the same seed on all ranks, then go on greedily from some of them."""
    # On an accelerator `generate` compiles the step if the cache has a fixed size.
    options = {} if args.device == "cpu" else {"compile_config": CompileConfig(backend="tatten")}
    model(prompt[:, :-1], **cache_kwargs(cache))
    fork = cache.fork(args.samples, capacity=2 * args.new_tokens)
    torch.manual_seed(1)
    drawn = model.generate(
        prompt,
        **cache_kwargs(fork),
        do_sample=True,
        num_return_sequences=args.samples,
        max_new_tokens=args.new_tokens,
        **options,
    )
    best = drawn[:, prompt.shape[1] :].sum(1).topk(max(1, args.samples // 3)).indices  # any score will do here
    return model.generate(
        drawn[best],
        **cache_kwargs(fork.select(best)),
        do_sample=False,
        max_new_tokens=args.new_tokens,
        **options,
    )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompt-len", type=int, default=2001)
    parser.add_argument("--samples", type=int, default=12, help="of which a third goes on")
    parser.add_argument("--new-tokens", type=int, default=8)
    args = parser.parse_args()
    args.dtype = getattr(torch, args.dtype)

    mesh = connect(args.device)
    model = build(args)
    prompt = torch.randint(model.config.vocab_size, (1, args.prompt_len), device=args.device)
    tokens = {}
    for name, cache in (
        ("one process", SharedPrefixCache(model.config)),
        (f"{mesh.size()} ranks", SharedPrefixCache(model.config, mesh=mesh)),
    ):
        start = time.perf_counter()
        tokens[name] = sample(model, prompt, cache, args)
        if dist.get_rank() == 0:
            seconds = time.perf_counter() - start
            print(f"{name:12} {cache.nbytes / 2**20:8.2f} MiB of the prompt on a rank, {seconds:.1f} s")
    alone, together = tokens.values()
    same = torch.tensor(int(torch.equal(alone, together)), device=args.device)
    dist.all_reduce(same, dist.ReduceOp.MIN)
    if dist.get_rank() == 0:
        print("tokens:", "identical on all ranks and in one process" if same else f"DIFFERENT in {args.dtype}")
    dist.destroy_process_group()
    if not same and args.dtype == torch.float32:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
