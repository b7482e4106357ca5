"""Unchanged transformers decoders: every decode SDPA is rewritten and the logits stay, over several steps."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import transformers
from rewriting import as_for_inductor
from slow import slow_but, slow_but_some
from transformers import DynamicCache, StaticCache

import tatten
from tatten.integrations.transformers import cache_kwargs
from tatten.passes import sliding
from tatten.passes.reasons import Reason

LAYERS, STEPS, PROMPT, MAX_LEN = 2, 5, 10, 32
COMMON = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
GQA = COMMON | {"num_key_value_heads": 2}
MOE = GQA | {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

ZOO: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", GQA),
    "llama_mha": ("Llama", COMMON),
    "llama_mqa": ("Llama", COMMON | {"num_key_value_heads": 1}),
    "llama_wide_heads": ("Llama", GQA | {"head_dim": 512}),
    "mistral": ("Mistral", GQA | {"sliding_window": None}),
    "mistral_window": ("Mistral", GQA | {"sliding_window": 8}),
    "mixtral": ("Mixtral", GQA | {"num_local_experts": 4}),
    "ministral": ("Ministral", GQA | {"sliding_window": 8, "head_dim": 16}),
    "qwen2": ("Qwen2", GQA),
    "qwen2_window": ("Qwen2", GQA | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen2_moe": ("Qwen2Moe", MOE | {"num_experts": 4, "shared_expert_intermediate_size": 32}),
    "qwen3": ("Qwen3", GQA | {"head_dim": 16}),
    "qwen3_moe": ("Qwen3Moe", MOE | {"num_experts": 4, "head_dim": 16}),
    "gemma": ("Gemma", GQA | {"head_dim": 16}),
    "gemma3": (
        "Gemma3",
        GQA | {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi": ("Phi", GQA),
    "phi3": ("Phi3", GQA),
    "starcoder2": ("Starcoder2", GQA),
    "olmo": ("Olmo", GQA),
    "olmo2": ("Olmo2", GQA),
    "olmo3": ("Olmo3", GQA | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "olmoe": ("Olmoe", GQA | {"num_experts": 4, "num_experts_per_tok": 2}),
    "granite": ("Granite", GQA),
    "granite_moe": ("GraniteMoe", GQA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "cohere": ("Cohere", GQA),
    "cohere2": ("Cohere2", GQA | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "stablelm": ("StableLm", GQA),
    "smollm3": ("SmolLM3", GQA),
    "nemotron": ("Nemotron", GQA),
    "persimmon": ("Persimmon", COMMON),
    "glm": ("Glm", GQA | {"head_dim": 16}),
    "glm4": ("Glm4", GQA | {"head_dim": 16}),
    "helium": ("Helium", GQA | {"head_dim": 16}),
    "ernie": ("Ernie4_5", GQA | {"head_dim": 16}),
    "exaone4": ("Exaone4", GQA | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "arcee": ("Arcee", GQA),
    "seed_oss": ("SeedOss", GQA | {"head_dim": 16}),
    "bitnet": ("BitNet", GQA),
    "diffllama": ("DiffLlama", GQA),
    "gpt2": ("GPT2", {"vocab_size": 99, "n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 128}),
    "gpt_neox": ("GPTNeoX", COMMON),
    "gpt_bigcode": (
        "GPTBigCode",
        {"vocab_size": 99, "n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 128, "multi_query": True},
    ),
    "opt": ("OPT", COMMON | {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "falcon_mqa": ("Falcon", COMMON | {"multi_query": True, "new_decoder_architecture": False}),
    "falcon_gqa": ("Falcon", COMMON | {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon_alibi": ("Falcon", COMMON | {"multi_query": True, "new_decoder_architecture": False, "alibi": True}),
    "deepseek_v3": (
        "DeepseekV3",
        COMMON
        | {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
        | {"moe_intermediate_size": 32, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    ),
}
WRITTEN_OUT = {
    "gemma2": ("Gemma2", GQA | {"head_dim": 16, "sliding_window": 8}),
    "gpt_oss": (
        "GptOss",
        GQA | {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gptj": (
        "GPTJ",
        {"vocab_size": 99, "n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 128, "rotary_dim": 8},
    ),
    "bloom": ("Bloom", {"vocab_size": 99, "hidden_size": 64, "n_layer": LAYERS, "n_head": 4}),
    "granite_swa": ("GraniteSwa", GQA | {"sliding_window": 8}),
    "llama": ("Llama", GQA),
    "qwen3_moe": ("Qwen3Moe", MOE | {"num_experts": 4, "head_dim": 16}),
}

FLEX = {name: (ZOO | WRITTEN_OUT)[name] for name in ("llama", "mistral_window", "gemma2")}
# Without padding transformers 5.23 attends to one slot of a static cache too many: its mask function reads the cache's
# length where that has grown already.
FLEX_CACHES = ["dynamic", "dynamic-padded", "static-padded"]

# With `dynamic=True`: the attention of transformers that models of ZOO and WRITTEN_OUT are built with, and the caches,
# which have windows in those layers that do.
ANY_SIZE = [
    (attention, name, cache)
    for attention, names in (("sdpa", ZOO), ("eager", WRITTEN_OUT))
    for name, cache in product(names, ["dynamic", "static", "static-padded"])
    if name not in ("falcon_alibi", "bloom") or cache == "dynamic"
]
ANY_SIZE += [("flex_attention", name, cache) for name, cache in product(FLEX, FLEX_CACHES)]

# One for each kind of graph: GQA, MHA, MQA, a window, layers of two kinds, a bias, latent keys, two calls in a layer.
KINDS = [("llama", "static-padded"), ("llama_mha", "static"), ("gpt_bigcode", "static"), ("mistral_window", "dynamic")]
KINDS += [("gemma3", "static-padded"), ("falcon_alibi", "dynamic"), ("deepseek_v3", "static"), ("diffllama", "dynamic")]
# Each model meets both caches, and padding and none; a static cache without padding, whose mask no model makes itself,
# is there for the kinds.
CASES = [*KINDS, *product(ZOO, ["dynamic", "static-padded"])]


def build(name: str, config: dict, **kwargs) -> transformers.PreTrainedModel:
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config", None)
    if config_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config_class(**config), **kwargs).eval().float()


def decode(model, forward, cache: str, padded: bool, steps: int = STEPS) -> torch.Tensor:
    """Logits of greedy steps after an eager prefill."""
    ids = torch.arange(1, 2 * PROMPT + 1).view(2, PROMPT)
    mask = torch.ones(2, PROMPT, dtype=torch.int64)
    if padded:
        mask[0, :3] = 0
    kv = StaticCache(model.config, max_cache_len=MAX_LEN) if cache == "static" else DynamicCache(config=model.config)
    logits = []
    with torch.no_grad():
        extra = {"attention_mask": mask} if padded else {}
        token = model(ids, **cache_kwargs(kv), **extra).logits[:, -1:].argmax(-1)
        for _ in range(steps):
            if padded:
                mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.int64)], dim=1)
                extra = {"attention_mask": mask}
            step = forward(token, **cache_kwargs(kv), **extra).logits
            logits.append(step)
            token = step[:, -1:].argmax(-1)
    return torch.cat(logits)


def check_all_rewritten(report: tatten.Report, *others: Reason) -> None:
    assert report.rewritten or report.declined
    for finding in report.declined:
        assert finding.decline.reason in (Reason.NO_GAIN, *others), str(report)
    found = len(report.rewritten) + len(report.declined)
    assert found % LAYERS == 0
    assert found >= LAYERS


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name, cache", slow_but(KINDS, dict.fromkeys(CASES)))
def test_decoder(name: str, cache: str) -> None:
    if name == "falcon_alibi" and cache != "dynamic":
        pytest.skip("transformers adds an ALiBi bias as long as the prompt to a mask as long as the static cache")
    cache, _, padded = cache.partition("-")
    model = build(*ZOO[name], attn_implementation="sdpa")
    want = decode(model, model, cache, bool(padded))
    torch._dynamo.reset()
    with tatten.recording() as report:
        got = decode(model, torch.compile(model, backend="tatten", options={"inner": "eager"}), cache, bool(padded))
    check_all_rewritten(report)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral_window"])
def test_decoder_through_inductor(name: str, dynamic: bool) -> None:
    if dynamic and torch.__version__ < "2.12":
        pytest.skip("Inductor of torch 2.11 alone makes C++ that does not compile from these models with dynamic=True")
    steps = STEPS if dynamic else 2  # each of which is compiled anew: the mask grows
    model = build(*ZOO[name], attn_implementation="sdpa")
    want = decode(model, model, "static", True, steps)
    torch._dynamo.reset()
    with tatten.recording() as report:
        got = decode(model, torch.compile(model, backend="tatten", dynamic=dynamic), "static", True, steps)
    check_all_rewritten(report)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "name", slow_but(["llama"], ["llama", "qwen3", "gemma3", "mistral_window", "falcon_mqa", "gpt2"])
)
def test_generate(name: str, padded: bool) -> None:
    """The main path: `generate` with a static cache, which compiles the model itself."""
    model = build(*ZOO[name], attn_implementation="sdpa")
    model.generation_config.eos_token_id = None
    ids = torch.arange(1, 2 * PROMPT + 1).view(2, PROMPT)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = 0
    config = transformers.CompileConfig(backend="tatten", mode=None, options={"inner": "eager"})
    config._compile_all_devices = True  # transformers compiles on accelerators only, by default
    settings = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 8, "cache_implementation": "static"}
    settings |= {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    want = model.generate(ids, **settings, disable_compile=True)
    torch._dynamo.reset()
    with tatten.recording() as report:
        got = model.generate(ids, **settings, compile_config=config)
    check_all_rewritten(report)
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_generate_on_a_gpu(name: str) -> None:
    """CUDA graphs as users get them: from the default mode of CompileConfig, with nothing else set."""
    model = build(*ZOO[name], attn_implementation="sdpa").cuda()
    model.generation_config.eos_token_id = None
    ids = torch.arange(1, 2 * PROMPT + 1, device="cuda").view(2, PROMPT)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    settings = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 12, "cache_implementation": "static"}
    settings |= {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    want = model.generate(ids, **settings, disable_compile=True)
    torch._dynamo.reset()
    with tatten.recording() as report:
        got = model.generate(ids, **settings, compile_config=transformers.CompileConfig(backend="tatten"))
    check_all_rewritten(report)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), atol=1e-5, rtol=0)


@pytest.mark.drawn(2, "models")
@pytest.mark.parametrize(
    "name, cache",
    slow_but([("gpt_oss", "static-padded"), ("gemma2", "dynamic")], product(WRITTEN_OUT, ["dynamic", "static-padded"])),
)
def test_models_that_write_attention_out(name: str, cache: str) -> None:
    if name == "bloom" and cache != "dynamic":
        pytest.skip("transformers adds an ALiBi bias as long as the prompt to a mask as long as the static cache")
    cache, _, padded = cache.partition("-")
    model = build(*WRITTEN_OUT[name], attn_implementation="eager")
    want = decode(model, model, cache, bool(padded))
    torch._dynamo.reset()
    with tatten.recording() as report:
        got = decode(model, torch.compile(model, backend="tatten", options={"inner": "eager"}), cache, bool(padded))
    assert not report.declined, str(report)
    assert len(report.rewritten) % LAYERS == 0
    assert all(finding.note.startswith("attention written out") for finding in report.rewritten)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.drawn(2, "models")
@pytest.mark.parametrize("name, cache", slow_but([("mistral_window", "static-padded")], product(FLEX, FLEX_CACHES)))
def test_flex_attention(name: str, cache: str) -> None:
    """The logits of eager attention, from keys and values that it cached."""
    cache, _, padded = cache.partition("-")
    models = [build(*FLEX[name], attn_implementation=x) for x in ("eager", "flex_attention")]
    want = decode(models[0], models[0], cache, bool(padded))
    torch._dynamo.reset()
    with tatten.recording() as report:
        forward = torch.compile(models[1], backend="tatten", options={"inner": "eager"})
        got = decode(models[0], forward, cache, bool(padded))
    assert not report.declined, str(report)
    assert report.rewritten
    assert len(report.rewritten) % LAYERS == 0
    assert all(finding.note.startswith("flex_attention (") for finding in report.rewritten)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.drawn(2, "models")
@pytest.mark.parametrize("attention, name, cache", slow_but_some(3, ANY_SIZE))
def test_any_size(attention: str, name: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `dynamic=True` each size and each number of a model may be an input of its graph."""
    monkeypatch.setitem(sliding.LEAST_BYTES, "cpu", 1)
    cache, _, padded = cache.partition("-")
    model = build(*(ZOO | WRITTEN_OUT)[name], attn_implementation=attention)
    plain = build(*FLEX[name], attn_implementation="eager") if attention == "flex_attention" else model
    want = decode(plain, plain, cache, bool(padded))
    torch._dynamo.reset()
    with tatten.recording() as report:
        got = decode(plain, torch.compile(model, backend=as_for_inductor, dynamic=True), cache, bool(padded))
    if (
        attention == "flex_attention"
    ):  # its block sizes, and the soft cap of its score function, are inputs of the graph
        assert {x.decline.reason for x in report.declined} == {Reason.FLEX_ATTENTION}, str(report)
    elif attention == "eager" and getattr(model.config, "attn_logit_softcapping", None):
        check_all_rewritten(report, Reason.SCALE)  # on a CPU under Inductor no guard fixes a soft cap that is an input
    else:
        check_all_rewritten(report)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
