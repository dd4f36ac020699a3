"""Continuous batching of transformers through this library against its own ``sdpa``.

    python -m attn_backends.bench.transformers_run --json OUT.json
    python -m attn_backends.bench.transformers_run --device cpu --requests 3 --prompt 20 --new 4

``generate_batch`` of a random model: first greedy tokens in float32 on few layers, which must be
those of ``sdpa``, then new tokens per second in bfloat16, the routes taking turns. A route is the
model's own attention, or ours: over gathered keys, over pages, and over pages from CUDA graphs.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .report import save
from .serving import Note, undisturbed
from .serving_rates import rates, spread
from .serving_tokens import whole_sequences

MODULE = "attn_backends.bench.transformers_run"
REFERENCE = "sdpa"
BLOCK = 64
SHAPES = {
    "cuda": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                 num_attention_heads=32, num_key_value_heads=8),
    "cpu": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2),
}  # fmt: skip
NAMES = {"cuda": "Llama-1B shape, random weights", "cpu": "tiny Llama, random weights"}


@dataclass(frozen=True)
class Route:
    """A way for ``generate_batch`` to compute attention.

    Attributes:
        name: What results call it.
        options: For ``enable``; None leaves transformers alone.
        graphs: Whether steps are captured.
    """

    name: str
    options: dict[str, Any] | None
    graphs: bool = False

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Lead ``sdpa`` this way."""
        if self.options is None:
            yield
            return
        from ..engines.transformers import enable

        with enable(override=(REFERENCE,), **self.options):
            yield


def routes(backend: str, graphs: bool) -> list[Route]:
    """The reference first, then ours."""
    found = [
        Route(REFERENCE, None),
        Route(f"attn_backends ({backend}), gathered", {"backend": backend, "paged": False}),
        Route(f"attn_backends ({backend}), pages", {"backend": backend}),
    ]
    if graphs:
        name = f"attn_backends ({backend}), pages, CUDA graphs"
        found.append(Route(name, {"backend": backend}, graphs=True))
    return found


