"""`tatten-serve`: a real process, and clients that stream from several connections at once."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import ContinuousBatchingConfig, PreTrainedTokenizerFast
from transformers.cli.serving import model_manager, utils
from transformers.utils import import_utils

import tatten.serve
from tatten.integrations.transformers.continuous_batching import supported

PROMPTS = ["11 12 13 14 15", " ".join(map(str, range(20, 80))), "31", "11 12 13 14 15 16 17 18", "41 42", "51 52 53"]
NEW = 60
PAGE, PAGES = 16, 40
ROOM = PAGE * PAGES  # the tokens of all pages


def serving(test: Any) -> Any:
    """Skip a test where there is no server, or no version of transformers with which batches were tested."""
    there, tested = import_utils.is_serve_available(), transformers.__version__.startswith(supported.VERSIONS)
    test = pytest.mark.skipif(not there, reason="the server of transformers is not installed")(test)
    return pytest.mark.skipif(not tested, reason="transformers is not a version that batches were tested with")(test)


def save(path: Path, name: str) -> None:
    """Write a tiny model with a tokenizer of numbers to a folder."""
    words = Tokenizer(models.WordLevel({str(i): i for i in range(99)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    tiny_models.build(name, "sdpa").save_pretrained(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save(path, "llama")
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    """The texts that `generate` finds, one by one."""
    model = tiny_models.build("llama", "sdpa")
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([[int(word) for word in prompt.split()]])
        tokens = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :]
        texts.append(" ".join(map(str, tokens.tolist())))
    return texts


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with served(folder) as address:
        yield address


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the model of a folder from a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pages = ["--cb-block-size", str(PAGE), "--cb-num-blocks", str(PAGES), "--cb-max-batch-tokens", "32"]
    command = [sys.executable, "-m", "tatten.serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    root = str(Path(tatten.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    log = folder / "log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, *pages, "--device", "cpu"],
            stderr=output,
            stdout=output,
            env=environment,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 240
        while not healthy(address):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield address
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            server.kill()
            raise


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def ask(url: str, folder: Path, prompt: str, **options: Any) -> HTTPResponse:
    """Post a request for a completion."""
    body = {"model": str(folder), "prompt": prompt, "max_tokens": NEW, **options}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    answer: HTTPResponse = urllib.request.urlopen(request, timeout=120)
    return answer


def stream(answer: HTTPResponse) -> Iterator[Any]:
    """The events of a stream, as they come."""
    for line in answer:
        if line.strip():
            assert line.startswith(b"data: "), line
            yield json.loads(line.removeprefix(b"data: "))


@serving
def test_streams_at_once(url: str, folder: Path, expected: list[str]) -> None:
    """Each stream has the tokens of `generate`, and all run at the same time; one client leaves early."""

    def client(prompt: str) -> tuple[str, float, float]:
        with ask(url, folder, prompt, stream=True) as answer:
            text, times = "", []
            for event in stream(answer):
                text += event["choices"][0]["text"]
                times.append(time.monotonic())
        assert event["choices"][0]["finish_reason"] == "length"
        assert event["usage"]["completion_tokens"] == NEW
        assert len(times) > 3
        return text, times[0], times[-1]

    def leave(prompt: str) -> None:
        with ask(url, folder, prompt, stream=True) as answer:
            next(stream(answer))

    with ThreadPoolExecutor(len(PROMPTS) + 1) as pool:
        left = pool.submit(leave, PROMPTS[0])
        texts, begins, ends = zip(*pool.map(client, PROMPTS), strict=True)
        left.result()
    assert list(texts) == expected
    assert max(begins) < min(ends)
    assert healthy(url)


@serving
def test_answers_at_once(url: str, folder: Path, expected: list[str]) -> None:
    def client(prompt: str) -> str:
        with ask(url, folder, prompt) as answer:
            text: str = json.load(answer)["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(client, PROMPTS)) == expected


def refusal(url: str, folder: Path, prompt: str, **options: Any) -> tuple[int, str]:
    """Return the status and the reason of an answer that is an error."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(url, folder, prompt, **options)
    with caught.value as answer:
        reason: str = json.load(answer)["detail"]
    return caught.value.code, reason


