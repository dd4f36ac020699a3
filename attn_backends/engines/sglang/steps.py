"""What the layers of a step share: its batches, and a plan per kind of layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ...backend import AttentionBackend
from ...capacity import Capacity
from ...plan import Plan
from ...registry import select
from ...spec import AttentionSpec
from .batches import Batches


@dataclass
class Step:
    """The ``forward_metadata`` of a step.

    Attributes:
        phase: ``"prefill"`` or ``"decode"``.
        batches: The sequences.
        capacity: Bounds of the captured graph that the plans are for; None if there is none.
        plans: By spec and pool: the backend that the configuration chose, and its plan.
    """

    phase: str
    batches: Batches
    capacity: Capacity | None = None
    plans: dict[tuple[AttentionSpec, bool], tuple[AttentionBackend, Plan]] = field(
        default_factory=dict
    )

    @property
    def rows(self) -> int:
        """Queries that belong to a sequence; what comes after them is padding."""
        return self.batches.full.total_q

    def plan(
        self, spec: AttentionSpec, windowed: bool, device: torch.device
    ) -> tuple[AttentionBackend, Plan]:
        """The backend and plan of a layer, made for the first that asks.

        Args:
            spec: What the layer fixes.
            windowed: Whether its keys are in the pool for sliding windows.
            device: Where it runs.

        Raises:
            AttnBackendsError: As ``select`` and ``plan``.
        """
        key = (spec, windowed)
        found = self.plans.get(key)
        if found is None:
            backend = select(spec, phase=self.phase, device=device).backend
            plan = backend.plan(self.batches.of(windowed), self.capacity)
            found = self.plans[key] = (backend, plan)
        return found

    def update(self, batches: Batches) -> None:
        """Make every plan fit other sequences, before a replay.

        Args:
            batches: Over the tensors that the plans were made of.
        """
        for (_, windowed), (_, plan) in self.plans.items():
            if not plan.update_in_place():
                plan.update(batches.of(windowed))


__all__ = ["Step"]
