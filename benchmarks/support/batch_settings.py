"""The workloads of `generate_batch`: the number of prompts, their tokens, and the samples of each."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import transformers
from packaging.version import Version

OLDEST = "5.24"  # transformers with pages by those names


@dataclass(frozen=True)
class Setting:
    """Prompts of `shortest` to `longest` tokens, drawn with a seed; one sample is greedy, several are drawn."""

    model: str
    prompts: int
    shortest: int
    longest: int
    new: int
    samples: int = 1
    page: int = 256

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def new_tokens(self) -> int:
        return self.sequences * self.new

    @property
    def lengths(self) -> list[int]:
        drawn = random.Random(0)
        return [drawn.randint(self.shortest, self.longest) for _ in range(self.prompts)]

    def inputs(self, vocabulary: int, seed: int) -> list[list[int]]:
        """Draw tokens by `seed`, in prompts of the setting's lengths."""
        rng = random.Random(seed)
        return [[rng.randrange(1, vocabulary) for _ in range(n)] for n in self.lengths]

    @property
    def blocks(self) -> int:
        """Pages of all layers that hold everything, of which transformers keeps 15% free; a fork shares full pages."""
        full = sum(n // self.page for n in self.lengths)
        per_sample = sum(-(-(n + self.new) // self.page) + 1 - n // self.page for n in self.lengths)
        return -(-(full + self.samples * per_sample) * 5 // 4) + 2


SETTINGS = {
    "cuda": {
        "a": Setting("llama", 64, 512, 4096, 128),
        "b": Setting("llama", 4, 4096, 4096, 256, samples=16),
        "gemma3": Setting("gemma3_text", 64, 512, 4096, 128),
        "gpt_oss": Setting("gpt_oss", 64, 512, 4096, 128),
    },
    "cpu": {
        "a": Setting("llama", 5, 20, 90, 8, page=16),
        "b": Setting("llama", 2, 64, 64, 8, samples=3, page=16),
        "gemma3": Setting("gemma3_text", 4, 20, 90, 8, page=16),
        "gpt_oss": Setting("gpt_oss", 4, 20, 90, 8, page=16),
    },
}
HOST = {  # a stub makes up the tokens, so that only lengths matter
    "cuda": Setting("llama", 64, 4096, 4096, 64),
    "cpu": Setting("llama", 64, 4096, 4096, 64),
}


def check_version() -> None:
    """Exit unless transformers has the continuous batching whose internals these benchmarks use."""
    if Version(transformers.__version__) < Version(OLDEST):
        raise SystemExit(f"needs transformers {OLDEST} or later, got {transformers.__version__}")


def setting(device: str, name: str, prompts: int | None = None, new: int | None = None) -> Setting:
    """Return a setting, with its number of prompts or new tokens replaced where they are named."""
    default = SETTINGS[device][name]
    return replace(default, prompts=prompts or default.prompts, new=new or default.new)
