"""The launches of a plan for one layout of tensors: everything that does not change, bound once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..backend import RunExtras
from ..errors import Reason, UnsupportedCallError
from ..output import AttentionOutput
from .configs import PrefillConfig, SplitConfig, fit_stages
from .kernels import launcher_of, next_power_of_2
from .launch import Launcher, launch
from .operands import TINY_SCALE, Operands

if TYPE_CHECKING:
    from .hopper_call import HopperCall
    from .maps import KeyMaps
    from .plan import TritonPlan

#: Launchers that a backend looks up without their constants: forget all rather than grow.
MAX_LAUNCHERS = 4096
#: Programs of a merge per multiprocessor up to which kernels of the next call start beside it.
CHAIN_PROGRAMS = 1.0


def key_maps(k: torch.Tensor, v: torch.Tensor, plan: TritonPlan) -> KeyMaps | None:
    """Tensor maps of keys and values for the tiles of a plan; None where they do not fit."""
    from .maps import KeyMaps

    fit = plan.device.arch >= 90 and KeyMaps.fit(k, v) and k.dtype == plan.formats.compute
    return KeyMaps(k, v, plan.prefill.block_n) if fit else None


def refuse_hopper(reasons: list[Reason]) -> None:
    """Raise that a call which must take the warp-specialised kernel cannot."""
    text = "; ".join(map(str, reasons))
    message = f"triton with hopper=True cannot do this call: {text}"
    raise UnsupportedCallError(message, backend="triton", reasons=reasons)


class Step(NamedTuple):
    """A launch of a call, but for what tensors and options bring.

    Attributes:
        launcher: Of the kernel.
        grid: Programs per dimension.
        tensors: Gives the plan's own, between those of the call.
        at: Their addresses.
        numbers: After the factors on scores and values.
        ends: Whether the kernel takes outputs, sinks and the scale of values alone.
        maps: Of keys and values, if the kernel takes some.
    """

    launcher: Launcher
    grid: tuple[int, int, int]
    tensors: Callable[[], tuple[Any, ...]]
    at: tuple[Any, ...]
    numbers: tuple[int, ...]
    ends: bool
    maps: KeyMaps | None = None


class Call:
    """The launches of one plan for one set of strides and options: what does not change, bound."""

    def __init__(
        self, plan: TritonPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: AttentionOutput, extras: RunExtras, share: bool, form: Any,
    ) -> None:  # fmt: skip
        self.plan: TritonPlan = weakref.proxy(plan)  # which holds this: its buffers end with it
        operands = Operands(plan.spec, plan.batch, plan.formats, q, k, v, out, extras, share, form)
        self.operands = operands
        self.key, self.bytes = operands.key, operands.bytes
        self.scale, self.softcap = operands.scale, operands.softcap
        self.split = self.merge = self.prefill = None
        self.hopper: HopperCall | None = None
        if plan.splits:
            self._bind_split(plan)
        self.maps: KeyMaps | None = None
        if plan.prefills:
            if plan.prefill.maps and operands.narrow == 2 and operands.plain_rows:
                self.maps = key_maps(k, v, plan)
            self._bind_prefill(plan)
            self._bind_hopper(plan, q, k, v, out, extras)
        self.steps = self._steps(q.shape[0])
        #: Its repeats, by which outputs, values and options are given.
        self.repeats: dict[Any, Any] = {}

    def _warps(self, config: SplitConfig | PrefillConfig) -> int:
        """Warps per program: two where warpgroup products cannot be trusted.

        Triton 3.6 gives wrong values where they read narrow tiles that are not pipelined, seen at
        head dims 40 and 72 with unaligned strides; two warps cannot issue them.
        """
        hopper = self.plan.device.arch >= 90 and config.block_m >= 64
        return config.warps if self.operands.whole_vectors or not hopper else 2

    def _launcher(self, what: tuple, make: Callable[[], Launcher]) -> Launcher:
        """The launcher of a kernel, made once for all plans of the backend.

        Args:
            what: The kernel's name and the plan's choices that its constants depend on.
            make: Makes it.
        """
        known = self.plan.backend.launchers
        key = (what, self.plan.device.arch, self.key)
        found = known.get(key)
        if found is None:
            if len(known) >= MAX_LAUNCHERS:
                known.clear()
            found = known[key] = make()
        return found

    def _bind_split(self, plan: TritonPlan) -> None:
        spec, config, operands = plan.spec, plan.split, self.operands
        group, dvp = spec.group_size, next_power_of_2(spec.dv)
        merges = plan.bounds.slots > 0
        pdl = merges and plan.backend.options.pdl and plan.device.arch >= 90
        pdl = pdl and not plan.device.interpreted
        phases = config.phases and spec.bounds[0] is None and not spec.has_mask
        blocks, merge_rows, few = self._merge_grid(plan)
        # The kernels of the next call start early beside a small merge; see ``cuts.FEW_KEYS``.
        small = blocks[0] * blocks[1] <= CHAIN_PROGRAMS * plan.device.processors
        chain = pdl and small and plan.few_keys
        equal = plan.equal is not None
        alike = plan.equal or (0,) * 5

        def split_launcher() -> Launcher:
            constants = (
                ("HK", spec.num_kv_heads), ("GROUP", group), ("GROUP_P2", next_power_of_2(group)),
                *operands.widths(), ("DVP", dvp), *operands.flags(), ("FUSE", config.fuse),
                ("LANE_SUMS", config.lane_sums), ("PHASES", phases), ("C0", plan.c0),
                ("EQUAL", equal), ("PDL", pdl), ("CHAIN", chain),
                ("BLOCK_M", config.block_m), ("BLOCK_N", config.block_n),
            )  # fmt: skip
            stages = config.stages
            if not operands.share:
                stages = fit_stages(config, plan.device.arch, spec.head_dim, spec.dv, *plan.sizes)
            return launcher_of("split", constants, self._warps(config), stages, chain)

        what = ("split", config, plan.c0, equal, pdl, chain)
        self.split = self._launcher(what, split_launcher)
        plan, table = self.plan, operands.table
        self.split_tensors = lambda: (plan.items, plan.part_acc, plan.part_ml, table)
        self.split_at = (plan.items_at, plan.part_acc_at, plan.part_ml_at, table.data_ptr())
        self.split_numbers = (
            plan.part_rows, operands.left, operands.right, operands.k_step, operands.v_step, *alike
        )  # fmt: skip
        self.split_grid = (plan.bounds.items * spec.num_kv_heads, 1, 1)
        if merges:
            block_d = dvp // blocks[1]
            tiles = max(plan.batch.num_seqs * -(-merge_rows // config.block_m), 1)
            parts = next_power_of_2(plan.bounds.slots // tiles)
            block_s = min(max(parts, 8), 64 if few else 16, 8192 // block_d)

            def merge_launcher() -> Launcher:
                constants = (
                    ("HK", spec.num_kv_heads), ("GROUP", group), ("DV", spec.dv),
                    ("BLOCK_D", block_d), *operands.ends(), ("IN_ORDER", plan.c0 > 0),
                    ("EQUAL", equal), ("PDL", pdl),
                    ("CHAIN", chain), ("BLOCK_M", config.block_m), ("BLOCK_S", block_s),
                )  # fmt: skip
                return launcher_of("merge", constants, 4, 2, pdl)

            what = ("merge", config.block_m, block_d, block_s, plan.c0, equal, pdl, chain)
            self.merge = self._launcher(what, merge_launcher)
            self.merge_tensors = lambda: (plan.seqs, plan.part_acc, plan.part_ml)
            self.merge_at = (plan.seqs_at, plan.part_acc_at, plan.part_ml_at)
            self.merge_numbers = (
                *operands.out_strides, merge_rows, plan.part_rows, operands.v_step, alike[0],
                *alike[2:4],
            )  # fmt: skip
            self.merge_grid = (*blocks, 1)

    def _merge_grid(self, plan: TritonPlan) -> tuple[tuple[int, int], int, bool]:
        """Programs of the merge, by rows and by blocks of lanes; rows a sequence; few or many."""
        spec, batch = plan.spec, plan.batch
        # Sequences of several tiles have more rows than one tile; they may be cut as well.
        rows = min(batch.max_seqlen_q * spec.group_size, plan.short_rows)
        if plan.c0:
            rows = plan.part_rows  # only single tiles are cut
        programs = rows * spec.num_kv_heads * batch.num_seqs
        # Few rows are cut by lanes, and many parts are read many at a time, since otherwise
        # a few programs would wait for one load after the other.
        few = programs < 4 * plan.device.processors
        dvp = next_power_of_2(spec.dv)
        return (programs, dvp // 128 if few and dvp > 256 else 1), rows, few

    def _bind_prefill(self, plan: TritonPlan) -> None:
        spec, batch, config, operands = plan.spec, plan.batch, plan.prefill, self.operands
        group = spec.group_size
        # Queries shorter than a tile share it with the other heads of their KV head.
        mean = batch.total_q / max(batch.num_seqs, 1)
        packed = mean * 1.1 < config.block_m and batch.total_q * group < 2**31
        self.pack = group if packed else 1
        phases = config.phases and not spec.has_mask
        block_b = min(max(next_power_of_2(batch.num_seqs + 1), 32), 1024)

        registers = 0 if plan.device.interpreted else config.registers

        def prefill_launcher() -> Launcher:
            constants = (
                ("H", spec.num_heads), ("GROUP", group), *operands.widths(), *operands.flags(),
                ("SKIP_SHORT", plan.splits), ("PHASES", phases),
                ("HEADS_INNER", config.heads_inner), ("FUSE", config.fuse),
                ("LANE_SUMS", config.lane_sums), ("SETTLE", registers > 0),
                ("MAPS", self.maps is not None),
                ("PACK", self.pack), ("BLOCK_B", block_b),
                ("BLOCK_M", config.block_m), ("BLOCK_N", config.block_n),
            )  # fmt: skip
            return launcher_of(
                "prefill", constants, self._warps(config), config.stages, False, registers
            )

        what = ("prefill", config, plan.splits, self.pack, block_b, self.maps is not None)
        self.prefill = self._launcher(what, prefill_launcher)
        self.units = spec.num_heads // self.pack
        k_starts = batch.seqlens_k if batch.cu_seqlens_k is None else batch.cu_seqlens_k
        tensors = (batch.cu_seqlens_q, batch.seqlens_k, k_starts, operands.table)
        self.prefill_tensors = lambda: (None, None, *tensors)  # where maps would be
        self.prefill_at = (None, None, *[x.data_ptr() for x in tensors])
        self.prefill_numbers = (
            operands.left, operands.right, plan.short_rows, operands.k_step, operands.v_step
        )  # fmt: skip

    def _bind_hopper(
        self, plan: TritonPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: AttentionOutput, extras: RunExtras,
    ) -> None:  # fmt: skip
        """Decide whether tensors laid out like these take the warp-specialised kernel."""
        insist = plan.backend.options.hopper
        if plan.hopper is None and not insist:
            return
        from .hopper_call import HopperCall
        from .hopper_prefill import hopper_reasons

        spec, batch = plan.spec, plan.batch
        reasons = hopper_reasons(spec, q.device, q, k, v)
        if reasons and insist:
            refuse_hopper(reasons)
        if not reasons:
            self.hopper = HopperCall(
                q, k, v, *out, variant=plan.hopper, num_seqs=batch.num_seqs,
                page_table=batch.page_table if spec.page_size is not None else None,
                scale=spec.scale, causal=spec.causal, window=spec.window, softcap=spec.softcap,
                sinks=extras.sinks is not None,
            )  # fmt: skip

    def takes_hopper(self, addresses: tuple[int, ...]) -> bool:
        """Whether the warp-specialised kernel reads queries, keys and values from there."""
        if self.hopper is None:
            return False
        fits = not (addresses[0] | addresses[1] | addresses[2]) & 15
        if not fits and self.plan.backend.options.hopper:
            refuse_hopper([Reason("data_ptr() % 16 of q, k, v", "not all 0", "0")])
        return fits

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: AttentionOutput,
        extras: RunExtras,
    ) -> None:  # fmt: skip
        """Launch the kernels on tensors of this layout."""
        plan = self.plan
        scale, v_factor = self.scale, 1.0
        sinks, slopes, mask, k_scale, v_scale = extras
        if k_scale is not None and not isinstance(k_scale, torch.Tensor):
            scale, k_scale = max(scale * k_scale, TINY_SCALE), None
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
        for step in self.steps:
            if step.ends:
                launch(
                    step.launcher, step.grid, at[3:] + step.at + (options_at[0], options_at[5]),
                    (v_factor, *step.numbers), self.key,
                    lambda step=step: (*out, *step.tensors(), options[0], options[5]),
                )  # fmt: skip
            elif step.launcher is self.prefill and self.takes_hopper(at):
                self.hopper(
                    q, k, v, *out, work=plan.hopper_work, page_table=plan.batch.page_table,
                    sinks=sinks,
                )  # fmt: skip
            else:
                own, tensors = step.at, step.tensors
                if step.maps is not None:
                    own, tensors = self._mapped(step, k, v)
                launch(
                    step.launcher, step.grid, at + own + options_at,
                    (scale, self.softcap, v_factor, *step.numbers), self.key,
                    lambda tensors=tensors: (*common, *tensors(), *options),
                )  # fmt: skip

    def _mapped(
        self, step: Step, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[tuple[Any, ...], Callable[[], tuple[Any, ...]]]:
        """What a step takes between the tensors of a call and options, with the maps filled in."""
        maps, at, tensors = step.maps, step.at, step.tensors
        assert maps is not None
        form = step.launcher.form(self.key)
        if form is not None:
            maps.learn(form.compiled)
            at = (*maps.encoded(k.data_ptr(), v.data_ptr()), *at[2:])
        return at, lambda: (*maps.described(k, v), *tensors()[2:])

    def _steps(self, rows: int) -> list[Step]:
        """The launches for ``rows`` query rows, in order."""
        plan, batch = self.plan, self.plan.batch
        numbers = (*self.operands.strides, batch.num_seqs, rows)
        steps = []
        if self.split is not None:
            steps.append(Step(
                self.split, self.split_grid, self.split_tensors, self.split_at,
                numbers + self.split_numbers, False,
            ))  # fmt: skip
        if self.prefill is not None:
            tiles = rows * self.pack // plan.prefill.block_m + batch.num_seqs + 1
            steps.append(Step(
                self.prefill, (tiles * self.units, 1, 1), self.prefill_tensors, self.prefill_at,
                (*numbers, tiles, *self.prefill_numbers), False, self.maps,
            ))  # fmt: skip
        if self.merge is not None:
            steps.append(Step(
                self.merge, self.merge_grid, self.merge_tensors, self.merge_at,
                self.merge_numbers, True,
            ))  # fmt: skip
        return steps


__all__ = ["Call", "Step"]
