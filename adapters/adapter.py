"""What all adapters share: checks that wait for the first plan, and runs that repeat the last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from .. import driver
from ..backend import AttentionBackend, BackendOptions, RunExtras
from ..batch import Batch
from ..capacity import Capacity
from ..errors import UnsupportedCallError
from ..layouts import guard
from ..output import AttentionOutput
from ..packages import installed_version
from ..plan import Plan
from .arrange import Arrangement

#: ``attend(q, k, v, out=None)`` of tensors that need no preparation: the library, and little else.
Attend = Callable[..., AttentionOutput]

#: Layouts that a plan learns; layers that keep changing them take the ordinary way.
_MOST_LAYOUTS = 8
#: Choices of extras that a plan keeps.
_MOST_EXTRAS = 512
_new = tuple.__new__


def _never(*tensors: Any) -> bool:
    return False


def state_of(
    o: torch.Tensor, lse: torch.Tensor, out: AttentionOutput | None = None
) -> AttentionOutput:
    """What a library gave, copied to ``out`` if there is one."""
    if out is None:
        return _new(AttentionOutput, (o, lse))
    out.o.copy_(o)
    out.lse.copy_(lse)
    return out


def repeat_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    out: AttentionOutput | None,
    attend: Attend,
) -> Callable[..., AttentionOutput | None]:
    """A run with tensors laid out as before: one comparison, and then the library.

    It runs between two calls of foreign code that leave nothing of ours in the processor's caches,
    so that every name and every frame counts.

    Args:
        q: Queries of the run before.
        k: Keys.
        v: Values, or None.
        out: Outputs, if the caller gave them.
        attend: What computes tensors like these.

    Returns:
        ``repeat(q, k, v, extras, out)``; None is its answer to tensors that need the ordinary way,
        with its checks.
    """
    known = [x for x in (q, k, v, *(out or ())) if x is not None]
    fits = guard(*known) or _never
    index = q.device.index if q.device.type == "cuda" else None
    current = driver.current_device
    given, without_v = out is not None, v is None

    def fresh(q: Any, k: Any, v: Any, extras: Any, out: Any) -> AttentionOutput | None:
        if extras is not None or out is not None or not fits(q, k, v):
            return None
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return None
        if index is not None and current() != index:
            return None
        return attend(q, k, v)

    def any_kind(q: Any, k: Any, v: Any, extras: Any, out: Any) -> AttentionOutput | None:
        if extras is not None or (v is None) is not without_v or (out is not None) is not given:
            return None
        tensors = (q, k) if v is None else (q, k, v)
        if out is not None:
            try:
                out = _new(AttentionOutput, out)
                tensors = (*tensors, *out)
            except TypeError:  # the checks will name it
                return None
        if not fits(*tensors):
            return None
        if (q.data_ptr() | k.data_ptr() | (0 if v is None else v.data_ptr())) & 15:
            return None
        if index is not None and current() != index:
            return None
        return attend(q, k, v, out)

    return any_kind if given or without_v else fresh


class RepeatWithExtras:
    """Runs with optional inputs: a repeat for each choice of numbers and slopes seen before.

    Layers have scales of their own, and share slopes. Slopes are told apart by identity, and kept,
    so that no other tensor can take their place.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[Callable[..., Any], Any]] = {}

    def add(self, extras: RunExtras, repeat: Callable[..., AttentionOutput | None]) -> None:
        """Keep a repeat of runs with these extras, which ``can_repeat``."""
        if len(self._known) >= _MOST_EXTRAS:
            self._known.clear()
        slopes = extras.alibi_slopes
        self._known[id(slopes), extras.k_scale, extras.v_scale] = (repeat, slopes)

    def __call__(self, q: Any, k: Any, v: Any, extras: Any, out: Any) -> AttentionOutput | None:
        """Run on these tensors; None if they need the ordinary way, with its checks."""
        if extras is None:
            return None
        sinks, slopes, mask, k_scale, v_scale = extras
        if sinks is not None or mask is not None or not _numbers(k_scale, v_scale):
            return None
        found = self._known.get((id(slopes), k_scale, v_scale))
        return None if found is None else found[0](q, k, v, None, out)


def _numbers(*scales: Any) -> bool:
    return all(scale is None or type(scale) is float for scale in scales)


class AdapterPlan(Plan):
    """A plan that learns, from a run, how the next layer can go straight to the library."""

    work: Arrangement
    _learned = 0

    def learn(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        extras: RunExtras,
        out: AttentionOutput | None,
        attend: Callable[[RunExtras], Attend],
    ) -> None:
        """Keep a run that was made, if it needed nothing but what ``attend`` gives.

        Args:
            q: Queries as the caller gave them.
            k: Keys.
            v: Values, or None.
            extras: The optional inputs.
            out: Outputs, if given.
            attend: Of the extras, what computes q, k, v as they are; the caller knows that they
                need no copy.
        """
        work = self.work
        whole = work.rows is None and work.empty is None and q.shape[0] == work.batch.total_q
        if not whole or self.check_always or not self.spec.scale:
            return
        if all(x is None for x in extras):
            if self._learned < _MOST_LAYOUTS:
                self._learned += 1
                self.repeat = repeat_of(q, k, v, out, attend(extras))
        elif extras.sinks is None and extras.mask is None:
            if _numbers(extras.k_scale, extras.v_scale):
                if not isinstance(self.repeat, RepeatWithExtras):
                    self.repeat = RepeatWithExtras()
                self.repeat.add(extras, repeat_of(q, k, v, out, attend(extras)))


class AdapterBackend(AttentionBackend):
    """A backend over a library, which works on some devices and fails badly on others."""

    #: Choices of options that deserve a conformance report of their own: other kernels, or other
    #: libraries. What has none is listed as not run.
    variants: ClassVar[tuple[dict[str, str], ...]] = ({},)
    #: Choices of options that name a library each, where several serve: all are health-checked.
    builds: ClassVar[tuple[dict[str, str], ...]] = ()
    packages: ClassVar[tuple[str, ...]]

    _accepted: frozenset[torch.device] = frozenset()

    @classmethod
    def library(
        cls, options: BackendOptions | None = None, device: torch.device | None = None
    ) -> tuple[str, str] | None:
        """Package and version of the library that serves, for reports.

        Args:
            options: The backend's options.
            device: Where calls run.

        Returns:
            Both; None for PyTorch, whose version stands in every report, and for what is not there.
        """
        version = installed_version(cls.packages[0])
        return None if cls.packages == ("torch",) or version is None else (cls.packages[0], version)

    def plan(self, batch: Batch, capacity: Capacity | None = None) -> Plan:
        """Prepare a batch; see the base class.

        Raises:
            UnsupportedCallError: The batch lies on a device where the call cannot run.
        """
        if batch.device not in self._accepted:
            reasons = self.unsupported_reasons(self.spec, None, batch.device, self.options)
            if reasons:
                text = "; ".join(map(str, reasons))
                raise UnsupportedCallError(
                    f"{self.name} cannot do this call: {text}", backend=self.name, reasons=reasons
                )
            self._accepted |= {batch.device}
        return super().plan(batch, capacity)


__all__ = ["AdapterBackend", "AdapterPlan", "Attend", "repeat_of", "state_of"]
