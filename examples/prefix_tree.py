"""Decode a tree of prefixes: a system prompt, questions, samples for each, and more samples after the best of these.

    python examples/prefix_tree.py
    python examples/prefix_tree.py --device cuda --dtype bfloat16 --system 16000 --questions 8 --samples 32

The same program runs twice: with Inductor and an ordinary KV cache, which stores all tokens of each sequence, and with
tatten and a `tatten.SharedPrefixCache`, which stores each node of the tree once. The decoder is plain PyTorch with
random weights.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tatten

VOCABULARY, WIDTH, HEADS, HEAD_DIM = 8000, 512, 8, 64


class FullCache:
    """An ordinary KV cache of tensors `[batch, heads, slots, head_dim]`: a fork copies the tokens so far."""

    def __init__(self, layers: list[tuple[Tensor, Tensor]], used: int = 0):
        self.layers = layers
        self.length = torch.tensor(used, device=layers[0][0].device)
        for tensor in (self.length, *itertools.chain(*layers)):
            torch._dynamo.mark_static_address(tensor)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in itertools.chain(*self.layers))

    def positions(self, q_len: int) -> Tensor:
        return (self.length + torch.arange(q_len, device=self.length.device))[None]

    def mask(self, q_len: int) -> Tensor:
        slots = self.layers[0][0].shape[2]
        return torch.arange(slots, device=self.length.device) <= self.positions(q_len)[:, None, :, None]

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.layers[layer]
        slots = self.positions(key.shape[2])[0]
        keys.index_copy_(2, slots, key)
        values.index_copy_(2, slots, value)
        if layer == len(self.layers) - 1:
            self.length.add_(key.shape[2])
        return keys, values

    def fork(self, n: int, capacity: int) -> FullCache:
        used = int(self.length)
        return self._copy(lambda x: F.pad(x[:, :, :used].repeat_interleave(n, dim=0), (0, 0, 0, capacity)))

    def select(self, indices: Tensor) -> FullCache:
        return self._copy(lambda x: x[indices])

    def _copy(self, copy: Callable[[Tensor], Tensor]) -> FullCache:
        return FullCache([(copy(key), copy(value)) for key, value in self.layers], int(self.length))


Cache = FullCache | tatten.SharedPrefixCache


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor, cache: Cache, layer: int) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2).chunk(3, dim=1)
        keys, values = cache.update(layer, key, value)
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    def __init__(self, num_layers: int, max_length: int):
        super().__init__()
        self.token_embedding, self.position_embedding = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(max_length, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Add `tokens`, `[batch, q_len]`, to `cache`, and return the logits after the last of them."""
        q_len = tokens.shape[1]
        x = self.token_embedding(tokens) + self.position_embedding(cache.positions(q_len))
        mask = cache.mask(q_len)
        for layer, block in enumerate(self.blocks):
            x = block(x, mask, cache, layer)
        return self.head(self.norm(x[:, -1])).float()


@dataclass(frozen=True)
class Round:
    """The samples of all questions, and the time of a step."""

    tokens: Tensor  # [questions * samples, new_tokens]
    log_p: Tensor  # of each token
    milliseconds: float
    kv_bytes: int


def explore(
    decoder: Decoder, step: Callable[[Tensor, Cache], Tensor], root: Cache, args: argparse.Namespace
) -> list[Round]:
    """Read the system prompt and the questions; then, in each round, sample for each question and keep the best."""
    torch.manual_seed(1)
    decoder(torch.randint(VOCABULARY, (1, args.system), device=args.device), root)
    node = root.fork(args.questions, capacity=args.question)
    logits = decoder(torch.randint(VOCABULARY, (args.questions, args.question), device=args.device), node)
    rounds = []
    for _ in range(args.rounds):
        cache, logits = node.fork(args.samples, capacity=args.new_tokens), logits.repeat_interleave(args.samples, 0)
        tokens, log_p, times = [], [], []
        for _ in range(args.new_tokens):
            token = torch.multinomial(logits.softmax(-1), 1)
            tokens.append(token)
            log_p.append(logits.log_softmax(-1).gather(1, token))
            logits = step(token, cache)
            if logits.is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter())
        drawn = Round(torch.cat(tokens, 1), torch.cat(log_p, 1), milliseconds_per_step(times), cache.nbytes)
        rounds.append(drawn)
        best = drawn.log_p.mean(1).unflatten(0, (args.questions, args.samples)).argmax(1)
        best += args.samples * torch.arange(args.questions, device=args.device)
        node, logits = cache.select(best), logits[best]
    return rounds


