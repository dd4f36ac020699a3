"""The comparison of engines reports what the engines said, and only that."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_backends.bench import (
    serving,
    serving_models,
    serving_rates,
    serving_tokens,
    serving_truth,
    sglang_run,
    vllm_run,
)
from attn_backends.bench.tables import table

SOON = 60.0


def answer(*sequences: list[int], second: float = -0.75) -> dict[str, Any]:
    """Tokens with the logprobs of three candidates: the token itself, and two below it."""
    return {
        "tokens": [list(s) for s in sequences],
        "logprobs": [
            [{str(t): -0.5, str(t + 1): second, str(t + 2): -3.0} for t in s] for s in sequences
        ],
        "cached": 0,
    }


class Fake:
    """An engine that goes on from any text by a rule: one more than the last token.

    Args:
        other: Tokens after which it says something else than the rule, and what.
        moved: Added to the log-probability of the second candidate.
    """

    def __init__(self, backend: str, other: dict[int, int] | None = None, moved: float = 0.0):
        self.backend, self.other, self.moved = backend, other or {}, moved
        self.dtype = "bfloat16"
        self.case = {"model": "made", "dtype": self.dtype}
        self.model = vllm_run.MODELS["smollm2"]
        self.asked: list[dict[str, Any]] = []

    def ask(self, command: dict[str, Any], deadline: float) -> dict[str, Any]:
        self.asked.append(command)
        counts = command["max_tokens"]
        if not isinstance(counts, list):
            counts = [counts] * len(command["prompts"])
        found: dict[str, Any] = {"tokens": [], "logprobs": [], "cached": 3, "seconds": 0.5}
        for prompt, count in zip(command["prompts"], counts):
            last, said, steps = prompt[-1], [], []
            for _ in range(count):
                token = self.other.get(last, last + 1)
                steps.append({str(last + 1): -0.5, str(last + 2): -0.75 + self.moved, "0": -4.0})
                said.append(token)
                last = token
            found["tokens"].append(said)
            found["logprobs"].append(steps)
        return found


def agree(*engines: Fake) -> list[dict[str, Any]]:
    prompts = [[100], [1000], [2000]]
    soon = time.monotonic() + SOON
    return noted(engines, prompts, serving_tokens.Times(soon, soon))


def noted(
    engines: Any, prompts: list[list[int]], times: serving_tokens.Times, scorer: Any = None
) -> list[Any]:
    """Rows in the order they were first noted; the reference against itself goes first."""
    rows: list[dict[str, Any]] = []

    def note(more: list[dict[str, Any]]) -> None:
        rows.extend(row for row in more if not any(row is known for known in rows))

    serving_tokens.agreement("tokens", list(engines), prompts, times, note, scorer)
    return rows[-1:] + rows[:-1]


def test_equal_tokens_are_counted_up_to_the_first_difference() -> None:
    same = serving_tokens.whole_sequences(answer([1, 2, 3, 4]), answer([1, 2, 3, 4]))
    assert (same["equal_sequences"], same["equal_tokens"]) == (1, 1.0)
    theirs = answer([1, 3, 3, 4], [5, 6, 7, 8])
    other = serving_tokens.whole_sequences(answer([1, 2, 3, 4], [5, 6, 7, 8]), theirs)
    assert other["equal_sequences"] == 1 and other["sequences"] == 2
    assert other["equal_tokens"] == 5 / 8


def test_every_step_is_compared_under_the_same_text() -> None:
    ours = Fake("attn_backends", other={102: 104, 110: 112, 1050: 1052})
    again, row = agree(Fake("THEIRS"), ours)
    assert row["equal_sequences"] == 1 and row["steps"] == 3 * 64 and row["parted"] == 3
    assert again["parted"] == 0 and "other way round" in again["backend"]
    assert row["max_gap"] == row["median_gap"] == pytest.approx(0.25) and row["beyond_top"] == 0
    # Sequences go on from the reference's token: the prompt, and the text up to there.
    assert ours.asked[1]["prompts"] == [[100, 101, 102, 103], [*range(1000, 1052)]]
    assert ours.asked[1]["max_tokens"] == [61, 13]
    assert ours.asked[2]["prompts"] == [[*range(100, 112)]]
    assert len(ours.asked) == 3


def test_a_choice_beyond_the_noise_of_the_engines_own_backends_is_told() -> None:
    ours = Fake("attn_backends", other={102: 104})
    again, yardstick, row = agree(Fake("THEIRS"), Fake("OTHER", moved=0.1), ours)
    assert again["gap_moved_max"] == 0.0
    assert yardstick["gap_moved_max"] == pytest.approx(0.1)
    assert row["noise"] == pytest.approx(0.1)
    assert row["decided_steps"] == row["steps"] and row["decided_parted"] == 1
    assert agree(Fake("THEIRS"), Fake("OTHER", moved=0.3), ours)[2]["decided_parted"] == 0


def test_a_token_that_the_reference_did_not_think_of_is_counted_apart() -> None:
    row = agree(Fake("THEIRS"), Fake("attn_backends", other={1005: 7}))[1]
    assert row["beyond_top"] == 1 and row["max_gap"] == 0.0 and row["decided_parted"] == 1


class Scorer:
    """Float32 whose best token is always one more than the last; another is so much worse."""

    def ask(self, command: dict[str, Any], deadline: float) -> dict[str, Any]:
        assert command["weights"] == "bfloat16"
        found = []
        for text, count, among in zip(command["score"], command["counts"], command["among"]):
            steps = []
            for token, asked in zip(text[-count:], among):
                steps.append({str(t): -4.0 for t in asked} | {str(token): -0.5})
                steps[-1][str(token + 1)] = -0.625
            found.append(steps)
        return {"logprobs": found}


def test_choices_and_gaps_are_judged_by_float32() -> None:
    ours = Fake("attn_backends", other={102: 104, 1005: 7}, moved=0.0625)
    soon = serving_tokens.Times(time.monotonic() + SOON, time.monotonic() + SOON)
    rows = noted([Fake("THEIRS"), ours], [[100], [1000]], soon, Scorer())
    reference, found = rows[1]["reference_float32"], rows[1]["float32"]
    assert reference["steps"] == found["steps"] == 128 and reference["other_choice"] == 0
    assert (found["other_choice"], found["beyond_asked"]) == (2, 1)
    assert found["given_up_max"] == found["given_up_median"] == 0.125
    assert reference["gap_error_max"] == reference["gap_error_median"] == 0.125
    assert found["gap_error_max"] == pytest.approx(0.0625)
    assert rows[0]["float32"]["other_choice"] == 0
    assert "float32" not in agree(Fake("THEIRS"), ours)[1]


def test_an_engine_that_does_not_answer_again_leaves_its_steps_out() -> None:
    class Once(Fake):
        def ask(self, command: dict[str, Any], deadline: float) -> Any:
            return None if self.asked else super().ask(command, deadline)

    row = agree(Fake("THEIRS"), Once("attn_backends", other={102: 104}))[1]
    assert row["steps"] == 3 + 2 * 64


def test_steps_are_left_out_where_there_is_no_time_to_go_on() -> None:
    prompts, now = [[100], [1000]], time.monotonic()
    engines = [Fake("THEIRS"), Fake("attn_backends", other={102: 104})]
    row = noted(engines, prompts, serving_tokens.Times(now - 1, now + SOON))[1]
    assert row["steps"] == 3 + 64 and row["parted"] == 1


class Clocked(Fake):
    """Takes the times that it is given, in turn."""

    def __init__(self, backend: str, seconds: list[float], log: list[str]):
        super().__init__(backend)
        self.seconds, self.log = iter(seconds), log

    def ask(self, command: dict[str, Any], deadline: float) -> dict[str, Any]:
        self.log.append(self.backend)
        return {"seconds": next(self.seconds), "cached": 7}


def test_engines_are_compared_within_a_turn() -> None:
    log: list[str] = []
    slow = [9.0] * 4 + [1.0] * 4 + [2.0] * 4 + [4.0] * 4
    engines = [Clocked("THEIRS", slow, log), Clocked("OURS", [s / 1.25 for s in slow], log)]
    rows = serving_rates.throughput("rates", engines, [[1]], 3, time.monotonic() + SOON)
    assert [r["case"]["workload"] for r in rows[::2]] == [
        "prefill",
        "decode",
        "long decode",
        "mixed",
    ]
    for theirs, ours in zip(rows[::2], rows[1::2]):
        assert theirs["ratio"] == 1.0 and theirs["turns"] == ours["turns"] == 3
        assert ours["ratio"] == ours["ratio_p25"] == ours["ratio_p75"] == pytest.approx(1.25)
        assert theirs["seconds"] == [1.0, 2.0, 4.0]  # the first turn warmed up
        assert ours["cached_prompt_tokens"] == 7
        assert ours["tokens_per_s"] == pytest.approx(1.25 * theirs["tokens_per_s"])
    firsts = [log[i] for i in range(0, len(log), 8)]
    assert set(firsts) == {"THEIRS", "OURS"}


def test_workloads_can_be_chosen() -> None:
    engines = [Clocked("THEIRS", [1.0] * 9, []), Clocked("OURS", [1.0] * 9, [])]
    soon = time.monotonic() + SOON
    rows = serving_rates.throughput("rates", engines, [[1]], 2, soon, ["decode"])
    assert {row["case"]["workload"] for row in rows} == {"decode"} and rows[0]["turns"] == 2


def test_an_answer_is_waited_for_no_longer_than_patience_and_deadline() -> None:
    now = time.monotonic()
    assert serving_tokens.Times(now, now + 5, 100.0).late == now + 5
    assert now + 2 <= serving_tokens.Times(now, now + 500, 2.0).late < now + 60
    asked: list[float] = []

    class Watched(Fake):
        def ask(self, command: dict[str, Any], deadline: float) -> dict[str, Any]:
            asked.append(deadline)
            return super().ask(command, deadline)

    times = serving_tokens.Times(now + SOON, now + SOON, 7.0)
    noted([Watched("THEIRS"), Watched("attn_backends")], [[100]], times)
    assert len(asked) == 3 and all(late < now + SOON for late in asked)


def test_no_turn_begins_that_would_not_end_in_time() -> None:
    log: list[str] = []
    engine = Clocked("THEIRS", [1.0] * 100, log)
    assert serving_rates.throughput("rates", [engine], [[1]], 9, time.monotonic() - 1) == []
    assert log == []


@pytest.mark.parametrize("missing, reference", [((), "fa3"), (("fa3",), "triton")])
def test_engines_that_do_not_come_up_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...], reference: str
) -> None:
    """The first that is up is the reference, and is timed whatever is chosen."""

    class Started(Clocked):
        def __init__(self, backend: str, *rest: Any):
            super().__init__(backend, [0.25] * 99, [])
            self.ready: dict[str, Any] = {}
            self.process = SimpleNamespace(pid=0, wait=lambda: None)

        def ask(self, command: dict[str, Any] | None, deadline: float) -> Any:
            if command is None:
                return None if self.backend in missing else {"version": "0"}
            return {**Fake.ask(self, command, deadline), "cached": 0, "seconds": next(self.seconds)}

        def why(self) -> str:
            return "no such library"

    monkeypatch.setattr(sglang_run, "start", Started)
    monkeypatch.setattr(sglang_run, "stop", lambda each: None)
    monkeypatch.setattr(sglang_run, "smollm2_folder", lambda gguf, folder: folder.mkdir())
    monkeypatch.setattr(sglang_run, "tokenized", lambda folder: [[100], [1000]])
    asked = (
        "--models smollm2 --device cpu --peers fa3,triton --timed attn_backends "
        "--workloads decode --turns 1"
    )
    parsed = sglang_run.options_of(asked.split())
    rows: list[dict[str, Any]] = []
    started = sglang_run.serve("smollm2", tmp_path, parsed, time.monotonic() + 9, rows.extend)
    assert [name for name, facts in started.items() if "failed" in facts] == [
        f"smollm2 bfloat16 {name}" for name in missing
    ]
    tokens = [row for row in rows if row["bench"] == "sglang_tokens"]
    assert {row["reference"] for row in tokens} == {reference}
    assert {"triton", "attn_backends"} - {reference} <= {row["backend"] for row in tokens}
    timed = [row["backend"] for row in rows if row["bench"] == "sglang_throughput"]
    assert timed == [reference, "attn_backends"]
    assert all(row["case"]["page_size"] == 1 for row in rows)


def test_vllm_engines_start_before_the_model_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each dtype has rows beside its reference; one that comes up alone is compared to nobody."""
    log: list[str] = []

    class Started(Fake):
        def __init__(self, backend: str, model: Any, dtype: str, *rest: Any):
            super().__init__(backend)
            self.dtype, self.ready = dtype, {}
            log.append(f"{dtype} {backend}")

        def ask(self, command: dict[str, Any] | None, deadline: float) -> Any:
            if command is None:
                late = (self.dtype, self.backend) == ("float32", "attn_backends")
                return None if late else {"version": "0"}
            whom = Scorer() if "score" in command else super()
            return whom.ask(command, deadline)

        def why(self) -> str:
            return "late"

        def stop(self) -> None:
            log.append("stop")

    def drawn(family: str, shape: Any, device: str, folder: Path, *widths: Any) -> None:
        log.append(f"{family} {widths}")

    monkeypatch.setattr(vllm_run, "start", Started)
    monkeypatch.setattr(vllm_run, "drawn_folder", drawn)
    monkeypatch.setattr(vllm_run, "random_ids", lambda vocabulary: [[100], [1000]])
    parsed = SimpleNamespace(dtypes="float32,bfloat16", gguf=None, share=0.5, patience=9.0, turns=0)
    parsed.timed = None
    rows: list[dict[str, Any]] = []
    started = vllm_run.serve("gemma2", tmp_path, parsed, time.monotonic() + 9, rows.extend)
    ours = ["FLASH_ATTN", "TRITON_ATTN", "attn_backends"]
    names = ["float32 transformers", "float32 attn_backends", *(f"bfloat16 {n}" for n in ours)]
    assert log == [*names, "Gemma2 (0.05, 0.004)", *["stop"] * 5]
    assert list(started) == [f"gemma2 {name}" for name in names]
    assert {row["reference"] for row in rows} == {"FLASH_ATTN"}
    assert all("reference_float32" in row for row in rows)
    assert {row["backend"] for row in rows if "prompts" not in row["backend"]} == set(ours[1:])


