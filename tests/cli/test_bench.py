"""bench and tune on a CPU: small shapes, the whole way from the options to the files."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attn_backends.bench.presets import SHORT
from attn_backends.registry import load_tuning, register_attention_backend

from .toys import Absent, Wrong

Cli = Callable[..., object]
DOCS = Path(__file__).parents[2] / "docs" / "benchmarking.md"
CPU = ["--device", "cpu", "--rounds", "2"]
NATIVE = [*CPU, "--backend", "torch_native"]
SMALL = {
    "prefill": ["--length", "16"],
    "extend": ["--length", "32", "--q-len", "5"],
    "decode": ["--batch", "2", "--length", "32"],
    "mla": ["--length", "16"],
    "cascade": ["--batch", "2", "--prefix", "32", "--suffix", "5"],
}


@pytest.mark.parametrize("bench", list(SMALL))
def test_each_benchmark_gives_checked_rows_that_say_where_they_come_from(
    cli: Cli, bench: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_COMMIT", "abc1234")
    answer = cli("bench", bench, *NATIVE, *SMALL[bench], "--json")
    assert answer.code == 0, answer.stderr
    meta, rows = answer.json["meta"], answer.json["rows"]
    said = " ".join(["attn-backends bench", bench, *NATIVE, *SMALL[bench], "--json"])
    assert re.sub(r"^\S+( \S+)? bench", "attn-backends bench", meta["command"]) == said
    assert meta["commit"] == "abc1234" and meta["torch"] == torch.__version__ and meta["date"]
    assert (meta["gpu"], meta["device"], meta["threads"]) == ("", "cpu", 1)
    assert rows and all(row["bench"] == bench and row["right"] for row in rows)
    for row in rows:
        assert (row["mode"], row["device"], row["clock"]) == ("eager", "cpu", "wall")
        assert 0 < row["p25_us"] <= row["median_us"] <= row["p75_us"]
        assert row["gbps"] > 0 and row["max_err"] <= row["limit"]


def test_merge_measures_pairs_and_many_states_beside_a_copy(cli: Cli) -> None:
    rows = cli("bench", "merge", *CPU, "--tokens", "3", "--json").json["rows"]
    found = {(row["case"]["states"], row["backend"]) for row in rows}
    assert found == {(2, "torch"), (2, "copy"), (8, "torch"), (8, "pairwise")}
    assert all(row["right"] and row["gbps"] > 0 for row in rows)


def test_merge_tells_how_far_apart_two_groupings_of_three_states_are(cli: Cli) -> None:
    options = [*CPU, "--part", "pairs", "--tokens", "3", "--dtype", "bf16"]
    rows = cli("bench", "merge", *options, "--json").json["rows"]
    errors = {row["backend"]: row.get("associativity_err") for row in rows}
    assert 0 < errors["torch"] <= 5 * 3 * torch.finfo(torch.bfloat16).eps
    assert errors["copy"] is None  # nothing that could be regrouped
    assert "associativity" in cli("bench", "merge", *options).stdout


def test_host_measures_select_and_plan_and_says_why_not_run(cli: Cli) -> None:
    options = ["--device", "cpu", "--backend", "torch_native", "--length", "32", "--json"]
    answer = cli("bench", "host", *options).json
    assert {row["bench"] for row in answer["rows"]} == {"host-select", "host-plan"}
    assert all(row["median_us"] > 0 for row in answer["rows"])
    assert any("run on a CPU" in item["reason"] for item in answer["refused"])


@pytest.mark.parametrize("preset", list(SHORT))
def test_a_preset_decides_the_shapes(cli: Cli, preset: str) -> None:
    options = ["--preset", preset, "--length", "8", "--json"]
    [row] = cli("bench", "decode", *NATIVE, *options).json["rows"]
    known = {"llama3-8b": (32, 8, 128), "llama3-70b": (64, 8, 128), "qwen": (28, 4, 128)}
    known |= {"gemma": (16, 8, 256), "deepseek": (128, 1, 576)}
    want = known[preset]
    assert tuple(row["case"][k] for k in ("num_heads", "num_kv_heads", "head_dim")) == want


def test_every_option_reaches_the_case(cli: Cli) -> None:
    options = "--heads 8 --dtype fp16 --kv-dtype fp8 --page-size 4 --batch-invariant --length 8"
    [row] = cli("bench", "decode", *NATIVE, *options.split(), "--json").json["rows"]
    case = row["case"]
    assert (case["num_heads"], case["dtype"], case["kv_dtype"]) == (8, "fp16", "fp8")
    assert (case["page_size"], case["batch_invariant"]) == (4, True)
    [row] = cli("bench", "decode", *NATIVE, "--page-size", "0", "--length", "8", "--json").json[
        "rows"
    ]
    assert row["case"]["page_size"] is None


def test_people_get_a_table_a_file_and_a_picture(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "new" / "out.json", tmp_path / "out.png"
    options = ["--backend", "torch_sdpa", "--length", "16", "--length", "32"]
    answer = cli("bench", "decode", *NATIVE, *options, "--json", str(file), "--plot", str(picture))
    assert answer.code == 0
    for word in ("decode 1x16 H32", "torch_sdpa", "time / torch_native", "quartiles", "1.00"):
        assert word in answer.stdout, word
    data = json.loads(file.read_text())
    assert len(data["rows"]) == 4 and str(tmp_path) not in file.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in file.parent.iterdir()] == ["out.json"]


def test_a_wrong_backend_has_no_figure_and_fails_the_command(cli: Cli, own_table: None) -> None:
    register_attention_backend("toy_wrong", type("W", (Wrong,), {"_run": _far_off}))
    options = [*NATIVE, "--backend", "toy_wrong", "--length", "16"]
    answer = cli("bench", "decode", *options)
    assert answer.code == 1
    line = next(line for line in answer.stdout.splitlines() if "toy_wrong" in line)
    assert "WRONG" in line and not re.search(r"\d+\.\d\d to", line)


def _far_off(self: Wrong, *args: object) -> object:
    out = super(Wrong, self)._run(*args)
    return type(out)(out.o * 2, out.lse)


def test_what_is_not_measured_is_said(cli: Cli, own_table: None) -> None:
    register_attention_backend("toy_absent", Absent)
    answer = cli("bench", "decode", *NATIVE, "--backend", "toy_absent", "--length", "16")
    assert answer.code == 0
    assert "not measured: toy_absent: toylib=not installed" in answer.stderr
    alone = cli("bench", "decode", *CPU, "--backend", "toy_absent", "--length", "16")
    assert alone.code == 1 and "toylib" in alone.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["decode", "--preset", "gpt-9"], "preset='gpt-9'"),
        (["decode", "--backend", "tritom"], "tritom"),
        (["decode", "--mode", "graph_cold"], "mode='graph_cold'"),
        (["decode", "--peer", "fa3"], "GPU only"),
        (["decode", "--peer", "fa3", "--no-peers"], "--no-peers"),
        (["decode", "--dtype", "int4"], "dtype='int4'"),
        (["decode", "--length", "0"], "length=0"),
        (["decode", "--q-len", "3"], "q_len=3"),
        (["decode", "--heads", "5"], "num_heads=5"),
        (["decode", "--rounds", "0"], "rounds=0"),
        (["mla", "--preset", "llama3-8b"], "deepseek, for mla"),
        (["merge", "--part", "sweep"], "part='sweep'"),
        (["merge", "--tokens", "0"], "tokens=0"),
        (["cascade", "--prefix", "40"], "prefix=40"),
        (["cascade", "--preset", "deepseek"], "without MLA"),
        (["host", "--batch", "0"], "batch=0"),
    ],
)
def test_a_malformed_question_is_an_error_with_code_2(cli: Cli, arguments, word) -> None:
    people = cli("bench", *arguments, "--device", "cpu")
    assert people.code == 2 and people.stdout == ""
    assert word in people.stderr, people.stderr
    program = cli("bench", *arguments, "--device", "cpu", "--json")
    assert program.code == 2
    assert word in program.json["error"]["message"]


def test_a_picture_without_matplotlib_is_refused_before_measuring(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    answer = cli("bench", "decode", *NATIVE, "--length", "8", "--plot", str(tmp_path / "p.png"))
    assert answer.code == 2 and "attn-backends[bench]" in answer.stderr
    assert answer.stdout == ""


def test_an_interrupted_benchmark_keeps_its_rows(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from attn_backends.cli import bench_attention

    real, calls = bench_attention.measure_case, []

    def measure(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(bench_attention, "measure_case", measure)
    file = tmp_path / "out.json"
    answer = cli("bench", "decode", *NATIVE, "--length", "8", "--length", "16", "--json", str(file))
    assert answer.code != 0
    assert len(json.loads(file.read_text())["rows"]) == 1
    assert "decode 1x8 H32" in answer.stdout


# --- compare ------------------------------------------------------------------------------------


def test_compare_leaves_with_1_if_something_became_slower(cli: Cli, tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    assert cli("bench", "decode", *NATIVE, "--length", "8", "--json", str(old)).code == 0
    same = cli("bench", "compare", str(old), str(old))
    assert same.code == 0 and "PASS: 1 same" in same.stdout
    data = json.loads(old.read_text())
    for field in ("median_us", "p20_us", "p25_us", "p75_us", "p80_us"):
        data["rows"][0][field] *= 100
    new.write_text(json.dumps(data))
    people = cli("bench", "compare", str(old), str(new))
    assert people.code == 1 and "FAIL: 1 slower" in people.stdout and "100.0" in people.stdout
    program = cli("bench", "compare", str(old), str(new), "--json")
    assert program.code == 1
    assert program.json["ok"] is False and program.json["changes"][0]["verdict"] == "slower"
    assert cli("bench", "compare", str(old), str(new), "--threshold", "200").code == 0
    assert cli("bench", "compare", str(new), str(old)).code == 0
    gone = cli("bench", "compare", str(old), str(tmp_path / "none.json"))
    assert gone.code == 2 and "none.json" in gone.stderr


# --- tune ---------------------------------------------------------------------------------------


def test_tune_writes_a_file_that_explain_shows_and_goes_on_with_it(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tuning.json"
    options = "--device cpu --phase decode --batch 1 --length 8 --rounds 1".split()
    options += ["--backend", "torch_native", "--backend", "torch_sdpa", "--out", str(file)]
    answer = cli("tune", *options)
    assert answer.code == 0, answer.stderr
    assert "2 points measured" in answer.stdout and "D128-G4-bfloat16-paged" in answer.stdout
    assert "ATTN_BACKENDS_TUNING_FILE" in answer.stdout
    rows = load_tuning(file).rows
    assert {row.bucket.rpartition("-")[2] for row in rows} == {"paged", "ragged"}
    assert load_tuning(file).meta["command"].endswith("--out tuning.json")
    again = cli("tune", *options, "--json")
    assert again.json["rows"] == json.loads(file.read_text())["rows"]
    assert "0 points measured" in cli("tune", *options).stdout

    monkeypatch.setenv("ATTN_BACKENDS_TUNING_FILE", str(file))
    layer = "explain --kv-heads 8 --page-size 16 --phase decode --device cpu".split()
    text = cli(*layer).stdout
    [paged] = [row for row in rows if row.bucket.endswith("paged")]
    assert "measured, us" in text and "1 x 1 over 8" in text
    for name in ("torch_native", "torch_sdpa"):
        assert f"{paged.points[0].median_us[name]:g}" in text
    measured = cli(*layer, "--json").json["phases"]["decode"]["measured"]
    assert measured["points"][0]["kv_len"] == 8


def test_tune_writes_where_the_environment_reads(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.json"
    monkeypatch.setenv("ATTN_BACKENDS_TUNING_FILE", str(file))
    options = "--device cpu --phase decode --length 8 --rounds 1 --backend torch_native".split()
    assert cli("tune", *options).code == 0
    assert load_tuning(file).rows


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--preset", "gpt-9"], "preset='gpt-9'"),
        (["--phase", "both"], "phase='both'"),
        (["--backend", "tritom"], "tritom"),
        (["--budget", "0"], "budget=0"),
        (["--rounds", "0"], "rounds=0"),
    ],
)
def test_tune_refuses_what_it_cannot_measure(cli: Cli, arguments, word, tmp_path: Path) -> None:
    answer = cli("tune", "--device", "cpu", "--out", str(tmp_path / "t.json"), *arguments)
    assert answer.code == 2 and word in answer.stderr
    assert not (tmp_path / "t.json").exists()


# --- the house ----------------------------------------------------------------------------------


def test_help_of_bench_names_every_benchmark(cli: Cli) -> None:
    text = cli("bench", "--help").stdout
    for name in ("prefill", "extend", "decode", "mla", "merge", "cascade", "host", "compare"):
        assert name in text
    assert "bench" in cli("--help").stdout and "tune" in cli("--help").stdout


def test_other_commands_do_not_load_triton_or_matplotlib() -> None:
    code = (
        "import sys; from attn_backends.cli.app import build_app; build_app()\n"
        "assert 'triton' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


COMMANDS = [
    line.strip()
    for block in re.findall(r"^```\n(.*?)^```", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if re.match(r"(\w+=\S+ )*attn-backends ", line)
]


def test_the_page_has_commands_of_every_kind() -> None:
    names = {" ".join(line.split()[1:3]) for line in COMMANDS}
    assert any(line.startswith("ATTN_BACKENDS_TUNING_FILE=") for line in COMMANDS)
    assert names >= {f"bench {n}" for n in (*SMALL, "merge", "host", "compare")}
    assert any(line.startswith("attn-backends tune") for line in COMMANDS)


def test_the_commands_of_the_page_run(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, in one folder; a GPU is not asked for."""
    monkeypatch.chdir(tmp_path)
    for line in COMMANDS:
        words = shlex.split(line)
        start = words.index("attn-backends") + 1
        settings, words = words[: start - 1], words[start:]
        if "compare" not in words and "--device" not in words and words[0] in ("bench", "tune"):
            continue  # standard points, which take a GPU
        with monkeypatch.context() as patch:
            for setting in settings:
                patch.setenv(*setting.split("=", 1))
            answer = cli(*words)
        assert answer.code == 0, f"{line}\n{answer.stdout}{answer.stderr}"
        if settings and not torch.cuda.is_available():
            assert "measured on cpu" in answer.stdout


