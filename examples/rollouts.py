"""Draw rollouts as GRPO does: many samples of several prompts, and again with changed weights.

    python examples/rollouts.py
    python examples/rollouts.py --device cuda --shape 8b --prompts 8 --prompt-len 2048 --samples 16 --new-tokens 256 \\
        --ends 0

The same samples are drawn three times: by `generate` with a static cache that repeats each prompt for its samples,
compiled by Inductor and by tatten; and from a fork of a `SharedPrefixCache`, whose sequences leave the batch as they
finish. Then the weights change in place, as by an optimizer, and another rollout compiles nothing. The model has random
weights. Times are without compilation.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, CompileConfig, LlamaConfig, PreTrainedModel, StaticCache

from tatten.integrations.transformers import SharedPrefixCache, cache_kwargs

SHARPNESS = 20  # scales the logits: makes the random model more confident
SHAPES = {
    "tiny": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 4000,
    },
    # Llama-3.1-8B, where it is not as the defaults of LlamaConfig
    "8b": {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256},
}
PAD = 0


@dataclass(frozen=True)
class Task:
    """Prompts with padding on the left, `[prompts, length]`, and the samples to draw of each."""

    ids: Tensor
    mask: Tensor
    samples: int
    new: int  # tokens of a sample, at most
    stop: list[int]  # tokens that end one

    @property
    def batch(self) -> int:
        return len(self.ids) * self.samples

    def repeated(self) -> tuple[Tensor, Tensor]:
        return self.ids.repeat_interleave(self.samples, 0), self.mask.repeat_interleave(self.samples, 0)


@dataclass(frozen=True)
class Rollout:
    tokens: Tensor  # [batch, new_tokens]; PAD after the token that ends a text
    seconds: float
    steps_per_second: float
    prefilled: int  # tokens, padding included
    kv_bytes: int
    steps: dict[int, int]  # of each batch size

    @property
    def tokens_per_second(self) -> float:
        return int((self.tokens != PAD).sum()) / self.seconds

    def row(self, name: str) -> str:
        batches = " + ".join(f"{count} of {batch}" for batch, count in self.steps.items() if count)
        speed = f"{self.steps_per_second:9.1f} {self.tokens_per_second:9.0f}"
        return f"{name:24} {self.prefilled:9} {self.kv_bytes / 2**20:9.1f} {speed}   {batches}"


class Noise:
    """Draws tokens by the Gumbel-max trick: the token with the largest sum of logit and noise is a sample.

    The noise of a step is drawn for all sequences, even finished ones, so that a sequence gets the same noise whatever
    the batch. It is drawn once in each step, so it records the time as well.
    """

    def __init__(self, seed: int, task: Task):
        self.batch, self.device = task.batch, task.ids.device
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.steps, self.start = 0, self.now()

    def __call__(self, logits: Tensor, left: Tensor | slice = slice(None)) -> Tensor:
        if not self.steps:
            self.first = self.now()
        self.steps += 1
        exponential = torch.empty(self.batch, logits.shape[1], device=self.device)
        exponential.exponential_(generator=self.generator)
        scores = logits.float() - exponential[left].log()
        scores[:, PAD] = -torch.inf  # not a word
        return scores

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def speed(self) -> tuple[float, float]:
        """Return the seconds since the start, and the steps per second since the prefill."""
        end = self.now()
        return end - self.start, (self.steps - 1) / (end - self.first)


def build(args: argparse.Namespace) -> PreTrainedModel:
    config = LlamaConfig(max_position_embeddings=1 << 17, eos_token_id=None, **SHAPES[args.shape])
    torch.manual_seed(0)
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(config, dtype=args.dtype)
    model.lm_head.weight.data.mul_(SHARPNESS)
    return model.eval()


def make_task(vocabulary: int, args: argparse.Namespace) -> Task:
    lengths = torch.linspace(args.prompt_len, args.prompt_len // 2, args.prompts).long()
    mask = (torch.arange(args.prompt_len) >= args.prompt_len - lengths[:, None]).long()
    ids = torch.randint(1, vocabulary, mask.shape) * mask
    stop = list(range(1, 1 + vocabulary // args.ends)) if args.ends else []
    return Task(ids.to(args.device), mask.to(args.device), args.samples, args.new_tokens, stop)


class Duplicated:
    """Rollouts by `generate`, with a static cache that has a row for each sample."""

    def __init__(self, model: PreTrainedModel, task: Task, backend: str):
        self.model, self.task = model, task
        self.cache = StaticCache(model.config, max_cache_len=task.ids.shape[1] + task.new)
        self.compile_config = CompileConfig(backend=backend)
        self.compile_config._compile_all_devices = True  # transformers compiles on accelerators only, unless told
        self.generate(Noise(0, task), min(4, task.new))  # compile, capture, replay

    def generate(self, noise: Noise, new: int) -> Tensor:
        ids, mask = self.task.repeated()
        self.cache.reset()  # so that what was captured over it stays valid
        texts = self.model.generate(
            ids,
            attention_mask=mask,
            **cache_kwargs(self.cache),
            max_new_tokens=new,
            do_sample=False,  # with the noise, the largest is a sample
            logits_processor=[lambda _, logits: noise(logits)],
            pad_token_id=PAD,
            eos_token_id=self.task.stop or None,
            compile_config=self.compile_config,
        )
        return F.pad(texts[:, ids.shape[1] :], (0, ids.shape[1] + new - texts.shape[1]), value=PAD)

    def draw(self, seed: int) -> Rollout:
        noise, batch = Noise(seed, self.task), self.task.batch
        tokens, speed = self.generate(noise, self.task.new), noise.speed()
        kv_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)
        return Rollout(tokens, *speed, batch * self.task.ids.shape[1], kv_bytes, {batch: noise.steps})


class Shared:
    """Rollouts from a fork. As soon as half of the texts have ended, the others go on in a batch of half the size.

    The caches keep the memory of the first rollout, so that graphs compiled and captured over it stay valid.
    """

    def __init__(self, model: PreTrainedModel, task: Task):
        self.model, self.task = model, task
        device, batch = task.ids.device, task.batch
        self.stop = torch.tensor(task.stop, device=device, dtype=torch.int64)
        mode = "reduce-overhead" if device.type == "cuda" else None  # CUDA graphs
        self.step = torch.compile(model, backend="tatten", mode=mode, dynamic=False)
        self.caches: list[SharedPrefixCache] = []  # of the batch, and of half of it
        with torch.no_grad():
            self.caches.append(self.prefill())
            if task.stop:
                # Out of order, so that each sequence has the row of its prompt, and any other selection fits in.
                some = torch.tensor([batch - 1, *range(batch // 2 - 1)], device=device)
                self.caches.append(self.caches[0].select(some))
            for cache in self.caches:
                inputs = [x[: cache.batch_size] for x in self.inputs()]
                for _ in range(3):  # compile, capture, replay
                    self.step(*inputs, cache)
                    cache.crop(-1)

    def prefill(self) -> SharedPrefixCache:
        """Return a fork of all tokens of the prompts but the last, in the memory of the last rollout."""
        ids, mask = self.task.ids[:, :-1], self.task.mask[:, :-1]
        cache = SharedPrefixCache(self.model.config)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        self.model(ids, mask, positions, cache, logits_to_keep=1)
        return cache.fork(self.task.samples, capacity=self.task.new, into=next(iter(self.caches), None))

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first step's inputs: the last token of each prompt, a mask of all slots to come, and positions."""
        ids, mask = self.task.repeated()
        last = ids[:, -1:].clone(memory_format=torch.contiguous_format)  # with the strides of tokens that are drawn
        return last, F.pad(mask, (0, self.task.new - 1), value=1), mask.sum(1, keepdim=True) - 1

    @torch.no_grad()
    def draw(self, seed: int) -> tuple[Rollout, Tensor]:
        """Return a rollout, and the log-probability of each token."""
        noise, (batch, new, device) = Noise(seed, self.task), (self.task.batch, self.task.new, self.task.ids.device)
        cache, (token, mask, positions) = self.prefill(), self.inputs()
        tokens = torch.full((batch, new), PAD, device=device)
        log_p = torch.zeros(batch, new, device=device)
        left, done = torch.arange(batch, device=device), torch.zeros(batch, dtype=torch.bool, device=device)
        steps = {batch: 0, batch // 2: 0}
        for t in range(new):
            if len(self.stop) and t % 8 == 7:  # the host waits for the device, so not in each step
                going = int((~done).sum())
                if not going:
                    break
                if going <= batch // 2 < len(left):
                    order = done.argsort(stable=True)[: batch // 2]
                    cache = cache.select(order, into=self.caches[1])
                    token, mask, positions, left, done = (x[order] for x in (token, mask, positions, left, done))
            logits = self.step(token, mask, positions, cache).logits[:, -1]
            token = noise(logits, left).argmax(-1, keepdim=True).masked_fill(done[:, None], PAD)
            tokens[left, t] = token[:, 0]
            log_p[left, t] = logits.float().log_softmax(-1).gather(1, token)[:, 0].masked_fill(done, 0)
            done = done | torch.isin(token[:, 0], self.stop)
            positions = positions + 1
            steps[len(left)] += 1
        return Rollout(tokens, *noise.speed(), self.task.ids[:, :-1].numel(), self.nbytes, steps), log_p

    @property
    def nbytes(self) -> int:
        """Return the bytes of keys and values: of the prompts once, and of the suffixes of each batch."""
        tensors = [tensor for cache in self.caches for layer in cache.layers for tensor in layer.kv.tensors]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


@torch.no_grad()
def forward_log_p(model: PreTrainedModel, task: Task, drawn: Tensor) -> Tensor:
    """Return the log-probabilities of the drawn tokens in a forward of the whole texts, a prompt at a time."""
    (ids, mask), n, new = task.repeated(), task.samples, task.new
    parts = []
    for at in range(0, len(ids), n):
        texts = torch.cat([ids[at : at + n], drawn[at : at + n]], 1)
        seen = F.pad(mask[at : at + n], (0, new), value=1)
        positions = (seen.cumsum(-1) - 1).clamp(min=0)
        logits = model(texts, seen, positions, use_cache=False, logits_to_keep=new + 1).logits[:, :-1]
        parts.append(logits.float().log_softmax(-1).gather(2, drawn[at : at + n, :, None])[..., 0])
    return torch.cat(parts).masked_fill(drawn == PAD, 0)


def compare(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> str:
    """Check that the tokens are the same. The noise is the same, so only a tie within rounding can break either way."""
    same = int((ours == theirs).all(1).sum())
    if same == len(ours):
        return f"tokens: identical ({same} sequences, {int((ours != PAD).sum())} tokens)"
    if dtype == torch.float32:
        raise SystemExit(f"tokens: DIFFERENT in {len(ours) - same} of {len(ours)} sequences")
    alike = (ours == theirs).long().cumprod(1).sum(1).float().mean()
    return f"tokens: identical for {alike:.1f} tokens on average, until rounding in {dtype} parts the sequences"


@torch.no_grad()
def check_log_p(model: PreTrainedModel, task: Task, drawn: Tensor, ours: Tensor) -> str:
    """Check that log-probabilities equal those of a forward; in 16 bits, that both are as near to float32."""
    if model.dtype == torch.float32:
        error = (ours - forward_log_p(model, task, drawn)).abs().max().item()
        if error > 1e-3:
            raise SystemExit(f"log-probabilities: DIFFERENT from those of a forward by up to {error:.1e}")
        return f"log-probabilities: those of a forward of the whole texts up to {error:.1e}"
    first, n = replace(task, ids=task.ids[:1], mask=task.mask[:1]), task.samples  # float32 takes long
    forward = forward_log_p(model, first, drawn[:n])
    exact = forward_log_p(copy.deepcopy(model).float(), first, drawn[:n])
    ours_off, off = ((x - exact).square().mean().sqrt().item() for x in (ours[:n], forward))
    said = f"log-probabilities: {ours_off:.2g} from those in float32, where a forward in {model.dtype} is {off:.2g}"
    if not ours_off <= 1.25 * off:
        raise SystemExit(f"{said}: TOO FAR")
    return said


@torch.no_grad()
def update(model: PreTrainedModel) -> None:
    """Change the weights in place, as an optimizer does."""
    torch.manual_seed(2)
    for parameter in model.parameters():
        parameter.mul_(1 + 0.1 * torch.randn_like(parameter))


def compiled() -> tuple[int, int]:
    """Return the number of compiled graphs, and the number of non-static inputs of their CUDA graphs."""
    return counters["stats"]["unique_graphs"], counters["inductor"]["cudagraph_recorded_non_static_inputs"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--shape", default="tiny", choices=list(SHAPES))
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-len", type=int, default=400, help="of the longest; the shortest has half of it")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--ends", type=int, default=16, help="one word in this many ends a text; 0: none does")
    args = parser.parse_args()
    args.dtype = getattr(torch, args.dtype or ("float32" if args.device == "cpu" else "bfloat16"))

    model = build(args)
    task = make_task(model.config.vocab_size, args)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(
        f"a Llama of {size:.0f}M parameters, {args.dtype}, {args.device}; {args.prompts} prompts of up to "
        f"{args.prompt_len} tokens x {args.samples} samples x {args.new_tokens} tokens"
    )
    rows: dict[str, Rollout] = {}
    for backend in ("inductor", "tatten"):
        print(f"generate, compiled by {backend} ...", flush=True)
        torch._dynamo.reset()
        rows[f"generate, {backend}"] = Duplicated(model, task, backend).draw(1)
    print("a shared prefix, compiled by tatten ...", flush=True)
    shared = Shared(model, task)
    before = compiled()
    ours, log_p = shared.draw(1)

    for name, theirs in rows.items():
        print(f"{name}: {compare(ours.tokens, theirs.tokens, args.dtype)}")
    print(check_log_p(model, task, ours.tokens, log_p))

    update(model)
    again, log_p = shared.draw(2)
    if compiled() != before:
        raise SystemExit(f"the last rollout must not compile or capture anything, got {before} and {compiled()}")
    print("after a change of the weights: nothing was compiled or captured")
    print(check_log_p(model, task, again.tokens, log_p))

    print("\n                          prefill    KV MiB   steps/s  tokens/s   steps of batch")
    for name, rollout in {**rows, "shared, tatten": ours, "shared, second rollout": again}.items():
        print(rollout.row(name))
    for name, theirs in rows.items():
        print(f"{ours.tokens_per_second / theirs.tokens_per_second:.1f} times the tokens per second of {name}")


if __name__ == "__main__":
    main()
