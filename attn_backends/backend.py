"""The base class of every backend: declared capabilities, ``plan`` and ``run``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple, get_args, get_origin

import torch
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from .batch import Batch
from .capabilities import Capabilities
from .capacity import Capacity
from .errors import InvalidInputError, Reason, UnsupportedCallError
from .output import AttentionOutput
from .plan import Plan, make_buffers
from .spec import AttentionSpec, check_device
from .validation import check_batch, check_extras, check_out, check_qkv


class BackendOptions(BaseModel):
    """Base of each backend's options; unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _tuple_of_list(cls, value: Any, info: ValidationInfo) -> Any:
        """A tuple from a list: files know no other."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        kinds = (annotation, *get_args(annotation))
        takes = isinstance(value, list) and any(get_origin(kind) is tuple for kind in kinds)
        return tuple(value) if takes else value


class RunExtras(NamedTuple):
    """The optional inputs of a run, already checked against the spec.

    Attributes:
        sinks: ``[H]`` float32 logits, or None; only given to backends that declare fused sinks.
        alibi_slopes: ``[H]`` float32, or None.
        mask: Flat bool, True = visible, sequence b at ``mask_indptr[b]``, row-major, or None.
        k_scale: What a stored key is multiplied by: float, or float32 ``[]``, ``[1]``, ``[HK]``.
        v_scale: The same for values.
    """

    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    k_scale: float | torch.Tensor | None = None
    v_scale: float | torch.Tensor | None = None


class AttentionBackend(ABC):
    """A way to compute attention states, bound to one spec.

    A subclass declares ``name`` and ``capabilities`` and implements ``_run``. ``plan`` and ``run``
    here check every input once, so an implementation sees only calls that its declaration allows.

    Attributes:
        name: What the backend is called in reasons, logs and reports.
        capabilities: What it can do; the rest is refused.
        Options: The pydantic model of its options.
        spec: The spec it is bound to.
        options: The options it was built with.

    Args:
        spec: What the layer fixes.
        device: Where it will run; default: decided by the first batch.
        options: An instance of the backend's ``Options``; None takes the defaults.

    Raises:
        InvalidInputError: An argument is of another type.
        UnsupportedCallError: The declaration rules the spec out; it carries every reason.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    Options: ClassVar[type[BackendOptions]] = BackendOptions

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        device: torch.device | str | None = None,
        options: BackendOptions | None = None,
    ) -> None:
        if not isinstance(spec, AttentionSpec):
            raise InvalidInputError.of("spec", type(spec).__name__, "an AttentionSpec")
        if options is not None and not isinstance(options, self.Options):
            allowed = f"None, or {type(self).__name__}.Options(...)"
            raise InvalidInputError.of("options", type(options).__name__, allowed)
        self.spec = spec
        self.options = self.Options() if options is None else options
        where = None if device is None else check_device(device)
        reasons = self.unsupported_reasons(spec, None, where, self.options)
        if reasons:
            text = "; ".join(map(str, reasons))
            raise UnsupportedCallError(
                f"{self.name} cannot do this call: {text}", backend=self.name, reasons=reasons
            )

    @classmethod
    def dependency_reasons(cls, options: BackendOptions | None = None) -> list[Reason]:
        """Reasons of missing or broken packages; cheap, and never touches a device.

        Args:
            options: The backend's options; they may decide which packages are needed.

        Returns:
            One reason for each package that cannot be used.
        """
        return []

    @classmethod
    def kernels(
        cls,
        spec: AttentionSpec,
        phase: str,
        device: torch.device,
        options: BackendOptions | None = None,
    ) -> list[str]:
        """What would compute the calls of a phase, in words, for ``explain``.

        Args:
            spec: What the layer fixes; the backend has nothing against it.
            phase: ``"prefill"`` or ``"decode"``.
            device: Where calls would run.
            options: The backend's options; None takes its defaults.

        Returns:
            A line for each kernel, with the reasons against better ones; nothing from backends
            that have one.
        """
        return []

    @classmethod
    def extra_reasons(
        cls,
        spec: AttentionSpec,
        phase: str | None,
        device: torch.device | None,
        options: BackendOptions | None,
    ) -> list[Reason]:
        """Reasons that the declared data cannot express, for example limits on combinations.

        Args:
            spec: What the layer fixes.
            phase: ``"prefill"``, ``"decode"`` or None (either).
            device: Where the call would run; None leaves the device out of it.
            options: The backend's options.

        Returns:
            Every such reason.
        """
        return []

    @classmethod
    def unsupported_reasons(
        cls,
        spec: AttentionSpec,
        phase: str | None = None,
        device: torch.device | None = None,
        options: BackendOptions | None = None,
    ) -> list[Reason]:
        """Every reason against a call, in order: package, device, dtype, shape, feature.

        Supported means that the list is empty. Pure and cheap: nothing is allocated or compiled.

        Args:
            spec: What the layer fixes.
            phase: ``"prefill"``, ``"decode"`` or None (either).
            device: Where the call would run; None leaves the device out of it.
            options: The backend's options; they may change what is supported.

        Returns:
            The reasons; none means that the call is supported.
        """
        reasons = list(cls.dependency_reasons(options))
        reasons += cls.capabilities.device_reasons(device)
        reasons += cls.capabilities.spec_reasons(spec, phase)
        reasons += cls.extra_reasons(spec, phase, device, options)
        return reasons

    def check_batch(self, batch: Batch) -> None:
        """Raise InvalidInputError unless the batch can belong to this backend's spec.

        Args:
            batch: Ragged or paged as the spec, with lengths that its pages hold.

        Raises:
            InvalidInputError: It cannot; the message names the field.
        """
        check_batch(batch, self.spec)

    def plan(self, batch: Batch, capacity: Capacity | None = None) -> Plan:
        """Prepare a batch; once per step, reused by every layer with this spec.

        Args:
            batch: The step's sequences.
            capacity: For CUDA graphs: reserve fixed buffers of this size, refilled by
                ``plan.update``.

        Returns:
            The plan, for ``run`` of this backend or of one with an equal spec.

        Raises:
            InvalidInputError: The batch does not fit the spec or the capacity.
            UnsupportedCallError: The backend does not run on the batch's device, or not under
                CUDA graphs.
        """
        check_batch(batch, self.spec)
        if batch.device.type not in self.capabilities.devices:
            allowed = ", ".join(self.capabilities.devices)
            fix = "build the batch with device="
            raise self._refusal(Reason("batch.device", str(batch.device), allowed, fix))
        if capacity is None:
            return self._plan(batch, None)
        if not isinstance(capacity, Capacity):
            raise InvalidInputError.of("capacity", type(capacity).__name__, "a Capacity, or None")
        if "cuda_graph" not in self.capabilities.features:
            fix = "this backend is not graph-capturable"
            raise self._refusal(Reason("capacity", "given", "None", fix))
        return self._plan(make_buffers(batch, capacity, self.spec.page_size), capacity)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        plan: Plan,
        *,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> AttentionOutput:
        """Attention of one layer over the planned batch.

        Any strides are accepted except over the last dim, which must be contiguous. Rows of ``q``
        that belong to no sequence (padding) get the state of no keys.

        Args:
            q: ``[T, H, D]`` queries, sequence b at ``cu_seqlens_q[b]``.
            k: ``[Tk, HK, D]``, or a cache ``[num_pages, page_size, HK, D]`` if paged.
            v: The same with width DV; None takes the first DV lanes of ``k`` (MLA).
            plan: From this backend's ``plan``, or from one with an equal spec.
            sinks: ``[H]`` float32: one more key per head, of this logit and value 0. ``o`` and
                ``lse`` then include it; leave it out of states that will still be merged.
            alibi_slopes: ``[H]`` float32: bias ``-slope * |i + kv_len - q_len - j|``.
            mask: Flat bool ``[sum of q_len * kv_len]``, True = visible; row-major by sequence.
            k_scale: For an fp8 cache: float, or float32 ``[]``, ``[1]`` or ``[HK]``; None is 1.
            v_scale: The same for values.
            out: ``(o [T, H, DV], lse [T, H] float32)`` to write into, of any strides.

        Returns:
            ``o [T, H, DV]`` in the query dtype (fp8 queries: bfloat16) and ``lse [T, H]`` float32,
            natural log. A query that sees no key has ``o = 0`` and ``lse = -inf``.

        Raises:
            InvalidInputError: An input does not fit the spec or the plan; the message names it.
        """
        if getattr(plan, "backend", None) is not self:
            self._check_plan(plan)
        elif plan.repeat is not None:
            options = None
            if not (
                sinks is None and alibi_slopes is None and mask is None
                and k_scale is None and v_scale is None
            ):  # fmt: skip
                options = (sinks, alibi_slopes, mask, k_scale, v_scale)
            if (result := plan.repeat(q, k, v, options, out)) is not None:
                return result
        layout = _layout(q, k, v)
        if layout is None or layout not in plan.checked or plan.check_always:
            check_qkv(q, k, v, plan)
            plan.checked.add(layout)
        check_extras(plan, sinks, alibi_slopes, mask, k_scale, v_scale)
        state = None
        if out is not None:
            check_out(out, q.shape[0], self.spec, q.device)
            state = AttentionOutput(*out)
        fused = self.capabilities.fused_sinks
        extras = RunExtras(sinks if fused else None, alibi_slopes, mask, k_scale, v_scale)
        if q.is_cuda and torch.cuda.current_device() != q.device.index:
            with torch.cuda.device(q.device):
                result = self._run_or_empty(q, k, v, plan, extras, state)
        else:
            result = self._run_or_empty(q, k, v, plan, extras, state)
        if sinks is not None and not fused:
            from .merge import apply_sinks

            return apply_sinks(result, sinks, out=state)
        return result

    def _check_plan(self, plan: Any) -> None:
        if not isinstance(plan, Plan):
            raise InvalidInputError.of("plan", type(plan).__name__, "a Plan from this backend")
        if plan.backend.name != self.name:
            raise InvalidInputError.of("plan.backend", plan.backend.name, self.name)
        if plan.spec != self.spec:
            fix = "plan again with the backend of this layer"
            raise InvalidInputError.of("plan.spec", plan.spec, f"{self.spec}", fix)

    def _run_or_empty(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        plan: Plan,
        extras: RunExtras,
        out: AttentionOutput | None,
    ) -> AttentionOutput:
        if q.shape[0] and (plan.batch.max_seqlen_k or extras.sinks is not None):
            return self._run(q, k, v, plan, extras, out)
        if out is None:  # no query or no key: the identity, without a launch
            rows, heads, spec = q.shape[0], self.spec.num_heads, self.spec
            o = torch.empty(rows, heads, spec.dv, dtype=spec.out_dtype, device=q.device)
            out = AttentionOutput(o, torch.empty(rows, heads, device=q.device))
        out.o.zero_()
        out.lse.fill_(float("-inf"))
        return out

    def _refusal(self, reason: Reason) -> UnsupportedCallError:
        return UnsupportedCallError(f"{self.name}: {reason}", backend=self.name, reasons=[reason])

    def _plan(self, batch: Batch, capacity: Capacity | None) -> Plan:
        return Plan(self, batch, capacity)

    @abstractmethod
    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        plan: Plan,
        extras: RunExtras,
        out: AttentionOutput | None,
    ) -> AttentionOutput:
        """Compute a checked call with at least one query, on the tensors' device.

        Writes into ``out`` if given; allocates otherwise. Keys beyond ``seqlens_k`` must not be
        read into the result, and rows of no sequence get ``o = 0``, ``lse = -inf``.
        """


def _layout(q: Any, k: Any, v: Any) -> tuple[Any, ...] | None:
    """Everything that checks of q, k and v look at, as a key; None if they need a closer look."""
    try:
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
            return None
        own = (q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device)
        if v is None:
            return own
        if v.requires_grad and torch.is_grad_enabled():
            return None
        return (*own, v.shape, v.stride(), v.dtype, v.device)
    except AttributeError:  # not tensors
        return None


__all__ = ["AttentionBackend", "BackendOptions", "RunExtras"]
