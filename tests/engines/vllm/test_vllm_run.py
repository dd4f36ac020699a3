"""What the comparison of engines reports is what the engines said."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_backends.bench import vllm_prompts


@pytest.mark.parametrize("made", [vllm_prompts.texts, lambda: vllm_prompts.random_ids(1000)])
def test_prompts_are_the_same_every_time_and_share_four_beginnings(made):
    prompts = made()
    assert prompts == made() and len(prompts) == vllm_prompts.PROMPTS
    assert len({tuple(p) for p in prompts}) == vllm_prompts.PROMPTS
    assert len({tuple(p[:200]) for p in prompts}) == 4


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
