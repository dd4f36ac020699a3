"""Multi-head latent attention: one latent vector per token in the cache, read in two ways.

A token is stored as ``c [R]``, from which every head's key and value are made, and ``k_rope [P]``,
which all heads share: R = 512 and P = 64 in DeepSeek-V2 and V3. For head h with ``w_uk[h] [N, R]``
and ``w_uv[h] [R, DV]``:

    expanded    k = (w_uk c, k_rope), v = c w_uv: ordinary attention of H heads, N + P = 192 wide
                for scores and 128 for values. Little arithmetic per score: for prefill.
    absorbed    (w_uk c) . q_nope = c . (q_nope w_uk): the query takes the projection on itself,
                and all heads read the same R + P = 576 lanes, whose first R are the values. Little
                memory per key: for decode. The output is still latent; w_uv comes after.

Scores, and with them LSEs, are the same number in both; outputs are related by a linear map. So
states of the two forms over disjoint keys merge, once the absorbed output is projected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .errors import InvalidInputError
from .output import AttentionOutput
from .spec import AttentionSpec


@dataclass(frozen=True, eq=False)
class MLAProjection:
    """The two up-projections of an MLA layer, and what they turn into what.

    Attributes:
        w_uk: ``[H, N, R]``, from a latent to the part of a head's key without position.
        w_uv: ``[H, R, DV]``, from a latent to a head's value.
        rope_dim: P, lanes of the part of a key that carries position.

    Raises:
        InvalidInputError: The shapes do not fit together.
    """

    w_uk: torch.Tensor
    w_uv: torch.Tensor
    rope_dim: int

    def __post_init__(self) -> None:
        for name, w in (("w_uk", self.w_uk), ("w_uv", self.w_uv)):
            if not isinstance(w, torch.Tensor) or w.dim() != 3:
                got = getattr(w, "shape", type(w).__name__)
                raise InvalidInputError.of(f"{name}.shape", got, "3 dims, heads first")
        heads, _, rank = self.w_uk.shape
        if self.w_uv.shape[:2] != (heads, rank):
            allowed = f"[{heads}, {rank}, DV], as w_uk"
            raise InvalidInputError.of("w_uv.shape", list(self.w_uv.shape), allowed)
        if isinstance(self.rope_dim, bool) or not isinstance(self.rope_dim, int):
            raise InvalidInputError.of("rope_dim", repr(self.rope_dim), "an int >= 0")
        if self.rope_dim < 0:
            raise InvalidInputError.of("rope_dim", self.rope_dim, "an int >= 0")

    @property
    def num_heads(self) -> int:
        """H."""
        return self.w_uk.shape[0]

    @property
    def rank(self) -> int:
        """R, lanes of the latent."""
        return self.w_uk.shape[2]

    @property
    def query_dim(self) -> int:
        """N + P, lanes of a query and of an expanded key."""
        return self.w_uk.shape[1] + self.rope_dim

    def _scale(self, sm_scale: float | None) -> float:
        return self.query_dim**-0.5 if sm_scale is None else sm_scale

    def absorbed_spec(
        self, *, page_size: int | None, sm_scale: float | None = None, **more: Any
    ) -> AttentionSpec:
        """The spec of attention over latents: one KV head of R + P lanes, values its first R.

        Args:
            page_size: Tokens per page of the latent cache; None is ragged.
            sm_scale: Factor on scores; None is ``1 / sqrt(N + P)``, of the query before absorption.
            more: Further fields of ``AttentionSpec``.

        Returns:
            A spec of R + P = 576 and R = 512 lanes in DeepSeek's models.
        """
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_dim=self.rank + self.rope_dim,
            head_dim_v=self.rank,
            page_size=page_size,
            sm_scale=self._scale(sm_scale),
            **{"dtype": self.w_uk.dtype, **more},
        )

    def expanded_spec(
        self, *, page_size: int | None, sm_scale: float | None = None, **more: Any
    ) -> AttentionSpec:
        """The spec of attention over expanded keys: H heads of N + P lanes, values of DV.

        Args:
            page_size: Tokens per page of the latent cache, for ``plan_chunked``; None is ragged.
            sm_scale: As in ``absorbed_spec``.
            more: Further fields of ``AttentionSpec``.

        Returns:
            A spec of N + P = 192 and DV = 128 lanes in DeepSeek's models.
        """
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.query_dim,
            head_dim_v=self.w_uv.shape[2],
            page_size=page_size,
            sm_scale=self._scale(sm_scale),
            **{"dtype": self.w_uk.dtype, **more},
        )

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Queries for latents.

        Args:
            q: ``[T, H, N + P]``, the lanes with position last.

        Returns:
            ``[T, H, R + P]``.

        Raises:
            InvalidInputError: ``q`` has another shape.
        """
        want = (self.num_heads, self.query_dim)
        if q.dim() != 3 or q.shape[1:] != want:
            raise InvalidInputError.of("q.shape", list(q.shape), f"[T, {want[0]}, {want[1]}]")
        nope = self.query_dim - self.rope_dim
        latent = torch.einsum("thn,hnr->thr", q[..., :nope], self.w_uk)
        return torch.cat([latent, q[..., nope:]], dim=-1)

    def project(self, state: AttentionOutput) -> AttentionOutput:
        """The state over latents as a state over values: ``o [T, H, R]`` to ``[T, H, DV]``.

        Args:
            state: What a backend gave for absorbed queries.

        Returns:
            ``o [T, H, DV]``, and the LSE as it was.
        """
        o = torch.einsum("thr,hrv->thv", state.o, self.w_uv)
        return AttentionOutput(o, state.lse)

    def expand(
        self, latents: torch.Tensor, values: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of stored tokens, for ``ChunkedPlan.run(..., expand=)``.

        Args:
            latents: ``[n, 1, R + P]``, as stored.
            values: None, where other caches hold ``[n, HK, DV]``: they are made from the latents.

        Returns:
            ``k [n, H, N + P]`` and ``v [n, H, DV]``.

        Raises:
            InvalidInputError: The latents have another shape or dtype, or values were given.
        """
        width = self.rank + self.rope_dim
        if values is not None:
            raise InvalidInputError.of("v", "given", "None: values are made from latents")
        if latents.dim() != 3 or latents.shape[1:] != (1, width):
            raise InvalidInputError.of("latents.shape", list(latents.shape), f"[n, 1, {width}]")
        if latents.dtype != self.w_uk.dtype:
            fix = "convert a quantised cache in a function of your own, and expand that"
            raise InvalidInputError.of("latents.dtype", latents.dtype, str(self.w_uk.dtype), fix)
        c, rope = latents[:, 0, : self.rank], latents[:, :, self.rank :]
        nope = torch.einsum("nr,hkr->nhk", c, self.w_uk)
        k = torch.cat([nope, rope.expand(-1, self.num_heads, -1)], dim=-1)
        return k, torch.einsum("nr,hrv->nhv", c, self.w_uv)


__all__ = ["MLAProjection"]
