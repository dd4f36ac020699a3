"""One vLLM engine in a process of its own, driven line by line: the worker of ``vllm_run``.

Reads JSON commands from standard input and answers each with one line of JSON. Whatever vLLM
prints goes to the log file. vLLM runs its core in this very process, so that a command is timed
from call to result, without other processes between.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from .serving import undisturbed
from .serving_models import wait_until_ready

#: Uniform weights of this half width have the spread that trained models start from.
WEIGHT = 0.035

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "2",
    "TOKENIZERS_PARALLELISM": "false",
}


def spread_dummy_weights() -> None:
    """Let ``load_format=dummy`` make a model whose scores differ, instead of one near zero."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    plain = DummyModelLoader.load_weights

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        plain(self, model, model_config)
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.data.fill_(1.0)
            else:
                weight.data.mul_(WEIGHT / 1e-3)

    DummyModelLoader.load_weights = load_weights  # type: ignore[method-assign]


def start_sooner() -> None:
    """Leave out of the start what takes half a minute, and what greedy tokens do not need.

    vLLM looks at a model's class in another process, which imports everything once more; and it
    compiles the kernels of random sampling.
    """
    from vllm.model_executor.models import registry
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    registry._run_in_subprocess = lambda look: look()
    GPUModelRunner._dummy_sampler_run = lambda self, hidden_states: None


def build(options: dict[str, Any]) -> Any:
    """The engine, with prefix caching, chunked prefill and decode graphs."""
    from vllm import LLM

    start_sooner()
    wait_until_ready(options["model"])
    name = options["backend"]
    if options["ours"]:
        from ..engines.vllm import backend_name

        name = backend_name()
    dummy = options["dummy"]
    if dummy:
        spread_dummy_weights()
    graphs: dict[str, Any] = {"cudagraph_capture_sizes": options["capture"]}
    if not options["compile"]:
        graphs |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if not options["capture"]:
        graphs |= {"cudagraph_mode": "NONE"}
    return LLM(
        model=options["model"],
        skip_tokenizer_init=True,
        load_format="dummy" if dummy else "auto",
        dtype=options["dtype"],
        seed=0,
        max_model_len=options["max_model_len"],
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=options["kv_bytes"],
        attention_backend=name,
        compilation_config=graphs,
        **options["more"],
    )


class Watch:
    """Counts what our builders do, as evidence that graphs were replayed.

    Attributes:
        sizes: Requests, tokens and queries of the steps that graphs were captured for.
        steps: Steps that refilled the plan of a graph, and steps that were planned anew.
    """

    def __init__(self) -> None:
        self.sizes: set[tuple[int, int, int]] = set()
        self.steps = {"replayed": 0, "planned": 0}

    def install(self) -> None:
        """Look over the shoulder of every builder from here on."""
        from ..engines.vllm.builder import Builder

        plain = Builder.build

        def build(builder: Any, *args: Any, **kwargs: Any) -> Any:
            step = plain(builder, *args, **kwargs)
            if any(plan.capacity is None for plan in plans_of(step)):
                self.steps["planned"] += 1
            elif builder._capturing:
                self.sizes |= {key for _, key in builder._captured}
                self.sizes |= {key for each in builder.context.values() for key in each._captured}
            else:
                self.steps["replayed"] += 1
            return step

        Builder.build = build  # type: ignore[method-assign]

    def take(self) -> dict[str, int]:
        """Steps since this was last asked."""
        steps, self.steps = self.steps, {"replayed": 0, "planned": 0}
        return steps


def plans_of(step: Any) -> list[Any]:
    """The plans of a step, those of context parallelism included."""
    parts = [part.plan for parts in step.parts.values() for part in parts]
    return parts + [plan for each in step.context.values() for plan in (each.context, each.own)]


def generate(llm: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens for every prompt; with ``logprobs`` the best of each step too.

    ``max_tokens`` is one number, or one for each prompt; with ``cached`` the prompts are in the
    cache before the time begins.
    """
    from vllm import SamplingParams

    def sampling(count: int) -> Any:
        return SamplingParams(
            temperature=0.0,
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
            logprobs=command.get("logprobs"),
        )

    prompts = [{"prompt_token_ids": ids} for ids in command["prompts"]]
    most = command["max_tokens"]
    params = [sampling(n) for n in most] if isinstance(most, list) else sampling(most)
    if llm.reset_prefix_cache() is False:  # blocks were still in use: it may be asked again
        time.sleep(0.05)
        if llm.reset_prefix_cache() is False:
            raise RuntimeError("the prefix cache cannot be emptied")
    if command.get("cached"):
        llm.generate(prompts, sampling(1), use_tqdm=False)
    with undisturbed():
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answer: dict[str, Any] = {"seconds": time.perf_counter() - start}
    answer["cached"] = sum(each.num_cached_tokens or 0 for each in outputs)
    if command.get("tokens", True):
        answer["tokens"] = [list(each.outputs[0].token_ids) for each in outputs]
    if command.get("logprobs"):
        answer["logprobs"] = [
            [{str(t): x.logprob for t, x in step.items()} for step in each.outputs[0].logprobs]
            for each in outputs
        ]
    return answer


def main() -> int:
    """Entry point: ``vllm_engine OPTIONS_JSON LOG``."""
    options, log = json.loads(sys.argv[1]), Path(sys.argv[2])
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    with log.open("w") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    start = time.perf_counter()
    watch = Watch()
    if options["ours"]:
        watch.install()
    llm = build(options)
    import vllm

    ready = {"ready": time.perf_counter() - start, "version": vllm.__version__}
    answers.write(json.dumps(ready | {"captured": sorted(watch.sizes)}) + "\n")
    for line in sys.stdin:
        # Where it is, if an answer takes long: into the log.
        faulthandler.dump_traceback_later(15, repeat=True)
        watch.take()
        answer = generate(llm, json.loads(line))
        steps = watch.take()
        if any(steps.values()):  # workers of tensor parallelism count where nobody asks
            answer["steps"] = steps
        answers.write(json.dumps(answer) + "\n")
        faulthandler.cancel_dump_traceback_later()
    # Skip the teardown of the engine: nothing is left to save.
    answers.flush()
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
