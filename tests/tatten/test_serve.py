"""`tatten-serve`: a real process, and clients that stream from several connections at once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.cli.serving import model_manager
from transformers.utils import import_utils

import tatten.serve
from tatten.integrations.transformers.continuous_batching import supported

PROMPTS = ["11 12 13 14 15", " ".join(map(str, range(20, 80))), "31", "11 12 13 14 15 16 17 18", "41 42", "51 52 53"]
NEW = 60


def serving(test: Any) -> Any:
    """Skip a test where there is no server, or no version of transformers with which batches were tested."""
    there, tested = import_utils.is_serve_available(), transformers.__version__.startswith(supported.VERSIONS)
    test = pytest.mark.skipif(not there, reason="the server of transformers is not installed")(test)
    return pytest.mark.skipif(not tested, reason="transformers is not a version that batches were tested with")(test)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of numbers."""
    path = tmp_path_factory.mktemp("model")
    words = Tokenizer(models.WordLevel({str(i): i for i in range(99)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    tiny_models.build("llama", "sdpa").save_pretrained(path)
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pages = ["--cb-block-size", "16", "--cb-num-blocks", "40", "--cb-max-batch-tokens", "32"]
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


def test_a_server_that_checks_names_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(model_manager.ModelManager, "_validate_args")
    refused = pytest.raises(SystemExit, match=r"`ModelManager\._validate_args` of transformers, .* moved")
    with refused, tatten.serve.accepted_by_the_server():
        raise AssertionError("the server must not start")
