"""SGLang's own engine serves tiny random models through the plug, on a CPU.

Scheduler, radix cache, chunked prefill, model runner and sampling are SGLang's; greedy tokens must
be those of transformers. It needs SGLang and its Python dependencies, no kernels.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.engine, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[3]
NEW = 12

BASE = dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "gemma2": (
        "Gemma2",
        dict(
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
            attn_logit_softcapping=2.0,
            final_logit_softcapping=None,
            query_pre_attn_scalar=4,
            hidden_act="gelu_pytorch_tanh",  # where SGLang looks for it
            tie_word_embeddings=True,
        ),
    ),
}


def save_model(name: str, folder: Path) -> Any:
    """A random model, wide enough for attention to be far from uniform, saved to a folder."""
    import transformers

    family, changes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**BASE, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    return model


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """The tokens that transformers' eager attention gives, without a cache."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(NEW):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def prompts() -> list[list[int]]:
    """Prompts of many lengths, four of which begin alike."""
    draw = torch.Generator().manual_seed(1)

    def ids(count: int) -> list[int]:
        return torch.randint(5, 512, (count,), generator=draw).tolist()

    start = ids(48)
    return [start + ids(n) for n in (1, 3, 17, 30)] + [ids(n) for n in (1, 2, 70)]


def run_engine(tmp_path: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the engine in a process that has the library's entry point, as if installed."""
    site = tmp_path / "site"
    info = site / "attn_backends-0.0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: attn-backends\nVersion: 0.0.0\n")
    text = (ROOT / "pyproject.toml").read_text()
    line = re.search(r'^(attn_backends = "attn_backends\.engines\.sglang[^"]*)"$', text, re.M)
    assert line is not None
    entry = line.group(1).replace('"', "")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{entry}\n")
    # On a platform that it has no kernels for, SGLang imports vLLM's, and calls torch's.
    (site / "vllm").mkdir()
    (site / "vllm" / "__init__.py").write_text("")
    (site / "vllm" / "_custom_ops.py").write_text("rotary_embedding = None\n")
    path = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("engine_run.py")), json.dumps(options)],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "SGLANG_PLUGINS": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    assert lines, (done.stdout + done.stderr)[-3000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


@pytest.mark.parametrize(
    "name, page_size, backend",
    [("llama", 1, "torch_native"), ("llama", 16, "torch_native"), ("gemma2", 1, "torch_native")],
)
def test_tokens_equal_those_of_transformers(
    sglang, tmp_path, monkeypatch, name, page_size, backend
) -> None:
    monkeypatch.setenv("ATTN_BACKENDS_BACKEND", backend)
    model = save_model(name, tmp_path / "model")
    asked = prompts()
    want = [greedy(model, prompt) for prompt in asked]
    assert len({tuple(tokens) for tokens in want}) == len(want), "a model that says one thing"
    first, second = run_engine(
        tmp_path,
        {
            "model": str(tmp_path / "model"),
            "prompts": asked,
            "new_tokens": NEW,
            "engine": {
                "attention_backend": "attn_backends",
                "page_size": page_size,
                "chunked_prefill_size": 32,
            },
        },
    )
    assert first["tokens"] == want
    assert second["tokens"] == want
    # The second round finds all but the last page of each prompt in the radix cache.
    assert sum(second["cached"]) > sum(map(len, asked)) - len(asked) * (page_size + 1)


def test_a_refusal_ends_the_engine_with_its_reason(sglang, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ATTN_BACKENDS_BACKEND", "flash_attention")
    save_model("llama", tmp_path / "model")
    with pytest.raises(AssertionError, match="flash_attention"):
        run_engine(
            tmp_path,
            {
                "model": str(tmp_path / "model"),
                "prompts": [[5, 6]],
                "new_tokens": 1,
                "engine": {"attention_backend": "attn_backends"},
            },
        )
