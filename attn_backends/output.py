"""The attention state ``(O, LSE)``: what every backend returns and what merges combine."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .errors import InvalidInputError


class AttentionOutput(NamedTuple):
    """Attention over a set of keys, in the form that can still be merged with other keys.

    ``exp(lse)`` is the softmax mass of the keys seen, so two states over disjoint keys combine
    into the state over their union. The state of no keys is ``o = 0``, ``lse = -inf``.

    Attributes:
        o: ``[T, H, DV]`` normalised output, in the query dtype.
        lse: ``[T, H]`` float32, natural log of the sum of exp(score), after scale, softcap, mask.
    """

    o: torch.Tensor
    lse: torch.Tensor

    def merge(self, other: AttentionOutput) -> AttentionOutput:
        """Combine with the state over other, disjoint keys (see ``merge_state``).

        Args:
            other: State of the same queries over disjoint keys, ``[T, H, DV]`` and ``[T, H]``.

        Returns:
            The state over both key sets.

        Raises:
            InvalidInputError: The states do not fit together; the message names what.
        """
        from .merge import merge_state

        if not isinstance(other, AttentionOutput):
            raise InvalidInputError.of("other", type(other).__name__, "an AttentionOutput")
        return merge_state(self.o, self.lse, other.o, other.lse)


__all__ = ["AttentionOutput"]
