"""Host time of merges: a part of ``merge``.

Calls in a row on one copy of the inputs, which do not wait for the GPU (``host``) or do so at the
end (``eager``). Rows named ``-allocating`` are calls without ``out=``; ``-launch`` is the launch
that a call ends in, by itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from ..merge import cuda_merge, merge_state, triton_merge
from .graph_timer import Times
from .merge import DTYPES, Case, check, make_states, oracle, pair_makers, paths_on
from .runner import EAGER, Call, Found, Way, forget_error
from .wall_timer import sync_of


def host_rows(case: Case, peers: bool, samples: int = 60, calls: int = 50) -> Found:
    """Eager time per call: ``host`` without waiting for the GPU, ``eager`` with it."""
    makers, want = pair_makers(case, peers)
    o, lse = make_states(case)
    for name in ("copy", "cuda-alone", "triton-alone"):
        makers.pop(name, None)
    states = (o[0, 0], lse[0, 0], o[1, 0], lse[1, 0])
    other = oracle([states[:2], states[2:]])
    for path in paths_on(case.device)[:2]:
        makers[f"{path}-allocating"] = lambda p=path: (  # type: ignore
            lambda i: merge_state(*states, path=p)
        )
        if case.device == "cuda":
            makers[f"{path}-launch"] = lambda p=path: bare_launch(p, states)  # type: ignore
    found, point, sync = Found(), case.point(), sync_of(torch.device(case.device))
    ready, checks = {}, {}
    for name, make in makers.items():
        try:
            call = make.make() if isinstance(make, Way) else make()
            right = other if name.endswith(("-allocating", "-launch")) else want
            checks[name] = check(call, right, DTYPES[case.dtype])
        except Exception as error:  # foreign code may raise anything
            found.refused.append(point.refusal(name, f"{type(error).__name__}: {error}"))
            forget_error(point.device)
            continue
        if checks[name].right:
            ready[name] = call
        else:
            found.rows.append(point.wrong(name, EAGER, checks[name]))
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(samples):
        for name, call in ready.items():
            sync()
            start = time.perf_counter()
            for _ in range(calls):
                call(0)
            queued = time.perf_counter()
            sync()
            done = time.perf_counter()
            times.setdefault((name, "host"), []).append((queued - start) / calls * 1e6)
            times.setdefault((name, EAGER), []).append((done - start) / calls * 1e6)
    for (name, mode), spent in times.items():
        if mode == EAGER or case.device == "cuda":  # a CPU works while it is called
            found.rows.append(point.row(name, mode, Times.of(spent), checks[name]))
    return found


def bare_launch(path: str, states: Sequence[torch.Tensor]) -> Call:
    """The launch that ends a merge on a kernel path, with all arguments written: the driver's part.

    Args:
        path: ``cuda`` or ``triton``.
        states: ``o_a, lse_a, o_b, lse_b``, contiguous.
    """
    out = torch.empty_like(states[0]), torch.empty_like(states[1])
    six, dtype = (*states, *out), states[0].dtype
    if path == "cuda":
        run = cuda_merge.prepare_pair(*six, dtype)  # type: ignore[arg-type]
    else:
        run = triton_merge.prepare_pair(*six, dtype, True)  # type: ignore[arg-type]
    at = [x.data_ptr() for x in six]
    run(*at, -1, None, False)
    stream = torch.cuda.current_stream().cuda_stream
    launch = run.ready[False].filled(stream, *at)  # type: ignore[attr-defined]

    def call(i: int) -> Any:
        launch()
        return out

    return call


__all__ = ["bare_launch", "host_rows"]
