"""Stream a text token by token with `decode_loop`, beside `generate`: the same text, in less time.

    python examples/chat.py                                     # a small random model on a CPU
    python examples/chat.py --device cuda --dtype bfloat16 --hidden 4096 --layers 32 --new-tokens 256
    python examples/chat.py --model meta-llama/Llama-3.1-8B-Instruct --device cuda --dtype bfloat16

Without `--model`, the weights are random and words are numbers: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import threading
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, TextIteratorStreamer

from tatten.integrations.transformers import decode_loop


class Numbers:
    """A tokenizer for the random model: each token is a number."""

    def decode(self, tokens: list[int], **_: object) -> str:
        return "".join(f"{token} " for token in tokens)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model of the Hub or a folder; default: random weights")
    parser.add_argument("--prompt", default="Why is the sky blue?")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=48)
    return parser.parse_args()


def load(args: argparse.Namespace) -> tuple[torch.nn.Module, object, torch.Tensor]:
    """Return the model, its tokenizer, and the tokens of the prompt."""
    dtype = getattr(torch, args.dtype)
    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        messages = [{"role": "user", "content": args.prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
        return model.to(args.device).eval(), tokenizer, ids["input_ids"].to(args.device)
    torch.manual_seed(0)
    heads = max(4, args.hidden // 128)
    sizes = {"hidden_size": args.hidden, "intermediate_size": 4 * args.hidden, "num_hidden_layers": args.layers}
    config = LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=heads // 4, vocab_size=2000)
    model = LlamaForCausalLM(config).to(args.device, dtype).eval()
    return model, Numbers(), torch.randint(3, 2000, (1, 32), device=args.device)


def stream(model: torch.nn.Module, tokenizer: object, ids: torch.Tensor, **arguments: object) -> tuple[str, float]:
    """Print a text as it comes, and return it with the milliseconds of a token after the first."""
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=600.0)

    def generate() -> None:
        try:
            model.generate(ids, streamer=streamer, **arguments)
        finally:
            streamer.end()  # ends the loop below after an error, too

    thread = threading.Thread(target=generate)
    thread.start()
    pieces, times = [], []
    for piece in streamer:
        times.append(time.perf_counter())
        pieces.append(piece)
        print(piece, end="", flush=True)
    thread.join()
    print()
    return "".join(pieces), (times[-1] - times[0]) / max(1, len(times) - 1) * 1e3


def main() -> None:
    args = parse()
    model, tokenizer, ids = load(args)
    arguments = {"max_new_tokens": args.new_tokens, "do_sample": True, "temperature": 0.8, "top_p": 0.95}
    arguments |= {"pad_token_id": 0} | ({} if args.model else {"eos_token_id": None})
    model.generate(ids, **arguments, custom_generate=decode_loop)  # compiles
    texts, took = {}, {}
    for name, more in (("generate", {}), ("decode_loop", {"custom_generate": decode_loop})):
        print(f"{name}:")
        torch.manual_seed(0)
        texts[name], took[name] = stream(model, tokenizer, ids, **arguments, **more)
    same = "the same text" if texts["generate"] == texts["decode_loop"] else "another text, as rounding chose"
    print(f"generate {took['generate']:.1f} ms a token, decode_loop {took['decode_loop']:.1f} ms: {same}")
    if decode_loop.reason is not None:
        print("the loop of generate ran, because", decode_loop.reason)


if __name__ == "__main__":
    main()
