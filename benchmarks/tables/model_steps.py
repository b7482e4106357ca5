"""Tables of whole decode steps: of models, of `generate`, of packages."""

from __future__ import annotations

from tables.table import Cell, Row, Table, error, figure, heads, number, us
from tatten.ops.cuda.skinny_linear import one_row_tile


def faster(slow: str, fast: str) -> Cell:
    return lambda r: number(r[slow] / r[fast], 2)


STATIC_CACHE: dict[str, Cell | str] = {
    "dtype": "dtype",
    "batch": "batch",
    "heads": heads,
    "head_dim": "head_dim",
    "cache": "max_cache_len",
    "used": lambda r: f"{r['used']}{', padded' * r['padded']}",
    "Inductor ms": figure("inductor_ms", 2),
    "tatten ms": figure("tatten_ms", 2),
    "byte floor ms": figure("floor_ms", 2),
    "speedup": faster("inductor_ms", "tatten_ms"),
}


def share(r: Row) -> str:
    return "all" if r["full"] else "an eighth"


def ms(name: str, digits: int = 2) -> Cell:
    return lambda r: number(r["ms"].get(name), digits)


def token_ms(name: str) -> Cell:
    return lambda r: number(r["token_ms"][name], 2)


STEP: dict[str, Cell | str] = {
    "Inductor ms": figure("inductor_ms", 2),
    "tatten ms": figure("tatten_ms", 2),
    "byte floor ms": figure("floor_ms", 2),
    "times as fast": figure("faster", 2),
    "error, Inductor": error("inductor_error"),
    "error, tatten": error("tatten_error"),
}


def chosen_us(r: Row) -> float:
    """Microseconds of the tile of a linear layer of one row."""
    us: float = r["us"][str(one_row_tile(r["features"]))]
    return us


AOTI = {
    "batch": "batch",
    "heads": heads,
    "head_dim": "head_dim",
    "cache": "max_cache_len",
    "used": "used",
    "layers": "layers",
    "Inductor's package ms": figure("inductor_ms", 1),
    "tatten's package ms": figure("tatten_ms", 1),
    "compiled ms": figure("compiled_ms", 1),
}

GENERATE: dict[str, Cell | str] = {
    "mode": "mode",
    "batch": "batch",
    "layers": "layers",
    "slots": "capacity",
    "used": "used",
    "Inductor ms": token_ms("inductor"),
    "tatten ms": token_ms("tatten"),
    "byte floor ms": figure("floor_ms", 2),
    "tatten to Inductor": figure("ratio", 2),
    "compile s, Inductor": lambda r: number(r["compile_s"]["inductor"], 0),
    "compile s, tatten": lambda r: number(r["compile_s"]["tatten"], 0),
}


def loop_ms(name: str) -> Cell:
    return lambda r: number(r["token_ms"].get(name), 2)


def lookup_step_ms(r: Row) -> object:
    return number(r["drafts"]["loop_lookup"]["step_ms"], 2)


def loop_to_floor(r: Row) -> object:
    return number(r["token_ms"]["loop"] / r["floor_ms"], 2)


def part_of_layer(part: str) -> Cell:
    return lambda r: number(r["parts"]["tatten"][part], 0)


FEW_ROWS: dict[str, Cell | str] = {
    "model": "model",
    "layers": "group",
    "rows": "rows",
    "parts": "parts",
    "cuBLAS us": us("cublas"),
    "joined us": lambda r: number(r["us"].get("joined")),
    "tatten us": us("tatten"),
    "floor us": figure("floor_us"),
    "tatten to cuBLAS": lambda r: number(r["us"]["tatten"] / r["us"]["cublas"], 2),
}

