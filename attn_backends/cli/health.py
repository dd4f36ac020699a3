"""A tiny real call of a backend, held against a float64 computation that shares no code with it.

For each device and phase, the first small case that the backend's own declaration allows is run:
mixed lengths, a prefix before the queries, grouped heads. The bound on the error follows from the
dtype: scores carry a relative rounding error of eps, so values err by about eps * (1 + max |s|).
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ..batch import Batch
from ..capabilities import Capabilities
from ..config import AttentionConfig
from ..errors import AttnBackendsError, BackendUnavailableError, UnsupportedCallError
from ..registry import BackendInfo, select
from ..registry.registry import TABLE
from ..registry.target import RaisedReason
from ..spec import AttentionSpec
from .options import short_dtype

#: Query and key lengths of the case: a chunk behind a prefix, one token, a whole prompt.
_LENGTHS = {"prefill": ([5, 1, 19], [12, 33, 19]), "decode": ([1, 1, 1], [1, 17, 40])}
_DTYPES = {
    "cpu": (torch.float32, torch.float16, torch.bfloat16, torch.float64),
    "cuda": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
}
_SAFETY = 4.0


@dataclass(frozen=True)
class Check:
    """The result of one backend on one device in one phase.

    Attributes:
        backend: Its name.
        device: Device type.
        phase: ``"prefill"`` or ``"decode"``.
        status: ``"PASS"``, ``"FAIL"``, ``"unsupported"`` (no small case is declared for the device
            and phase), or ``"unavailable"`` (it says so only when it is built).
        case: What ran, in words.
        error_o: Largest absolute error of o.
        error_lse: Largest absolute error of lse.
        tolerance_o: Bound on ``error_o``.
        tolerance_lse: Bound on ``error_lse``.
        seconds: Time of the call, compiling included.
        message: The exception, the mismatch, or the reasons.
        trace: The traceback of an exception.
        options: Which of the libraries behind the name ran, if it has several.
    """

    backend: str
    device: str
    phase: str
    status: str
    case: str = ""
    error_o: float | None = None
    error_lse: float | None = None
    tolerance_o: float | None = None
    tolerance_lse: float | None = None
    seconds: float | None = None
    message: str = ""
    trace: str = ""
    options: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def check_backend(info: BackendInfo, devices: tuple[str, ...]) -> list[Check]:
    """Run the tiny calls of an available backend, both phases on each device.

    A name that stands for several libraries is run with each of them that is there.
    """
    phases = ("prefill", "decode")
    return [
        replace(check_call(info, device, phase, options), options=options)
        for options in _builds(info)
        for device in devices
        for phase in phases
    ]


def _builds(info: BackendInfo) -> list[dict[str, str]]:
    """Options that choose one library each; none where there is no choice."""
    target: Any = TABLE.entries[info.name].load()
    builds: tuple[dict[str, str], ...] = getattr(target, "builds", ())
    there = [
        options
        for options in builds
        if not target.dependency_reasons(target.Options.model_validate(options))
    ]
    return there or [{}]


def check_call(
    info: BackendInfo, device: str, phase: str, options: dict[str, str] | None = None
) -> Check:
    """Run one tiny call and judge it."""
    refusals: list[str] = []
    config = AttentionConfig(options={info.name: options}) if options else None
    try:
        for spec in cases(info.capabilities, device, phase):
            try:
                selection = select(
                    spec, phase=phase, device=device, backend=info.name, config=config
                )
            except UnsupportedCallError as error:
                if any(isinstance(reason, RaisedReason) for reason in error.reasons):
                    raise  # its own check is broken
                refusals.append("; ".join(map(str, error.reasons)) or str(error))
                continue
            return _run(info.name, selection.backend, spec, device, phase)
    except AttnBackendsError as error:
        cause = error.__cause__
        foreign = cause is not None and not isinstance(cause, AttnBackendsError)
        declared = isinstance(error, BackendUnavailableError) and not foreign
        status = "unavailable" if declared else "FAIL"
        trace = "".join(traceback.format_exception(cause)) if foreign else ""
        return Check(info.name, device, phase, status, message=str(error), trace=trace)
    return Check(info.name, device, phase, "unsupported", message=refusals[0])


def cases(declared: Capabilities | None, device: str, phase: str) -> Iterator[AttentionSpec]:
    """Small specs, the most useful first; the backend picks the first that it can do."""
    dims: list[tuple[int, int, int]] = [(4, 2, 64), (4, 2, 128), (4, 4, 64), (4, 4, 128)]
    pairs: list[tuple[int, int, int, int]] = [(h, hk, d, d) for h, hk, d in dims]
    # Each layout comes first in one phase, so that a backend with both runs both.
    layouts: dict[str, list[int | None]] = {"prefill": [None, 16], "decode": [16, None]}
    pages = [*layouts[phase], 64, 256, 1]
    if declared is not None:
        listed = declared.head_dims.values or (declared.head_dims.low,)
        pairs += [(4, hk, d, d) for d in listed for hk in (2, 4)]
        groups = declared.group_sizes.values or (declared.group_sizes.low,)
        pairs += [(g, 1, d, dv) for d, dv in declared.head_dim_pairs or () for g in (16, *groups)]
        pages += [p for p in declared.page_sizes.values or (declared.page_sizes.low,)]
    for dtype in _DTYPES.get(device, _DTYPES["cuda"]):
        for heads, kv_heads, dim, dim_v in dict.fromkeys(pairs):
            for page in dict.fromkeys(pages):
                for causal in (True, False):
                    yield AttentionSpec(
                        num_heads=heads,
                        num_kv_heads=kv_heads,
                        head_dim=dim,
                        head_dim_v=dim_v,
                        dtype=dtype,
                        page_size=page,
                        causal=causal,
                    )


def _run(name: str, backend: Any, spec: AttentionSpec, device: str, phase: str) -> Check:
    layout = "ragged" if spec.page_size is None else f"pages of {spec.page_size}"
    case = (
        f"{short_dtype(spec.dtype)}, {spec.num_heads}/{spec.num_kv_heads} heads, "
        f"dim {spec.head_dim}{'' if spec.dv == spec.head_dim else f'/{spec.dv}'}, {layout}, "
        f"{'causal' if spec.causal else 'full'}"
    )
    q_lens, kv_lens = _LENGTHS[phase]
    q, keys, values = _inputs(spec, q_lens, kv_lens)
    want_o, want_lse, largest = expected(spec, q, keys, values, q_lens)
    try:
        start = time.perf_counter()
        k, v, table = _stored(spec, keys, values)
        batch = Batch.from_lengths(q_lens, kv_lens, page_table=table, device=device)
        v_given = None if v is None else v.to(device)
        out = backend.run(q.to(device), k.to(device), v_given, backend.plan(batch))
        o, lse = out.o.double().cpu(), out.lse.double().cpu()  # waits for the device
        seconds = time.perf_counter() - start
    except Exception as error:  # whatever a kernel or compiler raises is the finding
        text = f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        return Check(name, device, phase, "FAIL", case, message=text, trace=trace)
    bound = _SAFETY * torch.finfo(spec.dtype).eps * (1 + largest)
    # lse is float32 whatever the inputs are.
    bound_lse = max(bound, _SAFETY * torch.finfo(torch.float32).eps * (1 + largest))
    bound_o = bound * max(v.abs().max().item() for v in values)
    message = ""
    error_o = error_lse = math.nan
    if o.shape != want_o.shape or lse.shape != want_lse.shape:
        message = f"shapes o {list(o.shape)}, lse {list(lse.shape)} are not those of the contract"
    else:
        error_o = (o - want_o).abs().max().item()
        error_lse = (lse - want_lse).abs().max().item()
        if not (error_o <= bound_o and error_lse <= bound_lse):
            message = (
                f"differs from float64: o by {error_o:.3g} (allowed {bound_o:.3g}), "
                f"lse by {error_lse:.3g} (allowed {bound_lse:.3g})"
            )
    status = "FAIL" if message else "PASS"
    errors = (error_o, error_lse, bound_o, bound_lse)
    return Check(name, device, phase, status, case, *errors, seconds, message)


def _inputs(
    spec: AttentionSpec, q_lens: list[int], kv_lens: list[int]
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Queries ``[T, H, D]``, and per sequence keys ``[n, HK, D]`` and values ``[n, HK, DV]``."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(spec.dtype)

    q = random(sum(q_lens), spec.num_heads, spec.head_dim)
    keys = [random(n, spec.num_kv_heads, spec.head_dim) for n in kv_lens]
    if _values_in_keys(spec):
        return q, keys, [k[..., : spec.dv] for k in keys]
    return q, keys, [random(n, spec.num_kv_heads, spec.dv) for n in kv_lens]


def _values_in_keys(spec: AttentionSpec) -> bool:
    """Whether the case is latent attention, whose values are the first lanes of its keys."""
    return spec.num_kv_heads == 1 and (spec.head_dim, spec.dv) == (576, 512)


def _stored(
    spec: AttentionSpec, keys: list[torch.Tensor], values: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None, list[list[int]] | None]:
    """Keys and values as a backend takes them, and the page table; pages lie out of order."""
    size = spec.page_size
    if size is None:
        v = None if _values_in_keys(spec) else torch.cat(values)
        return torch.cat(keys), v, None
    counts = [-(-k.shape[0] // size) for k in keys]
    pages = list(range(sum(counts), 0, -1))  # page 0 belongs to nobody
    width = max(counts)
    k_cache = torch.zeros(sum(counts) + 1, size, *keys[0].shape[1:], dtype=spec.dtype)
    v_cache = torch.zeros(sum(counts) + 1, size, *values[0].shape[1:], dtype=spec.dtype)
    table = []
    for count, k, v in zip(counts, keys, values):
        own, pages = pages[:count], pages[count:]
        for j in range(k.shape[0]):
            k_cache[own[j // size], j % size] = k[j]
            v_cache[own[j // size], j % size] = v[j]
        table.append(own + [0] * (width - count))
    return k_cache, None if _values_in_keys(spec) else v_cache, table


def expected(
    spec: AttentionSpec,
    q: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    q_lens: list[int],
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """O and lse in float64, from the definition; and the largest score, for the error bound."""
    outs, lses, largest, start = [], [], 0.0, 0
    for n, k, v in zip(q_lens, keys, values):
        repeat = spec.num_heads // spec.num_kv_heads
        kk, vv = (x.double().repeat_interleave(repeat, dim=1).transpose(0, 1) for x in (k, v))
        qq = q[start : start + n].double().transpose(0, 1)
        start += n
        scores = qq @ kk.transpose(1, 2) / math.sqrt(spec.head_dim)  # [H, n, kv]
        largest = max(largest, scores.abs().max().item())
        if spec.causal:
            i, j = torch.arange(n)[:, None], torch.arange(k.shape[0])[None]
            scores = scores.masked_fill(j > i + k.shape[0] - n, float("-inf"))
        outs.append((torch.softmax(scores, -1) @ vv).transpose(0, 1))
        lses.append(torch.logsumexp(scores, -1).transpose(0, 1))
    return torch.cat(outs), torch.cat(lses), largest


__all__ = ["Check", "cases", "check_backend", "check_call", "expected"]
