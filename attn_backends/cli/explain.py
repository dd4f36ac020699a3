"""``attn-backends explain``: which backend a layer would get, who decided, why not the others."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from ..config import AttentionConfig
from ..registry import PhaseChoice, explain
from ..spec import AttentionSpec
from .console import EXIT_BAD_ANSWER, JsonFlag, guarded, print_json, stdout, table
from .options import parse_dtype, parse_window

NAME = "explain"


@guarded
def command(
    heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads. Default: heads.")] = None,
    head_dim: Annotated[int, typer.Option(help="Width of queries and keys.")] = 128,
    head_dim_v: Annotated[
        int | None, typer.Option(help="Width of values. Default: head-dim.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Query dtype: fp64, fp32, fp16, bf16, fp8.")] = "bf16",
    kv_dtype: Annotated[str | None, typer.Option(help="Cache dtype. Default: dtype.")] = None,
    page_size: Annotated[
        int | None, typer.Option(help="Tokens per page of the cache. Default: ragged keys.")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal/--no-causal", help="Bottom-right.")] = True,
    window: Annotated[
        str | None,
        typer.Option(metavar="LEFT[,RIGHT]", help="W tokens are W-1; none is unbounded."),
    ] = None,
    softcap: Annotated[float | None, typer.Option(help="Cap of the scores.")] = None,
    alibi: Annotated[bool, typer.Option("--alibi", help="Calls pass ALiBi slopes.")] = False,
    mask: Annotated[bool, typer.Option("--mask", help="Calls pass a boolean mask.")] = False,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Bits must not depend on batch mates.")
    ] = False,
    phase: Annotated[str | None, typer.Option(help="prefill or decode. Default: both.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, ... Default: CUDA if visible.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Ask for this backend, as an argument would.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="Configuration file: YAML, TOML or JSON.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show which backend a layer gets, which setting decided, and every reason against the rest.

    Exit code 1 if the call would be refused.
    """
    spec = AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=parse_dtype(dtype),
        kv_dtype=None if kv_dtype is None else parse_dtype(kv_dtype, field="kv_dtype"),
        page_size=page_size,
        causal=causal,
        window=parse_window(window),
        softcap=softcap,
        has_alibi=alibi,
        has_mask=mask,
        batch_invariant=batch_invariant,
    )
    settings = None if config is None else AttentionConfig.from_file(config)
    answer = explain(spec, phase=phase, device=device, backend=backend, config=settings)
    if as_json:
        print_json({**answer.to_dict(), "spec": _spec_dict(answer.spec)})
    else:
        out = stdout()
        out.print(f"{answer.spec} on {answer.device}", soft_wrap=True)
        for choice in answer.choices:
            _show(out, choice)
    if any(choice.name is None for choice in answer.choices):
        raise typer.Exit(EXIT_BAD_ANSWER)


def _spec_dict(spec: AttentionSpec) -> dict[str, Any]:
    fields = (field.name for field in dataclasses.fields(spec) if field.init)
    values = {name: getattr(spec, name) for name in fields}
    values["dtype"] = str(spec.dtype).removeprefix("torch.")
    values["kv_dtype"] = str(spec.kv).removeprefix("torch.")
    return values


def _show(out: Any, choice: PhaseChoice) -> None:
    by = f"{choice.layer}: {choice.setting}" if choice.setting else choice.layer
    verdict = choice.name or "refused"
    out.print(f"\n{choice.phase}: {verdict} (chosen by {by})", style="bold", soft_wrap=True)
    for kernel in choice.kernels:
        out.print(f"by: {kernel}", soft_wrap=True)
    if choice.ranking is not None:
        out.print(f"order: {choice.ranking}", soft_wrap=True)
    if choice.measured is not None and choice.measured.points:
        names = list(choice.measured.median_us)
        lines = []
        for p in choice.measured.points:
            times = [f"{p.median_us[n]:g}" if n in p.median_us else "" for n in names]
            lines.append([f"{p.batch} x {p.q_len} over {p.kv_len}", *times])
        out.print(table("", ["measured, us", *names], lines))
    if choice.error is not None:
        out.print(choice.error, style="red", soft_wrap=True)
    rows = [[name, "\n".join(map(str, rs))] for name, rs in choice.rejected.items()]
    if rows:
        out.print(table("", ["not chosen", "reasons"], rows))


__all__ = ["NAME", "command"]