def worker(code: str, tmp_path: Path) -> serving.Engine:
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    model = vllm_run.MODELS["llama8"]
    return serving.Engine("X", model, "bfloat16", process, tmp_path / "log")


def test_an_engine_is_asked_and_answers(tmp_path: Path) -> None:
    echo = "import sys\nprint('{}', flush=True)\nfor l in sys.stdin: print(l, end='', flush=True)"
    asked = worker(echo, tmp_path)
    soon = time.monotonic() + 30
    assert asked.ask(None, soon) == {}
    assert asked.ask({"max_tokens": 3}, soon) == {"max_tokens": 3}
    asked.stop()
    assert asked.ask({}, soon) is None


def test_an_engine_that_is_late_or_gone_is_left_out(tmp_path: Path) -> None:
    late = worker("import time; time.sleep(60)", tmp_path)
    assert late.ask(None, time.monotonic() + 0.2) is None
    assert late.process.poll() is not None
    gone = worker("raise SystemExit(1)", tmp_path)
    gone.process.wait()
    gone.log.write_text("loading\nValueError: no such backend\nbye\n")
    assert gone.ask(None, time.monotonic() + 5) is None
    assert gone.why() == "ValueError: no such backend"
    soon = time.monotonic() + 1
    assert noted([gone], [[1]], serving_tokens.Times(soon, soon)) == []


