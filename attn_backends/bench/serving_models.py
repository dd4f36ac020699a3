"""Checkpoints for engines to serve: shapes of models with drawn weights, small enough for a test.

A drawn model is no worse a test of attention than a trained one where its scores differ: softcaps,
windows and sinks of these shapes are such that leaving one out changes the tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: A file that appears in a model's folder when it is complete.
READY = "complete"

#: Some hundred million weights, and scores that spread over several units.
SMALL = dict(
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=128,
    vocab_size=32000,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
)
#: Every score is bent by the cap, and prompts outgrow the window of every other layer.
SMALL_GEMMA2 = SMALL | dict(
    query_pre_attn_scalar=128,
    sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 3,
    attn_logit_softcapping=5.0,
    hidden_act="gelu_pytorch_tanh",  # where engines look for it
    tie_word_embeddings=True,
)
#: Sinks and windows; all experts serve every token, so that no rounding makes another choice.
SMALL_GPT_OSS = SMALL | dict(
    head_dim=64,
    intermediate_size=1024,
    sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 3,
    num_local_experts=4,
    num_experts_per_tok=4,
)


def drawn_folder(
    family: str,
    shape: Mapping[str, Any],
    device: str,
    target: Path,
    spread: float = 0.02,
    embedding: float | None = None,
) -> Path:
    """Write a checkpoint of a shape.

    Args:
        family: Of transformers' classes, such as ``Llama``.
        shape: Arguments of the family's configuration.
        device: Where weights are drawn.
        target: The folder; ``READY`` appears in it last.
        spread: Standard deviation of matrices; that of models before training is 0.02.
        embedding: The same of embeddings, if it differs. Where they are scaled up and tied, a wide
            one makes every token follow itself.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**shape, dtype=torch.bfloat16)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = getattr(transformers, f"{family}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if embedding is not None and "embed_tokens" in name:
                parameter.normal_(0, embedding)
            elif parameter.dim() > 1:
                parameter.normal_(0, spread)
            elif name.endswith("sinks"):  # about as much as all keys together, or next to nothing
                parameter.normal_(3, 2)
    model.save_pretrained(target)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    (target / READY).touch()
    return target


def wait_until_ready(folder: str | Path) -> None:
    """Return once whoever writes the model has finished."""
    while not (Path(folder) / READY).exists():
        time.sleep(0.05)


__all__ = [
    "READY",
    "SMALL",
    "SMALL_GEMMA2",
    "SMALL_GPT_OSS",
    "drawn_folder",
    "wait_until_ready",
]
