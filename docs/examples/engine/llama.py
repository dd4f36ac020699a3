"""A Llama in plain torch; keys and values go to pages, attention goes to the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import embedding, linear, rms_norm, silu

import attn_backends as ab

#: ``(q [T, H, D], k_cache, v_cache) -> o [T, H, D]``, over the sequences of a step.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class PagedLlama:
    """The weights of a transformers ``LlamaForCausalLM``, and a paged cache.

    Raises:
        ValueError: The configuration has something that this file does not do.
    """

    def __init__(self, model: Any, num_pages: int, page_size: int, max_len: int) -> None:
        config, rope = model.config, model.config.rope_parameters
        kind = (config.model_type, rope["rope_type"], config.hidden_act)
        if kind != ("llama", "default", "silu") or config.attention_bias or config.mlp_bias:
            raise ValueError(f"only a plain Llama, without biases and scaled rope: {config}")
        self.weights: dict[str, torch.Tensor] = model.state_dict()
        table = self.weights["model.embed_tokens.weight"]
        self.head = self.weights.get("lm_head.weight", table)
        self.eps, self.dim = config.rms_norm_eps, model.model.layers[0].self_attn.head_dim
        self.spec = ab.AttentionSpec(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=self.dim,
            dtype=table.dtype,
            page_size=page_size,
        )
        self.device = table.device
        pages = (num_pages, page_size, self.spec.num_kv_heads, self.dim)
        shape = (config.num_hidden_layers, 2, *pages)
        self.cache = torch.zeros(shape, dtype=table.dtype, device=self.device)
        steps = torch.arange(0, self.dim, 2, device=self.device).float() / self.dim
        positions = torch.arange(max_len, device=self.device).float()
        angles = torch.outer(positions, 1 / rope["rope_theta"] ** steps)
        self.cos, self.sin = angles.cos()[:, None], angles.sin()[:, None]  # [max_len, 1, D/2]

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of ``[T, heads, D]``."""
        a, b = x.float().chunk(2, dim=-1)
        cos, sin = self.cos[positions], self.sin[positions]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor,
        rows: torch.Tensor, attend: Attend,
    ) -> torch.Tensor:  # fmt: skip
        """Logits ``[len(rows), V]`` of one step.

        Args:
            ids: ``[T]`` tokens of all sequences in a row.
            positions: ``[T]`` their positions.
            slots: ``[T]`` where their keys go, ``page * page_size + offset``; -1 is nowhere.
            rows: Rows whose logits are wanted.
            attend: Attention of the step.
        """

        def project(x: torch.Tensor, name: str) -> torch.Tensor:
            return linear(x, self.weights[f"model.layers.{layer}.{name}_proj.weight"])

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            return rms_norm(x, x.shape[-1:], self.weights[f"model.{name}.weight"], self.eps)

        x = embedding(ids, self.weights["model.embed_tokens.weight"])  # [T, hidden]
        for layer, (k_cache, v_cache) in enumerate(self.cache):
            y = norm(x, f"layers.{layer}.input_layernorm")
            q, k, v = (project(y, f"self_attn.{n}").unflatten(1, (-1, self.dim)) for n in "qkv")
            ab.write_kv(self.rotate(k, positions), v, k_cache, v_cache, slots)
            o = attend(self.rotate(q, positions), k_cache, v_cache)
            x = x + project(o.flatten(1), "self_attn.o")
            y = norm(x, f"layers.{layer}.post_attention_layernorm")
            x = x + project(silu(project(y, "mlp.gate")) * project(y, "mlp.up"), "mlp.down")
        return linear(norm(x[rows], "norm"), self.head)
