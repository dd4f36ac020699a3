"""SGLang's own engine on a CPU: generate greedily, twice, and print tokens and cache hits as JSON.

Usage: ``engine_run.py OPTIONS_JSON``; options are ``model``, ``prompts``, ``new_tokens`` and
``engine``, the arguments of ``sglang.Engine``.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    import sglang

    options = json.loads(sys.argv[1])
    engine = sglang.Engine(
        model_path=options["model"],
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        sampling_backend="pytorch",
        grammar_backend="none",
        max_total_tokens=4096,
        mem_fraction_static=0.5,
        log_level="error",
        **options["engine"],
    )
    params = {"temperature": 0, "max_new_tokens": options["new_tokens"], "ignore_eos": True}
    rounds = []
    for _ in range(2):
        answers = engine.generate(input_ids=options["prompts"], sampling_params=params)
        rounds.append(
            {
                "tokens": [answer["output_ids"] for answer in answers],
                "cached": [answer["meta_info"]["cached_tokens"] for answer in answers],
            }
        )
    print("RESULT " + json.dumps(rounds), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