# --- progress -----------------------------------------------------------------------------------


def test_progress_is_shown_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from rich.console import Console

    from attn_backends.cli import bench_progress

    for terminal in (True, False):
        file = io.StringIO()
        console = Console(file=file, force_terminal=terminal, width=100)
        monkeypatch.setattr(bench_progress, "stderr", lambda console=console: console)
        with bench_progress.progress_bar("decode", 2) as step:
            step("1x64")
            step(None)
        assert ("decode 1x64" in file.getvalue()) is terminal
        assert ("1/2" in file.getvalue()) is terminal


def test_a_point_that_cannot_be_measured_does_not_end_the_others(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attn_backends.cli import bench_attention

    real = bench_attention.measure_case

    def measure(x: object, *args: object, **kwargs: object) -> object:
        if x.case.kv_len == 8:
            raise torch.OutOfMemoryError("out of memory")
        return real(x, *args, **kwargs)

    monkeypatch.setattr(bench_attention, "measure_case", measure)
    answer = cli("bench", "decode", *NATIVE, "--length", "8", "--length", "16", "--json")
    assert answer.code == 1
    assert [row["case"]["kv_len"] for row in answer.json["rows"]] == [16]
    [item] = answer.json["refused"]
    assert item["backend"] == "every backend" and "out of memory" in item["reason"]