def milliseconds_per_step(times: list[float]) -> float:
    """Return the median over the steps after the first ones, which compile."""
    return 1e3 * statistics.median(b - a for a, b in itertools.pairwise(times[2:]))


def run(decoder: Decoder, backend: str, args: argparse.Namespace) -> list[Round]:
    print(f"{backend}: prefill, then {args.rounds} rounds; each compiles a decode step (this takes the longest) ...")
    root: Cache = tatten.SharedPrefixCache(args.layers, device=args.device)
    if backend == "inductor":
        none = torch.empty(1, HEADS, 0, HEAD_DIM, dtype=getattr(torch, args.dtype), device=args.device)
        root = FullCache([(none, none)] * args.layers).fork(1, capacity=args.system)
    torch._dynamo.reset()
    mode = "reduce-overhead" if args.device.startswith("cuda") else None  # CUDA graphs
    with torch.no_grad():
        return explore(decoder, torch.compile(decoder, backend=backend, mode=mode, dynamic=False), root, args)


def compare(ours: list[Round], theirs: list[Round], dtype: torch.dtype) -> str:
    """Check that the tokens are the same.

    Equal seeds draw equal noise, so that only a tie within rounding can break either way. Low precision has many ties,
    and after one the texts differ.
    """
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1):
        different = (a.tokens != b.tokens).any(dim=1).nonzero().flatten().tolist()
        if different and dtype != torch.float32:
            same = len(a.tokens) - len(different)
            return f"tokens: identical in {same} of {len(a.tokens)} sequences of round {number}, rounded to {dtype}"
        if different:
            at = different[0], int((a.tokens[different[0]] != b.tokens[different[0]]).int().argmax())
            drawn = [f"{x.tokens[at]} of log-probability {x.log_p[at]}" for x in (b, a)]
            raise SystemExit(
                f"tokens: DIFFERENT in {len(different)} sequences of round {number}; at sequence, token {at} "
                f"Inductor drew {drawn[0]}, tatten {drawn[1]}"
            )
    return f"tokens: identical ({len(ours)} rounds of {len(ours[0].tokens)} sequences of {ours[0].tokens.shape[1]})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--system", type=int, default=3000, help="tokens of the system prompt")
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--question", type=int, default=60, help="tokens of a question")
    parser.add_argument("--samples", type=int, default=8, help="for each question")
    parser.add_argument("--new-tokens", type=int, default=24, help="of a sample, in each round")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()

    torch.manual_seed(0)
    length = args.system + args.question + args.rounds * args.new_tokens
    decoder = Decoder(args.layers, length).to(args.device, getattr(torch, args.dtype)).eval()
    with tatten.recording() as report:
        theirs, ours = (run(decoder, backend, args) for backend in ("inductor", "tatten"))

    print(f"\n{report}\n\n{compare(ours, theirs, getattr(torch, args.dtype))}\n")
    print("round  backend     ms per step    KV MiB   tokens")
    batch, new, nodes = args.questions * args.samples, args.new_tokens, ""
    for number, (full, shared) in enumerate(zip(theirs, ours, strict=True), start=1):
        tree = f"1 x {args.system} + {args.questions} x {args.question}{nodes} + {batch} x {new}"
        row(number, "inductor", full, f"{batch} x {args.system + args.question + number * new}")
        row(number, "tatten", shared, tree)
        nodes += f" + {args.questions} x {new}"
    faster, smaller = full.milliseconds / shared.milliseconds, full.kv_bytes / shared.kv_bytes
    print(f"tatten is {faster:.1f} times as fast, with {smaller:.1f} times less KV")


def row(number: int, backend: str, drawn: Round, tokens: str) -> None:
    print(f"{number:5}  {backend:10} {drawn.milliseconds:12.2f} {drawn.kv_bytes / 2**20:9.1f}   {tokens}")


if __name__ == "__main__":
    main()
