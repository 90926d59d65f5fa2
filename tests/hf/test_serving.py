"""`qvattn serve` over real HTTP: a server process, a chat completion, a stream; and what it refuses."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.import_utils import is_serve_available

from qvattn import UserError
from qvattn.hf.serving import check_servable
from qvattn.models import CausalLM

from .test_ecosystem import ATTENTION, WORDS, language, words

TEMPLATE = (
    "{% for m in messages %}<s> {{ m['content'] }} </s> {% endfor %}{% if add_generation_prompt %}<s> {% endif %}"
)
PATIENCE = 240
QUESTION = {"messages": [{"role": "user", "content": "w1 w2 w3"}], "max_tokens": 6, "temperature": 0.0, "seed": 1}


def saved(folder: Path) -> CausalLM:
    model = language(ATTENTION["layers that differ"])
    model.tokenizer = words()
    model.tokenizer.chat_template = TEMPLATE
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, CausalLM]]:
    if not is_serve_available():
        pytest.skip("the packages of the extra `serve` are not installed")
    folder = tmp_path_factory.mktemp("served") / "model"
    model = saved(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (folder.parent / "log").open("w+")
    command = [sys.executable, "-m", "qvattn.cli", "serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen([*command, "--device", "cpu", "--", "--log-level", "error"], stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        end = time.monotonic() + PATIENCE
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).read()
                break
            except (urllib.error.URLError, ConnectionError):
                log.seek(0)
                assert process.poll() is None and time.monotonic() < end, log.read()[-3000:]
                time.sleep(0.3)
        yield address, folder, model
    finally:
        process.terminate()
        process.wait(timeout=30)
        log.close()


def ask(address: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        content: bytes = answer.read()
    return content


def expected(model: CausalLM) -> list[str]:
    ids = [WORDS.index(word) for word in ["<s>", "w1", "w2", "w3", "</s>", "<s>"]]
    made = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0, len(ids) :]
    return [WORDS[i] for i in made if i > 2]


@pytest.mark.slow  # a server process that imports torch
def test_a_chat_completion_over_http(server: tuple[str, Path, CausalLM]) -> None:
    address, folder, model = server
    answer = json.loads(ask(address, {"model": str(folder), **QUESTION}))
    assert answer["object"] == "chat.completion"
    message = answer["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert message["content"].split() == expected(model)
    assert answer["usage"]["prompt_tokens"] == 6


@pytest.mark.slow
def test_a_stream_over_http(server: tuple[str, Path, CausalLM]) -> None:
    address, folder, model = server
    lines = ask(address, {"model": str(folder), "stream": True, **QUESTION}).decode().splitlines()
    parts = [json.loads(line[6:]) for line in lines if line.startswith("data: ") and "[DONE]" not in line]
    text = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts if part["choices"])
    assert text.split() == expected(model)


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    from .test_adopt import foreign

    foreign("llama").save_pretrained(tmp_path / "foreign")
    with pytest.raises(UserError, match="model_type='llama' is not a language model of ours"):
        check_servable(str(tmp_path / "foreign"))
    language("qv").save_pretrained(tmp_path / "silent")
    with pytest.raises(UserError, match="no tokenizer beside the weights"):
        check_servable(str(tmp_path / "silent"))
