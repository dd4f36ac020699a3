"""A plan of the ``triton`` backend: which kernels run, with what grid, workspace and constants."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton.language as tl

from ..backend import RunExtras
from ..batch import Batch
from ..capacity import Capacity
from ..errors import Reason, UnsupportedCallError
from ..merge import apply_sinks
from ..output import AttentionOutput
from ..plan import Plan
from ..spec import AttentionSpec
from .configs import (
    PrefillConfig,
    SplitConfig,
    fit_stages,
    prefill_config,
    split_config,
    split_lanes,
)
from .decode import ITEM_FIELDS, SEQ_FIELDS, _merge_fwd_kernel, _split_fwd_kernel
from .launch import Launcher, is_interpreted
from .prefill import _prefill_fwd_kernel
from .schedule import MERGE_COST, RAGGED_PIECE, WAVES, _schedule_kernel, split_bounds

LOG2E = 1.4426950408889634
#: More rows (tokens times group) than any sequence has: everything takes the split kernel.
ALL_ROWS = 2**31 - 1
#: Rows up to which queries take the split kernel; one tensor-core tile of packed heads.
SHORT_ROWS = 64
#: The same while the prefill kernel would leave most multiprocessors without work.
SHORT_ROWS_IDLE = 1024
#: Keys of the first batch-invariant chunks; rows of a batch-invariant tile.
INVARIANT_CHUNK = 512
INVARIANT_ROWS = 64
#: Stands in for a scale of 0, so that masked scores stay -inf; exp2 of anything times it is 1.
TINY_SCALE = 1.2e-38

COMPUTE = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Device:
    """What kernels need to know about where they run."""

    arch: int
    processors: int
    interpreted: bool


@cache
def _device(kind: str, index: int | None) -> _Device:
    interpreted = is_interpreted(_split_fwd_kernel)
    if kind != "cuda":
        return _Device(90, 4, interpreted)
    found = torch.cuda.get_device_properties(index)
    return _Device(found.major * 10 + found.minor, found.multi_processor_count, interpreted)


@cache
def _launcher(kernel_name: str, constants: tuple, warps: int, stages: int, pdl: bool) -> Launcher:
    kernels = {
        "split": _split_fwd_kernel,
        "merge": _merge_fwd_kernel,
        "prefill": _prefill_fwd_kernel,
        "schedule": _schedule_kernel,
    }
    return Launcher(kernels[kernel_name], dict(constants), warps=warps, stages=stages, pdl=pdl)


def _next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class Formats:
    """How stored numbers reach the tensor cores, for a spec on a device.

    Attributes:
        compute: Dtype of the products.
        fp8: Keys are fp8: 0 no, 1 converted by an instruction, 2 by arithmetic on their bytes.
        fp8_q: The same for queries.
        row_scale: Queries are scaled per row into the range of the compute dtype.
    """

    compute: torch.dtype
    fp8: int
    fp8_q: int
    row_scale: bool

    @classmethod
    def of(cls, spec: AttentionSpec, device: _Device) -> Formats:
        """Products run in the query dtype; in fp16, where e4m3 is exact, if anything is fp8."""
        if spec.kv != torch.float8_e4m3fn:
            upcast = device.interpreted and spec.dtype == torch.bfloat16
            return cls(torch.float32 if upcast else spec.dtype, 0, 0, False)
        how = 2 if device.interpreted or device.arch < 89 else 1
        if spec.dtype == torch.float32 or (device.interpreted and spec.dtype == torch.bfloat16):
            return cls(torch.float32, how, 0, False)
        fp8_q = how if spec.dtype == torch.float8_e4m3fn else 0
        return cls(torch.float16, how, fp8_q, spec.dtype == torch.bfloat16)


class TritonPlan(Plan):
    """Buffers and choices for one batch, or for every batch within a capacity."""

    def __init__(self, backend: Any, batch: Batch, capacity: Capacity | None) -> None:
        super().__init__(backend, batch, capacity)
        spec, options = self.spec, backend.options
        device = _device(batch.device.type, batch.device.index)
        self.device = device
        self.formats = Formats.of(spec, device)
        self._prepared: dict[Any, _Call] = {}
        self.exact = batch.q_lens is not None and batch.kv_lens is not None and capacity is None
        self._choose_kernels(options)
        if self.splits:
            self._make_work_list(options)
        self.mask_indptr = None
        if spec.has_mask:
            if batch.mask_indptr is not None:
                self.mask_indptr = batch.mask_indptr.to(torch.int64).contiguous()
            else:
                self.mask_indptr = batch.cu_seqlens_q.new_zeros(
                    batch.num_seqs + 1, dtype=torch.int64
                )
        self.on_update()

    def _choose_kernels(self, options: Any) -> None:
        """Decide by the longest query, or by the lengths if known, which kernels are launched."""
        spec, batch, device = self.spec, self.batch, self.device
        group = spec.group_size
        rows = batch.max_seqlen_q * group
        q_bytes = 4 if self.formats.compute == torch.float32 else 2
        kv_bytes = 1 if self.formats.fp8 else q_bytes
        self.sizes = (q_bytes, kv_bytes)
        dv = spec.dv
        self.short_rows = self._short_rows(options, rows)
        short = min(rows, self.short_rows)
        if spec.batch_invariant:
            short = INVARIANT_ROWS
        # Whether V lies in K is known at run time; tiles are chosen as if, where widths allow it.
        share = dv > 256 and dv < spec.head_dim and dv == split_lanes(spec.head_dim)[0]
        self.split = split_config(
            device.arch, short, spec.head_dim, dv, q_bytes, kv_bytes, share, spec.batch_invariant
        )
        if options.split_config is not None:
            self.split = SplitConfig(*options.split_config)
        small = -(-batch.total_q // 128) * spec.num_heads < device.processors or rows <= 64
        self.prefill = prefill_config(
            device.arch, small, spec.head_dim, dv, q_bytes, kv_bytes, spec.has_mask
        )
        if options.prefill_config is not None:
            self.prefill = PrefillConfig(*options.prefill_config)
        if self.exact:
            longest = max(batch.q_lens, default=0)
            self.prefills = longest * group > self.short_rows
            shortest = longest
            if self.prefills:
                shortest = min((n for n in batch.q_lens if n), default=0)
            self.splits = shortest * group <= self.short_rows
        else:
            self.splits = True
            self.prefills = rows > self.short_rows
        # Rows after the last sequence are filled by one of the two kernels.
        self.pad_rows = not self.exact and not self.prefills
        self.hopper = self._hopper_variant() if self.prefills else None
        self.hopper_work: torch.Tensor | None = None

    def _hopper_variant(self) -> Any:
        """The warp-specialised variant for this batch, or None where the plain kernel runs."""
        spec, batch, device = self.spec, self.batch, self.device
        if batch.device.type != "cuda" or device.arch != 90 or device.interpreted:
            return None
        if self.backend.options.hopper is False:
            return None
        if self.backend.options.prefill_config is not None:  # a tuning run of the plain kernel
            return None
        from .hopper_prefill import choose_variant, hopper_reasons

        if hopper_reasons(spec):
            return None
        return choose_variant(
            head_dim=spec.head_dim, num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads,
            max_seqlen_q=batch.max_seqlen_q, total_q=batch.total_q, num_seqs=batch.num_seqs,
            num_sms=device.processors,
        )  # fmt: skip

    def _list_hopper_work(self) -> None:
        from .hopper_prefill import hopper_work

        batch, spec = self.batch, self.spec
        self.hopper_work = hopper_work(
            self.hopper, cu_seqlens_q=batch.cu_seqlens_q, seqlens_k=batch.seqlens_k,
            cu_seqlens_k=batch.cu_seqlens_k, total_q=batch.total_q, causal=spec.causal,
            window=spec.window, skip=self.short_rows // spec.group_size if self.splits else 0,
            out=self.hopper_work,
        )  # fmt: skip

    def _short_rows(self, options: Any, rows: int) -> int:
        spec, batch = self.spec, self.batch
        if spec.batch_invariant or spec.dv > 256:
            return ALL_ROWS
        if options.short_rows is not None:
            return options.short_rows
        short = max(SHORT_ROWS, min(4 * spec.group_size, 512))
        tiles = -(-batch.total_q * spec.num_heads // 128) + batch.num_seqs
        if short < rows <= SHORT_ROWS_IDLE and tiles < self.device.processors:
            return SHORT_ROWS_IDLE
        return short

    def _make_work_list(self, options: Any) -> None:
        spec, batch, config = self.spec, self.batch, self.split
        self.c0 = INVARIANT_CHUNK if spec.batch_invariant else 0
        self.num_splits = 0 if self.c0 else options.num_splits or 0
        left = spec.bounds[0]
        self.slots = max(self.device.processors * config.occupancy, 1)
        bounds = split_bounds(
            batch.q_lens if self.exact else None, batch.kv_lens if self.exact else None,
            num_seqs=batch.num_seqs, total_q=batch.total_q, max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k, left=left, short_rows=self.short_rows,
            block_m=config.block_m, block_n=config.block_n, slots=self.slots,
            min_chunk=config.min_chunk, num_kv_heads=spec.num_kv_heads, group=spec.group_size,
            chunk=0 if self.c0 else options.split_keys or 0, splits=self.num_splits, c0=self.c0,
            pad_rows=self.pad_rows,
        )  # fmt: skip
        self.bounds = bounds
        self.part_rows = min(config.block_m, batch.max_seqlen_q * spec.group_size)
        make = lambda *shape, dtype: torch.empty(shape, dtype=dtype, device=batch.device)  # noqa: E731
        # One allocation for both lists; entries of 64 and 16 bytes.
        lists = make(bounds.items * ITEM_FIELDS + batch.num_seqs * SEQ_FIELDS, dtype=torch.int32)
        self.items = lists[: bounds.items * ITEM_FIELDS]
        self.seqs = lists[bounds.items * ITEM_FIELDS :]
        # Never touched while no sequence is cut, but compiled kernels know its dtype.
        self.part_acc = self.part_ml = lists.view(torch.float32)
        if bounds.slots:
            states = bounds.slots * spec.num_kv_heads * self.part_rows
            self.part_ml = make(states * 2, dtype=torch.float32)
            self.part_acc = make(states * spec.dv, dtype=torch.float32)

    def on_update(self) -> None:
        """Rebuild what depends on the lengths, on the current stream."""
        device = self.batch.device
        if device.type == "cuda" and torch.cuda.current_device() != device.index:
            with torch.cuda.device(device):
                return self.on_update()
        batch, spec = self.batch, self.spec
        if self.mask_indptr is not None and batch.mask_indptr is None:
            q_lens = batch.cu_seqlens_q.diff().long()
            torch.cumsum(q_lens * batch.seqlens_k, 0, out=self.mask_indptr[1:])
        if self.hopper is not None:
            self._list_hopper_work()
        if not self.splits:
            return
        config, left = self.split, spec.bounds[0]
        constants = (
            ("HK", spec.num_kv_heads), ("GROUP", spec.group_size), ("HAS_LEFT", left is not None),
            ("RAGGED", batch.cu_seqlens_k is not None), ("PAD_ROWS", self.pad_rows),
            ("C0", self.c0), ("BLOCK_M", config.block_m), ("BLOCK_N", config.block_n),
            ("BLOCK_B", min(max(_next_power_of_2(batch.num_seqs), 16), 1024)),
            ("WAVES", WAVES), ("RAGGED_PIECE", RAGGED_PIECE), ("MERGE_COST", MERGE_COST),
        )  # fmt: skip
        launcher = _launcher("schedule", constants, 4, 1, False)
        k_starts = batch.seqlens_k if batch.cu_seqlens_k is None else batch.cu_seqlens_k
        tensors = (batch.cu_seqlens_q, batch.seqlens_k, k_starts, self.items, self.seqs)
        addresses = tuple([x.data_ptr() for x in tensors])
        numbers = (
            batch.num_seqs, self.bounds.items, left or 0, self.short_rows, self.bounds.chunk,
            self.num_splits, self.slots, config.min_chunk,
        )  # fmt: skip
        grid = (batch.num_seqs + 1, 1, 1)
        _launch(launcher, grid, addresses, numbers, "schedule", tensors)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        extras: RunExtras,
        out: AttentionOutput | None,
    ) -> AttentionOutput:
        """Launch the chosen kernels on checked inputs."""
        spec = self.spec
        result = out
        if out is None:
            shape = (q.shape[0], spec.num_heads)
            o = torch.empty((*shape, spec.dv), dtype=spec.out_dtype, device=q.device)
            result = out = AttentionOutput(
                o, torch.empty(shape, dtype=torch.float32, device=q.device)
            )
        if self.device.interpreted:
            q, k, v, out = _for_interpreter(q, k, v, out)
        share = v is None
        if v is None:
            v = k
        elif v.data_ptr() == k.data_ptr():
            share = v.stride() == k.stride()
        key = (
            q.stride(), k.stride(), v.stride(), out.o.stride(), out.lse.stride(), out.o.dtype,
            q.shape[0], q.dtype, k.dtype, share, extras.sinks is None, _scale_kind(extras.k_scale),
            _scale_kind(extras.v_scale),
        )  # fmt: skip
        call = self._prepared.get(key)
        if call is None:
            call = self._prepared[key] = _Call(self, q, k, v, out, extras, share, key)
        call(q, k, v, out, extras)
        if result.o is not out.o:
            result.o.copy_(out.o)
        return result


def _for_interpreter(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, out: AttentionOutput
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, AttentionOutput]:
    """The interpreter multiplies the bit patterns of bf16 and knows no fp8: give it neither."""

    def plain(x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float8_e4m3fn:
            return x.view(torch.uint8)
        return x.float() if x.dtype == torch.bfloat16 else x

    o = out.o.float() if out.o.dtype not in (torch.float16, torch.float32) else out.o
    return plain(q), plain(k), None if v is None else plain(v), AttentionOutput(o, out.lse)


def _scale_kind(scale: Any) -> int:
    """0: a number or none; 1: one value on the device; 2: one per KV head."""
    if not isinstance(scale, torch.Tensor):
        return 0
    return 2 if scale.numel() > 1 else 1


def _launch(
    launcher: Launcher, grid: tuple[int, int, int], addresses: tuple[int, ...], numbers: tuple,
    signature: Any, tensors: tuple[torch.Tensor, ...],
) -> None:  # fmt: skip
    """Launch from addresses if they allow the remembered form, else from the tensors."""
    bits = 0
    for address in addresses:
        bits |= address
    if bits & 15:  # the compiler may specialise on alignment: leave it to Triton
        launcher.first(grid, tensors, numbers)
    elif not launcher.again(grid, addresses, numbers, signature):
        launcher.first(grid, tensors, numbers, signature)


def alignment(sizes: tuple[int, ...]) -> int:
    """Largest power of two up to 16 that divides every size."""
    bits = 16
    for size in sizes:
        bits |= size
    return bits & -bits


class _Call:
    """The launches of one plan for one set of strides and options: what does not change, bound."""

    def __init__(
        self, plan: TritonPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: AttentionOutput, extras: RunExtras, share: bool, key: Any,
    ) -> None:  # fmt: skip
        spec, batch, formats = plan.spec, plan.batch, plan.formats
        self.plan = plan
        # Everything that the compiler may specialise on, beside the constants.
        self.key = (key, batch.page_table.stride(0) if batch.is_paged else 0)
        d, dv = spec.head_dim, spec.dv
        d0, d1 = split_lanes(d)
        dv0, dv1 = split_lanes(dv)
        self.share = share and d0 == dv0 == dv
        left, right = spec.bounds
        self.k_step = int(_scale_kind(extras.k_scale) == 2)
        self.v_step = int(_scale_kind(extras.v_scale) == 2)
        softcap = spec.softcap
        scale = max(spec.scale, TINY_SCALE)
        self.scale = scale if softcap is not None else scale * LOG2E
        self.softcap = 1.0 if softcap is None else softcap
        self.bytes = formats.fp8 == 2  # fp8 travels as bytes
        paged = spec.page_size is not None
        ks = (k.stride(0), k.stride(1), k.stride(2)) if paged else (0, k.stride(0), k.stride(1))
        vs = (v.stride(0), v.stride(1), v.stride(2)) if paged else (0, v.stride(0), v.stride(1))
        # With room to spare for the lanes of a row, which are added later.
        short_rows = paged and spec.page_size * max(ks[1], vs[1]) < 2**30
        self.table = batch.page_table if paged else batch.seqlens_k
        stride_table = batch.page_table.stride(0) if paged else 0
        align = min(alignment(ks), alignment(vs))
        # Loads of less than 16 bytes are not pipelined; the products then stay off the
        # warpgroup instructions, which two warps cannot issue (see ``_warps``).
        width = min(align, alignment((d,)), alignment((dv,)))
        self.whole_vectors = width * k.element_size() >= 16
        self.strides = (
            *q.stride()[:2], *[s // align for s in (*ks, *vs)], *out.o.stride()[:2],
            *out.lse.stride(), stride_table,
        )  # fmt: skip
        self.out_strides = (*out.o.stride()[:2], *out.lse.stride())
        self.left, self.right = left or 0, right or 0
        features = (
            ("D", d), ("D0", d0), ("D1", d1), ("DV", dv), ("DV0", dv0), ("DV1", dv1),
        )  # fmt: skip
        flags = (
            ("HAS_LEFT", left is not None), ("HAS_RIGHT", right is not None),
            ("HAS_SOFTCAP", softcap is not None), ("HAS_ALIBI", spec.has_alibi),
            ("HAS_MASK", spec.has_mask), ("HAS_SINKS", extras.sinks is not None),
            ("HAS_K_SCALE", _scale_kind(extras.k_scale) > 0),
            ("HAS_V_SCALE", _scale_kind(extras.v_scale) > 0),
            ("PAGE_SIZE", spec.page_size or 0), ("SHARE_KV", self.share),
            ("SAME_STRIDES", ks == vs), ("SHORT_ROWS", short_rows), ("KV_ALIGN", align),
            ("COMPUTE", COMPUTE[formats.compute]), ("FP8", formats.fp8), ("FP8_Q", formats.fp8_q),
            ("ROW_SCALE", formats.row_scale),
        )  # fmt: skip
        self.split = self.merge = self.prefill = None
        self.hopper = False
        if plan.splits:
            self._bind_split(plan, features, flags, extras)
        if plan.prefills:
            self._bind_prefill(plan, features, flags)
            self._bind_hopper(plan, q, k, v, extras)

    def _warps(self, config: SplitConfig | PrefillConfig) -> int:
        """Warps per program: two where warpgroup products cannot be trusted.

        Triton 3.6 gives wrong values where they read narrow tiles that are not pipelined, seen at
        head dims 40 and 72 with unaligned strides; two warps cannot issue them.
        """
        hopper = self.plan.device.arch >= 90 and config.block_m >= 64
        return config.warps if self.whole_vectors or not hopper else 2

    def _bind_split(self, plan: TritonPlan, features: tuple, flags: tuple, extras: Any) -> None:
        spec, config = plan.spec, plan.split
        group, dvp = spec.group_size, _next_power_of_2(spec.dv)
        merges = plan.bounds.slots > 0
        pdl = merges and plan.backend.options.pdl and plan.device.arch >= 90
        pdl = pdl and not plan.device.interpreted
        constants = (
            ("HK", spec.num_kv_heads), ("GROUP", group), ("GROUP_P2", _next_power_of_2(group)),
            *features, ("DVP", dvp), *flags, ("C0", plan.c0), ("PDL", pdl),
            ("BLOCK_M", config.block_m), ("BLOCK_N", config.block_n),
        )  # fmt: skip
        stages = config.stages
        if not self.share:
            stages = fit_stages(config, plan.device.arch, spec.head_dim, spec.dv, *plan.sizes)
        self.split = _launcher("split", constants, self._warps(config), stages, False)
        self.split_tensors = (plan.items, plan.part_acc, plan.part_ml, self.table)
        self.split_at = tuple([x.data_ptr() for x in self.split_tensors])
        self.split_numbers = (plan.part_rows, self.left, self.right, self.k_step, self.v_step)
        self.split_grid = (plan.bounds.items * spec.num_kv_heads, 1, 1)
        if merges:
            block_s = 16 if dvp <= 256 else 8
            constants = (
                ("HK", spec.num_kv_heads), ("GROUP", group), ("DV", spec.dv), ("DVP", dvp),
                ("HAS_SINKS", extras.sinks is not None),
                ("HAS_V_SCALE", _scale_kind(extras.v_scale) > 0), ("IN_ORDER", plan.c0 > 0),
                ("PDL", pdl), ("BLOCK_M", config.block_m), ("BLOCK_S", block_s),
            )  # fmt: skip
            self.merge = _launcher("merge", constants, 4, 2, pdl)
            # Sequences of several tiles have more rows than one tile; they may be cut as well.
            rows = min(plan.batch.max_seqlen_q * group, plan.short_rows)
            if plan.c0:
                rows = plan.part_rows  # only single tiles are cut
            self.merge_tensors = (plan.seqs, plan.part_acc, plan.part_ml)
            self.merge_at = tuple([x.data_ptr() for x in self.merge_tensors])
            self.merge_numbers = (*self.out_strides, rows, plan.part_rows, self.v_step)
            self.merge_grid = (rows * spec.num_kv_heads * plan.batch.num_seqs, 1, 1)

    def _bind_prefill(self, plan: TritonPlan, features: tuple, flags: tuple) -> None:
        spec, batch, config = plan.spec, plan.batch, plan.prefill
        group = spec.group_size
        # Queries shorter than a tile share it with the other heads of their KV head.
        mean = batch.total_q / max(batch.num_seqs, 1)
        packed = mean * 1.1 < config.block_m and batch.total_q * group < 2**31
        self.pack = group if packed else 1
        phases = config.phases and not spec.has_mask
        constants = (
            ("H", spec.num_heads), ("GROUP", group), *features, *flags,
            ("SKIP_SHORT", plan.splits), ("PHASES", phases), ("HEADS_INNER", config.heads_inner),
            ("PACK", self.pack),
            ("BLOCK_B", min(max(_next_power_of_2(batch.num_seqs + 1), 16), 1024)),
            ("BLOCK_M", config.block_m), ("BLOCK_N", config.block_n),
        )  # fmt: skip
        self.prefill = _launcher("prefill", constants, self._warps(config), config.stages, False)
        self.units = spec.num_heads // self.pack
        k_starts = batch.seqlens_k if batch.cu_seqlens_k is None else batch.cu_seqlens_k
        self.prefill_tensors = (batch.cu_seqlens_q, batch.seqlens_k, k_starts, self.table)
        self.prefill_at = tuple([x.data_ptr() for x in self.prefill_tensors])
        self.prefill_numbers = (
            self.left, self.right, plan.short_rows, self.k_step, self.v_step
        )  # fmt: skip

    def _bind_hopper(
        self, plan: TritonPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: RunExtras
    ) -> None:
        """Decide whether tensors laid out like these take the warp-specialised kernel."""
        insist = plan.backend.options.hopper
        if plan.hopper is None and not insist:
            return
        from .hopper_prefill import hopper_prefill, hopper_reasons

        reasons = hopper_reasons(plan.spec, q.device, q, k, v)
        if extras.sinks is not None and plan.splits:
            # The split kernel has sinks in its rows already; a merge would count them twice.
            reasons.append(Reason("sinks", "given", "None beside short queries"))
        if q.shape[0] != plan.batch.total_q:
            reasons.append(Reason("q.shape[0]", str(q.shape[0]), f"total_q={plan.batch.total_q}"))
        if reasons and insist:
            text = "; ".join(map(str, reasons))
            message = f"triton with hopper=True cannot do this call: {text}"
            raise UnsupportedCallError(message, backend="triton", reasons=reasons)
        self.hopper = not reasons
        self.run_hopper = hopper_prefill

    def _launch_hopper(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: AttentionOutput,
        extras: RunExtras,
    ) -> None:  # fmt: skip
        plan, spec = self.plan, self.plan.spec
        batch = plan.batch
        self.run_hopper(
            q, k, v, cu_seqlens_q=batch.cu_seqlens_q, seqlens_k=batch.seqlens_k,
            cu_seqlens_k=batch.cu_seqlens_k, page_table=batch.page_table,
            max_seqlen_q=batch.max_seqlen_q, scale=spec.scale, causal=spec.causal,
            window=spec.window, softcap=spec.softcap, o=out.o, lse=out.lse, variant=plan.hopper,
            work=plan.hopper_work,
        )  # fmt: skip
        if extras.sinks is not None:
            apply_sinks(out, extras.sinks, out=out)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: AttentionOutput,
        extras: RunExtras,
    ) -> None:  # fmt: skip
        plan = self.plan
        batch = plan.batch
        scale, v_factor = self.scale, 1.0
        sinks, slopes, mask, k_scale, v_scale = extras
        if k_scale is not None and not isinstance(k_scale, torch.Tensor):
            scale, k_scale = scale * k_scale, None
        if v_scale is not None and not isinstance(v_scale, torch.Tensor):
            v_factor, v_scale = float(v_scale), None
        if self.bytes:
            q, k, v = (
                x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x for x in (q, k, v)
            )
        common = (q, k, v, *out)
        # Absent inputs still need an address; the kernels never read it.
        spare = out.lse
        options = (
            spare if sinks is None else sinks, spare if slopes is None else slopes,
            spare if mask is None else mask.view(torch.uint8),
            spare if plan.mask_indptr is None else plan.mask_indptr,
            spare if k_scale is None else k_scale, spare if v_scale is None else v_scale,
        )  # fmt: skip
        at = tuple([x.data_ptr() for x in common])
        options_at = tuple([x.data_ptr() for x in options])
        numbers = (scale, self.softcap, v_factor, *self.strides, batch.num_seqs, q.shape[0])
        if self.split is not None:
            _launch(
                self.split, self.split_grid, at + self.split_at + options_at,
                numbers + self.split_numbers, self.key, (*common, *self.split_tensors, *options),
            )  # fmt: skip
        if self.hopper and not (at[0] | at[1] | at[2]) & 15:
            self._launch_hopper(q, k, v, out, extras)
        elif self.prefill is not None:
            tiles = q.shape[0] * self.pack // plan.prefill.block_m + batch.num_seqs + 1
            _launch(
                self.prefill, (tiles * self.units, 1, 1), at + self.prefill_at + options_at,
                (*numbers, tiles, *self.prefill_numbers), self.key,
                (*common, *self.prefill_tensors, *options),
            )  # fmt: skip
        if self.merge is not None:
            ends = (options[0], options[5])
            _launch(
                self.merge, self.merge_grid,
                at[3:] + self.merge_at + (options_at[0], options_at[5]),
                (v_factor, *self.merge_numbers), self.key, (*out, *self.merge_tensors, *ends),
            )  # fmt: skip


__all__ = ["Formats", "TritonPlan"]
