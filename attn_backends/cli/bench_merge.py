"""``attn-backends bench merge|cascade``: states put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ..bench import merge as bench
from ..bench.cascade import PEERS, CascadeCase, CascadeInputs, cascade_ways, measure_cascade
from ..bench.presets import preset as find_preset
from ..bench.runner import EAGER, GRAPH, Found
from ..errors import InvalidInputError
from . import bench_options as options
from .bench_run import Output, run_points
from .console import guarded
from .options import parse_device

_PARTS = ("pairs", "many", "host", "sweep")
#: What a CPU gets through in a second.
_SMALL_CASCADE = {"batch": 4, "prefix": 128, "suffix": 16}


@dataclass(frozen=True)
class _Part:
    part: str
    case: bench.Case

    @property
    def label(self) -> str:
        return f"{self.part} {self.case.label}"


@guarded
def merge(
    ctx: typer.Context,
    preset: options.Preset = options.DEFAULT,
    part: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(_PARTS)}; may be repeated. Default: the first three."),
    ] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Tokens; may be repeated.")] = None,
    dtype: options.Dtype = "bf16",
    no_peers: options.NoPeers = False,
    device: options.Device = None,
    rounds: options.Rounds = options.ROUNDS,
    results: options.Results = None,
    plot: options.Picture = None,
) -> None:
    """Measure the merge on every path, beside a copy of as many bytes and other libraries.

    Parts: pairs of states and many states by graph replay, host and eager time, and a sweep over
    launch shapes of our kernels. A CPU has the first two, timed eagerly.
    """
    where = parse_device(device)
    options.check_dtype("dtype", dtype, list(bench.DTYPES))
    options.check_rounds(rounds)
    if any(t < 1 for t in tokens or ()):
        raise InvalidInputError.of("tokens", min(tokens or ()), "an int >= 1")
    cuda = where.type == "cuda"
    allowed = _PARTS if cuda else _PARTS[:2]
    for name in part or ():
        if name not in allowed:
            raise InvalidInputError.of("part", repr(name), f"{', '.join(allowed)} on {where.type}")
    model = find_preset(preset).model
    shape = {"num_heads": model.num_heads, "head_dim": model.dv, "dtype": dtype}
    cases = bench.standard_cases(tokens or (), device=where.type, **shape)
    points = [_Part(p, case) for p in dict.fromkeys(part or allowed[:3]) for case in cases[p]]
    modes, limit = (GRAPH if cuda else EAGER,), options.limit_on(where)

    def measure(point: _Part) -> Found:
        return bench.measure_part(
            point.part, point.case, peers=cuda and not no_peers, rounds=rounds, modes=modes,
            limit_s=limit,
        )  # fmt: skip

    output = Output(ctx, where, results, plot, own="cuda" if cuda else "torch")
    run_points(output, points, measure)


@guarded
def cascade(
    ctx: typer.Context,
    preset: options.Preset = options.DEFAULT,
    backend: options.Backends = None,
    peer: options.Peers = None,
    no_peers: options.NoPeers = False,
    batch: options.Batches = None,
    prefix: Annotated[
        list[int] | None, typer.Option(help="Keys that all share; may be repeated.")
    ] = None,
    suffix: Annotated[int | None, typer.Option(help="Own keys of each request.")] = None,
    dtype: options.Dtype = "bf16",
    device: options.Device = None,
    mode: options.Modes = None,
    rounds: options.Rounds = options.ROUNDS,
    results: options.Results = None,
    plot: options.Picture = None,
) -> None:
    """Measure decode over a shared prefix: a cascade beside plain paged decode.

    Default: 64 requests over 32768 shared keys and 256 own ones; on a CPU 4 over 128 and 16.
    """
    where = parse_device(device)
    modes = options.check_modes(mode, where)
    peers = options.check_peers(peer, no_peers, list(PEERS), where)
    options.check_dtype("dtype", dtype, list(bench.DTYPES))
    options.check_rounds(rounds)
    model = find_preset(preset).model
    if model.v_in_k:
        raise InvalidInputError.of("preset", repr(preset), "a model without MLA")
    fields: dict[str, Any] = {} if where.type == "cuda" else dict(_SMALL_CASCADE)
    fields |= {} if suffix is None else {"suffix": suffix}
    fields |= {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads}
    base = CascadeCase(head_dim=model.head_dim, dtype=dtype, **fields)
    limit = options.limit_on(where)

    def measure(case: CascadeCase) -> Found:
        x = CascadeInputs(case, where)
        ways, against = cascade_ways(x, backend or (), peers)
        found = Found()
        if ways:
            found = measure_cascade(x, ways, modes=modes, rounds=rounds, limit_s=limit)
        point = x.point()
        found.refused += [point.refusal(name, why) for name, why in against.items()]
        return found

    own = "cascade-triton" if where.type == "cuda" else None
    points = base.grid(batch or (), prefix or ())
    run_points(Output(ctx, where, results, plot, own=own), points, measure)


__all__ = ["cascade", "merge"]