def model_of(options: argparse.Namespace, dtype: torch.dtype, layers: int | None) -> Any:
    """A random Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {**SHAPES[options.device], **({"num_hidden_layers": layers} if layers else {})}
    config = LlamaConfig(vocab_size=1000, max_position_embeddings=4096, **shape)
    model: Any = LlamaForCausalLM(config).to(dtype).to(options.device)
    return model.eval()


def generate(
    model: Any, route: Route, prompts: list[list[int]], new: int, device: str
) -> tuple[float, list[list[int]]]:
    """Seconds, and the new tokens of each prompt."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    settings = GenerationConfig(
        max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    blocks = sum(-(-(len(p) + new) // BLOCK) + 1 for p in prompts)
    fields = ContinuousBatchingConfig.__dataclass_fields__
    page = {"page_size" if "page_size" in fields else "block_size": BLOCK}  # 5.17 has the latter
    batching = ContinuousBatchingConfig(
        num_blocks=blocks, max_batch_tokens=2048, use_cuda_graph=route.graphs, **page
    )
    batching.auto_switch_to_flash = False
    batching.allow_block_sharing = False
    model.set_attn_implementation(REFERENCE)
    with route.taken(), undisturbed():
        start = time.perf_counter()
        answers = model.generate_batch(
            prompts, generation_config=settings, continuous_batching_config=batching,
            progress_bar=False,
        )  # fmt: skip
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    wrong = [answer.error for answer in answers.values() if answer.error]
    if wrong:
        raise RuntimeError(f"{route.name}: {wrong[0]}")
    order = sorted(answers, key=lambda name: int(name.rsplit("_", 1)[1]))
    return seconds, [list(answers[name].generated_tokens) for name in order]


def tokens(options: argparse.Namespace, ways: list[Route]) -> list[dict[str, Any]]:
    """Rows of equality in float32, on two layers; a route that fails is told and taken out."""
    model = model_of(options, torch.float32, 2)
    prompts = made(options)
    case = {"model": f"{NAMES[options.device]}, 2 layers", "dtype": "float32"}
    rows: list[dict[str, Any]] = []
    reference = None
    for route in list(ways):
        try:
            answer = {"tokens": generate(model, route, prompts, options.new, options.device)[1]}
        except Exception as error:
            print(f"{route.name}: FAILED: {error}"[:400], flush=True)
            ways.remove(route)
            continue
        if reference is None:
            reference = answer
            continue
        rows.append({"bench": "transformers_tokens", "case": case, "backend": route.name,
                     "reference": REFERENCE, **whole_sequences(reference, answer)})  # fmt: skip
    return rows


def throughput(options: argparse.Namespace, ways: list[Route], deadline: float, note: Note) -> None:
    """Note rows of new tokens per second after every turn; none begins that would end late."""
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model = model_of(options, dtype, None)
    prompts = made(options)
    seconds: dict[str, list[float]] = {route.name: [] for route in ways}
    longest = 0.0
    for turn in range(options.turns + 1):
        begin = time.monotonic()
        if begin + 1.2 * longest > deadline:
            break
        for route in ways if turn % 2 == 0 else ways[::-1]:
            taken, _ = generate(model, route, prompts, options.new, options.device)
            print(f"turn {turn}, {route.name}: {taken:.2f} s", flush=True)
            if turn:  # the first one warms up
                seconds[route.name].append(taken)
        longest = max(longest if turn > 1 else 0.0, time.monotonic() - begin)
        if turn:
            note(rows_of(options, str(dtype).removeprefix("torch."), seconds))


def rows_of(
    options: argparse.Namespace, dtype: str, seconds: dict[str, list[float]]
) -> list[dict[str, Any]]:
    """Rows of what each route took, turn by turn; the first route is the reference."""
    workload = f"{options.requests} requests, {options.prompt} + {options.new} tokens"
    case = {"model": NAMES[options.device], "dtype": dtype, "workload": workload}
    rows = []
    for name, times in seconds.items():
        ratios = [a / b for a, b in zip(seconds[REFERENCE], times)]
        rows.append({
            "bench": "transformers_throughput", "case": case, "backend": name,
            "reference": REFERENCE, **rates(times, options.requests * options.new),
            **spread(ratios), "turns": len(times), "seconds": [round(t, 4) for t in times],
        })  # fmt: skip
    return rows


def made(options: argparse.Namespace) -> list[list[int]]:
    """Random prompts of one length."""
    g = torch.Generator().manual_seed(1)
    return torch.randint(5, 1000, (options.requests, options.prompt), generator=g).tolist()


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--backend", help="default: triton, torch_native on a CPU")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate")
    parser.add_argument("--turns", type=int, default=4, help="of throughput; 0 leaves it out")
    parser.add_argument("--no-tokens", dest="tokens", action="store_false", help="throughput only")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds in all")
    parser.add_argument("--json", help="results file to write")
    options = parser.parse_args(argv)
    deadline = time.monotonic() + options.limit
    on_gpu = options.device == "cuda"
    ways = routes(options.backend or ("triton" if on_gpu else "torch_native"), on_gpu)
    asked = len(ways)
    rows = tokens(options, ways) if options.tokens else []
    for row in rows:
        print(f"{row['backend']}: {row['equal_sequences']} of {row['sequences']} as {REFERENCE}",
              flush=True)  # fmt: skip
    save(options.json, MODULE, rows)
    more: list[dict[str, Any]] = []

    def note(found: list[dict[str, Any]]) -> None:
        more[:] = found
        save(options.json, MODULE, rows + more)

    if options.turns:
        throughput(options, ways, deadline, note)
    for row in more:
        spread_of = f"{row['slowest']:.0f}..{row['fastest']:.0f}"
        print(f"{row['backend']}: {row['tokens_per_s']:.0f} new tokens/s ({spread_of}), "
              f"{row['ratio']:.2f}x", flush=True)  # fmt: skip
    equal = all(row["equal_sequences"] == row["sequences"] for row in rows)
    return 0 if equal and len(ways) == asked else 1


if __name__ == "__main__":
    raise SystemExit(main())
