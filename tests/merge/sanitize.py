"""Every form of the CUDA merge kernels once, small, for NVIDIA's compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \\
        --kernel-name kernel_substring=merge_ python tests/merge/sanitize.py

and the same with ``racecheck`` and ``initcheck``. Results are compared with the torch path; the
exit status says whether all agree.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from attn_backends.merge import apply_sinks, default_path, merge_state, merge_state_, merge_states

FORMS = ("plain", "padded", "head_major")
DTYPES = (torch.bfloat16, torch.float32)


def make(tokens: int, heads: int, dim: int, dtype: torch.dtype, form: str):
    """A random state, initialised through and through, some of it empty."""
    o = torch.randn(tokens, heads, dim, device="cuda").to(dtype)
    lse = torch.randn(tokens, heads, device="cuda")
    lse[torch.rand(tokens, heads, device="cuda") < 0.2] = -float("inf")
    if form == "padded":
        wide = torch.zeros(tokens, heads, dim + 8, device="cuda", dtype=dtype)
        room = torch.zeros(tokens, heads + 3, device="cuda")
        wide[..., :dim], room[:, :heads] = o, lse
        return wide[..., :dim], room[:, :heads]
    return (o, lse.mT.contiguous().mT) if form == "head_major" else (o, lse)


def same(got, want) -> bool:
    """Whether two results agree as far as their dtype can tell."""
    bound = 2e-2 if got.o.dtype == torch.bfloat16 else 1e-5
    return all(torch.allclose(x.float(), y.float(), atol=bound) for x, y in zip(got, want))


def on(path: str, call):
    """The result of ``call`` on a path."""
    token = default_path.set(path)
    try:
        return call()
    finally:
        default_path.reset(token)


def calls(dtype: torch.dtype, form: str, dim: int):
    """Merges to compare, as functions without arguments."""
    tokens, heads = 13, 5
    states = [make(tokens, heads, dim, dtype, form) for _ in range(3)]
    a, b = states[:2]
    yield lambda: merge_state(*a, *b)
    yield lambda: merge_state(*a, *b, num_tokens_with_prefix=7)
    yield lambda: merge_state_(a[0].clone(), a[1].clone(), *b)
    yield lambda: merge_states(states)
    sinks = torch.randn(heads, device="cuda")
    yield lambda: apply_sinks(a, sinks)
    for n in (2, 8, 20, 130):
        o = torch.stack([a[0]] * n)
        lse = torch.randn(n, tokens, heads, device="cuda")
        if form == "head_major":
            lse = lse.mT.contiguous().mT
        counts = torch.arange(tokens, device="cuda", dtype=torch.int32) % (n + 1)
        yield lambda o=o, lse=lse: merge_states((o, lse))
        yield lambda o=o, lse=lse, c=counts: merge_states((o, lse), counts=c)


def main() -> int:
    """Run all; 1 if a result is wrong."""
    torch.manual_seed(0)
    wrong = done = 0
    for dtype, form, dim in itertools.product(DTYPES, FORMS, (64, 80)):
        for call in calls(dtype, form, dim):
            done += 1
            wrong += not same(on("cuda", call), on("torch", call))
    torch.cuda.synchronize()
    print(f"{done} merges, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
