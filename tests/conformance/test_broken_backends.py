"""The suite itself under test: a plain backend passes it, and each way of being wrong is caught.

Every broken backend differs from the plain one in one place, and must fail the requirement that is
about this place; requirements that the fault does not touch must still pass.
"""

from __future__ import annotations

import math

import pytest
import torch

from attn_backends.backend import AttentionBackend
from attn_backends.capabilities import Capabilities, IntSet
from attn_backends.conformance import CHECKS, run_conformance
from attn_backends.errors import Reason, UnsupportedCallError
from attn_backends.output import AttentionOutput
from attn_backends.plan import Plan

INF = float("inf")


class Toy(AttentionBackend):
    """Attention row by row of sequences, in plain torch; every step can be overridden."""

    name = "toy"
    capabilities = Capabilities(
        devices=("cpu",),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        head_dims=IntSet(),
        head_dims_v=IntSet(),
        features=frozenset(
            {"ragged", "paged", "causal", "bidirectional", "window", "softcap"}
            | {"batch_invariant", "cuda_graph"}
        ),
    )

    def _run(self, q, k, v, plan, extras, out):
        spec, batch = self.spec, plan.batch
        v = k[..., : spec.dv] if v is None else v
        if out is None:
            o = torch.full((q.shape[0], spec.num_heads, spec.dv), math.nan, dtype=spec.out_dtype)
            out = AttentionOutput(o, torch.full(o.shape[:2], math.nan))
        starts, lens = self.lengths(plan)
        for b, kv_len in enumerate(lens):
            rows = slice(starts[b], starts[b + 1])
            if rows.stop == rows.start:
                continue
            keys, values = self.gather(k, v, batch, b, kv_len)
            o, lse = self.attend(q[rows], keys, values, kv_len, extras, batch)
            self.write(out, rows, o, lse)
        out.o[starts[-1] :], out.lse[starts[-1] :] = 0, -INF
        return self.finish(out, extras)

    def lengths(self, plan):
        return plan.batch.cu_seqlens_q.tolist(), plan.batch.seqlens_k.tolist()

    def gather(self, k, v, batch, b, kv_len):
        if batch.page_table is None:
            start = int(batch.cu_seqlens_k[b])
            return k[start : start + kv_len].float(), v[start : start + kv_len].float()
        size, at = self.spec.page_size, torch.arange(kv_len)
        page = self.page_row(batch, b)[at // size].long()
        return k[page, at % size].float(), v[page, at % size].float()

    def page_row(self, batch, b):
        return batch.page_table[b]

    def attend(self, q, k, v, kv_len, extras, batch):
        heads = self.head_map()
        s = torch.einsum("qhd,khd->hqk", q.float(), k[:, heads]) * self.scale()
        if self.spec.softcap is not None:
            s = self.cap(s)
        seen = self.visible(len(q), kv_len)
        s = torch.where(seen, s, -INF)
        lse = torch.logsumexp(torch.cat([s, s.new_full((*s.shape[:2], 1), -INF)], -1), -1)
        unseen = ~seen.any(dim=0)  # 0 * NaN is NaN: what nobody sees is selected away
        return self.weigh(s, lse, v.masked_fill(unseen[:, None, None], 0)[:, heads]), lse.T

    def weigh(self, s, lse, v):
        p = torch.where(lse.isneginf()[..., None], 0.0, torch.exp(s - lse[..., None]))
        return torch.einsum("hqk,khd->qhd", p, v)

    def head_map(self):
        return torch.arange(self.spec.num_heads) // self.spec.group_size

    def scale(self):
        return self.spec.scale

    def cap(self, s):
        return self.spec.softcap * torch.tanh(s / self.spec.softcap)

    def visible(self, q_len, kv_len):
        i, j = torch.arange(q_len)[:, None] + kv_len - q_len, torch.arange(kv_len)[None]
        left, right = self.spec.bounds
        seen = torch.ones(q_len, kv_len, dtype=torch.bool)
        if left is not None:
            seen &= j >= i - left
        if right is not None:
            seen &= j <= i + right
        return seen

    def write(self, out, rows, o, lse):
        out.o[rows], out.lse[rows] = o.to(out.o.dtype), lse

    def finish(self, out, extras):
        return out


BROKEN: dict[type[Toy], str] = {}


def broken(requirement):
    """Register a broken backend with the requirement it must fail."""

    def register(backend):
        BROKEN[backend] = requirement
        return backend

    return register


@broken("values")
class WrongScale(Toy):
    def scale(self):
        return self.spec.scale * 1.05


@broken("values")
class ScaleOfPaddedHeadDim(Toy):
    def scale(self):
        padded = 1 << (self.spec.head_dim - 1).bit_length()
        return padded**-0.5 if self.spec.sm_scale is None else self.spec.sm_scale


@broken("lse")
class BaseTwoLse(Toy):
    def write(self, out, rows, o, lse):
        super().write(out, rows, o, lse / math.log(2))


@broken("lse")
class LseTransposed(Toy):
    def finish(self, out, extras):
        out.lse.copy_(out.lse.T.reshape(out.lse.shape).clone())
        return out


@broken("lse")
class LseOfUnscaledScores(Toy):
    def write(self, out, rows, o, lse):
        super().write(out, rows, o, lse / self.spec.scale)


@broken("lengths")
class CausalOffByOne(Toy):
    def visible(self, q_len, kv_len):
        if not self.spec.causal:
            return super().visible(q_len, kv_len)
        wider = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len + 1)
        return wider & (super().visible(q_len, kv_len) | (wider & ~wider.tril(kv_len - q_len)))


