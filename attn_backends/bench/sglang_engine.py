"""One SGLang engine, driven line by line: the worker of ``sglang_run``.

Reads JSON commands from standard input and answers each with one line of JSON. Whatever SGLang
prints goes to the log file. SGLang runs its scheduler in a process of its own, as it does when it
serves.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from .serving import undisturbed
from .serving_models import wait_until_ready

SETTINGS = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def build(options: dict[str, Any]) -> Any:
    """The engine, with its radix cache, chunked prefill and decode graphs."""
    import sglang

    wait_until_ready(options["model"])
    arguments = {
        "model_path": options["model"],
        "attention_backend": options["backend"],
        "dtype": options["dtype"],
        "page_size": options["page_size"],
        "max_total_tokens": options["max_total_tokens"],
        "context_length": options["context_length"],
        "skip_tokenizer_init": True,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "random_seed": 0,
        "max_running_requests": 64,
        "chunked_prefill_size": 2048,
        "mem_fraction_static": 0.85,
        "log_level": "info",
    }
    return sglang.Engine(**{**arguments, **options["more"]})


def top(step: list[Any]) -> dict[str, float]:
    """The best tokens of a step with their log-probabilities."""
    return {str(token): float(logprob) for logprob, token, *_ in step}


def empty(engine: Any, tries: int = 500) -> None:
    """Empty the radix cache; SGLang refuses while it still tidies up after an answer.

    Raises:
        RuntimeError: It refused all the time.
    """
    for _ in range(tries):
        done = engine.flush_cache()
        if getattr(done, "success", True):
            return
        time.sleep(0.01)
    raise RuntimeError(f"the cache cannot be emptied: {done}")


def generate(engine: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens for every prompt; with ``logprobs`` the best of each step too.

    ``max_tokens`` is one number, or one for each prompt; with ``cached`` the prompts are in the
    cache before the time begins.
    """

    def sampling(count: int) -> dict[str, Any]:
        return {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}

    more: dict[str, Any] = {}
    if command.get("logprobs"):
        more = {"return_logprob": True, "top_logprobs_num": command["logprobs"]}
    most = command["max_tokens"]
    params = [sampling(n) for n in most] if isinstance(most, list) else sampling(most)
    empty(engine)
    if command.get("cached"):
        engine.generate(input_ids=command["prompts"], sampling_params=sampling(1))
    with undisturbed():
        start = time.perf_counter()
        outputs = engine.generate(input_ids=command["prompts"], sampling_params=params, **more)
        answer: dict[str, Any] = {"seconds": time.perf_counter() - start}
    facts = [each["meta_info"] for each in outputs]
    answer["cached"] = sum(each["cached_tokens"] for each in facts)
    if command.get("tokens", True):
        answer["tokens"] = [list(each["output_ids"]) for each in outputs]
    if command.get("logprobs"):
        answer["logprobs"] = [[top(step) for step in each["output_top_logprobs"]] for each in facts]
    return answer


def main() -> int:
    """Entry point: ``sglang_engine OPTIONS_JSON LOG``."""
    options, log = json.loads(sys.argv[1]), Path(sys.argv[2])
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    with log.open("w") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    start = time.perf_counter()
    engine = build(options)
    import sglang

    ready = {"ready": time.perf_counter() - start, "version": sglang.__version__}
    answers.write(json.dumps(ready) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(generate(engine, json.loads(line))) + "\n")
    engine.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
