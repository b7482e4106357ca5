"""Run greedy `generate` with a KV cache sharded over ranks: the tokens of one process, and the cost beside a ring.

    torchrun --nproc-per-node 4 examples/tree_decode.py
    torchrun --nproc-per-node 8 examples/tree_decode.py --device cuda --dtype bfloat16 --prompt-len 65536
    python examples/tree_decode.py

In Tree Attention (arXiv 2408.04093), each rank attends to its own share of the keys and values, and the states, one for
each query head, are merged over the ranks. Ring attention passes keys and values from neighbour to neighbour instead.
The model is a Llama of about 30M parameters with random weights: nothing is downloaded. With `--device cuda` every rank
needs a GPU of its own; otherwise ranks are processes on a CPU, whether or not there are GPUs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

import tatten
from tatten.integrations.transformers import ShardedKVCache, cache_kwargs


class Sent(TorchDispatchMode):
    """Count the bytes that this rank sends: each tensor times its receivers, one neighbour or all peers."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.bytes = 0
        peers = ranks - 1
        self.receivers = {"send": 1, "recv_": 0, "wait_tensor": 0, "all_gather_into_tensor": peers, "push_merge": peers}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name = func._schema.name.split("::")
        if namespace in ("c10d", "_c10d_functional") or name == "push_merge":
            tensors = [x for arg in args for x in (arg if isinstance(arg, list) else [arg]) if isinstance(x, Tensor)]
            self.bytes += self.receivers[name] * sum(x.nbytes for x in tensors)
        return func(*args, **(kwargs or {}))


def connect(device: str) -> DeviceMesh:
    """Return a mesh of all ranks of torchrun, or of this process alone: NCCL with a GPU for each rank, or gloo on CPUs.

    The group is made with a named backend: if PyTorch sees a GPU, `init_device_mesh` would set up NCCL for a CPU mesh,
    too.
    """
    backend = "gloo"
    if device == "cuda":
        ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
        if ranks > gpus:
            raise SystemExit(f"`--device cuda` must have a GPU for each rank, got {ranks} ranks and {gpus} GPUs")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        backend = "nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return DeviceMesh.from_group(dist.group.WORLD, device, mesh_dim_names=("kv",))


def say(*lines: object) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(*lines, sep="\n", flush=True)


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


def generate(model: LlamaForCausalLM, prompt: Tensor, new: int, **kwargs: object) -> tuple[Tensor, Tensor]:
    """Return the new tokens and their logits."""
    out = model.generate(
        prompt, max_new_tokens=new, do_sample=False, output_logits=True, return_dict_in_generate=True, **kwargs
    )
    return out.sequences[:, prompt.shape[1] :], torch.stack(out.logits, dim=1)


def compare(ours: Tensor, theirs: Tensor, logits: Tensor, dtype: torch.dtype) -> str:
    """Check that the tokens are the same. In low precision only ties within rounding may break either way."""
    gathered = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, ours)
    if not all(torch.equal(ours, others) for others in gathered):
        raise SystemExit("tokens: DIFFERENT from rank to rank")
    if torch.equal(ours, theirs):
        return f"tokens: identical on all ranks and in one process ({ours.shape[1]})"
    position = int((ours != theirs).int().argmax())  # from here on the texts differ
    at = logits[0, position]
    gap = (at[theirs[0, position]] - at[ours[0, position]]).item()
    if dtype == torch.float32 or gap > 8 * torch.finfo(dtype).eps * at.abs().max().item():
        raise SystemExit(f"tokens: DIFFERENT from one process, by {gap} in the logits of token {position}")
    return f"tokens: identical on all ranks, and in one process up to a tie in {dtype} at token {position}"


def ring_attention(q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh) -> Tensor:
    """Attend while passing keys and values around: each rank sends its current ones on and receives the next."""
    group, rank, ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
    for hop in range(ranks):
        current, works = (k, v), []
        if hop < ranks - 1:
            k, v = torch.empty_like(k), torch.empty_like(v)
            ops = [dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % ranks) for x in current]
            ops += [dist.P2POp(dist.irecv, x, group=group, group_peer=(rank - 1) % ranks) for x in (k, v)]
            works = dist.batch_isend_irecv(ops)
        out, lse = tatten.merge_state(out, lse, *tatten.decode_attention(q, *current, return_lse=True))
        for work in works:
            work.wait()
    return out


def microseconds(step: Callable[[], object], device: str) -> float:
    """Return the median time in eager mode, of the slowest rank."""
    times = []
    for _ in range(23):
        dist.barrier()
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start))
    median = torch.tensor(statistics.median(times[3:]), device=device)
    dist.all_reduce(median, dist.ReduceOp.MAX)
    return median.item()


def sent(step: Callable[[], object], ranks: int) -> int:
    """Return the bytes that this rank sends in a step."""
    with Sent(ranks) as counter:
        step()
    return counter.bytes


def costs(config: LlamaConfig, length: int, mesh: DeviceMesh, args: argparse.Namespace) -> str:
    """Measure one layer's attention of one query to `length` tokens, and return a row of the table."""
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q = torch.randn(1, heads, 1, dim, device=args.device).to(args.dtype)
    dist.broadcast(q, 0)
    torch.manual_seed(dist.get_rank())
    k, v = torch.randn(2, 1, kv_heads, length // mesh.size(), dim, device=args.device).to(args.dtype).unbind()

    local = lambda: tatten.decode_attention(q, k, v, return_lse=True)
    state = local()
    merge = lambda: tatten.tree_merge(*state, mesh)
    tree = lambda: tatten.tree_merge(*local(), mesh)
    ring = lambda: ring_attention(q, k, v, mesh)
    tolerance = 10 * torch.finfo(args.dtype).eps
    torch.testing.assert_close(tree()[0], ring(), rtol=tolerance, atol=tolerance)

    times = [microseconds(step, args.device) for step in (local, merge, tree, ring)]
    sizes = [sent(step, mesh.size()) for step in (tree, ring)]
    row = f"{length:9}" + "".join(f"{x:10.0f}" for x in times) + "".join(f"{x:14,}" for x in sizes)
    return f"{row} {times[3] / times[2]:8.1f}x"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompt-len", type=int, default=2000)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument(
        "--lengths", type=int, nargs="*", default=[4096, 16384, 65536], help="context lengths in the table"
    )
    args = parser.parse_args()
    args.dtype = getattr(torch, args.dtype)

    mesh = connect(args.device)
    model = build(args)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    say(
        f"a Llama of {size:.0f}M parameters, {args.dtype}, {args.device}, {mesh.size()} ranks; prompt {args.prompt_len}"
    )
    prompt = torch.randint(model.config.vocab_size, (1, args.prompt_len), device=args.device)
    tokens, logits = generate(model, prompt, args.new_tokens)
    cache = ShardedKVCache(model.config, mesh, args.prompt_len + args.new_tokens)
    # On an accelerator `generate` compiles the step if the cache has a fixed size.
    options = {} if args.device == "cpu" else {"compile_config": CompileConfig(backend="tatten")}
    ours, _ = generate(model, prompt, args.new_tokens, **cache_kwargs(cache), **options)
    say(compare(ours, tokens, logits, args.dtype), f"keys and values on each rank: {cache.nbytes / 2**20:.1f} MiB")

    say("", "one layer's attention of one token: microseconds, and bytes that a rank sends", "")
    say("   tokens     local     merge      tree      ring    tree sends    ring sends   faster")
    for length in args.lengths:
        say(costs(model.config, length, mesh, args))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
