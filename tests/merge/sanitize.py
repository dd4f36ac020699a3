"""Every form of the CUDA merge kernels once, small, for NVIDIA's compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no \\
        --kernel-name kernel_substring=merge_ python tests/merge/sanitize.py

and the same with ``racecheck`` and ``initcheck``. Results are compared with the torch path on the
CPU, so that the GPU runs little else; the exit status says whether all agree. Inputs are copied
from the host, since ``initcheck`` does not see what kernels write that it does not watch. Kernels
are compiled once and found on disk after that: a first run without the tool saves time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from attn_backends.merge import apply_sinks, default_path, merge_state, merge_state_, merge_states

#: dtype, layout and head dim of the states.
KINDS = (
    (torch.bfloat16, "plain", 128),
    (torch.bfloat16, "padded", 80),
    (torch.bfloat16, "head_major", 64),
    (torch.float32, "plain", 80),
    (torch.float32, "padded", 64),
)
TOKENS, HEADS = 13, 5

State = tuple[torch.Tensor, torch.Tensor]
Place = Callable[[torch.Tensor], torch.Tensor]  # copies a host tensor to where a merge runs


def make(dim: int, dtype: torch.dtype, form: str, states: int = 0) -> Callable[[Place], State]:
    """A random state, or a stack of them, some of it empty or NaN; ``state(to)`` copies it."""
    lead = (states,) if states else ()
    o = torch.randn(*lead, TOKENS, HEADS, dim).to(dtype)
    lse = torch.randn(*lead, TOKENS, HEADS)
    lse[torch.rand(lse.shape) < 0.2] = -float("inf")
    lse[torch.rand(lse.shape) < 0.02] = float("nan")
    if form == "padded":
        wide = torch.zeros(*o.shape[:-1], dim + 8, dtype=dtype)
        room = torch.zeros(*lse.shape[:-1], HEADS + 3)
        wide[..., :dim], room[..., :HEADS] = o, lse
        return lambda to: (to(wide)[..., :dim], to(room)[..., :HEADS])
    if form == "head_major":
        turned = lse.mT.contiguous()
        return lambda to: (to(o), to(turned).mT)
    return lambda to: (to(o), to(lse))


def calls(dtype: torch.dtype, form: str, dim: int) -> Iterator[tuple[str, Callable[[Place], Any]]]:
    """Merges to compare, named, as functions of where to run."""
    a, b, c = (make(dim, dtype, form) for _ in range(3))
    sinks = torch.randn(HEADS)
    yield "pair", lambda to: merge_state(*a(to), *b(to))
    yield "prefix", lambda to: merge_state(*a(to), *b(to), num_tokens_with_prefix=7)
    yield "float8", lambda to: merge_state(*a(to), *b(to), output_scale=0.5)
    yield "in place", lambda to: merge_state_(*a(to), *b(to))
    yield "separate", lambda to: merge_states([a(to), b(to), c(to)])
    yield "sinks", lambda to: apply_sinks(a(to), to(sinks))
    for n in (3, 8, 20, 130):
        stack = make(dim, dtype, form, n)
        counts = torch.arange(TOKENS, dtype=torch.int32) % (n + 1)
        yield f"{n} states", lambda to, stack=stack: merge_states(stack(to))
        yield (
            f"{n} counted",
            lambda to, stack=stack, counts=counts: merge_states(stack(to), counts=to(counts)),
        )
        yield (
            f"{n} in place",
            lambda to, stack=stack: merge_states(pair := stack(to), out=(pair[0][1], pair[1][1])),
        )


def on(path: str, call: Callable[[Place], Any], to: Place) -> Any:
    """The result of ``call`` on a path, as host tensors."""
    token = default_path.set(path)
    try:
        # Copied whole: turning a strided result into a dense one would take a kernel.
        return [to_host(x) for x in call(to)]
    finally:
        default_path.reset(token)


def to_host(x: torch.Tensor) -> torch.Tensor:
    """A host tensor like a view, its memory copied as it lies."""
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride()))
    flat = torch.as_strided(x, (span,), (1,), x.storage_offset())
    host = torch.empty(span, dtype=x.dtype)
    host.copy_(flat)
    return torch.as_strided(host, x.shape, x.stride())


def same(got: Any, want: Any) -> bool:
    """Whether two results agree as far as their dtype can tell."""
    bound = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float8_e4m3fn: 0.3}
    for x, y in zip(got, want):
        unit = bound[x.dtype]
        if not torch.allclose(x.float(), y.float(), atol=unit, rtol=unit, equal_nan=True):
            return False
    return True


def main() -> int:
    """Run all; 1 if a result is wrong."""
    torch.manual_seed(0)
    wrong = done = 0
    for dtype, form, dim in KINDS:
        for name, call in calls(dtype, form, dim):
            got = on("cuda", call, torch.Tensor.cuda)
            done += 1
            if not same(got, on("torch", call, torch.Tensor.clone)):
                wrong += 1
                print(f"wrong: {name}, {dtype}, {form}, head dim {dim}")
    torch.cuda.synchronize()
    print(f"{done} merges, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
