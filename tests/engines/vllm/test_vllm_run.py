"""What the comparison of engines reports is what the engines said."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from attn_backends.bench import vllm_prompts, vllm_run


def answer(*sequences):
    """Tokens with the logprobs of three candidates: the token itself, and two below it."""
    return {
        "tokens": [list(s) for s in sequences],
        "logprobs": [
            [{str(t): -0.5, str(t + 1): -0.75, str(t + 2): -3.0} for t in s] for s in sequences
        ],
    }


def test_equal_tokens_are_counted_up_to_the_first_difference():
    same = vllm_run.compare(answer([1, 2, 3, 4]), answer([1, 2, 3, 4]))
    assert (same["equal_sequences"], same["equal_tokens"], same["max_gap"]) == (1, 1.0, 0.0)
    other = vllm_run.compare(answer([1, 2, 3, 4], [5, 6, 7, 8]), answer([1, 3, 3, 4], [5, 6, 7, 8]))
    assert other["equal_sequences"] == 1 and other["sequences"] == 2
    assert other["equal_tokens"] == 5 / 8
    assert other["max_gap"] == other["median_gap"] == pytest.approx(0.25)
    far = vllm_run.compare(answer([1, 2]), answer([1, 90]))
    assert far["beyond_top"] == 1 and far["max_gap"] == 0.0


def test_logprobs_of_equal_tokens_are_compared():
    ours = answer([1, 2, 9])
    ours["logprobs"][0][1]["2"] = -0.6
    ours["logprobs"][0][2]["9"] = -9.0  # after the difference: other text, nothing to compare
    row = vllm_run.compare(answer([1, 2, 3]), ours)
    assert row["max_logprob_difference"] == pytest.approx(0.1)


@pytest.mark.parametrize("made", [vllm_prompts.texts, lambda: vllm_prompts.random_ids(1000)])
def test_prompts_are_the_same_every_time_and_share_four_beginnings(made):
    prompts = made()
    assert prompts == made() and len(prompts) == vllm_prompts.PROMPTS
    assert len({tuple(p) for p in prompts}) == vllm_prompts.PROMPTS
    assert len({tuple(p[:200]) for p in prompts}) == 4


def worker(code, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    log = Path(tmp_path) / "log"
    return vllm_run.Engine("X", vllm_run.MODELS["llama8"], "bfloat16", process, log)


def test_an_engine_is_asked_and_answers(tmp_path):
    echo = "import sys\nprint('{}', flush=True)\nfor l in sys.stdin: print(l, end='', flush=True)"
    asked = worker(echo, tmp_path)
    soon = time.monotonic() + 30
    assert asked.ask(None, soon) == {}
    assert asked.ask({"max_tokens": 3}, soon) == {"max_tokens": 3}
    asked.stop()
    assert asked.ask({}, soon) is None


def test_an_engine_that_is_late_or_gone_is_left_out(tmp_path):
    late = worker("import time; time.sleep(60)", tmp_path)
    assert late.ask(None, time.monotonic() + 0.2) is None
    assert late.process.poll() is not None
    gone = worker("raise SystemExit(1)", tmp_path)
    gone.process.wait()
    gone.log.write_text("loading\nValueError: no such backend\nbye\n")
    assert gone.ask(None, time.monotonic() + 5) is None
    assert gone.why() == "ValueError: no such backend"
    assert vllm_run.agreement([gone], [[1]], time.monotonic() + 1) == []


def test_tables_of_the_page_are_made_from_the_results():
    from attn_backends.bench.tables import rewrite

    page = Path(__file__).parents[3] / "docs" / "engines" / "vllm.md"
    text = page.read_text()
    assert text.count("tokens/s |") >= 1
    assert rewrite(page) == text, "run python -m attn_backends.bench.tables docs/engines/vllm.md"


def test_replayed_steps_are_counted(engine, monkeypatch):
    from attn_backends.bench.vllm_engine import Watch
    from attn_backends.engines.vllm.builder import Builder

    monkeypatch.setattr(Builder, "build", Builder.build)  # taken back afterwards
    watch = Watch()
    watch.install()
    made = served(engine)
    common = made.metadata([(made.requests[0], 1)])
    made.builder.build_for_cudagraph_capture(common)
    made.builder.build(0, common)
    made.builder.build(0, common)
    assert watch.sizes == {(1, 1, 1)}
    assert watch.take() == {"replayed": 2, "planned": 1}
    assert watch.take() == {"replayed": 0, "planned": 0}


def served(engine):
    made = engine("triton")
    made.step([(made.request(9), 4)])
    return made