TABLES = {
    "static_cache": Table("static_cache", STATIC_CACHE),
    "static_cache_cpu": Table("static_cache_cpu", STATIC_CACHE),
    "small_calls": Table(
        "small_calls",
        {
            "dtype": "dtype",
            "batch": "batch",
            "heads": heads,
            "slots": "slots",
            "used": "used",
            "Inductor us": us("inductor", 0),
            "tatten us": us("tatten", 0),
            "tatten to Inductor": figure("ratio", 2),
        },
        lambda r: r["slots"] in (64, 128, 512) and r["used"] != "quarter",
    ),
    "generate": Table("generate", GENERATE),
    "generate_cpp_wrapper": Table("generate_cpp_wrapper", GENERATE),
    "generate_architectures": Table("generate_architectures", {"model": "model", **GENERATE}),
    "generate_two_layers": Table("generate_two_layers", {"model": "model", **GENERATE}),
    "generate_batch8": Table("generate_batch8", GENERATE),
    "decode_loop": Table(
        "decode_loop",
        {
            "batch": "batch",
            "layers": "layers",
            "slots": "capacity",
            "used": "used",
            "`generate`, Inductor": loop_ms("generate_inductor"),
            "`generate`, tatten": loop_ms("generate_tatten"),
            "decode_loop": loop_ms("loop"),
            "sampled": loop_ms("loop_sampled"),
            "streamed": loop_ms("loop_streamed"),
            "loop, Inductor alone": loop_ms("loop_inductor"),
            "replay": figure("replay_ms", 2),
            "byte floor": figure("floor_ms", 2),
            "loop to floor": loop_to_floor,
        },
    ),
    "decode_loop_h200": Table(
        "decode_loop_h200",
        {
            "layers": "layers",
            "slots": "capacity",
            "used": "used",
            "decode_loop": loop_ms("loop"),
            "sampled": loop_ms("loop_sampled"),
            "a step of prompt lookup": lookup_step_ms,
            "replay": figure("replay_ms", 2),
            "byte floor": figure("floor_ms", 2),
            "loop to floor": loop_to_floor,
        },
    ),
    "decode_loop_600m_h200": Table(
        "decode_loop_600m_h200",
        {
            "layers": "layers",
            "slots": "capacity",
            "used": "used",
            "decode_loop": loop_ms("loop"),
            "replay": figure("replay_ms", 2),
            "byte floor": figure("floor_ms", 2),
            "loop to floor": loop_to_floor,
        },
    ),
    "decode_loop_lookup": Table(
        "decode_loop_lookup",
        {
            "layers": "layers",
            "slots": "capacity",
            "used": "used",
            "decode_loop": loop_ms("loop"),
            "prompt lookup": loop_ms("loop_lookup"),
            "tokens of a step": lambda r: number(r["drafts"]["loop_lookup"]["tokens_per_step"], 0),
            "its ms": lookup_step_ms,
            "to a step of one": lambda r: number(r["drafts"]["loop_lookup"]["step_ms"] / r["token_ms"]["loop"], 2),
            "byte floor": figure("floor_ms", 2),
        },
    ),
    "decode_loop_batch8": Table(
        "decode_loop_batch8",
        {
            "batch": "batch",
            "layers": "layers",
            "slots": "capacity",
            "used": "used",
            "decode_loop": loop_ms("loop"),
            "loop, cuBLAS": loop_ms("loop_cublas"),
            "loop, Inductor alone": loop_ms("loop_inductor"),
            "replay": figure("replay_ms", 2),
            "byte floor": figure("floor_ms", 2),
            "loop to floor": loop_to_floor,
        },
    ),
    "decode_loop_sampled": Table(
        "decode_loop_sampled",
        {
            "layers": "layers",
            "slots": "capacity",
            "used": "used",
            "decode_loop": loop_ms("loop"),
            "sampled": loop_ms("loop_sampled"),
            "streamed": loop_ms("loop_streamed"),
            "loop, Inductor alone": loop_ms("loop_inductor"),
            "gpt-fast of 2024": loop_ms("gpt_fast"),
            "replay": figure("replay_ms", 2),
            "byte floor": figure("floor_ms", 2),
            "loop to floor": loop_to_floor,
        },
    ),
    "decode_loop_gpt_fast": Table(
        "decode_loop_gpt_fast",
        {
            "layers": "layers",
            "slots": "capacity",
            "used": "used",
            "decode_loop": loop_ms("loop"),
            "gpt-fast": loop_ms("gpt_fast"),
            "replay": figure("replay_ms", 2),
            "byte floor": figure("floor_ms", 2),
            "loop to gpt-fast": lambda r: number(r["token_ms"]["loop"] / r["token_ms"]["gpt_fast"], 2),
        },
    ),
    "decode_loop_start": Table(
        "decode_loop_start",
        {
            "layers": "layers",
            "decode_loop": lambda r: {"loop_untuned": "`decode=False`", "loop": "tuned, as it was"}[r["candidate"]],
            "first process": lambda r: number(r["cold"]["first_tokens_s"], 0),
            "second process": lambda r: number(r["warm"]["first_tokens_s"], 0),
            "first, with its start": lambda r: number(r["cold"]["process_s"], 0),
            "second, with its start": lambda r: number(r["warm"]["process_s"], 0),
        },
    ),
    "one_row_linear_h200": Table(
        "one_row_linear_h200",
        {
            "model": "model",
            "layers": "group",
            "cuBLAS us": us("cublas"),
            "joined us": lambda r: number(r["us"].get("joined")),
            "Inductor us": us("inductor"),
            "tatten us": us("tatten"),
            "floor us": figure("floor_us"),
            "tatten to Inductor": lambda r: number(r["us"]["tatten"] / r["us"]["inductor"], 2),
        },
    ),
    "one_row_tiles": Table(
        "one_row_tiles",
        {
            "input features": "features",
            "rows": "rows",
            "tile": lambda r: str(one_row_tile(r["features"])),
            "us": lambda r: number(chosen_us(r), 2),
            "best us": lambda r: number(min(r["us"].values()), 2),
            "floor us": figure("floor_us", 2),
            "to the best": lambda r: number(chosen_us(r) / min(r["us"].values()), 2),
        },
    ),
    "fused_linear_h200": Table(
        "fused_linear_h200",
        {
            "model": "model",
            "separate us": us("separate", 2),
            "gates": us("gates", 2),
            "norms": us("norms", 2),
            "residuals": us("residuals", 2),
            "norms and gates": us("sandwich", 2),
            "all, not early": us("not_ahead", 2),
            "all us": us("fused", 2),
            "floor us": figure("floor_us", 2),
            "all to separate": lambda r: number(r["us"]["fused"] / r["us"]["separate"], 2),
        },
    ),
    "few_rows_linear_h200": Table("few_rows_linear_h200", FEW_ROWS, lambda r: r["rows"] == 8),
    "skinny_linear": Table("skinny_linear", FEW_ROWS, lambda r: r["rows"] == 8),
    "aoti": Table("aoti", AOTI),
    "aoti_cuda": Table("aoti_cuda", AOTI),
    "written_out_steps": Table(
        "written_out",
        {"model": "model", "batch": "batch", "cache": "slots", "used": "used", **STEP},
        lambda r: r["section"] == "step",
    ),
    "written_out_layers": Table(
        "written_out",
        {
            "form": "form",
            "slots": "keys",
            "used": share,
            "Inductor us": figure("inductor_us"),
            "tatten us": figure("tatten_us"),
            "floor us": figure("floor_us"),
            "times as fast": figure("faster", 2),
        },
        lambda r: r["section"] == "layer" and r["batch"] == 8,
    ),
    "latent_kernel": Table(
        "latent_kernel",
        {
            "heads": "heads",
            "batch": "batch",
            "latents": "length",
            "FA3": us("fa3"),
            "tatten": us("tatten"),
            "tatten, output in float32": us("unrounded"),
            "floor": lambda r: number(max(r["bytes_us"], r["flops_us"])),
            "tatten to FA3": figure("ratio", 2),
        },
    ),
    "latent_kernel_h100": Table(
        "latent_kernel_h100",
        {
            "heads": "heads",
            "batch": "batch",
            "latents": "length",
            "FlashMLA": us("flash_mla"),
            "FA3": us("fa3"),
            "tatten": us("tatten"),
            "tatten, in float32": us("unrounded"),
            "floor": lambda r: number(max(r["bytes_us"], r["flops_us"])),
            "tatten to FlashMLA": lambda r: number(r["us"]["tatten"] / r["us"]["flash_mla"], 2),
            "tatten to FA3": figure("ratio", 2),
        },
    ),
    "sparse_kernel": Table(
        "sparse_kernel",
        {
            "heads": "heads",
            "batch": "batch",
            "keys": "length",
            "picks": "picks",
            "dense": us("dense"),
            "masked": us("masked"),
            "copied": us("copied"),
            "2048 in a row": us("short"),
            "FA3": us("fa3"),
            "FlashMLA": us("flash_mla"),
            "tatten": us("tatten"),
            "bytes of the picks": figure("bytes_us"),
            "masked to tatten": lambda r: number(r["us"]["masked"] / r["us"]["tatten"], 1),
            "tatten to copied": lambda r: number(r["us"]["tatten"] / r["us"]["copied"], 2),
        },
    ),
    "indexer": Table(
        "indexer",
        {
            "batch": "batch",
            "keys": "length",
            "index heads": "heads",
            "queries": "q_length",
            "stored as": "keys",
            "Inductor": us("inductor"),
            "tatten": us("tatten"),
            "floor": figure("bytes_us"),
            "topk": us("topk"),
            "topk, unsorted": us("unsorted"),
            "top_picks": us("top_picks"),
        },
    ),
    "sparse_layer": Table(
        "sparse_layer",
        {
            "batch": "batch",
            "keys": "length",
            "Inductor": us("inductor", 0),
            "tatten, masked": us("masked", 0),
            "tatten": us("tatten", 0),
            **{f"{part} of tatten": part_of_layer(part) for part in ("indexer", "top-k", "attention", "projections")},
        },
    ),
    "latent_product": Table(
        "latent_product",
        {
            "heads": "heads",
            "rows": "batch",
            "bmm of rounded sums": us("rounded"),
            "bmm of both halves": us("split"),
            "tatten": us("tatten"),
            "byte floor": figure("floor_us"),
        },
    ),
    "latent_step": Table(
        "latent_step", {"batch": "batch", "heads": "heads", "cache": "max_cache_len", "used": "used", **STEP}
    ),
    "latent_generate": Table(
        "latent_generate",
        {
            "mode": "mode",
            "batch": "batch",
            "slots": "capacity",
            "used": "used",
            "Inductor ms": token_ms("inductor"),
            "tatten ms": token_ms("tatten"),
            "byte floor ms": figure("floor_ms", 2),
            "times as fast": figure("faster"),
        },
    ),
    "latent_rounding": Table(
        "latent_rounding",
        {
            "latents": "length",
            "query times": lambda r: number(r["sharpness"], 0),
            "SDPA, norm": lambda r: f"{r['sdpa']['norm']:.2e}",
            "tatten, norm": lambda r: f"{r['tatten']['norm']:.2e}",
            "SDPA, largest": lambda r: f"{r['sdpa']['max']:.2e}",
            "tatten, largest": lambda r: f"{r['tatten']['max']:.2e}",
        },
    ),
    "latent_sharded": Table(
        "latent_sharded",
        {
            "heads": "heads",
            "latents": "length",
            "all on one GPU": us("local"),
            "sharded": us("sharded"),
            "more than half": figure("over_share_us"),
        },
    ),
    "sliding_cpu": Table(
        "sliding_cpu",
        {
            "batch, kv heads, slots, head_dim": lambda r: ", ".join(map(str, r["shape"])),
            "dtype": "dtype",
            "MB": lambda r: number(r["bytes"] / 1e6),
            "Inductor us": us("inductor"),
            "tatten us": us("tatten"),
            "byte floor us": figure("floor_us"),
            "times as fast": figure("faster", 2),
        },
    ),
    "latent_cpu": Table(
        "latent_cpu",
        {
            "dtype": "dtype",
            "batch": "batch",
            "heads": "heads",
            "cache": "max_cache_len",
            "used": "used",
            "Inductor ms": figure("inductor_ms", 0),
            "tatten ms": figure("tatten_ms"),
            "byte floor ms": figure("floor_ms"),
            "times as fast": figure("faster"),
        },
    ),
    "encoder_decoder": Table(
        "encoder_decoder",
        {
            "model": "model",
            "sources": "batch",
            "layers": "layers",
            "Inductor ms": ms("inductor"),
            "Inductor, stored once ms": ms("both"),
            "tatten ms": ms("tatten"),
            "Inductor, without sources ms": ms("rest"),
            "times as fast": figure("faster", 2),
            "MB, Inductor": lambda r: number(r["held_bytes"]["inductor"] / 1e6, 0),
            "MB, tatten": lambda r: number(r["held_bytes"]["tatten"] / 1e6, 0),
        },
    ),
    "encoder_decoder_loop": Table(
        "encoder_decoder_loop",
        {
            "model": "model",
            "sources": "batch",
            "`generate`, eager": loop_ms("generate"),
            "`generate`, Inductor": loop_ms("generate_inductor"),
            "decode_loop": loop_ms("loop"),
            "byte floor": figure("floor_ms", 2),
            "times as fast as Inductor": lambda r: number(
                r["token_ms"]["generate_inductor"] / r["token_ms"]["loop"], 2
            ),
        },
    ),
    "eager_step": Table(
        "eager_step",
        {
            "model": "model",
            "batch": "batch",
            "cache": "capacity",
            "used": "used",
            "eager ms": ms("eager"),
            "sdpa ms": ms("sdpa"),
            "tatten ms": ms("tatten"),
            "logits differ, tatten": lambda r: number(r["error"]["tatten"], 2),
        },
    ),
    "quantised": Table(
        "quantised",
        {
            "cache": "cache",
            "batch": "batch",
            "slots": "capacity",
            "used": "used",
            "layers": "layers",
            "ms a token": figure("token_ms", 2),
            "tokens/s": figure("tokens_per_s", 0),
            "times as fast": figure("faster", 2),
            "of the bytes": figure("of_16_bits", 2),
            "error of logits": figure("logits_error", 2),
        },
    ),
}
