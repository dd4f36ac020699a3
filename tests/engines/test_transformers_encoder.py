"""A real bidirectional encoder gives the same sentence embeddings through the plug."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attn_backends.engines.transformers import attention as plug
from attn_backends.engines.transformers import enable

pytestmark = pytest.mark.xdist_group("weights")

SENTENCES = [
    "A cat sleeps on the warm windowsill.",
    "On the sunny sill, a kitten is taking a nap.",
    "Interest rates rose by half a point.",
    "",
    "Attention weighs every word of a text against every other word, in both directions, so that "
    "the meaning of each may depend on what comes before it and on what comes after it.",
]


@pytest.fixture(scope="module")
def loaded(minilm: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(minilm), local_files_only=True)
    model = AutoModel.from_pretrained(
        str(minilm), local_files_only=True, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    inputs = dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))
    return model, inputs


def embed(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Unit vectors ``[B, D]``: the mean of the real tokens' states."""
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    weights = inputs["attention_mask"][..., None].to(states.dtype)
    return torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=1)


@pytest.mark.parametrize(
    "backend, device",
    [("torch_native", "cpu"), pytest.param("triton", "cuda", marks=pytest.mark.gpu)],
)
def test_embeddings_of_minilm_are_as_near_to_float64_as_sdpa(loaded, monkeypatch, backend, device):
    model, inputs = loaded
    model, inputs = model.to(device), {name: x.to(device) for name, x in inputs.items()}
    masks: list[bool] = []
    make = plug._spec
    monkeypatch.setattr(plug, "_spec", lambda *f: masks.append(f[-1]) or make(*f))
    sdpa = embed(model, inputs)
    exact = embed(model.double(), inputs)
    model.float()
    try:
        with enable() as handle:
            model.set_attn_implementation(handle.names[backend])
            ours = embed(model, inputs)
    finally:
        model.set_attn_implementation("sdpa")
    rounding = torch.finfo(torch.float32).eps
    allowed = 2 * (sdpa - exact).abs().max().item() + rounding
    assert (ours - exact).abs().max() <= allowed < 1e-5
    assert len(masks) == 6 and not any(masks)  # padding is read as lengths, never as a matrix
    alike = ours @ ours.T
    assert alike[0, 1] > 0.5 > 0.2 > alike[0, 2]
