"""What all adapters share: a device that was not known when they were bound is checked by plans."""

from __future__ import annotations

import torch

from ..backend import AttentionBackend
from ..batch import Batch
from ..capacity import Capacity
from ..errors import UnsupportedCallError
from ..plan import Plan


class AdapterBackend(AttentionBackend):
    """A backend over a library, which works on some devices and fails badly on others."""

    _accepted: frozenset[torch.device] = frozenset()

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


__all__ = ["AdapterBackend"]
