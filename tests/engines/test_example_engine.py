"""The example engine serves a real model, and its page pool keeps its books."""

from __future__ import annotations

import random
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "examples" / "engine"
pytestmark = pytest.mark.xdist_group("weights")
NEW = 6
PAGE = 8
SUBJECTS = (
    "France", "Italy", "Japan", "Egypt", "Canada", "Spain", "Greece", "India",
    "a cat", "a tree", "an engine", "a river", "the moon", "a violin", "bread", "glass",
)  # fmt: skip
PROMPTS = [
    *(f"You answer questions about the world as shortly as you can. Tell me about {x}:"
      for x in SUBJECTS),
    *(f"{x} is" for x in SUBJECTS[8:]),
    *(f"Once upon a time in {x}, " + "it rained and rained, " * i
      for i, x in enumerate(SUBJECTS[:8])),
]  # fmt: skip


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    """The modules of the example, imported as its command imports them."""
    sys.path.insert(0, str(FOLDER))
    names = ("engine", "llama", "pages", "serve")
    try:
        modules = {name: __import__(name) for name in names}
        assert all(Path(m.__file__).parent == FOLDER for m in modules.values())
        yield SimpleNamespace(**modules)
    finally:
        sys.path.remove(str(FOLDER))
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def loaded(smollm2: Path) -> Any:
    from attn_backends.cli.generation import load

    return load(smollm2, torch.float32, torch.device("cpu"), "sdpa")


