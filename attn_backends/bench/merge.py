"""Benchmark the merge: every path, other libraries' kernels, and the copy bandwidth beside them.

    python -m attn_backends.bench.merge --json out.json          pairs, n states, host time
    python -m attn_backends.bench.merge pairs --tokens 1,256 --heads 128
    python -m attn_backends.bench.merge sweep                    launch shapes of our kernels

Cold L2 by rotating inputs, one graph replay, variants interleaved in one process, random data,
medians. A variant is timed only after its answer was checked. Where a device can, our kernels start
while the one ahead of them still runs, and bring their inputs to L2 meanwhile; in a replay the one
ahead is another merge. Rows ``cuda-alone`` and ``triton-alone`` are the same kernels without that,
launched as FlashInfer, vLLM and SGLang launch theirs. Rows of pairs on our paths also say how far
apart the two groupings of three states are: ``associativity_err``. What all that comes to beside
what was aimed at is printed at the end, and stands under ``aims`` in the results.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..merge import merge_state, merge_states
from . import report
from .gate import Checked
from .graph_timer import copies_for
from .merge_aims import aims, show_aims
from .merge_peers import PEERS, PairInputs, copies_of, flashinfer_states
from .roofline import find_gpu
from .runner import GRAPH, Call, Found, Point, Way, measure_point, release, unchecked

MODULE = "attn_backends.bench.merge"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOKENS = (1, 4, 16, 64, 256, 512, 613, 1024, 1536, 2048, 4096, 8192, 16384, 65536)
REGROUPED_TOKENS = 1024  # of the measure of associativity: more would only take memory
MAX_COPIES = 2048  # more launches than this make a graph slow to capture
MAX_TORCH_COPIES = 256  # the torch path launches some twenty kernels a call
PATHS = ("cuda", "triton", "torch")
Maker = Callable[[], Call] | Way


@dataclass(frozen=True)
class Case:
    """One point: what is merged, and how it lies in memory."""

    tokens: int
    num_heads: int = 32
    head_dim: int = 128
    dtype: str = "bf16"
    states: int = 2
    lse_layout: str = "token"  # or "head": views of [H, T]
    empty: float = 0.0  # share of rows whose first state is empty
    device: str = "cuda"

    @property
    def rows(self) -> int:
        """Rows (token, head)."""
        return self.tokens * self.num_heads

    @property
    def bytes(self) -> int:
        """Least traffic: every state read once, the result written once."""
        row = self.head_dim * DTYPES[self.dtype].itemsize
        states = self.states - self.empty
        return int(self.rows * (states * row + self.states * 4 + row + 4))

    @property
    def copies(self) -> int:
        """Copies of the inputs that one replay rotates through."""
        return min(copies_for(self.bytes), MAX_COPIES) if self.device == "cuda" else 1

    def row(self) -> dict[str, Any]:
        """The case as it stands in results files."""
        fields = {k: v for k, v in asdict(self).items() if k != "device"}
        return {**fields, "copies": self.copies}

    def point(self) -> Point:
        """The same for the runner; arithmetic is counted as one multiply-add a lane and state."""
        device = torch.device(self.device)
        gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        flops = 2 * self.rows * self.states * self.head_dim
        return Point(
            "merge", self.row(), self.label, self.bytes, flops, "fp32", self.copies, device, gpu
        )

    @property
    def label(self) -> str:
        """Short name for tables."""
        more = f" n={self.states}" if self.states != 2 else ""
        more += " lse[H,T]" if self.lse_layout == "head" else ""
        more += f" empty={self.empty}" if self.empty else ""
        return f"T={self.tokens} H={self.num_heads} D={self.head_dim} {self.dtype}{more}"


def make_states(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Random states: ``o [n, copies, T, H, D]``, ``lse [n, copies, T, H]``."""
    shape, device = (case.states, case.copies, case.tokens, case.num_heads), case.device
    o = torch.empty(*shape, case.head_dim, dtype=DTYPES[case.dtype], device=device).normal_()
    if case.lse_layout == "head":
        lse = torch.empty(*shape[:2], *shape[:1:-1], device=device).normal_().mT
    else:
        lse = torch.empty(shape, device=device).normal_()
    if case.empty:
        lse[0].masked_fill_(torch.rand(shape[1:], device=device) < case.empty, -float("inf"))
    return o, lse


