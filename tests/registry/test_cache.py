"""A repeated question is answered from a cache, and the cache never hides a changed setting."""

from __future__ import annotations

import json
import os
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import attn_backends as ab
from attn_backends import environment
from attn_backends.registry import selection

Register = Callable[..., Any]


@pytest.mark.parametrize("config", [None, ab.AttentionConfig(allow=["torch_native"])])
@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None])
def test_a_repeated_select_takes_less_than_three_microseconds(
    spec: ab.AttentionSpec, config: Any, device: Any
) -> None:
    def ask() -> ab.Selection:
        return ab.select(spec, phase="decode", device=device, config=config)

    assert ask() is ask()
    number = 100  # short samples, of which some run undisturbed on a busy machine
    best = min(timeit.repeat(ask, number=number, repeat=400)) / number
    assert best < 3e-6, f"{best * 1e6:.2f} us"


def test_every_kind_of_change_is_seen_at_once(
    spec: ab.AttentionSpec, register: Register, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register("one")
    register("two")

    def name(**arguments: Any) -> str:
        answers = {ab.select(spec, device="cpu", **arguments).name for _ in range(2)}
        assert len(answers) == 1
        return answers.pop()

    assert name() == "torch_native"
    monkeypatch.setenv("ATTN_BACKENDS_BACKEND", "one")
    assert name() == "one"
    os.environ["ATTN_BACKENDS_BACKEND"] = "two"
    assert name() == "two"
    os.environ.pop("ATTN_BACKENDS_BACKEND")
    assert name() == "torch_native"
    monkeypatch.setenv("ATTN_BACKENDS_PREFILL", "two")
    assert name() == "two"
    with ab.use("one"):
        assert name() == "one"
        assert name(backend="torch_native") == "torch_native"
    assert name() == "two"
    monkeypatch.delenv("ATTN_BACKENDS_PREFILL")
    ab.configure(ab.AttentionConfig(backend="one"))
    assert name() == "one"
    ab.configure(ab.AttentionConfig(deny=["torch_native", "one"]))
    assert name() == "two"
    ab.configure(None)
    assert name() == "torch_native"
    monkeypatch.setenv("ATTN_BACKENDS_DENY", "torch_native,one")
    assert name() == "two"
    monkeypatch.setenv("ATTN_BACKENDS_DENY", "torch_native , two")
    assert name() == "one"
    monkeypatch.delenv("ATTN_BACKENDS_DENY")
    monkeypatch.setenv("ATTN_BACKENDS_ALLOW", "two")
    assert name() == "two"
    monkeypatch.delenv("ATTN_BACKENDS_ALLOW")
    path = tmp_path / "config.json"
    monkeypatch.setenv("ATTN_BACKENDS_CONFIG", str(path))
    for number, other in enumerate(("one", "two", "torch_native")):
        path.write_text(json.dumps({"backend": other}))
        os.utime(path, ns=(number, number))  # the clock of a file system may be coarse
        assert name() == other


def test_a_new_override_is_seen_at_once(spec: ab.AttentionSpec, register: Register) -> None:
    first = register("mine")
    assert type(ab.select(spec, backend="mine").backend) is first
    second = register("mine", override=True)
    assert type(ab.select(spec, backend="mine").backend) is second is not first


def test_a_backend_registered_later_is_found(spec: ab.AttentionSpec, register: Register) -> None:
    for _ in range(2):
        with pytest.raises(ab.UnknownBackendError):
            ab.select(spec, backend="later")
    register("later")
    assert ab.select(spec, backend="later").name == "later"


def test_a_bad_setting_is_refused_every_time_even_after_a_cached_answer(
    spec: ab.AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    ab.select(spec)
    monkeypatch.setenv("ATTN_BACKENDS_BACKEND", "nope")
    for _ in range(2):
        with pytest.raises(ab.UnknownBackendError, match="ATTN_BACKENDS_BACKEND='nope'"):
            ab.select(spec)
        with pytest.raises(ab.UnknownBackendError):
            ab.select(spec, backend="torch_native")  # a misspelt setting is never passed over
    monkeypatch.delenv("ATTN_BACKENDS_BACKEND")
    assert ab.select(spec).layer == "auto"


def test_a_misspelt_variable_warns_once_even_after_a_cached_answer(
    spec: ab.AttentionSpec, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    ab.select(spec)
    monkeypatch.setenv("ATTN_BACKENDS_BACKENDS", "torch_native")
    for _ in range(3):
        ab.select(spec)
    texts = [str(w.message) for w in recwarn if "ATTN_BACKENDS" in str(w.message)]
    assert len(texts) == 1
    assert "ATTN_BACKENDS_BACKENDS is set" in texts[0]
    assert "closest that exists is ATTN_BACKENDS_BACKEND " in texts[0]


def test_another_implementation_of_environ_gives_the_same_answers(
    spec: ab.AttentionSpec, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    register("one")
    plain = {k: v for k, v in os.environ.items() if not k.startswith("ATTN_")}
    monkeypatch.setattr(os, "environ", plain)
    assert ab.select(spec, device="cpu").name == "torch_native"
    plain["ATTN_BACKENDS_BACKEND"] = "one"
    assert ab.select(spec, device="cpu").name == "one"
    del plain["ATTN_BACKENDS_BACKEND"]
    assert ab.select(spec, device="cpu").name == "torch_native"


def test_the_snapshot_holds_every_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.VARIABLES:
        before = environment.snapshot()
        monkeypatch.setenv(f"ATTN_BACKENDS_{name}", "a")
        middle = environment.snapshot()
        monkeypatch.setenv(f"ATTN_BACKENDS_{name}", "b")
        assert len({before, middle, environment.snapshot()}) == 3


def test_the_cache_does_not_grow_without_bound(
    spec: ab.AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "_MOST_CACHED", 8)
    selection._cache.clear()
    for _ in range(40):  # every configuration is another key
        ab.select(spec, config=ab.AttentionConfig())
    assert len(selection._cache) <= 8


def test_a_config_that_is_gone_does_not_answer_for_a_new_one_at_its_address(
    spec: ab.AttentionSpec, register: Register
) -> None:
    register("one")
    names = ["one", "torch_native"] * 20
    assert [
        ab.select(spec, device="cpu", config=ab.AttentionConfig(backend=n)).name for n in names
    ] == names


def test_a_config_cannot_change_under_the_cache() -> None:
    given = {"torch_native": {"tile_k": 7}}
    config = ab.AttentionConfig(options=given)
    given["torch_native"]["tile_k"] = 8
    assert config.options == {"torch_native": {"tile_k": 7}}
    changes: list[Callable[[], Any]] = [
        lambda: config.options["torch_native"].__setitem__("tile_k", 8),
        lambda: config.options.clear(),
        lambda: config.options.update({}),
        lambda: setattr(config, "backend", "torch_native"),
    ]
    for change in changes:
        with pytest.raises((TypeError, ValueError)):
            change()