def one_by_transformers(loaded: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of transformers' own attention, all prompts at once, padded on the left."""
    width, device = max(map(len, prompts)), loaded.model.device
    pad = loaded.tokenizer.eos_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
    real = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    out = loaded.model.generate(
        ids, attention_mask=real, max_new_tokens=NEW, do_sample=False, eos_token_id=-1,
        pad_token_id=pad,
    )  # fmt: skip
    return out[:, width:].tolist()


def serve(example: Any, loaded: Any, prompts: list[list[int]], **options: Any) -> Any:
    """The engine after it answered prompts without a stop token, and the requests."""
    with torch.inference_mode():
        model = example.llama.PagedLlama(loaded.model, num_pages=256, page_size=PAGE, max_len=256)
        engine = example.engine.Engine(model, max_tokens=128, **options)
        requests = [engine.add(prompt, NEW, frozenset()) for prompt in prompts]
        engine.run()
    return engine, requests


def test_32_concurrent_prompts_get_the_tokens_of_transformers(example, loaded):
    prompts = [loaded.tokenizer(text)["input_ids"] for text in PROMPTS]
    assert len(prompts) == 32
    engine, requests = serve(example, loaded, prompts, backend="torch_native", cascade=True)
    assert [r.answer for r in requests] == one_by_transformers(loaded, prompts)
    # Fifteen of sixteen like beginnings were found in the cache, and read once per group.
    assert sum(r.reused >= PAGE for r in requests[:16]) == 15
    assert engine.steps["cascade"] > NEW and engine.steps["prefill"] >= 3
    assert sum(engine.pool.users) == 0 and engine.pool.available == 256


@pytest.fixture(scope="module")
def random_llama(model_of) -> Any:
    model = model_of("llama", "sdpa", num_hidden_layers=3, max_position_embeddings=256).cuda()
    return SimpleNamespace(model=model, tokenizer=SimpleNamespace(eos_token_id=2))


@pytest.mark.gpu
@pytest.mark.parametrize("cascade", [True, False])
@pytest.mark.parametrize("graphs", [True, False])
def test_graphs_on_a_gpu_give_the_tokens_of_transformers(
    example, random_llama, tokens, graphs, cascade, monkeypatch
):
    kept, replay = [], example.engine.CapturedDecode.replay

    def reuse(self, *inputs):
        """Replay after memory that nobody holds was filled anew."""
        kept.extend(torch.full((1 << i % 7,), 1 << 40, device="cuda") for i in range(140))
        return replay(self, *inputs)

    monkeypatch.setattr(example.engine.CapturedDecode, "replay", reuse)
    shared = tokens(3 * PAGE + 2, seed=99).tolist()
    prompts = [shared + tokens(i + 1, seed=i).tolist() for i in range(16)]
    prompts += [tokens(1 + 9 * i, seed=50 + i).tolist() for i in range(16)]
    options = {"backend": "triton", "cascade": cascade, "graphs": graphs, "max_requests": 24}
    engine, requests = serve(example, random_llama, prompts, **options)
    assert [r.answer for r in requests] == one_by_transformers(random_llama, prompts)
    assert engine.steps["graph"] == graphs * engine.steps["decode"]
    assert bool(engine.steps["cascade"]) == cascade and engine.steps["decode"] > 2
    assert bool(engine.captured) == bool(kept) == graphs


@pytest.mark.gpu
def test_smollm2_on_a_gpu_gets_the_tokens_of_transformers(example, smollm2):
    from attn_backends.cli.generation import load

    loaded = load(smollm2, torch.float32, torch.device("cuda"), "sdpa")
    prompts = [loaded.tokenizer(text)["input_ids"] for text in PROMPTS]
    engine, requests = serve(example, loaded, prompts, backend="triton", graphs=True)
    assert [r.answer for r in requests] == one_by_transformers(loaded, prompts)
    assert engine.steps["graph"] == engine.steps["decode"] > 2


def commands() -> list[str]:
    text = (FOLDER / "README.md").read_text()
    return re.findall(r"^python docs/examples/engine/(serve\.py.*)$", text, re.MULTILINE)


@pytest.mark.parametrize("command", commands())
def test_the_commands_of_its_page_run(example, loaded, capsys, command):
    """With the model that is loaded already."""
    example.serve.main(shlex.split(command)[1:], loaded)
    assert "Paris" in (printed := capsys.readouterr().out) and "steps:" in printed


def test_the_example_is_short_and_has_a_command():
    assert sum(len(f.read_text().splitlines()) for f in FOLDER.glob("*.py")) < 400
    assert commands()


def test_a_prompt_that_never_fits_is_refused(example):
    model = SimpleNamespace(cos=torch.zeros(64, 1), cache=torch.zeros(1, 2, 4, 8))
    engine = example.engine.Engine(model)
    for prompt, new in (([], 1), ([1], 0), ([1] * 30, 3)):
        with pytest.raises(ValueError, match="1 \\+ 1 to 32 are served"):
            engine.add(prompt, new, frozenset())


def test_the_pool_never_gives_a_page_twice_and_finds_what_it_kept(example):
    rng, pool = random.Random(0), example.pages.PagePool(24, 2)
    held: list[tuple[list[int], list[int]]] = []
    content: dict[int, tuple[int, ...]] = {}
    found = 0
    for _ in range(2000):
        if held and rng.random() < 0.5:
            tokens, pages = held.pop(rng.randrange(len(held)))
            for i, page in enumerate(pages):
                if tokens[: 2 * i + 2] == list(content[page]):
                    pool.publish(page, content[page])
            pool.release(pages)
            continue
        tokens = [rng.randrange(2) for _ in range(rng.randrange(3, 12))]
        known = pool.match(tokens)
        assert known is not None and 2 * len(known) < len(tokens)
        for i, page in enumerate(known):
            assert content[page] == tuple(tokens[: 2 * i + 2])
        pool.use(known)
        missing = -(-len(tokens) // 2) - len(known)
        if missing > pool.available:
            pool.release(known)
            continue
        fresh = pool.take(missing)
        used = {page for _, pages in held for page in pages} | set(known)
        assert len(set(fresh)) == missing and not used & set(fresh)
        found += len(known)
        pages = known + fresh
        for i, page in enumerate(pages):
            content[page] = tuple(tokens[: 2 * i + 2])
        held.append((tokens, pages))
    for _, pages in held:
        pool.release(pages)
    assert found > 200
    assert sum(pool.users) == 0 and pool.available == 24


def test_a_prefix_that_is_being_computed_is_waited_for(example):
    pool = example.pages.PagePool(8, 2)
    prompt = [1, 2, 3, 4, 5]
    assert pool.match(prompt) == []
    pages = pool.take(3)
    pool.coming.update(pool.prefixes(prompt, 5))
    assert pool.match([1, 2, 9]) is None and pool.match([2, 2, 9]) == []
    for i in range(2):
        pool.publish(pages[i], tuple(prompt[: 2 * i + 2]))
    assert pool.match([1, 2, 9]) == pages[:1]
    assert pool.match([*prompt[:4], 7]) == pages[:2] and pool.match(prompt[:4]) == pages[:1]
