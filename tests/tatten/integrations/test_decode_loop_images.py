"""Images and sounds in the decode loop: a prefill reads them, steps don't, and tokens are those of `generate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import decode_loops
import pytest
import torch
import transformers
from decode_loops import SIZES, graphs_of
from slow import slow_after
from torch import Tensor, nn
from transformers import CompileConfig

from tatten.integrations.transformers import DecodeLoop
from tatten.integrations.transformers.loop.generate_call import GRIDS, inputs_of_prefill
from tatten.integrations.transformers.loop.rope_deltas import RopeDeltas
from tatten.ops import moved

pytestmark = pytest.mark.drawn(8)

IMAGE, VIDEO, START, END = 60, 61, 62, 63
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
CLIP = VISION | {"image_size": 28, "patch_size": 14}
TEXT = SIZES | {"eos_token_id": None, "bos_token_id": 1}
QWEN_VISION = {"depth": 1, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN_TEXT = TEXT | {
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
}
QWEN = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "text_config": QWEN_TEXT,
}
GEMMA_TEXT = TEXT | {"head_dim": 16, "sliding_window": 8, "model_type": "gemma3_text"}


def square(seed: int) -> dict[str, Any]:
    """A prompt with one image of 28 x 28 pixels, which takes 4 tokens."""
    ids = torch.tensor([[5, IMAGE, IMAGE, IMAGE, IMAGE, 6, 7, 8 + seed]])
    return {"input_ids": ids, "pixel_values": draw(seed, 1, 3, 28, 28)}


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def grids(seed: int) -> dict[str, Any]:
    """A batch of two prompts with images of several sizes, the second one padded: positions differ from places."""
    sizes = [(4, 4 + 2 * seed), (4, 2)]
    rows = [[START, *[IMAGE] * (h * w // 4), END, 7, 8] for h, w in sizes]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "pixel_values": draw(seed, sum(h * w for h, w in sizes), 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, h, w] for h, w in sizes]),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


def with_types(seed: int) -> dict[str, Any]:
    inputs = square(seed)
    return {**inputs, "token_type_ids": (inputs["input_ids"] == IMAGE).long()}


def sound(seed: int) -> dict[str, Any]:
    """A prompt with a sound of 16 frames, which takes 2 tokens."""
    ids = torch.tensor([[5, IMAGE, IMAGE, 6, 7, 8 + seed]])
    return {"input_ids": ids, "input_features": draw(seed, 1, 8, 16)}


def with_sizes(seed: int) -> dict[str, Any]:
    return {**square(seed), "image_sizes": torch.tensor([[28, 28]])}


KINDS: dict[str, tuple[str, dict[str, Any], Callable[[int], dict[str, Any]]]] = {
    "llava": (
        "Llava",
        {
            "vision_config": CLIP | {"model_type": "clip_vision_model", "projection_dim": 32},
            "text_config": TEXT | {"model_type": "llama"},
            "image_token_id": IMAGE,
            "vision_feature_layer": -1,
        },
        square,
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        QWEN
        | {
            "vision_config": QWEN_VISION
            | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "fullatt_block_indexes": [0]}
        },
        grids,
    ),
    "gemma3": (
        "Gemma3",
        {
            "vision_config": CLIP | {"model_type": "siglip_vision_model"},
            "text_config": GEMMA_TEXT | {"layer_types": ["sliding_attention", "full_attention"]},
            "mm_tokens_per_image": 4,
            "image_token_id": IMAGE,
            "tie_word_embeddings": False,
        },
        with_types,
    ),
    "qwen2_vl": ("Qwen2VL", QWEN | {"vision_config": QWEN_VISION | {"embed_dim": 32, "hidden_size": 64}}, grids),
    "qwen3_vl": (
        "Qwen3VL",
        QWEN
        | {
            "vision_config": QWEN_VISION
            | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
            | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
        },
        grids,
    ),
    "internvl": (
        "InternVL",
        {
            "vision_config": VISION | {"image_size": [28, 28], "patch_size": [7, 7]},
            "text_config": TEXT | {"model_type": "qwen2"},
            "image_token_id": IMAGE,
        },
        square,
    ),
    "mistral3": (
        "Mistral3",
        {
            "vision_config": VISION | {"model_type": "pixtral", "image_size": 28, "patch_size": 7},
            "text_config": TEXT | {"model_type": "mistral", "head_dim": 16},
            "image_token_id": IMAGE,
            "vision_feature_layer": -1,
        },
        with_sizes,
    ),
    "voxtral": (
        "Voxtral",
        {
            "audio_config": {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1}
            | {"num_attention_heads": 2, "num_mel_bins": 8, "max_source_positions": 8},
            "text_config": TEXT | {"model_type": "llama", "head_dim": 16},
            "audio_token_id": IMAGE,
        },
        sound,
    ),
}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def build(kind: str) -> Any:
    name, config, _ = KINDS[kind]
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(getattr(transformers, f"{name}Config")(**config))
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.2)
    model.get_output_embeddings().weight.data.normal_(0, 0.4)
    return model.eval()


def both(model: Any, loop: DecodeLoop, input_ids: Tensor, **arguments: Any) -> tuple[Tensor, Tensor, int]:
    """The tokens of the loop and of `generate` from one seed, and the number of graphs that the loop compiled."""
    arguments, texts = {"do_sample": True, "max_new_tokens": 14, **arguments}, list[Tensor]()
    graphs = graphs_of(lambda: texts.extend(decode_loops.both(model, loop, input_ids, **arguments)))
    return *texts, graphs


@pytest.mark.parametrize("kind", slow_after(3, KINDS))
def test_tokens_after_images(kind: str) -> None:
    """Images of other sizes compile nothing. Sampled tokens show small differences of scores."""
    model, loop, (_, _, make) = build(kind), DecodeLoop(), KINDS[kind]
    texts = []
    for seed in (0, 1, 2):
        result, expected, graphs = both(model, loop, **make(seed))
        assert loop.reason is None
        assert torch.equal(result, expected)
        assert graphs == (seed == 0)
        texts.append(result[:, -14:])
    others = {name: x + 1 if x.is_floating_point() else x for name, x in make(0).items()}
    assert not torch.equal(both(model, loop, **others)[0][:, -14:], texts[0])


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_text_after_an_image(kind: str) -> None:
    """Positions of an image that a model keeps do not reach the next call."""
    model, loop, (_, _, make) = build(kind), DecodeLoop(), KINDS[kind]
    for inputs in (make(2), {"input_ids": torch.tensor([[5, 6, 7, 8], [5, 9, 7, 8]])}, make(1)):
        result, expected, _ = both(model, loop, **inputs)
        assert torch.equal(result, expected)
        assert loop.reason is None


def test_positions_that_a_model_keeps() -> None:
    """A captured step reads them at one address. Outside of steps, the model has a tensor of each call, as before."""
    model, loop, (_, _, make) = build("qwen2_5_vl"), DecodeLoop(), KINDS["qwen2_5_vl"]
    kept, expected, addresses = [], [], list[int]()

    class Streamer:
        def put(self, tokens: Tensor) -> None:
            self.last = model.model.rope_deltas.data_ptr()

        def end(self) -> None:
            addresses.append(self.last)

    for seed in (0, 1, 2):
        arguments = {**make(seed), "max_new_tokens": 4, "do_sample": False}
        model.generate(**arguments)
        expected.append(model.model.rope_deltas.clone())
        model.generate(**arguments, custom_generate=loop, streamer=Streamer())
        assert loop.reason is None
        kept.append(model.model.rope_deltas)
    assert len(set(addresses)) == 1
    assert len({x.data_ptr() for x in [*kept, *expected]}) == 6
    assert all(map(torch.equal, kept, expected))
    assert len({tuple(x.flatten().tolist()) for x in kept}) > 1


def test_positions_are_put_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(self: RopeDeltas, x: Tensor, name: str) -> Tensor:
        if name == "1":
            raise MemoryError("test")
        return x.clone()

    parts, kept = nn.ModuleList([nn.Module(), nn.Module()]), [torch.ones(2, 1), torch.zeros(2, 1)]
    for part, x in zip(parts, kept, strict=True):
        part.rope_deltas = x
    monkeypatch.setattr(RopeDeltas, "_filled_with", fill)
    with pytest.raises(MemoryError), RopeDeltas().in_buffers(parts):
        pass
    assert all(part.rope_deltas is x for part, x in zip(parts, kept, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_after_images(kind: str) -> None:
    """Images of other sizes capture nothing."""
    model, loop, (_, _, make) = build(kind).cuda(), DecodeLoop(), KINDS[kind]
    config = CompileConfig(backend="tatten", mode=None, options={"inner": "aot_eager"})
    captured = set()
    for seed in (0, 1, 2):
        inputs = {name: x.cuda() for name, x in make(seed).items()} | {"max_new_tokens": 14, "do_sample": False}
        expected = model.generate(**inputs, disable_compile=True)
        result = model.generate(**inputs, custom_generate=loop, compile_config=config)
        assert (loop.reason, loop.not_captured) == (None, None)
        assert torch.equal(result, expected)
        captured |= {step.runner._graph for step in loop._steps[model].values()}
    assert len(captured) == 1
    assert None not in captured


def test_several_texts_for_an_image() -> None:
    model, loop = build("llava"), DecodeLoop()
    result, expected, _ = both(model, loop, **square(0), num_return_sequences=3)
    assert torch.equal(result, expected)
    assert loop.reason is None


@pytest.mark.parametrize("kind", ["llava", "gemma3"])
def test_prompt_lookup_after_an_image(kind: str) -> None:
    model, loop = build(kind), DecodeLoop()
    arguments = {"do_sample": False, "prompt_lookup_num_tokens": 3, "max_new_tokens": 30}
    result, expected, _ = both(model, loop, **KINDS[kind][2](0), **arguments)
    assert torch.equal(result, expected)
    assert loop.reason is None


def test_calls_that_run_the_loop_of_generate() -> None:
    model, loop = build("gemma3"), DecodeLoop()
    inputs = with_types(0)
    ids = inputs["input_ids"].repeat(2, 1)
    types = torch.zeros_like(ids)
    types[1, -1] = 1
    result, expected, _ = both(model, loop, input_ids=ids, token_type_ids=types)
    assert torch.equal(result, expected)
    assert loop.reason == "new tokens have several kinds of `token_type_ids`"


def test_an_assistant_reads_no_images() -> None:
    model, draft, loop = build("llava"), build("llava"), DecodeLoop()
    draft.generation_config.num_assistant_tokens = 3
    arguments = {**square(0), "do_sample": False, "assistant_model": draft}
    result, expected, _ = both(model, loop, **arguments)
    assert torch.equal(result, expected)
    assert loop.reason == "an assistant in one step reads text alone"


def test_a_prefill_in_chunks() -> None:
    """With transformers 5.24, a static cache gives chunks of Gemma 3 other masks than a dynamic one."""
    model, loop = build("gemma3"), DecodeLoop()
    result, expected, _ = both(model, loop, **with_types(0), prefill_chunk_size=3)
    assert torch.equal(result, expected)
    assert loop.reason == "in chunks of a prefill, the mask of an image depends on the kind of cache"


class Prepares(transformers.LlavaForConditionalGeneration):
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return super().prepare_inputs_for_generation(*args, **kwargs)


class Derived(transformers.LlavaForConditionalGeneration):
    pass


def test_models_outside_of_transformers() -> None:
    """`generate` keeps images from steps, but a step may read the grids, and code that prepares inputs anything."""
    config = build("llava").config
    assert inputs_of_prefill(build("llava")) > {"pixel_values", "image_grid_thw"}
    assert {"pixel_values"} < inputs_of_prefill(Derived(config)) == inputs_of_prefill(build("llava")) - GRIDS
    assert inputs_of_prefill(Prepares(config)) == frozenset()


class DerivedGemma(transformers.Gemma3ForConditionalGeneration):
    pass


def test_types_of_tokens_in_a_model_outside_of_transformers() -> None:
    model, loop, ids = DerivedGemma(build("gemma3").config).eval(), DecodeLoop(), torch.tensor([[5, 6, 7]])
    result, expected, _ = both(model, loop, ids, token_type_ids=torch.zeros_like(ids))
    assert torch.equal(result, expected)
    assert loop.reason == "the input `token_type_ids` of the model may change at each step"


def test_images_if_transformers_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved, "_notes", {})
    monkeypatch.delattr("transformers.generation.utils.MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL")
    assert inputs_of_prefill(build("llava")) == frozenset()
    (note,) = moved.moved_notes()
    assert "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL" in note
