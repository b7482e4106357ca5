"""Run a tiny serving engine: requests come and go, their keys are in pages, and one compiled step decodes them all.

    python examples/paged_decode.py

A request asks for several samples of a prompt. It is admitted when the batch has rows and the pool has pages for all of
them. One row reads the prompt, a token in each step, while the other rows have length 0. Then these begin with the full
pages of the prompt, which all samples share, and with a copy of its last page, which each sample fills up. The step is
compiled once, for any tables and lengths. In the end, all tokens are compared with a forward of the whole text.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tatten

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM, PAGE = 1000, 256, 8, 2, 32, 16


class Attention(nn.Module):
    """Attention with its keys and values in pages `[pages, PAGE, KV_HEADS, HEAD_DIM]`."""

    def __init__(self, pages: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.register_buffer("key", torch.zeros(pages, PAGE, KV_HEADS, HEAD_DIM))
        self.register_buffer("value", torch.zeros(pages, PAGE, KV_HEADS, HEAD_DIM))

    def forward(self, x: Tensor, where: tuple[Tensor, Tensor] | None, **pages: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(1, (-1, HEAD_DIM))
        query, key, value = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        if where is None:  # the tokens of one text
            in_order = (y.transpose(0, 1)[None] for y in (query, key, value))
            out = F.scaled_dot_product_attention(*in_order, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        else:
            self.key[where], self.value[where] = key, value
            out = tatten.decode_attention(query.unsqueeze(2), self.key, self.value, **pages)
        return x + self.out(out.flatten(1))


class Model(nn.Module):
    def __init__(self, pages: int, longest: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(longest, WIDTH)
        self.layers, self.head = nn.ModuleList(Attention(pages) for _ in range(2)), nn.Linear(WIDTH, VOCABULARY)

    def step(self, tokens: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        """Read one token for each row, the last of its `lens`, and return the logits after it."""
        place = (lens - 1).clamp(min=0)
        page = table.gather(1, (place // PAGE)[:, None])[:, 0]
        page = torch.where(lens > 0, page, 0)  # no sample has page 0: rows of length 0 write to it
        x = self.tokens(tokens) + self.places(place)
        for layer in self.layers:
            x = layer(x, (page, place % PAGE), block_table=table, kv_lens=lens)
        return self.head(x)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits after each token of a text, without pages."""
        x = self.tokens(text) + self.places.weight[: len(text)]
        for layer in self.layers:
            x = layer(x, None)
        return self.head(x)


@dataclass(eq=False)
class Sample:
    """A text that grows to `length` tokens, of which `read` are in its pages."""

    seed: int
    prompt_len: int
    text: list[int]
    length: int
    pages: list[int]
    read: int = 0
    waits: bool = False  # until another sample has read the prompt
    followers: list[Sample] = field(default_factory=list)  # those that wait for this one

    def scores(self, logits: Tensor, place: int) -> Tensor:
        """Return logits plus noise, for the token at `place` and those after it; the largest is the drawn token."""
        noise = [torch.Generator().manual_seed(1000 * self.seed + place + i) for i in range(len(logits))]
        return logits - torch.stack([torch.empty(VOCABULARY).exponential_(generator=x).log() for x in noise])