@serving
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("tokens", [0, ROOM])
def test_a_prompt_that_does_not_fit(url: str, folder: Path, expected: list[str], tokens: int, streamed: bool) -> None:
    """Its client gets the reason, and the server keeps serving: transformers ends the thread of its batches."""
    status, reason = refusal(url, folder, "7 " * tokens, stream=streamed)
    assert status == 400
    assert reason == (
        f"the prompt must have 1 to {ROOM - 1} tokens, as the memory of the server has room for {ROOM} tokens of a "
        f"request, got {tokens}"
    )
    with ask(url, folder, PROMPTS[0]) as answer:
        assert json.load(answer)["choices"][0]["text"] == expected[0]
    assert healthy(url)


@serving
def test_a_text_that_outgrows_the_memory(url: str, folder: Path, expected: list[str]) -> None:
    """It ends where the memory does, streamed or not, beside requests that end as they would without it."""
    long = ["7 " * (ROOM - 40), "8 " * (ROOM - 30)]

    def client(prompt: str, streamed: bool) -> tuple[str, str, int]:
        with ask(url, folder, prompt, max_tokens=10 * ROOM, stream=streamed) as answer:
            events = list(stream(answer)) if streamed else [json.load(answer)]
        text = "".join(x["choices"][0]["text"] for x in events)
        return text, events[-1]["choices"][0]["finish_reason"], events[-1]["usage"]["completion_tokens"]

    def other(prompt: str) -> str:
        with ask(url, folder, prompt) as answer:
            text: str = json.load(answer)["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(len(PROMPTS) + 2) as pool:
        clients = [pool.submit(client, prompt, streamed) for prompt, streamed in zip(long, (False, True), strict=True)]
        assert list(pool.map(other, PROMPTS)) == expected
    together = [x.result() for x in clients]
    assert [x[1:] for x in together] == [("length", 40), ("length", 30)]
    assert together == [client(prompt, not streamed) for prompt, streamed in zip(long, (False, True), strict=True)]
    assert healthy(url)


REFUSED = {
    "deepseek_v3": "must cache keys and values for continuous batching, got DeepseekV3ForCausalLM, which has latents",
    "gemma4": "must have separate keys in each layer for continuous batching, got Gemma4ForCausalLM",
    "llama4": "must have layers of full or sliding attention for continuous batching, got Llama4ForCausalLM",
}


@serving
@pytest.mark.parametrize("name", REFUSED)
def test_refused_models(name: str) -> None:
    """The manager of batches says so with the status of a request that must change, before it starts a thread."""
    from fastapi import HTTPException

    threads = threading.active_count()
    model = tiny_models.build(name, "tatten")
    with tatten.serve.accepted_by_the_server():
        manager = utils.GenerationState(continuous_batching=True).get_manager(name, use_cb=True)
        for _ in range(2):
            with pytest.raises(HTTPException, match=REFUSED[name]) as caught:
                manager.init_cb(model, model.generation_config)
            assert caught.value.status_code == 400
    assert manager.is_alive()
    assert threading.active_count() == threads


@serving
def test_clients_that_leave(folder: Path) -> None:
    """Nothing of their requests stays: transformers (5.24) keeps the receiver of a cancelled stream."""
    model, tokenizer = tiny_models.build("llama", "tatten"), PreTrainedTokenizerFast.from_pretrained(folder)

    async def client(manager: Any, name: str, leaves: bool) -> None:
        config = copy.deepcopy(model.generation_config)
        config.max_new_tokens = 100
        manager.init_cb(model, config)
        prompt = {"input_ids": [5, 2, 3]}
        texts, streamer = manager.generate_streaming(model, tokenizer, prompt, config, request_id=name)
        await texts.get()
        if leaves:
            streamer.cancel()
            return
        while await texts.get() is not None:
            pass

    async def clients(manager: Any) -> None:
        for i in range(20):
            await client(manager, f"{i}", leaves=True)
        for name in ("all others have left by its end", "the outputs that came for them are forgotten"):
            await client(manager, name, leaves=False)
        router = manager._cb.output_router
        assert router.result_handlers == {}
        assert router.output_queue.empty()

    with tatten.serve.accepted_by_the_server():
        manager = utils.CBGenerateManager(ContinuousBatchingConfig(page_size=8, num_blocks=40, max_batch_tokens=32))
        try:
            asyncio.run(clients(manager))
        finally:
            manager.stop()


@serving
def test_a_cache_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi import HTTPException

    monkeypatch.setattr(tatten.serve, "CACHE_SECONDS", 0.05)
    with tatten.serve.accepted_by_the_server():
        manager = utils.CBGenerateManager(ContinuousBatchingConfig())
        manager._cb = SimpleNamespace(batch_processor=None, is_running=lambda: True)
        with pytest.raises(HTTPException, match=r"made no cache in 0\.05 s") as caught:
            manager.generate_streaming(None, None, {"input_ids": [1]}, None, request_id="a")
        assert caught.value.status_code == 503


@serving
def test_other_errors_keep_their_status(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.build("llama", "tatten")
    with tatten.serve.accepted_by_the_server():
        manager = utils.CBGenerateManager(ContinuousBatchingConfig(page_size=12))
        with pytest.raises(ValueError, match="`page_size` must be a power of two"):
            manager.init_cb(model, model.generation_config)


@pytest.mark.slow
@serving
@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_of_a_refused_model(tmp_path: Path, streamed: bool) -> None:
    save(tmp_path, "deepseek_v3")
    with served(tmp_path) as url:
        for _ in range(2):
            status, reason = refusal(url, tmp_path, PROMPTS[0], stream=streamed)
            assert (status, REFUSED["deepseek_v3"] in reason) == (400, True), reason
        assert healthy(url)


@serving
def test_a_page_size_that_is_refused(folder: Path) -> None:
    """The command ends before it loads a model."""
    wanted = r"tatten-serve: `page_size` must be a power of two up to 256 .*, got 12, as `--cb-block-size`"
    with pytest.raises(SystemExit, match=wanted):
        tatten.serve.main([str(folder), "--cb-block-size", "12"])


@serving
def test_a_name_that_nobody_registered(folder: Path) -> None:
    theirs = model_manager.ModelManager
    with pytest.raises(ValueError, match="Unsupported attention implementation: 'taten'"):
        tatten.serve.main([str(folder), "--attn-implementation", "taten"])
    assert model_manager.ModelManager is theirs


def test_without_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_utils, "is_serve_available", lambda: False)
    with pytest.raises(SystemExit, match=r'tatten-serve needs FastAPI, Uvicorn .*: install "tatten\[serve\]"'):
        tatten.serve.main(["model"])


@pytest.mark.skipif(not import_utils.is_serve_available(), reason="the server of transformers is not installed")
def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_utils, "is_serve_available", lambda: True)
    monkeypatch.setattr(supported.transformers, "__version__", "5.17.0")
    with pytest.raises(
        SystemExit, match=r"tatten-serve: continuous batching .* does not run, as transformers 5\.17\.0 was not tested"
    ):
        tatten.serve.main(["model"])


@pytest.mark.parametrize(
    "module, manager, name",
    [
        (model_manager, "ModelManager", "_validate_args"),
        (utils, "CBGenerateManager", "init_cb"),
        (utils, "CBGenerateManager", "generate_non_streaming"),
    ],
)
def test_a_server_that_moved(module: Any, manager: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both = model_manager.ModelManager, utils.CBGenerateManager
    monkeypatch.delattr(getattr(module, manager), name)
    refused = pytest.raises(SystemExit, match=rf"`{manager}\.{name}` of transformers, .* moved")
    with refused, tatten.serve.accepted_by_the_server():
        raise AssertionError("the server must not start")
    assert (model_manager.ModelManager, utils.CBGenerateManager) == both
