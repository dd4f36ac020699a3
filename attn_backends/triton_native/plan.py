"""A plan of the ``triton`` backend: which kernels run, with what grid, workspace and constants."""

from __future__ import annotations

from typing import Any

import torch

from .. import driver
from ..backend import RunExtras
from ..batch import Batch
from ..capacity import Capacity
from ..output import AttentionOutput
from ..plan import Plan
from ..triton_compiled import is_hooked
from .call import Call
from .configs import (
    PrefillConfig,
    SplitConfig,
    few_configs,
    many_config,
    prefill_config,
    split_config,
    split_lanes,
)
from .cuts import FEW_KEYS, FEW_PROGRAMS, cut, few_chunk, prefers_many
from .decode import ITEM_FIELDS, SEQ_FIELDS
from .device import Formats, device_of
from .kernels import launcher_of, next_power_of_2
from .launch import launch
from .operands import scale_kind
from .repeat import kinds, repeat_of
from .schedule import SplitBounds, split_bounds

#: More rows (tokens times group) than any sequence has: everything takes the split kernel.
ALL_ROWS = 2**31 - 1
#: Rows up to which queries take the split kernel; one tensor-core tile of packed heads.
SHORT_ROWS = 64
#: The same while the prefill kernel would leave most multiprocessors without work.
SHORT_ROWS_IDLE = 1024
#: Keys up to which the prefill kernel takes its small tiles: masks on the diagonal waste less of
#: them. At 1024 the large ones win (prefill-forms.json); below nothing was measured.
SHORT_KEYS = 512
#: Bytes of keys and values that a program reads alone in a microsecond, measured on an H200.
PROGRAM_BYTES = 25_600
#: Keys of the first batch-invariant chunks; rows of a batch-invariant tile.
INVARIANT_CHUNK = 512
INVARIANT_ROWS = 64