class Engine:
    def __init__(self, model: Model, pages: int, rows: int, columns: int) -> None:
        self.model, self.step = model, torch.compile(model.step, backend="tatten", fullgraph=True, dynamic=False)
        self.free, self.holders = list(range(1, pages)), Counter[int]()  # pages, and how many samples have one
        self.rows: list[Sample | None] = [None] * rows
        self.queue: deque[tuple[Sequence[int], Sequence[int]]] = deque()  # a prompt, and the length of each sample
        self.columns, self.seeds, self.most_pages = columns, itertools.count(), 0
        self.seconds: list[float] = []  # of each step

    def admit(self) -> bool:
        """Give rows and pages to the first request; return False if there are too few for all of its samples."""
        prompt, lengths = self.queue[0]
        shared = (len(prompt) - 1) // PAGE  # pages; each sample reads the last token of the prompt itself
        more, rows = [-(-n // PAGE) - shared for n in lengths], [i for i, x in enumerate(self.rows) if x is None]
        if len(rows) < len(lengths) or len(self.free) < shared + sum(more):
            return False
        self.queue.popleft()
        prefix, samples = [self.free.pop() for _ in range(shared)], []
        for length, n in zip(lengths, more, strict=True):
            pages = prefix + [self.free.pop() for _ in range(n)]
            self.holders.update(pages)
            samples.append(Sample(next(self.seeds), len(prompt), list(prompt), length, pages, waits=bool(samples)))
        samples[0].followers = samples[1:]
        for row, sample in zip(rows, samples, strict=False):
            self.rows[row] = sample
        self.most_pages = max(self.most_pages, len(+self.holders))
        return True

    def fork(self, sample: Sample) -> None:
        """Let the followers of a sample begin, with copies of the page that it has filled in part."""
        last = sample.read // PAGE
        for follower in sample.followers:
            for layer in self.model.layers:
                for pool in (layer.key, layer.value):
                    pool[follower.pages[last]] = pool[sample.pages[last]]
            follower.read, follower.waits = sample.read, False
        sample.followers = []

    def leave(self, sample: Sample) -> None:
        """Give back the row of a sample, and the pages that no other sample has."""
        self.rows[self.rows.index(sample)] = None
        self.holders.subtract(sample.pages)
        self.free += [page for page in sample.pages if not self.holders[page]]

    def run(self) -> list[Sample]:
        """Decode until no request is left, and return all samples."""
        done: list[Sample] = []
        while self.queue or any(self.rows):
            while self.queue and self.admit():
                pass
            for x in self.rows:
                if x is not None and x.followers and x.read == len(x.text) - 1:
                    self.fork(x)
            reading = [(row, x) for row, x in enumerate(self.rows) if x is not None and not x.waits]
            if not reading:
                raise ValueError(f"{len(self.queue[0][1])} samples of a request must fit into the rows and the pages")
            tokens, lens = torch.zeros(2, len(self.rows), dtype=torch.int64)
            table = torch.full((len(self.rows), self.columns), -1, dtype=torch.int32)
            for row, x in reading:
                tokens[row], lens[row] = x.text[x.read], x.read + 1
                table[row, : len(x.pages)] = torch.tensor(x.pages)
            start = time.perf_counter()
            logits = self.step(tokens, table, lens)
            self.seconds.append(time.perf_counter() - start)
            for row, x in reading:
                x.read += 1
                if x.read == len(x.text):
                    x.text.append(int(x.scores(logits[row, None], len(x.text)).argmax()))
                if len(x.text) == x.length:
                    self.leave(x)
                    done.append(x)
        return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4, help="of a request, at most")
    parser.add_argument("--prompt-len", type=int, default=100, help="tokens of a prompt, at most")
    parser.add_argument("--new-tokens", type=int, default=40, help="tokens of a sample, at most")
    parser.add_argument("--rows", type=int, default=8, help="samples of a step, at most")
    parser.add_argument("--pages", type=int, default=60, help="pages of the pool")
    args = parser.parse_args()

    torch.manual_seed(0)
    longest = args.prompt_len + args.new_tokens
    model = Model(args.pages, longest).eval()
    engine, draw = Engine(model, args.pages, args.rows, -(-longest // PAGE)), random.Random(0).randint
    for _ in range(args.requests):
        prompt = [draw(0, VOCABULARY - 1) for _ in range(draw(1, args.prompt_len))]
        lengths = [len(prompt) + draw(1, args.new_tokens) for _ in range(draw(1, args.samples))]
        engine.queue.append((prompt, lengths))
    with torch.no_grad(), tatten.recording() as report:
        samples = engine.run()
        for sample in samples:
            check(sample, model)

    ms = 1e3 * statistics.median(engine.seconds[1:])  # the first compiles
    print(f"{len(samples)} samples of {args.requests} requests in {len(engine.seconds)} steps of {ms:.2f} ms")
    print(f"compiled: {len(report.graphs)} graph")
    print("tokens: those of a forward of each whole text")
    print(f"pages: at most {engine.most_pages} of {args.pages - 1} in use, {len(engine.free)} free in the end")


def check(sample: Sample, model: Model) -> None:
    """Raise SystemExit unless each token is one that a forward of the whole text yields, up to rounding."""
    text = torch.tensor(sample.text)
    scores = sample.scores(model(text[:-1])[sample.prompt_len - 1 :], sample.prompt_len)
    drawn = scores.gather(1, text[sample.prompt_len :, None])
    if (scores.amax(1, keepdim=True) - drawn > 1e-4).any():
        raise SystemExit(f"tokens: DIFFERENT from those of a forward of the whole text of sample {sample.seed}")


if __name__ == "__main__":
    main()