def test_a_cache_that_is_busy_is_emptied_when_it_is_not() -> None:
    from attn_backends.bench.sglang_engine import empty

    class Busy:
        def __init__(self, refusals: int) -> None:
            self.refusals = refusals

        def flush_cache(self) -> Any:
            self.refusals -= 1
            return SimpleNamespace(success=self.refusals < 0)

    engine = Busy(3)
    empty(engine)
    assert engine.refusals == -1
    with pytest.raises(RuntimeError, match="cannot be emptied"):
        empty(Busy(10), tries=2)


def test_transformers_answers_as_an_engine(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():  # the first token of an answer ends nothing
        model.generation_config.eos_token_id = int(
            model(torch.tensor([[9]])).logits[0, -1].argmax()
        )
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / serving_models.READY).touch()
    options = json.dumps({"model": str(tmp_path / "model"), "dtype": "float32"})
    command = [sys.executable, "-m", "attn_backends.bench.transformers_engine", options]
    process = subprocess.Popen(
        [*command, str(tmp_path / "log")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    engine = serving.Engine("X", vllm_run.MODELS["smollm2"], "float32", process, tmp_path / "log")
    soon = time.monotonic() + 100
    assert engine.ask(None, soon)["version"] == transformers.__version__
    prompts = [[5, 6, 7, 8], [9], [10, 11]]
    answer = engine.ask({"prompts": prompts, "max_tokens": [3, 5, 2], "logprobs": 4}, soon)
    scored = serving_truth.score(engine, prompts, answer, "float32", soon)
    coarse = serving_truth.score(engine, prompts, answer, "bfloat16", soon)
    engine.stop()
    assert scored is not None and coarse is not None
    # A text that is read at once has the scores it was written with; other weights have others.
    for steps, texts, others in zip(answer["logprobs"], scored, coarse):
        for step, text, other in zip(steps, texts, others, strict=True):
            assert {t: text[t] for t in step} == pytest.approx(step, abs=1e-5)
            assert {t: other[t] for t in step} == pytest.approx(step, abs=0.05)
            assert {t: other[t] for t in step} != pytest.approx(step, abs=1e-5)
    for prompt, count, tokens, steps in zip(
        prompts, (3, 5, 2), answer["tokens"], answer["logprobs"]
    ):
        assert len(tokens) == len(steps) == count
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
        want = torch.log_softmax(logits.double(), -1)
        for token, step, row in zip(tokens, steps, want):
            assert len(step) == 4
            assert step[str(token)] == pytest.approx(float(row[token]), abs=1e-5)


def test_rows_can_be_shown_and_made_into_a_table(tmp_path: Path) -> None:
    log: list[str] = []
    ours = Fake("attn_backends", other={102: 104})
    soon = serving_tokens.Times(time.monotonic() + SOON, time.monotonic() + SOON)
    rows = noted([Fake("THEIRS"), ours], [[100], [1000], [2000]], soon, Scorer())
    engines = [Clocked(n, [1.0] * 16, log) for n in ("THEIRS", "attn_backends")]
    rows += serving_rates.throughput("x_throughput", engines, [[1]], 3, time.monotonic() + SOON)
    rows = [{**r, "bench": r["bench"].replace("tokens", "x_tokens")} for r in rows]
    shown = [serving.show(row) for row in rows]
    assert "same text: 1/192 parted" in shown[1] and "ratio 1.000" in shown[3]
    assert "not float32's 1 (0), gave up 0.125 (0)" in shown[1]
    results = json.loads(json.dumps({"meta": {"command": "x", "gpu": "y"}, "rows": rows}))
    text = table(results)
    assert "| 1 of 192 steps |" in text and "| 1 of 192 (0 of 192) | 0.125 (0) |" in text
    assert "attn_backends / THEIRS within a turn" in text