def _round(n: int) -> int:
    """The next multiple of 16, so that what follows is aligned."""
    return -(-n // 16) * 16


class TritonPlan(Plan):
    """Buffers and choices for one batch, or for every batch within a capacity."""

    def __init__(self, backend: Any, batch: Batch, capacity: Capacity | None) -> None:
        super().__init__(backend, batch, capacity)
        spec, options = self.spec, backend.options
        device = device_of(batch.device.type, batch.device.index)
        self.device = device
        known = backend.formats.get(device)
        if known is None:
            known = backend.formats[device] = Formats.of(spec, device)
        self.formats: Formats = known
        self._prepared: dict[Any, Call] = {}
        self.exact = batch.q_lens is not None and batch.kv_lens is not None and capacity is None
        #: What all sequences have in common, for the split kernel; None: they have work lists.
        self.equal: tuple[int, int, int, int, int] | None = None
        self._choose_kernels(options)
        if self.splits:
            self._make_work_list(options)
        self._schedule: driver.Launch | None = None
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
        self.shares_width = share
        self.split = split_config(
            device.arch, short, spec.head_dim, dv, q_bytes, kv_bytes, share, spec.batch_invariant
        )
        programs = batch.num_seqs * -(-short // self.split.block_m) * spec.num_kv_heads
        self.few_keys = programs * batch.max_seqlen_k <= FEW_KEYS * device.processors
        self.few_chunk = 0
        if options.split_config is not None:
            self.split = SplitConfig(*options.split_config)
        elif not (spec.batch_invariant or options.num_splits or options.split_keys):
            form = (device.arch, self.split.block_m, spec.head_dim, dv, *self.sizes)
            many = many_config(*form)
            if many is not None and prefers_many(
                programs, device.processors, self.split.occupancy, many.occupancy
            ):
                self.split = many
            elif self.few_keys and 0 < programs * FEW_PROGRAMS <= device.processors:
                for most, few in few_configs(*form):
                    if programs * batch.max_seqlen_k <= most * device.processors:
                        self.split = few
                        self.few_chunk = few_chunk(
                            programs, batch.max_seqlen_k, device.processors, few.occupancy,
                            few.block_n,
                        )  # fmt: skip
                        break
        if self.exact:
            longest = max(batch.q_lens, default=0)
            self.prefills = longest * group > self.short_rows
            shortest = longest
            if self.prefills:
                shortest = min((n for n in batch.q_lens if n), default=0)
            self.splits = shortest * group <= self.short_rows
        else:
            self.prefills = rows > self.short_rows
            self.splits = self.short_rows > 0 or not self.prefills
        if self.prefills:
            self.prefill = self._prefill_config(options, rows)
        # Rows after the last sequence are filled by one of the two kernels.
        self.pad_rows = not self.exact and not self.prefills
        self.hopper = self._hopper_variant() if self.prefills else None
        self.hopper_work: torch.Tensor | None = None

    def _prefill_config(self, options: Any, rows: int) -> PrefillConfig:
        """The tile of the prefill kernel, for queries of at most as many rows."""
        if options.prefill_config is not None:
            return PrefillConfig(*options.prefill_config)
        spec, batch, device = self.spec, self.batch, self.device
        small = -(-batch.total_q // 128) * spec.num_heads < device.processors or rows <= 64
        small = small or batch.max_seqlen_k <= SHORT_KEYS
        return prefill_config(
            device.arch, small, spec.head_dim, spec.dv, *self.sizes, spec.has_mask, batch.is_paged
        )  # fmt: skip

    def _hopper_variant(self) -> Any:
        """The warp-specialised variant for this batch, or None where the plain kernel runs."""
        spec, batch, device = self.spec, self.batch, self.device
        if batch.device.type != "cuda" or device.arch != 90 or device.interpreted:
            return None
        if self.backend.options.hopper is False:
            return None
        if self.backend.options.prefill_config is not None:  # a tuning run of the plain kernel
            return None
        from .hopper_prefill import hopper_reasons
        from .hopper_variant import choose_variant

        if hopper_reasons(spec):
            return None
        return choose_variant(
            head_dim=spec.head_dim, num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads,
            max_seqlen_q=batch.max_seqlen_q, total_q=batch.total_q, num_seqs=batch.num_seqs,
            num_sms=device.processors, max_seqlen_k=batch.max_seqlen_k,
            causal=spec.bounds[1] is not None, paged=spec.page_size is not None,
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
        if options.hopper:
            return 0
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
        kv_bytes = self.sizes[1]
        # Bytes of a key and value; converting fp8 takes as long as reading twice as much.
        width = (spec.head_dim + (0 if self.shares_width else spec.dv)) * max(kv_bytes, 2)
        self.rate = PROGRAM_BYTES / width
        exact, block_m = self.exact, config.block_m
        bounds = split_bounds(
            batch.q_lens if exact else None, batch.kv_lens if exact else None, batch.num_seqs,
            batch.total_q, batch.max_seqlen_q, batch.max_seqlen_k, left, self.short_rows, block_m,
            config.block_n, self.device.processors, config.occupancy, self.rate, config.min_chunk,
            spec.num_kv_heads, spec.group_size,
            0 if self.c0 else options.split_keys or self.few_chunk, self.num_splits, self.c0,
            self.pad_rows,
        )  # fmt: skip
        self.equal = self._equal_items(bounds)
        if self.equal:
            _, _, tiles, parts, _ = self.equal
            items = batch.num_seqs * tiles * parts
            bounds = SplitBounds(items, items if parts > 1 else 0, bounds.chunk)
        self.bounds = bounds
        self.part_rows = min(config.block_m, batch.max_seqlen_q * spec.group_size)
        # One allocation for all: lists of 64 and 16 bytes an entry, then states of parts.
        states = bounds.slots * spec.num_kv_heads * self.part_rows
        items = seqs = 0
        if not self.equal:
            items, seqs = bounds.items * ITEM_FIELDS, batch.num_seqs * SEQ_FIELDS
        ml = items + _round(seqs)
        acc = ml + _round(2 * states)
        self._sizes, self._starts = (items, seqs, 2 * states, spec.dv * states), (0, items, ml, acc)
        total = acc + spec.dv * states
        # Where there is nothing to keep, any tensor will do.
        self.workspace = batch.seqlens_k
        if total:
            self.workspace = torch.empty(total, dtype=torch.int32, device=batch.device)
        base = self.workspace.data_ptr()
        self.items_at, self.seqs_at = base, base + 4 * items
        self.part_ml_at, self.part_acc_at = base + 4 * ml, base + 4 * acc

    def _equal_items(self, bounds: SplitBounds) -> tuple[int, int, int, int, int] | None:
        """Rows, keys, row tiles, parts and keys per part, if they are those of every sequence.

        Keys without pages may begin anywhere, which the device alone knows.
        """
        batch, config = self.batch, self.split
        q_lens, kv_lens = batch.q_lens, batch.kv_lens
        if not (self.exact and batch.is_paged) or self.prefills or self.c0:
            return None
        if self.spec.bounds[0] is not None:
            return None
        if not kv_lens or min(kv_lens) != max(kv_lens) or min(q_lens) != max(q_lens):
            return None
        q_len, kv_len = q_lens[0], kv_lens[0]
        tiles = -(-q_len * self.spec.group_size // config.block_m)
        return q_len, kv_len, tiles, *cut(kv_len, bounds.chunk, self.num_splits, config.block_n)

    def _part(self, index: int) -> torch.Tensor:
        start = self._starts[index]
        return self.workspace[start : start + self._sizes[index]]

    @property
    def items(self) -> torch.Tensor:
        """``[items * ITEM_FIELDS]`` int32: the work list."""
        return self._part(0)

    @property
    def seqs(self) -> torch.Tensor:
        """``[B * SEQ_FIELDS]`` int32: where the parts of each sequence are."""
        return self._part(1)

    @property
    def part_ml(self) -> torch.Tensor:
        """Peak and sum of each row of each part, float32; empty if no sequence is cut."""
        return self._part(2).view(torch.float32)

    @property
    def part_acc(self) -> torch.Tensor:
        """Sums of values of each row of each part, float32; empty if no sequence is cut."""
        return self._part(3).view(torch.float32)

    def update_in_place(self) -> bool:
        """Rebuild what depends on the lengths; no kernel here asks for more than bounds of them."""
        if self.capacity is None or not self.capacity.in_place or self.check_always:
            return False
        self.on_update()
        return True

    def on_update(self) -> None:
        """Rebuild what depends on the lengths, on the current stream."""
        device = self.batch.device
        if device.type == "cuda" and driver.current_device() != device.index:
            with torch.cuda.device(device):
                return self.on_update()
        batch, spec = self.batch, self.spec
        if self.mask_indptr is not None and batch.mask_indptr is None:
            q_lens = batch.cu_seqlens_q.diff().long()
            torch.cumsum(q_lens * batch.seqlens_k, 0, out=self.mask_indptr[1:])
        if self.hopper is not None:
            self._list_hopper_work()
        if not self.splits or self.equal:
            return
        if self._schedule is not None and not is_hooked():
            self._schedule(driver.current_stream(device.index))
            return
        config, left = self.split, spec.bounds[0]
        constants = (
            ("HK", spec.num_kv_heads), ("GROUP", spec.group_size), ("HAS_LEFT", left is not None),
            ("RAGGED", batch.cu_seqlens_k is not None), ("PAD_ROWS", self.pad_rows),
            ("C0", self.c0), ("BLOCK_M", config.block_m), ("BLOCK_N", config.block_n),
            ("BLOCK_B", min(max(next_power_of_2(batch.num_seqs), 16), 1024)),
            ("OCCUPANCY", config.occupancy),
        )  # fmt: skip
        launcher = launcher_of("schedule", constants, 4, 1, False)
        k_starts = batch.seqlens_k if batch.cu_seqlens_k is None else batch.cu_seqlens_k
        starts = (batch.cu_seqlens_q, batch.seqlens_k, k_starts)
        addresses = (*[x.data_ptr() for x in starts], self.items_at, self.seqs_at)
        numbers = (
            batch.num_seqs, self.bounds.items, left or 0, self.short_rows, self.bounds.chunk,
            self.num_splits, self.device.processors, self.rate, config.min_chunk,
        )  # fmt: skip
        grid = (batch.num_seqs + 1, 1, 1)
        launch(
            launcher, grid, addresses, numbers, "schedule",
            lambda: (*starts, self.items, self.seqs),
        )  # fmt: skip
        if self.capacity is not None and not any(at % 16 for at in addresses):
            form = launcher.form("schedule")  # under a capacity no argument changes any more
            if form is not None:
                self._schedule = form.launch(grid, (*addresses, *numbers, *launcher.values), 0)

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
        result, given, values = out, out is not None, v
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
        form = (
            q.stride(), k.stride(), v.stride(), out.o.stride(), out.lse.stride(), out.o.dtype,
            q.dtype, k.dtype, share, extras.sinks is None, scale_kind(extras.k_scale),
            scale_kind(extras.v_scale),
        )  # fmt: skip
        mapped = None
        if self.prefills and (self.hopper is not None or self.prefill.maps):
            # Tensor maps hold the shapes of keys and values, which pointers do not.
            mapped = (k.shape, v.shape, (k.data_ptr() | v.data_ptr()) & 15)
        key = (q.shape[0], form, mapped)
        call = self._prepared.get(key)
        if call is None:
            call = self._prepared[key] = Call(self, q, k, v, out, extras, share, form)
        if self.device.interpreted or self.check_always or is_hooked():
            call(q, k, v, out, extras)
        else:
            self._launch_and_keep(call, (q, k, values, v), extras, out, given)
        if result.o is not out.o:
            result.o.copy_(out.o)
        return result

    def _launch_and_keep(
        self, call: Call, tensors: tuple[Any, ...], extras: RunExtras, out: AttentionOutput,
        given: bool,
    ) -> None:  # fmt: skip
        """Launch, through a repeat for the layers to come if the kernels are known by now."""
        q, k, values, v = tensors
        options = None if all(x is None for x in extras) else extras
        kind = (given, values is None, kinds(extras))
        repeat, held = call.repeats.get(kind), (q, k, values, *(out if given else ()))
        if repeat is None:
            repeat = repeat_of(call, held, extras, out, given)
        elif repeat is self.repeat:  # which did not recognise them
            repeat.watch(held, extras)
        if repeat is not None:
            self.repeat = call.repeats[kind] = repeat
            if repeat.launch(q, k, values, options, *out):
                return
        call(q, k, v, out, extras)


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


__all__ = ["TritonPlan"]
