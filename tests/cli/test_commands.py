"""list, explain, roofline: the same facts for people and for programs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from attn_backends.bench.roofline import MODELS
from attn_backends.registry import register_attention_backend
from attn_backends.version import __version__

from .toys import Absent

Cli = Callable[..., object]


# --- list ---------------------------------------------------------------------------------------


def test_list_shows_every_backend_with_its_declaration(cli: Cli) -> None:
    answer = cli("list", "--json")
    assert answer.code == 0
    backends = {b["name"]: b for b in answer.json["backends"]}
    native = backends["torch_native"]
    assert native["available"] and native["reasons"] == []
    assert native["capabilities"]["phases"] == ["prefill", "decode"]
    assert "paged" in native["capabilities"]["features"]
    assert "float32" in native["capabilities"]["dtypes"]


def test_list_gives_the_reason_and_the_original_import_error(cli: Cli, own_table: None) -> None:
    register_attention_backend("toy_absent", Absent)
    register_attention_backend("toy_gone", "no_such_module_here:Backend")
    backends = {b["name"]: b for b in cli("list", "--json").json["backends"]}
    assert not backends["toy_absent"]["available"]
    assert (
        "toylib=not installed (supported: >=3); pip install toylib"
        in backends["toy_absent"]["reasons"]
    )
    assert "No module named 'no_such_module_here'" in backends["toy_gone"]["reasons"][0]
    assert backends["toy_gone"]["capabilities"] is None
    people = cli("list")
    assert people.code == 0
    assert "No module named 'no_such_module_here'" in people.stdout
    assert "torch_native" in people.stdout and "toy_absent" in people.stdout


def test_list_never_starts_cuda() -> None:
    code = (
        "import sys, torch; sys.argv = ['attn-backends', 'list', '--json']\n"
        "from attn_backends.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("{") and done.stdout.rstrip().endswith("}")


# --- explain ------------------------------------------------------------------------------------


def test_explain_names_the_backend_the_layer_and_the_reasons(cli: Cli, own_table: None) -> None:
    register_attention_backend("toy_absent", Absent)
    answer = cli("explain", "--device", "cpu", "--backend", "torch_native", "--json")
    assert answer.code == 0
    assert set(answer.json["phases"]) == {"prefill", "decode"}
    decode = answer.json["phases"]["decode"]
    assert decode["name"] == "torch_native"
    assert decode["layer"] == "argument"
    assert any("toylib" in reason for reason in decode["rejected"]["toy_absent"])
    people = cli("explain", "--device", "cpu", "--backend", "torch_native").stdout
    assert "decode: torch_native (chosen by argument" in people
    assert "toylib=not installed" in people


def test_explain_passes_every_option_to_the_spec(cli: Cli) -> None:
    options = "--heads 12 --kv-heads 4 --head-dim 80 --head-dim-v 48 --dtype fp16 --kv-dtype fp8"
    options += " --page-size 32 --no-causal --window 7,3 --softcap 30 --alibi --mask"
    options += " --batch-invariant --phase prefill --device cpu --json"
    answer = cli("explain", *options.split())
    assert answer.json["spec"] == {
        "num_heads": 12,
        "num_kv_heads": 4,
        "head_dim": 80,
        "head_dim_v": 48,
        "dtype": "float16",
        "kv_dtype": "float8_e4m3fn",
        "page_size": 32,
        "causal": False,
        "window": [7, 3],
        "softcap": 30.0,
        "sm_scale": None,
        "has_alibi": True,
        "has_mask": True,
        "batch_invariant": True,
    }
    assert list(answer.json["phases"]) == ["prefill"]


def test_explain_says_that_the_environment_won(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BACKENDS_DECODE", "torch_native")
    phases = cli("explain", "--device", "cpu", "--json").json["phases"]
    assert phases["decode"]["layer"] == "environment"
    assert phases["prefill"]["layer"] == "auto"


def test_explain_leaves_with_1_if_the_call_would_be_refused(cli: Cli, own_table: None) -> None:
    register_attention_backend("toy_absent", Absent)
    answer = cli("explain", "--device", "cpu", "--backend", "toy_absent", "--json")
    assert answer.code == 1
    assert answer.json["phases"]["prefill"]["name"] is None
    assert "toylib" in answer.json["phases"]["prefill"]["error"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--backend", "torch_nativ"], "the closest is torch_native"),
        (["--kv-heads", "5"], "num_kv_heads=5"),
        (["--window", "-1"], "W - 1"),
        (["--window", "1,2,3"], "LEFT"),
        (["--dtype", "int4"], "dtype='int4'"),
        (["--phase", "training"], "phase='training'"),
        (["--config", "no_such_file.yaml"], "no_such_file.yaml"),
    ],
)
def test_a_malformed_question_is_an_error_with_code_2(cli: Cli, arguments, word) -> None:
    people = cli("explain", "--device", "cpu", *arguments)
    assert people.code == 2
    assert word in people.stderr and people.stdout == ""
    program = cli("explain", "--device", "cpu", *arguments, "--json")
    assert program.code == 2
    assert word in program.json["error"]["message"]


# --- roofline -----------------------------------------------------------------------------------


def test_roofline_prints_the_account_of_the_default_model(cli: Cli) -> None:
    text = cli("roofline").stdout
    for figure in ("4.000 GiB", "16.156 GiB", "5.18 ms", "165.71 ms", "1.0995e+12", "35.56 ms"):
        assert figure in text, figure
    for figure in ("63.4", "6553.6", "103x", "295 FLOP/byte", "776 bytes", "0.50 FLOP/byte"):
        assert figure in text, figure


def test_roofline_in_json_has_units_in_its_names(cli: Cli) -> None:
    account = cli("roofline", "--preset", "llama3-8b", "--length", "32768", "--json").json
    assert account["score_bytes_per_layer"] == 64 * 2**30
    assert account["gpu"] == "h100" and account["bandwidth_tbs"] == 3.35
    assert account["tflops"] == 989.4
    assert account["merge"]["bytes_per_token_head"] == 776


def test_roofline_takes_shapes_and_rates_instead_of_presets(cli: Cli) -> None:
    shapes = "--heads 32 --kv-heads 8 --head-dim 128 --layers 32".split()
    rates = "--bandwidth-tbs 3.35 --tflops 989.4 --dtype bfloat16 --json".split()
    given = cli("roofline", *shapes, *rates).json
    preset = cli("roofline", "--json").json
    for part in ("textbook", "fused", "decode", "merge", "ridge_flop_per_byte"):
        assert given[part] == preset[part]
    assert given["gpu"] == "custom" and given["dtype"] == "bf16"


def test_roofline_lets_shapes_change_a_preset_and_says_so(cli: Cli) -> None:
    account = cli("roofline", "--preset", "llama3-8b", "--layers", "1", "--json").json
    assert account["model"]["name"] == "llama3-8b (changed)"
    assert account["textbook"]["floor_ms_model"] == account["textbook"]["floor_ms_per_layer"]


@pytest.mark.parametrize("name", list(MODELS))
def test_roofline_knows_every_preset_in_its_help(cli: Cli, name: str) -> None:
    assert cli("roofline", "--preset", name, "--json").code == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--preset", "gpt-9"], "llama3-8b"),
        (["--gpu", "h900"], "h100"),
        (["--heads", "8"], "--head-dim"),
        (["--dtype", "fp8", "--gpu", "a100"], "fp8"),
        (["--tflops", "0"], "tflops"),
        (["--length", "0"], "length"),
    ],
)
def test_roofline_refuses_what_it_cannot_count(cli: Cli, arguments, word) -> None:
    answer = cli("roofline", *arguments)
    assert answer.code == 2
    assert word in answer.stderr


# --- the console script -------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_package_is_said_with_the_command_that_installs_it(package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from attn_backends.cli.app import main\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "pip install 'attn-backends[cli]'" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_help_names_every_command(cli: Cli) -> None:
    text = cli("--help").stdout
    for name in ("list", "doctor", "explain", "generate", "roofline"):
        assert name in text


def test_the_version_is_that_of_the_package(cli: Cli) -> None:
    answer = cli("--version")
    assert (answer.code, answer.stdout.strip()) == (0, __version__)


def test_a_pipe_gets_neither_colors_nor_folded_tables(cli: Cli) -> None:
    text = cli("roofline").stdout
    assert "\x1b" not in text
    assert "textbook prefill" in text
