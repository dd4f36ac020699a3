"""The command itself: ``vllm serve MODEL --attention-backend ...``, and nothing else to edit."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_backends.bench.serving import OURS, Engine
from attn_backends.bench.serving_models import READY

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

WORDS, NEW = 512, 32
#: A start on a cold machine: imports, compilation of the model, graphs.
PATIENCE = float(os.environ.get("ATTN_BACKENDS_TEST_PATIENCE", "300"))


def prompts() -> list[list[int]]:
    """Eight that share a beginning of several blocks, and one that is short."""
    rng = random.Random(5)

    def words(count: int) -> list[int]:
        return [rng.randrange(3, WORDS) for _ in range(count)]

    start = words(200)
    return [*(start + words(17 * i + 1) for i in range(8)), words(2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with drawn weights, and a tokenizer whose words are ``w0`` to ``w511``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("served") / "tiny-llama"
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
        bos_token_id=1, eos_token_id=2, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / READY).touch()
    return folder


@pytest.fixture(scope="module")
def in_python(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The same model behind ``LLM``, in a process of its own that starts beside the server."""
    options = {
        "model": str(model), "dummy": False, "backend": OURS, "ours": True, "dtype": "float32",
        "compile": False, "capture": [1, 4, 9], "max_model_len": 1024, "kv_bytes": 1 << 29,
        "more": {},
    }  # fmt: skip
    log = tmp_path_factory.mktemp("llm") / "log"
    command = [sys.executable, "-m", "attn_backends.bench.vllm_engine", json.dumps(options)]
    process = subprocess.Popen(
        [*command, str(log)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "ATTN_BACKENDS_BACKEND": "triton"},
    )
    started = Engine(OURS, None, "float32", process, log)  # type: ignore[arg-type]
    yield started
    started.stop()


class Server:
    """``vllm serve`` as a process; see its output in ``log``."""

    def __init__(self, model: Path, log: Path) -> None:
        from attn_backends.engines.vllm import backend_name

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.log = log
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
            *("--attention-backend", backend_name()),
            # Only what keeps the start short and the answers exact.
            *("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "9"),
            *("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(1 << 29)),
            *("--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", self.url.rsplit(":", 1)[1]),
        ]
        settings = {
            "ATTN_BACKENDS_BACKEND": "triton",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }
        with log.open("w") as sink:
            self.process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **settings},
                start_new_session=True,
            )

    def wait(self, seconds: float) -> None:
        """Return once it is healthy."""
        late = time.monotonic() + seconds
        while time.monotonic() < late:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                pass
            if self.process.poll() is not None:
                break
            time.sleep(0.2)
        pytest.fail(f"not healthy, exit {self.process.poll()}:\n{self.log.read_text()[-3000:]}")

    def complete(self, prompt: list[int] | str, count: int) -> dict[str, Any]:
        """The first choice of a greedy completion."""
        asked = {
            "model": "tiny", "prompt": prompt, "max_tokens": count, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(asked).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return dict(json.load(answer)["choices"][0])

    def stop(self) -> None:
        """End it and what it started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(
    model: Path, in_python: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The server, up; ``in_python`` was started before it and comes up meanwhile."""
    started = Server(model, tmp_path_factory.mktemp("server") / "log")
    try:
        started.wait(PATIENCE)
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def answers(server: Server) -> list[list[int]]:
    """Tokens over HTTP, all requests at the same time."""
    with ThreadPoolExecutor(len(prompts())) as pool:
        choices = list(pool.map(lambda prompt: server.complete(prompt, NEW), prompts()))
    return [choice["token_ids"] for choice in choices]


def test_the_command_serves_the_tokens_of_transformers(model: Path, answers: list[list[int]]):
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="sdpa"
    ).to("cuda")
    plain.generation_config.eos_token_id = None
    for prompt, tokens in zip(prompts(), answers, strict=True):
        ids = torch.tensor([prompt], device="cuda")
        with torch.inference_mode():
            out = plain.generate(ids, do_sample=False, max_new_tokens=NEW, pad_token_id=0)
        assert tokens == out[0, len(prompt) :].tolist()


def test_the_command_serves_the_tokens_of_the_engine_in_python(
    in_python: Engine, answers: list[list[int]]
):
    late = time.monotonic() + PATIENCE
    assert in_python.ask(None, late) is not None, in_python.why()
    answer = in_python.ask({"prompts": prompts(), "max_tokens": NEW}, late)
    assert answer is not None, in_python.why()
    assert answers == answer["tokens"]
    assert answer["steps"]["replayed"] > 0


def test_the_log_names_what_stands_behind_the_name(server: Server, answers: list[list[int]]):
    text = server.log.read_text()
    assert "attn_backends: prefill=triton, decode=triton for H=8 HK=2 D=64 torch.float32" in text
    assert "captur" in text.lower()


def test_text_goes_in_and_comes_out(server: Server):
    choice = server.complete("w7 w8 w9", 5)
    words = [f"w{token}" for token in choice["token_ids"] if token not in (0, 2)]  # as special
    assert len(choice["token_ids"]) == 5 and choice["text"].split() == words
