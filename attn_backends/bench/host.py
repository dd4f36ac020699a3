"""Host time: what choosing, planning and launching cost the thread that calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .attention_cases import Case, Inputs
from .backend_ways import chooser, every_backend, why_not
from .gate import check, limit_of, reference
from .runner import Call, Found
from .wall_timer import measure_host

#: A CPU computes in ``run``: nothing is queued.
_NO_QUEUE = "run on a CPU computes while it is called; bench decode times it"


def host_case(x: Inputs, names: Sequence[str]) -> Found:
    """Host microseconds of ``select`` asked again, ``plan`` and ``run``, without waiting.

    Args:
        x: The inputs of a case.
        names: Backends, as ``backend_ways.parse`` takes them; empty is all that can do the case.

    Returns:
        A row per backend and part, named ``host-select``, ``host-plan`` and ``host-run``; only
        after its answer was right.
    """
    found, point, case = Found(), x.point(), x.case
    want = reference(x)
    limit = limit_of(want.o, x.spec.dtype, x.spec.kv)
    work: dict[tuple[str, str], Callable[[], Any]] = {}
    for name in names or every_backend():
        if why := why_not(name, x.spec, case.phase, x.device):
            found.refused.append(point.refusal(name, why))
            continue
        try:
            calls, run = _calls(name, x)
            checked = check(run, want, limit)
        except Exception as error:  # foreign code may raise anything
            found.refused.append(point.refusal(name, f"{type(error).__name__}: {error}"))
            continue
        if not checked.right:
            found.rows.append(point.wrong(name, "host", checked))
            continue
        work |= {(name, part): call for part, call in calls.items()}
        if "run" not in calls:
            found.refused.append(point.refusal(name, _NO_QUEUE, "host"))
    measure_host(work, x.device)  # the thread and its clock warm up
    for (name, part), times in measure_host(work, x.device).items():
        row = {
            "bench": f"host-{part}", "case": case.row(), "backend": name, "mode": "host",
            **times.row(), "right": True,
        }  # fmt: skip
        if x.device.type != "cuda":
            row |= {"device": x.device.type, "clock": "wall"}
        found.rows.append(row)
    return found


def _calls(name: str, x: Inputs) -> tuple[dict[str, Callable[[], Any]], Call]:
    """The parts of a backend that are timed, and its run on copy i."""
    choose = chooser(name, x.spec, x.case.phase, x.device)
    backend = choose()
    plan = backend.plan(x.batch)

    def run(i: int) -> Any:
        return backend.run(x.q[i], x.k[i], x.v[i], plan)

    parts: dict[str, Callable[[], Any]] = {
        "select": choose,
        "plan": lambda: backend.plan(x.batch),
    }
    if x.device.type == "cuda":
        first = (x.q[0], x.k[0], x.v[0])  # slicing inside would count
        parts["run"] = lambda: backend.run(*first, plan)
    return parts, run


def show_host(case: Case, found: Found) -> None:
    """Print a line per row."""
    for r in found.rows:
        time = f"{r['median_us']:8.1f} us" if r["right"] else "WRONG"
        print(f"{r['bench']:12s}{case.label:28s}{r['backend']:16s}{time}", flush=True)
    for r in found.refused:
        print(f"  {r['backend']}: {r['reason']}", flush=True)


__all__ = ["host_case", "show_host"]