def oracle(states: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The merged output in float64."""
    lses = torch.stack([lse.double() for _, lse in states])
    weights = torch.exp(lses - torch.logsumexp(lses, 0))
    return sum(w[..., None] * o.double() for w, (o, _) in zip(weights, states))  # type: ignore


def check(call: Call, want: torch.Tensor, dtype: torch.dtype) -> Checked:
    """Whether ``call(0)`` is right: a rounding or two of the dtype away at most."""
    got = call(0)[0].double()
    unit = {torch.float32: 2.0**-20, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
    error = (got - want).abs()
    # Where summands of a few units cancel, float32 arithmetic itself leaves about 1e-6.
    floor = max(unit * 1e-2, 2.0**-19)
    limit = unit * want.abs() + floor
    return Checked(float(error.max()), float(limit.max()), bool((error <= limit).all()))


def associativity_error(case: Case, path: str) -> float:
    """Largest difference of ``o`` between ``(a b) c`` and ``a (b c)`` on a path of ours."""
    shape = (3, min(case.tokens, REGROUPED_TOKENS), case.num_heads)
    o = torch.randn(*shape, case.head_dim, device=case.device).to(DTYPES[case.dtype])
    lse = torch.randn(shape, device=case.device)
    a, b, c = zip(o, lse)
    left = merge_state(*merge_state(*a, *b, path=path), *c, path=path)
    right = merge_state(*a, *merge_state(*b, *c, path=path), path=path)
    return float((left.o.double() - right.o.double()).abs().max())


def check_within(call: Call, want: torch.Tensor, bound: float) -> Checked:
    """Whether ``call(0)`` is nowhere further away than ``bound``."""
    error = float((call(0)[0].double() - want).abs().max())
    return Checked(error, bound, error <= bound)


def run(
    case: Case,
    makers: Mapping[str, Maker],
    want: torch.Tensor,
    rounds: int,
    modes: tuple[str, ...] = (GRAPH,),
    limit_s: float | None = None,
) -> Found:
    """Check and time ways to merge, all in turn."""
    dtype = DTYPES[case.dtype]
    ways = {name: m if isinstance(m, Way) else Way(m) for name, m in makers.items()}
    return measure_point(
        case.point(), ways, lambda call: check(call, want, dtype),
        modes=modes, rounds=rounds, limit_s=limit_s,
    )  # fmt: skip


def show(case: Case, found: Found) -> None:
    """Print one line per way, with its time over that of our best path."""
    right = [r for r in found.rows if r["right"]]
    own = [r["median_us"] for r in right if r["backend"].split("[")[0] in ("cuda", "triton")]
    best = min(own, default=float("nan"))
    for r in found.rows:
        text = f"{case.label:44s}{r['mode']:11s}{r['backend']:34s}"
        if r["right"]:
            text += f"{r['median_us']:10.2f} us{r['gbps']:7.0f} GB/s"
            text += f"{r['median_us'] / best:7.3f}x of our best"
            if "associativity_err" in r:
                text += f", associativity {r['associativity_err']:.1e}"
        else:
            text += f"WRONG, err {r['max_err']:.1e}"
        print(text, flush=True)
    for r in found.refused:
        print(f"  {r['backend']}: {r['reason']}", flush=True)


def paths_on(device: str) -> tuple[str, ...]:
    """Our paths that a device can run."""
    return PATHS if device == "cuda" else ("torch",)


def pair_makers(case: Case, peers: bool) -> tuple[dict[str, Maker], torch.Tensor]:
    """All ways to merge two states, and the right answer for copy 0."""
    o, lse = make_states(case)
    out = torch.empty_like(o[0]), torch.empty_like(lse[0])
    x = PairInputs(o[0], lse[0], o[1], lse[1], *out)

    def ours(path: str) -> Call:
        o_a, lse_a, o_b, lse_b, o, lse = copies_of(*x)
        return lambda i: merge_state(
            o_a[i], lse_a[i], o_b[i], lse_b[i], out=(o[i], lse[i]), path=path
        )

    def copy() -> Call:
        half = case.bytes // 2  # as many bytes read and written as the merge moves in all
        source = torch.empty(case.copies, half, dtype=torch.uint8, device=case.device).random_()
        target = torch.empty_like(source)
        return lambda i: target[i].copy_(source[i])

    makers: dict[str, Maker] = {
        p: lambda p=p: ours(p)
        for p in paths_on(case.device)  # type: ignore
    }
    if case.copies > MAX_TORCH_COPIES and "torch" in makers:
        why = f"a graph of {case.copies} calls would have too many kernels"
        makers["torch"] = Way(makers["torch"], no_graph=why)  # type: ignore
    usual = (case.head_dim, case.dtype, case.lse_layout, case.empty) == (128, "bf16", "token", 0.0)
    if case.device == "cuda" and usual:
        for path in PATHS[:2]:
            makers[f"{path}-alone"] = lambda path=path: alone(path, x)  # type: ignore
    makers["copy"] = Way(copy, gate=unchecked)
    if peers:
        makers |= {name: lambda make=make: make(x) for name, make in PEERS.items()}  # type: ignore
    return makers, oracle([(x.o_a[0], x.lse_a[0]), (x.o_b[0], x.lse_b[0])])


def alone(path: str, x: PairInputs) -> Call:
    """A kernel path whose kernels wait for the one ahead before they start."""
    from ..merge import cuda_merge, triton_merge

    six = copies_of(x.o_a, x.lse_a, x.o_b, x.lse_b, x.o, x.lse)
    first, dtype = [t[0] for t in six], x.o_a.dtype
    if path == "cuda":
        tuning = cuda_merge.TUNING._replace(pdl=False)
        run = cuda_merge.prepare_pair(*first, dtype, tuning)
    else:
        form = triton_merge.TUNING._replace(pdl=False)
        run = triton_merge.prepare_pair(*first, dtype, True, form)

    def call(i: int) -> Any:
        run(*[t[i].data_ptr() for t in six], -1, None, False)
        return six[4][i], six[5][i]

    return call


def many_makers(case: Case, peers: bool) -> tuple[dict[str, Maker], torch.Tensor]:
    """All ways to merge n states, pairwise merging among them."""
    o, lse = make_states(case)
    o, lse = o.transpose(0, 1).contiguous(), lse.transpose(0, 1).contiguous()
    want = oracle(list(zip(o[0], lse[0])))
    out = torch.empty_like(o[:, 0]), torch.empty_like(lse[:, 0])

    def ours(path: str) -> Call:
        return lambda i: merge_states((o[i], lse[i]), out=(out[0][i], out[1][i]), path=path)

    def pairwise() -> Call:
        def call(i: int) -> Any:
            target = (out[0][i], out[1][i])
            merge_state(o[i, 0], lse[i, 0], o[i, 1], lse[i, 1], out=target)
            for j in range(2, case.states):
                merge_state(*target, o[i, j], lse[i, j], out=target)
            return target

        return call

    makers: dict[str, Maker] = {
        p: lambda p=p: ours(p)
        for p in paths_on(case.device)  # type: ignore
    }
    # Each of its merges rounds a mean of states to their dtype.
    bound = float(o[0].abs().max()) * (case.states - 1) * torch.finfo(o.dtype).eps
    makers["pairwise"] = Way(pairwise, gate=lambda call: check_within(call, want, bound))
    if peers:
        makers["flashinfer"] = lambda: flashinfer_states(o, lse)
    return makers, want


def standard_cases(
    tokens: Sequence[int] = (), *, device: str = "cuda", **shape: Any
) -> dict[str, list[Case]]:
    """The points of each part of the benchmark.

    Args:
        tokens: Token counts of pairs and of the sweep; empty is the standard ones.
        device: ``cuda``, or ``cpu`` with few and small points.
        shape: Fields of the pairs: ``num_heads``, ``head_dim``, ``dtype``.
    """
    base = {"device": device, **shape}
    if device != "cuda":
        small = [Case(t, **base) for t in tokens or (1, 16, 64)]
        eight = [Case(c.tokens, **base, states=8) for c in small[:2]]
        return {"pairs": small, "many": eight, "host": small[:1], "sweep": []}
    pairs = [Case(t, **base) for t in tokens or TOKENS]
    if not tokens:
        pairs += [Case(t, 32, 128, "bf16", lse_layout="head") for t in (256, 1024, 8192)]
        pairs += [Case(8192, 32, 128, "bf16", empty=e) for e in (0.5, 1.0)]
        pairs += [Case(t, 128, 128, "bf16") for t in (256, 4096)]
        pairs += [Case(4096, 32, d, "bf16") for d in (64, 80, 256, 512, 576)]
        pairs += [Case(4096, 32, 128, d) for d in ("fp16", "fp32")]
    many = [Case(t, 32, 128, "bf16", states=8) for t in (64, 1024, 8192)]
    many += [Case(t, 32, 128, "fp32", states=n) for t, n in ((1, 64), (64, 16), (1024, 4))]
    sweep = [Case(t, **base) for t in tokens or (1, 64, 256, 1024, 2048, 4096, 8192, 65536)]
    sweep += [c for c in many if not tokens]
    return {"pairs": pairs, "many": many, "host": [Case(64), Case(1)], "sweep": sweep}


def measure_part(
    part: str,
    case: Case,
    *,
    peers: bool,
    rounds: int,
    modes: tuple[str, ...] = (GRAPH,),
    limit_s: float | None = None,
) -> Found:
    """Measure one point of a part: ``pairs``, ``many``, ``host`` or ``sweep``."""
    if part == "host":
        from .merge_host import host_rows

        return host_rows(case, peers)
    if part == "sweep":
        from .merge_sweep import many_sweep, pair_sweep

        makers, want = (pair_sweep if case.states == 2 else many_sweep)(case)
    else:
        makers, want = (pair_makers if part == "pairs" else many_makers)(case, peers)
    found = run(case, makers, want, rounds, modes, limit_s)
    if part == "pairs":
        for row in found.rows:
            if row["right"] and row["backend"] in PATHS:
                row["associativity_err"] = associativity_error(case, row["backend"])
    return found


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("what", nargs="*", help="of: pairs many host sweep (default: the first 3)")
    parser.add_argument("--json", help="results file to write")
    parser.add_argument("--tokens", help="token counts, as 1,64,256")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--rounds", type=int, default=24)
    args = parser.parse_args(argv)
    tokens = [int(t) for t in args.tokens.split(",")] if args.tokens else []
    shape = {"num_heads": args.heads, "head_dim": args.head_dim, "dtype": args.dtype}
    points = standard_cases(tokens, **shape)
    what = args.what or ["pairs", "many", "host"]
    if unknown := set(what) - set(points):
        parser.error(f"unknown part {', '.join(sorted(unknown))} (of: {', '.join(points)})")
    found = Found()
    for part in what:
        for case in points[part]:
            try:
                more = measure_part(part, case, peers=not args.no_peers, rounds=args.rounds)
                show(case, more)
                found.add(more)
            except Exception as error:
                print(f"{case.label}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            release(torch.device("cuda"))
            reached = aims(found.rows)
            report.save(args.json, MODULE, found.rows, refused=found.refused, aims=reached)
    show_aims(aims(found.rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
