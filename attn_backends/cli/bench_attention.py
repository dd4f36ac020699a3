"""``attn-backends bench prefill|extend|decode|mla|host``: attention, point by point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from ..bench.attention_cases import DTYPES, Case, Inputs, points, shape_of
from ..bench.attention_peers import PEER_NAMES
from ..bench.attention_point import measure_case, peer_ways
from ..bench.backend_ways import backend_ways, parse
from ..bench.host import host_case
from ..bench.presets import preset as find_preset
from ..bench.runner import Found
from . import bench_options as options
from .bench_run import Output, run_points
from .console import guarded
from .options import parse_device

ABOUT = {
    "prefill": "Measure prefill: queries over as many keys, causal, without a cache.",
    "extend": "Measure extend: new queries over a paged cache that holds their prefix too.",
    "decode": "Measure decode: one query of each sequence over a paged cache.",
    "mla": "Measure absorbed MLA decode: one KV head, whose values are lanes of its keys.",
}


def attention_command(bench: str) -> Callable[..., None]:
    """The command of one benchmark; they differ in their points only."""
    default = "deepseek" if bench == "mla" else options.DEFAULT

    @guarded
    def command(
        ctx: typer.Context,
        preset: options.Preset = default,
        backend: options.Backends = None,
        peer: options.Peers = None,
        no_peers: options.NoPeers = False,
        batch: options.Batches = None,
        length: options.Lengths = None,
        q_len: Annotated[
            int | None, typer.Option(help="New queries of each sequence; extend only.")
        ] = None,
        heads: Annotated[
            int | None, typer.Option(help="Query heads, in place of the preset's.")
        ] = None,
        dtype: options.Dtype = "bf16",
        kv_dtype: options.KvDtype = None,
        page_size: options.PageSize = None,
        batch_invariant: Annotated[
            bool, typer.Option("--batch-invariant", help="Demand it of the backends.")
        ] = False,
        device: options.Device = None,
        mode: options.Modes = None,
        rounds: options.Rounds = options.ROUNDS,
        results: options.Results = None,
        plot: options.Picture = None,
    ) -> None:
        where = parse_device(device)
        modes = options.check_modes(mode, where)
        peers = set(options.check_peers(peer, no_peers, PEER_NAMES[bench], where))
        options.check_rounds(rounds)
        shape = _shape(bench, preset, dtype, kv_dtype, page_size)
        shape |= {"batch_invariant": batch_invariant}
        shape |= {} if heads is None else {"num_heads": heads}
        cases = points(bench, shape, where, batch or (), length or (), q_len)
        _refuse_early(cases, backend)
        limit = options.limit_on(where)

        def measure(case: Case) -> Found:
            x = Inputs(case, device=where)
            ways, against = backend_ways(x, backend or ())
            ways |= peer_ways(x, peers)
            found = Found()
            if ways:
                found = measure_case(x, ways, modes=modes, rounds=rounds, limit_s=limit)
            point = x.point()
            found.refused += [point.refusal(name, why) for name, why in against.items()]
            return found

        run_points(Output(ctx, where, results, plot), cases, measure)

    command.__doc__ = ABOUT[bench]
    return command


@guarded
def host(
    ctx: typer.Context,
    preset: options.Preset = options.DEFAULT,
    backend: options.Backends = None,
    batch: options.Batches = None,
    length: options.Lengths = None,
    dtype: options.Dtype = "bf16",
    kv_dtype: options.KvDtype = None,
    page_size: options.PageSize = None,
    device: options.Device = None,
    results: options.Results = None,
) -> None:
    """Measure host time: choosing a backend again, planning a step, and launching a layer.

    Calls are queued and not waited for. On a CPU nothing is queued, so launching has no row.
    """
    where = parse_device(device)
    shape = _shape("decode", preset, dtype, kv_dtype, page_size)
    cases = points("decode", shape, where, batch or (), length or ())
    _refuse_early(cases, backend)

    def measure(case: Case) -> Found:
        return host_case(Inputs(case, device=where), backend or ())

    run_points(Output(ctx, where, results), cases, measure)


def _shape(
    bench: str, preset: str, dtype: str, kv_dtype: str | None, page_size: int | None
) -> dict[str, Any]:
    """The fields of every case; page size 0 is ragged keys."""
    shape = shape_of(bench, find_preset(preset))
    shape["dtype"] = options.check_dtype("dtype", dtype, list(DTYPES))
    shape["kv_dtype"] = options.check_dtype("kv_dtype", kv_dtype or dtype, list(DTYPES))
    if page_size is not None:
        shape["page_size"] = page_size or None
    return shape


def _refuse_early(cases: list[Case], backends: list[str] | None) -> None:
    """Raise for unknown names, and for shapes that no layer has, before anything is measured."""
    for name in backends or ():
        parse(name)
    _ = [case.spec for case in cases]


__all__ = ["ABOUT", "attention_command", "host"]