@broken("lengths")
class CausalTopLeft(Toy):
    def visible(self, q_len, kv_len):
        return torch.ones(q_len, kv_len, dtype=torch.bool).tril()


@broken("page_sizes")
class TailOfLastPageRead(Toy):
    def lengths(self, plan):
        starts, lens = super().lengths(plan)
        size = self.spec.page_size or 1
        return starts, [-(-n // size) * size for n in lens]


@broken("page_sizes")
class TableWidthFromLengths(Toy):
    def page_row(self, batch, b):
        width = -(-batch.max_seqlen_k // self.spec.page_size)
        return batch.page_table.flatten()[b * width : (b + 1) * width]


@broken("poison")
class TailMultipliedByZero(Toy):
    def gather(self, k, v, batch, b, kv_len):
        keys, values = super().gather(k, v, batch, b, kv_len)
        if batch.page_table is None or not kv_len:
            return keys, values
        last = int(batch.page_table[b, (kv_len - 1) // self.spec.page_size])
        return keys, values + 0 * v[last].float().sum()


@broken("windows")
class WindowOffByOne(Toy):
    def visible(self, q_len, kv_len):
        i, j = torch.arange(q_len)[:, None] + kv_len - q_len, torch.arange(kv_len)[None]
        left, right = self.spec.bounds
        low = torch.full_like(i, -1) if left is None else i - left - 1
        high = torch.full_like(i, kv_len) if right is None else i + right
        return (j >= low) & (j <= high)


@broken("options")
class WindowIgnored(Toy):
    def visible(self, q_len, kv_len):
        seen = torch.ones(q_len, kv_len, dtype=torch.bool)
        return seen.tril(kv_len - q_len) if self.spec.causal else seen


@broken("options")
class SoftcapDropped(Toy):
    def cap(self, s):
        return s


@broken("softcap_range")
class SoftcapOverflows(Toy):
    def cap(self, s):
        x = s / self.spec.softcap
        return self.spec.softcap * (x.exp() - (-x).exp()) / (x.exp() + (-x).exp())


@broken("options")
class SinksDropped(Toy):
    capabilities = Capabilities(**{**vars(Toy.capabilities), "fused_sinks": True})


@broken("options")
class SinksInLseOnly(SinksDropped):
    def finish(self, out, extras):
        if extras.sinks is not None:
            out.lse.copy_(torch.logaddexp(out.lse, extras.sinks.expand_as(out.lse)))
        return out


@broken("empty_rows")
class NanOnEmpty(Toy):
    def weigh(self, s, lse, v):
        return torch.einsum("hqk,khd->qhd", torch.softmax(s, dim=-1), v)


@broken("empty_rows")
class EmptyLeftUnwritten(Toy):
    def write(self, out, rows, o, lse):
        if not bool(lse.isneginf().all()):
            super().write(out, rows, o, lse)


@broken("empty_rows")
class PlusInfinityOnEmpty(Toy):
    def write(self, out, rows, o, lse):
        super().write(out, rows, o, torch.where(lse.isneginf(), INF, lse))


@broken("padding_rows")
class PaddingLeftUnwritten(Toy):
    def _run(self, q, k, v, plan, extras, out):
        live = int(plan.batch.cu_seqlens_q[-1])
        saved = None if out is None else (out.o[live:].clone(), out.lse[live:].clone())
        result = super()._run(q, k, v, plan, extras, out)
        if saved is not None:
            result.o[live:], result.lse[live:] = saved
        return result


@broken("grouped_heads")
class HeadsInterleaved(Toy):
    def head_map(self):
        return torch.arange(self.spec.num_heads) % self.spec.num_kv_heads


@broken("extreme_logits")
class NoMaximumSubtracted(Toy):
    def attend(self, q, k, v, kv_len, extras, batch):
        o, lse = super().attend(q, k, v, kv_len, extras, batch)
        return o, lse.exp().log()


@broken("strides")
class ValuesReadWithTheStridesOfKeys(Toy):
    def gather(self, k, v, batch, b, kv_len):
        if batch.page_table is not None and k.shape == v.shape:
            size = (k.shape[0] - 1) * k.stride(0) + k.shape[1] * k.shape[2] * k.shape[3]
            if v.untyped_storage().size() // v.element_size() >= v.storage_offset() + size:
                strides = (*k.stride()[:1], k.shape[2] * k.shape[3], k.shape[3], 1)
                v = v.as_strided(v.shape, strides)
        return super().gather(k, v, batch, b, kv_len)


@broken("out")
class OutIgnored(Toy):
    def _run(self, q, k, v, plan, extras, out):
        return super()._run(q, k, v, plan, extras, None)


@broken("out")
class WritesBesideOut(Toy):
    def finish(self, out, extras):
        lse = out.lse
        if lse.storage_offset() and lse.numel():
            flat = lse.as_strided((1,), (1,), lse.storage_offset() - 1)
            flat.fill_(-INF)
        return out


@broken("inputs_unchanged")
class ScalesQueriesInPlace(Toy):
    def _run(self, q, k, v, plan, extras, out):
        q.mul_(1.0000001).add_(0.5).sub_(0.5)
        return super()._run(q, k, v, plan, extras, out)


@broken("batch_invariance")
class BitsDependOnBatchMates(Toy):
    def attend(self, q, k, v, kv_len, extras, batch):
        o, lse = super().attend(q, k, v, kv_len, extras, batch)
        return o, lse + 1e-7 * batch.num_seqs


@broken("batch_invariance")
class BitsDependOnHostBounds(Toy):
    def attend(self, q, k, v, kv_len, extras, batch):
        o, lse = super().attend(q, k, v, kv_len, extras, batch)
        return o, lse + (1e-6 if batch.max_seqlen_k > 1000 else 0.0)


@broken("batch_invariance")
class AnotherAnswerEachTime(Toy):
    calls = 0

    def write(self, out, rows, o, lse):
        AnotherAnswerEachTime.calls += 1
        super().write(out, rows, o, lse + 1e-7 * (self.calls % 7))


@broken("plan_reuse")
class PlanKeepsTheFirstLayer(Toy):
    def gather(self, k, v, batch, b, kv_len):
        kept = batch.__dict__.setdefault("_kept", {})
        return kept.setdefault(b, super().gather(k, v, batch, b, kv_len))


class HostLengthsPlan(Plan):
    def __init__(self, backend, batch, capacity):
        super().__init__(backend, batch, capacity)
        self.seen = batch.cu_seqlens_q.tolist(), batch.seqlens_k.tolist()


@broken("capacity")
class LengthsFrozenAtPlan(Toy):
    def _plan(self, batch, capacity):
        return HostLengthsPlan(self, batch, capacity)

    def lengths(self, plan):
        return plan.seen


@broken("split")
class LseSlightlyLow(Toy):
    """Far too little for any one value test of o, but the weights of parts come from it."""

    def write(self, out, rows, o, lse):
        super().write(out, rows, o, lse - 0.05 * lse.isfinite() * (lse.abs() < 2))


@broken("visible_nan")
class NanHidden(Toy):
    def gather(self, k, v, batch, b, kv_len):
        return tuple(x.nan_to_num(0.0) for x in super().gather(k, v, batch, b, kv_len))


@broken("page_order")
class PagesTakenAsContiguous(Toy):
    def page_row(self, batch, b):
        row = batch.page_table[b]
        return row[0] + torch.arange(len(row)) if len(row) else row


@broken("allocates")
class ReturnsHalfOfWhatItAllocates(Toy):
    def _run(self, q, k, v, plan, extras, out):
        result = super()._run(q, k, v, plan, extras, out)
        if out is None:
            result.o[len(result.o) // 2 :] = 0
        return result


@broken("mistakes")
class ChecksNothing(Toy):
    def run(self, q, k, v, plan, **kwargs):
        try:
            return super().run(q, k, v, plan, **kwargs)
        except ValueError:
            return None


@broken("claims")
class RunsWhatItRefuses(Toy):
    """Says no to a head dim and then takes it."""

    capabilities = Capabilities(**{**vars(Toy.capabilities), "head_dims": IntSet((64, 128))})

    def __init__(self, spec, *, device=None, options=None):
        self.spec, self.options = spec, self.Options()


@broken("claims")
class RefusesWhatItClaims(Toy):
    def __init__(self, spec, *, device=None, options=None):
        super().__init__(spec, device=device, options=options)
        if spec.head_dim > 256:
            reason = Reason("head_dim", str(spec.head_dim), "1..256")
            raise UnsupportedCallError(str(reason), backend=self.name, reasons=[reason])


@broken("claims")
class RefusesAtPlanWhatItClaims(Toy):
    def _plan(self, batch, capacity):
        if self.spec.page_size == 100:
            reason = Reason("page_size", "100", "powers of two")
            raise UnsupportedCallError(str(reason), backend=self.name, reasons=[reason])
        return super()._plan(batch, capacity)


@broken("claims")
class ReasonsWithoutGrammar(Toy):
    class Vague(Reason):
        def __str__(self):
            return "head size not supported"

    @classmethod
    def extra_reasons(cls, spec, phase, device, options):
        return [cls.Vague("head_dim", "", "")] if spec.head_dim == 1024 else []


@broken("claims")
class FallsShortOfItsDeclaration(Toy):
    """Declares every head dim, computes the first 256 lanes."""

    def attend(self, q, k, v, kv_len, extras, batch):
        return super().attend(q[..., :256], k[..., :256], v, kv_len, extras, batch)


@broken("claims")
class IgnoresItsDeclaration(Toy):
    capabilities = Capabilities(**{**vars(Toy.capabilities), "page_sizes": IntSet((16,))})

    @classmethod
    def unsupported_reasons(cls, spec, phase=None, device=None, options=None):
        reasons = super().unsupported_reasons(spec, phase, device, options)
        return [r for r in reasons if r.argument != "page_size"]


@broken("core")
class NothingButFloat32(Toy):
    capabilities = Capabilities(**{**vars(Toy.capabilities), "dtypes": (torch.float32,)})


@broken("core")
class RefusesEverything(Toy):
    capabilities = Capabilities(**{**vars(Toy.capabilities), "devices": ("cuda",)})


#: Requirements that are cheap to try and that only faults of their own kind break.
CONTROLS = ("mistakes", "inputs_unchanged", "self_merge", "allocates")


@pytest.mark.parametrize("backend", BROKEN, ids=lambda b: b.__name__)
def test_a_broken_backend_fails_the_requirement_it_breaks(backend):
    requirement = BROKEN[backend]
    report = run_conformance(backend, requirements=[requirement])
    assert not report.ok
    assert report.counts(requirement)["failed"] > 0, report.summary()
    assert all(row.detail for row in report.failures)


@pytest.mark.parametrize(
    "backend",
    [WindowIgnored, SoftcapDropped, WrongScale, LengthsFrozenAtPlan, TableWidthFromLengths],
    ids=lambda b: b.__name__,
)
def test_a_broken_backend_passes_what_it_does_not_break(backend):
    report = run_conformance(backend, requirements=CONTROLS)
    for requirement in CONTROLS:
        assert not report.counts(requirement)["failed"], report.summary()
        assert report.counts(requirement)["passed"], requirement


def test_a_dropped_option_is_named():
    report = run_conformance(SoftcapDropped, requirements=["options"])
    details = [row.detail for row in report.failures]
    assert details and all(d.startswith("softcap has no effect") for d in details)


def test_a_plain_backend_passes_everything():
    report = run_conformance(Toy)
    assert report.ok, report.summary()
    for requirement in report.requirements:
        assert report.counts(requirement)["passed"] > 0, requirement


def test_every_requirement_is_broken_by_some_backend():
    # Rules that only a GPU shows are left to GPU runs; self-merge is about the merge alone.
    device_only = {c.requirement for c in CHECKS if c.devices == ("cuda",)}
    untested = {c.requirement for c in CHECKS} - set(BROKEN.values()) - device_only
    assert untested == {"self_merge", "offsets_64bit"}
