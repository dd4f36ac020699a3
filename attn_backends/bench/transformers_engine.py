"""transformers with its own attention, driven line by line: a reference for engines in float32.

Answers the commands of ``vllm_engine``, all prompts of a command in one padded batch; and scores
texts that others have written.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from .serving import undisturbed
from .serving_models import wait_until_ready

#: Texts scored at a time, and how many of its own best tokens float32 adds to those asked for.
AT_ONCE, OWN = 8, 4


def build(options: dict[str, Any]) -> Any:
    """The model, on the GPU if there is one."""
    from transformers import AutoModelForCausalLM

    wait_until_ready(options["model"])
    attention = options.get("attention", "sdpa")
    if attention.startswith("float8"):
        attention = over_rounded_keys(getattr(torch, attention))
    model: Any = AutoModelForCausalLM.from_pretrained(
        options["model"],
        dtype=getattr(torch, options["dtype"]),
        attn_implementation=attention,
    )
    model.generation_config.eos_token_id = None  # a token like any other, as engines are told
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def over_rounded_keys(dtype: torch.dtype) -> str:
    """The name of an attention that sees keys and values as a cache of this dtype has them."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, **more: Any) -> Any:
        k, v = k.to(dtype).to(k.dtype), v.to(dtype).to(v.dtype)
        return sdpa_attention_forward(module, q, k, v, mask, **more)

    name = str(dtype).removeprefix("torch.")
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


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


def rounded(model: Any, dtype: str) -> Any:
    """The model with its weights as a narrower dtype has them, still computing in its own."""
    if dtype == str(model.dtype).removeprefix("torch."):
        return model
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.copy_(weight.to(getattr(torch, dtype)))
    return other


@torch.inference_mode()
def score(model: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Log-probabilities at the last ``counts`` steps of texts: of ``among``, and the own best."""
    model = rounded(model, command["weights"])
    found: list[list[dict[str, float]]] = []
    start = time.perf_counter()
    for i in range(0, len(command["score"]), AT_ONCE):
        texts, counts, among = (
            command[name][i : i + AT_ONCE] for name in ("score", "counts", "among")
        )
        # What the last token leads to is not asked for.
        width, most = max(map(len, texts)) - 1, max(counts)
        ids = torch.zeros((len(texts), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(texts):
            ids[row, width - len(text) + 1 :] = torch.tensor(text[:-1])
            mask[row, width - len(text) + 1 :] = 1
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(
            ids.to(model.device), attention_mask=mask.to(model.device),
            position_ids=places.to(model.device), logits_to_keep=most, use_cache=False,
        ).logits  # fmt: skip
        scores = torch.log_softmax(logits.double(), dim=-1)
        best = scores.topk(OWN).indices
        for row, (count, steps) in enumerate(zip(counts, among)):
            text_scores = scores[row, most - count :]
            asked = torch.tensor(_filled(steps), device=scores.device)
            asked = torch.cat([asked, best[row, most - count :]], dim=1)
            values = text_scores.gather(1, asked)
            found.append(
                [dict(zip(map(str, t), v)) for t, v in zip(asked.tolist(), values.tolist())]
            )
    return {"logprobs": found, "seconds": time.perf_counter() - start}


def _filled(steps: list[list[int]]) -> list[list[int]]:
    """As many tokens at every step, by asking for the first one again."""
    most = max(map(len, steps))
    return [[*step, *step[:1] * (most - len(step))] for step in steps]


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
        command = json.loads(line)
        answer = score(model, command) if "score" in command else generate(model, command)
        answers.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
