"""transformers with its own ``sdpa``, driven line by line: a reference for engines in float32.

Answers the commands of ``vllm_engine``. All prompts of a command make one padded batch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from .serving import undisturbed


def build(options: dict[str, Any]) -> Any:
    """The model, on the GPU if there is one."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        options["model"], dtype=getattr(torch, options["dtype"]), attn_implementation="sdpa"
    )
    model.generation_config.eos_token_id = None  # a token like any other, as engines are told
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


@torch.inference_mode()
def generate(model: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens for every prompt; with ``logprobs`` the best of each step too."""
    prompts, counts = command["prompts"], command["max_tokens"]
    counts = counts if isinstance(counts, list) else [counts] * len(prompts)
    width = max(map(len, prompts))
    ids = torch.zeros((len(prompts), width), dtype=torch.long, device=model.device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt, device=model.device)
        mask[row, width - len(prompt) :] = 1
    most = command.get("logprobs")
    with undisturbed():
        start = time.perf_counter()
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=max(counts), pad_token_id=0,
            return_dict_in_generate=True, output_logits=bool(most),
        )  # fmt: skip
        new = out.sequences[:, width:].tolist()
        answer: dict[str, Any] = {"seconds": time.perf_counter() - start, "cached": 0}
    answer["tokens"] = [tokens[:count] for tokens, count in zip(new, counts)]
    if most:
        answer["logprobs"] = [[{} for _ in range(count)] for count in counts]
        for step, logits in enumerate(out.logits):
            best = torch.log_softmax(logits.double(), dim=-1).topk(most)
            for row, (values, tokens) in enumerate(
                zip(best.values.tolist(), best.indices.tolist())
            ):
                if step < counts[row]:
                    answer["logprobs"][row][step] = dict(zip(map(str, tokens), values))
    return answer


def main() -> int:
    """Entry point: ``transformers_engine OPTIONS_JSON LOG``."""
    options, log = json.loads(sys.argv[1]), Path(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    with log.open("w") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    start = time.perf_counter()
    model = build(options)
    import transformers

    ready = {"ready": time.perf_counter() - start, "version": transformers.__version__}
    answers.write(json.dumps(ready) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(generate(model, json.loads(line))) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
