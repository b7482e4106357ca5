"""Tokens of `generate` by wall clock, as a user waits for them: Inductor and tatten, in each mode of torch.compile.

    python benchmarks/generate.py --device cuda                       # 32 layers of Llama-3.1-8B; minutes of compiling
    python benchmarks/generate.py --device cuda --layers 4 --batch 1 --modes default cpp_wrapper
    python benchmarks/generate.py --device cpu                        # a tiny model, to try the code

A static cache of `--capacity` slots, of which a prompt fills `--used`. A time is that of one more token: the difference
of two calls, one of which generates more. Both wait for the GPU at every token, as `generate` does to see whether it is
done. Calls take turns. `compile` is how long the first call took beyond another one. The floor is each weight and each
used key and value once, at the rate of a plain read.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from support import results
from support.command_line import arguments, machine
from support.timing import in_turns, read_rate
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM, StaticCache

BACKENDS = "inductor", "tatten"
MODES = {
    "default": {"mode": "default"},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "cpp_wrapper": {"mode": None, "options": {"cpp_wrapper": True}},
}
FEW, MANY = 4, 36  # tokens of the two calls


def build(layers: int, device: str) -> LlamaForCausalLM:
    small = device == "cpu"
    config = LlamaConfig(
        hidden_size=128 if small else 4096,
        intermediate_size=256 if small else 14336,
        num_hidden_layers=layers,
        num_attention_heads=4 if small else 32,
        num_key_value_heads=2 if small else 8,
        vocab_size=100 if small else 32000,
        max_position_embeddings=1 << 17,
    )
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if small else torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
    torch.set_default_dtype(default)
    return model


def generator(
    model: LlamaForCausalLM, prompt: torch.Tensor, capacity: int, backend: str, mode: str
) -> Callable[[int], torch.Tensor]:
    """A function that generates so many tokens after the prompt, and returns them."""
    compile_config = CompileConfig(backend=backend, **MODES[mode])
    compile_config._compile_all_devices = True
    cache = StaticCache(model.config, max_cache_len=capacity)

    def generate(tokens: int) -> torch.Tensor:
        cache.reset()
        return model.generate(
            prompt,
            past_key_values=cache,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=False,
            compile_config=compile_config,
            pad_token_id=0,
        )[:, prompt.shape[1] :]

    return generate


def clock(call: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(model: LlamaForCausalLM, batch: int, mode: str, args: object) -> dict[str, dict[str, float]]:
    device = args.device
    prompt = torch.randint(1, model.config.vocab_size, (batch, args.used), device=device)
    calls, first = {}, {}
    for backend in BACKENDS:
        torch._dynamo.reset()
        model._compiled_call = None  # `generate` keeps what it compiled on the model
        call = generator(model, prompt, args.capacity, backend, mode)
        first[backend] = clock(lambda call=call: call(FEW), device)
        compiled = model._compiled_call

        def again(n: int, call: Callable[[int], torch.Tensor] = call, compiled: object = compiled) -> torch.Tensor:
            model._compiled_call = compiled
            return call(n)

        again(MANY)
        calls[backend] = again

    def token_ms(_: str, call: Callable[[int], torch.Tensor]) -> float:
        few = clock(lambda: call(FEW), device)
        return (clock(lambda: call(MANY), device) - few) / (MANY - FEW) * 1e3

    took = in_turns(calls, args.rounds, token_ms)
    again_s = {name: clock(lambda call=call: call(FEW), device) for name, call in calls.items()}
    return {"token_ms": took, "compile_s": {name: first[name] - again_s[name] for name in BACKENDS}}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--capacity", type=int)
    parser.add_argument("--used", type=int)
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    small = args.device == "cpu"
    args.layers = args.layers or (1 if small else 32)
    args.capacity, args.used = args.capacity or (128 if small else 8192), args.used or (16 if small else 1000)
    rate = read_rate(args.device)
    print(
        f"{machine(args.device)}, {rate / 1e9:.1f} GB/s; {args.layers} layers, {args.capacity} slots, {args.used} used"
    )
    print("batch mode            | inductor   tatten    floor ms | tatten/inductor | compile s inductor tatten")
    model = build(args.layers, args.device)
    weights = sum(p.nbytes for p in model.parameters()) - model.model.embed_tokens.weight.nbytes
    found = []
    with torch.no_grad():
        for batch in args.batch:
            for mode in args.modes:
                r = measure(model, batch, mode, args)
                config = model.config
                kv = 2 * batch * config.num_key_value_heads * config.head_dim * args.used * config.num_hidden_layers
                kv *= model.dtype.itemsize
                floor = (weights + kv) / rate * 1e3
                found.append(
                    {"batch": batch, "mode": mode, "layers": args.layers, "capacity": args.capacity, "used": args.used}
                    | r
                    | {"floor_ms": floor, "ratio": r["token_ms"]["tatten"] / r["token_ms"]["inductor"]}
                )
                ms, s = r["token_ms"], r["compile_s"]
                print(
                    f"{batch:5} {mode:15} | {ms['inductor']:8.2f} {ms['tatten']:8.2f} {floor:8.2f}    | "
                    f"{found[-1]['ratio']:15.3f} | {s['inductor']:18.1f} {s['tatten']:6.1f}",
                    flush=True,
                )
                if args.json:
                    results.write(args.json, args.device, found, bytes_per_second=rate)


if __name__ == "__main__":
    main()
