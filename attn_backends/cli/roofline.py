"""``attn-backends roofline``: what attention moves and computes, and how fast a GPU could be."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from ..bench.roofline import DTYPE_BYTES, GPUS, MODELS, Gpu, ModelShape, Roofline, roofline
from ..errors import InvalidInputError
from . import units
from .console import JsonFlag, guarded, print_json, stdout, table

NAME = "roofline"
_CUSTOM = "given on the command line"


def _model(preset: str | None, given: dict[str, int | None]) -> ModelShape:
    """The preset, with what was given in its place; without a preset, what was given alone."""
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if preset is None and fields:
        missing = [f"--{n}" for n in ("heads", "head-dim") if _FIELDS[n] not in fields]
        if missing:
            raise InvalidInputError.of("shapes", "incomplete", f"a --preset, or {missing} too")
        fields.setdefault("num_kv_heads", fields["num_heads"])
        fields.setdefault("num_layers", 1)
        return ModelShape(name="custom", **fields)
    name = "llama3-8b" if preset is None else preset
    if name not in MODELS:
        raise InvalidInputError.of("preset", repr(name), ", ".join(MODELS))
    model = MODELS[name]
    return replace(model, name=f"{name} (changed)", **fields) if fields else model


_FIELDS = {"heads": "num_heads", "head-dim": "head_dim"}


def _gpu(name: str, dtype: str, bandwidth_tbs: float | None, tflops: float | None) -> Gpu:
    if name not in GPUS:
        raise InvalidInputError.of("gpu", repr(name), ", ".join(GPUS))
    for field, value in (("bandwidth-tbs", bandwidth_tbs), ("tflops", tflops)):
        if value is not None and not value > 0:
            raise InvalidInputError.of(field, value, "a number > 0")
    gpu = GPUS[name]
    if bandwidth_tbs is None and tflops is None:
        return gpu
    source = _CUSTOM
    if bandwidth_tbs is None or tflops is None:
        other = "peak rate" if tflops is None else "bandwidth"
        source = f"{_CUSTOM}; {other} of {name}: {gpu.source}"
    rates = gpu.tflops if tflops is None else {dtype: tflops}
    return Gpu("custom", bandwidth_tbs or gpu.bandwidth_tbs, rates, source)


def _dtype(name: str) -> str:
    """Accept torch's names too."""
    long = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    return {**long, "float8_e4m3fn": "fp8"}.get(name, name)


@guarded
def command(
    preset: Annotated[
        str | None, typer.Option(help=f"Model: {', '.join(MODELS)}. Default: llama3-8b.")
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads. Default: heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of queries and keys.")] = None,
    head_dim_v: Annotated[
        int | None, typer.Option(help="Width of values. Default: head-dim.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers. Default: 1.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of the sequence.")] = 8192,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPE_BYTES)}.")] = "fp16",
    causal: Annotated[
        bool, typer.Option("--causal/--no-causal", help="Count only visible scores as work.")
    ] = False,
    gpu: Annotated[str, typer.Option(help=f"GPU: {', '.join(GPUS)}.")] = "h100",
    bandwidth_tbs: Annotated[
        float | None, typer.Option(help="Memory bandwidth in TB/s (10^12 bytes).")
    ] = None,
    tflops: Annotated[float | None, typer.Option(help="Dense TFLOP/s of the dtype.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Account for attention's memory, traffic, work and best possible times.

    Give a model with --preset or by its shapes, and a GPU with --gpu or by its two rates. Shapes
    beside a preset replace the preset's. Nothing is run or measured.
    """
    shapes = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "num_layers": layers,
    }
    dtype = _dtype(dtype)
    model, device = _model(preset, shapes), _gpu(gpu, dtype, bandwidth_tbs, tflops)
    account = roofline(model, length, dtype, device, causal=causal)
    if as_json:
        print_json(account.to_dict())
        return
    _show(account)


def _show(account: Roofline) -> None:
    out, model = stdout(), account.model
    mask = "causal" if account.causal else "full"
    title = f"{model.name}, T = {account.length}, {account.dtype}, {mask} attention, one sequence"
    columns = [account.textbook, account.fused, account.decode]
    rows = [[label, *(show(c) for c in columns)] for label, show in _ROWS]
    out.print(table(title, ["", "textbook prefill", "fused prefill", "decode step"], rows))
    v = "" if model.dv == model.head_dim else f", value dim {model.dv}"
    merge = account.merge
    lines = [
        f"model    {model.num_heads} heads, {model.num_kv_heads} KV heads, head dim "
        f"{model.head_dim}{v}, {model.num_layers} layers{'; ' if model.note else ''}{model.note}",
        f"GPU      {account.gpu}: {account.bandwidth_tbs:g} TB/s, {account.tflops:g} TFLOP/s "
        f"dense {account.dtype}; {account.gpu_source}",
        f"S        {units.gib(account.score_bytes_per_layer)} per layer, written once",
        f"ridge    {account.ridge_flop_per_byte:.0f} FLOP/byte; fused has "
        f"{account.intensity_ratio:.0f}x the intensity of textbook",
        f"merge    {merge.bytes_per_token_head} bytes, {merge.flop_per_token_head} FLOP per "
        f"token-head: {merge.flop_per_byte:.2f} FLOP/byte",
        "textbook moves Q, K, V, O once and S/P four times; fused moves Q, K, V, O once; decode "
        "reads K, V once. Times are floors.",
    ]
    for line in lines:
        out.print(line, soft_wrap=True)


_ROWS: list[tuple[str, Any]] = [
    ("traffic per layer", lambda p: units.gib(p.bytes_per_layer)),
    ("FLOP per layer", lambda p: f"{p.flop_per_layer:.4e}"),
    ("FLOP/byte", lambda p: f"{p.flop_per_byte:.1f}"),
    ("memory time per layer", lambda p: units.ms(p.memory_ms_per_layer)),
    ("compute time per layer", lambda p: units.ms(p.compute_ms_per_layer)),
    ("floor per layer", lambda p: units.ms(p.floor_ms_per_layer)),
    ("floor, all layers", lambda p: units.ms(p.floor_ms_model)),
    ("bound by", lambda p: p.bound),
]

__all__ = ["NAME", "command"]
