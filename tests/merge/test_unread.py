"""An output that weighs nothing is not read: not loaded, and not brought to L2 either."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attn_backends.merge import apply_sinks, default_path, merge_state, merge_states

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("emulate", HERE / "emulate.py")
emulate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(emulate)

INF, NAN = float("inf"), float("nan")
NONE = 104.0  # exp(-104) is 0 in float32
LAYOUTS = ["plain", "padded", "head_major", "every_other"]


class Reads:
    """Bytes that a kernel read, on a CPU."""

    def __init__(self) -> None:
        self.addresses: list[np.ndarray] = []

    def touched(self, row: torch.Tensor) -> bool:
        """Whether anything of a contiguous row was."""
        begin = row.data_ptr()
        end = begin + row.numel() * row.element_size()
        return any(bool(((begin <= at) & (at < end)).any()) for at in self.addresses)


@pytest.fixture(params=["cuda", "triton"])
def reads(request, monkeypatch, tmp_path):
    """What the kernels of a path read, run on a CPU."""
    if torch.cuda.is_available():
        pytest.skip("the kernels run on the GPU here")
    found = Reads()
    token = default_path.set(request.param)
    if request.param == "cuda":
        if emulate.COMPILER is None:
            pytest.skip("needs a C++ compiler")
        emulate.install(monkeypatch, tmp_path)
        monkeypatch.setattr(emulate, "seen", found.addresses.append)
    else:
        interpreter = pytest.importorskip("triton.runtime.interpreter")
        real = interpreter._interpreter

        def load(ptrs, mask, other, dtype):
            found.addresses.append(ptrs[mask].astype(np.uint64).ravel())
            return real.load(ptrs, mask, other, dtype)

        rest = {n: getattr(real, n) for n in dir(real) if not n.startswith("__")}
        monkeypatch.setattr(interpreter, "_interpreter", SimpleNamespace(**{**rest, "load": load}))
    yield found
    default_path.reset(token)
    emulate.pair.forget()
    emulate.many.forget()


def expect(reads, os, weights, merged) -> None:
    """Each row was read if and only if it weighs something, and no poison got through."""
    assert not merged.o.isnan().any() and not merged.lse.isnan().any()
    for o, w in zip(os, weights):
        for t in range(o.shape[0]):
            for h in range(o.shape[1]):
                assert reads.touched(o[t, h]) == bool(w[t, h]), (t, h)


def poisoned(state, empty, low, arrange, layout):
    """The state with rows that weigh nothing, in three ways, and NaN in their outputs."""
    o, lse = state[0].clone(), state[1].clone()
    lse[empty] = torch.where(torch.arange(int(empty.sum())) % 2 == 0, -INF, INF)
    lse[low] -= 2 * NONE
    o[empty | low] = NAN
    return arrange(o, lse, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_side_without_weight_is_not_read(reads, make_state, arrange, layout):
    tokens, heads = 9, 5
    g = torch.Generator().manual_seed(1)
    kind = torch.randint(0, 5, (tokens, heads), generator=g)
    kind[2] = 0  # tokens without a prefix, as serving has them
    kind[7] = 4
    a, b = (
        poisoned(
            make_state(tokens, heads, 64, torch.float16, seed=i), kind == i, kind == 2 + i,
            arrange, layout,
        )
        for i in range(2)
    )  # fmt: skip
    merged = merge_state(*a, *b)
    expect(reads, (a[0], b[0]), ((kind != 0) & (kind != 2), (kind != 1) & (kind != 3)), merged)


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_the_first_state_is_not_read_beyond_the_prefix(reads, make_state, arrange, layout):
    a, b = (arrange(*make_state(7, 3, 64, seed=i), layout) for i in range(2))
    a[0][4:] = NAN
    merged = merge_state(*a, *b, num_tokens_with_prefix=4)
    has = torch.zeros(7, 3, dtype=torch.bool)
    has[:4] = True
    expect(reads, (a[0], b[0]), (has, torch.ones_like(has)), merged)


def test_a_state_below_its_sinks_is_not_read(reads, make_state):
    o, lse = make_state(6, 3, 64)
    o[2:4], lse[2:4] = NAN, -INF
    o[5] = NAN
    lse[5] = -3 * NONE
    merged = apply_sinks((o, lse), torch.zeros(3))
    has = torch.ones(6, 3, dtype=torch.bool)
    has[2:4] = has[5] = False
    expect(reads, (o,), (has,), merged)


@pytest.mark.parametrize(
    "form, n",  # a sequence of more than eight is stacked first, which reads it
    [
        *[("stacked", 3), ("stacked", 8), ("stacked", 19), ("separate", 3), ("separate", 8)],
        *[("counted", 3), ("counted", 8), ("counted", 19)],
    ],
)
def test_states_without_weight_are_not_read(reads, make_state, form, n):
    states = [make_state(5, 3, 64, torch.float16, seed=i) for i in range(n)]
    o, lse = torch.stack([s[0] for s in states]), torch.stack([s[1] for s in states])
    g = torch.Generator().manual_seed(n)
    kind = torch.randint(0, 4, lse.shape, generator=g)
    kind[0] = 3  # some state of each row keeps its weight
    lse[kind == 0] = -INF
    lse[kind == 1] -= 3 * NONE
    has, options = kind > 1, {}
    if form == "counted":
        counts = torch.arange(5, dtype=torch.int32) * n // 4
        has &= torch.arange(n)[:, None, None] < counts[:, None]
        options["counts"] = counts
    o[~has] = NAN
    # The largest of each row may be one that is no longer there: then nothing is left to weigh.
    merged = merge_states(list(zip(o, lse)) if form == "separate" else (o, lse), **options)
    expect(reads, o, has, merged)


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["cuda", "triton"])
@pytest.mark.parametrize("form", ["empty", "prefix", "many", "control"])
def test_memory_that_is_not_there_is_not_missed(path, form):
    # Half of an output has addresses but no memory behind them: a load of it ends the process.
    pytest.importorskip("cuda.bindings")
    command = [sys.executable, str(HERE / "unmapped.py"), path, form]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if form == "control":  # which reads all of it
        assert done.returncode and "memory access" in done.stderr, done.stderr
    else:
        assert done.returncode == 0, done.stderr
