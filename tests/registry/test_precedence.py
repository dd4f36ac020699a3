from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import attn_backends as ab

Register = Callable[..., Any]
LAYERS = ("argument", "context", "config", "environment")


def _choose(
    layers: dict[str, str], phase: str, spec: ab.AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> ab.Selection:
    """Select with a backend named in each of the given layers."""
    with ExitStack() as stack:
        monkeypatch.delenv("ATTN_BACKENDS_BACKEND", raising=False)
        if "environment" in layers:
            monkeypatch.setenv("ATTN_BACKENDS_BACKEND", layers["environment"])
        if "context" in layers:
            stack.enter_context(ab.use(layers["context"]))
        config = ab.AttentionConfig(backend=layers["config"]) if "config" in layers else None
        return ab.select(
            spec, phase=phase, device="cpu", backend=layers.get("argument"), config=config
        )


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("setting", list(itertools.product([False, True], repeat=4)))
def test_the_first_layer_that_names_a_backend_wins(
    setting: tuple[bool, ...],
    phase: str,
    spec: ab.AttentionSpec,
    register: Register,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = {}
    for layer, is_set in zip(LAYERS, setting):
        if is_set:
            register(f"by_{layer}")
            layers[layer] = f"by_{layer}"
    chosen = _choose(layers, phase, spec, monkeypatch)
    if not layers:
        assert (chosen.name, chosen.layer) == ("torch_native", "auto")
    else:
        winner = next(iter(layers))
        assert (chosen.name, chosen.layer) == (f"by_{winner}", winner)
        assert chosen.setting


@pytest.mark.parametrize("layer", LAYERS)
def test_auto_in_a_layer_hides_the_layers_below(
    layer: str, spec: ab.AttentionSpec, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    register("below")
    layers = {name: "below" for name in LAYERS[LAYERS.index(layer) :]}
    layers[layer] = "auto"
    chosen = _choose(layers, "prefill", spec, monkeypatch)
    assert (chosen.name, chosen.layer) == ("torch_native", "auto")
    assert "auto" in chosen.setting


def test_a_phase_goes_before_both_in_every_layer(
    spec: ab.AttentionSpec, register: Register, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("both", "special"):
        register(name)

    def names(**arguments: Any) -> tuple[str, str]:
        return tuple(  # type: ignore[return-value]
            ab.select(spec, phase=phase, device="cpu", **arguments).name
            for phase in ("prefill", "decode")
        )

    config = ab.AttentionConfig(backend="both", decode="special")
    assert names(config=config) == ("both", "special")
    ab.configure(config)
    assert names() == ("both", "special")
    ab.configure(None)
    with ab.use("both", prefill="special"):
        assert names() == ("special", "both")
    with ab.use(decode="special"):
        assert names() == ("torch_native", "special")
    monkeypatch.setenv("ATTN_BACKENDS_BACKEND", "both")
    monkeypatch.setenv("ATTN_BACKENDS_DECODE", "special")
    assert names() == ("both", "special")
    monkeypatch.delenv("ATTN_BACKENDS_DECODE")
    path = tmp_path / "file.json"
    path.write_text('{"decode": "special"}')
    monkeypatch.setenv("ATTN_BACKENDS_CONFIG", str(path))
    assert names() == ("both", "both")  # the variable goes before the file, phase or not
    monkeypatch.delenv("ATTN_BACKENDS_BACKEND")
    assert names() == ("torch_native", "special")


def test_use_nests_and_is_undone_by_exceptions(spec: ab.AttentionSpec, register: Register) -> None:
    for name in ("outer", "inner"):
        register(name)

    def names() -> list[str]:
        return [ab.select(spec, phase=p, device="cpu").name for p in ("prefill", "decode")]

    with ab.use("outer"):
        with pytest.raises(ZeroDivisionError), ab.use(decode="inner"):
            assert names() == ["outer", "inner"]
            raise ZeroDivisionError
        assert names() == ["outer", "outer"]
        with ab.use():
            assert names() == ["outer", "outer"]
        with ab.use("auto"):
            assert names() == ["torch_native", "torch_native"]
    assert names() == ["torch_native", "torch_native"]


def test_use_refuses_an_unknown_name_at_once() -> None:
    with pytest.raises(ab.UnknownBackendError, match="decode='torch-native'"):
        with ab.use(decode="torch-native"):
            raise AssertionError("must not get here")


def test_use_holds_for_its_own_thread(spec: ab.AttentionSpec, register: Register) -> None:
    register("mine")
    seen = []
    with ab.use("mine"):
        thread = threading.Thread(target=lambda: seen.append(ab.select(spec, device="cpu").name))
        thread.start()
        thread.join()
        assert ab.select(spec, device="cpu").name == "mine"
    assert seen == ["torch_native"]


def test_a_config_of_the_call_replaces_that_of_the_process(
    spec: ab.AttentionSpec, register: Register
) -> None:
    register("mine")
    assert ab.configure(ab.AttentionConfig(backend="mine")) is None
    assert ab.select(spec, config=ab.AttentionConfig()).layer == "auto"
    before = ab.configure(None)
    assert before is not None and before.backend == "mine"


def test_each_question_is_answered_by_the_first_layer_that_sets_it(
    spec: ab.AttentionSpec, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    register("mine")
    monkeypatch.setenv("ATTN_BACKENDS_DENY", "mine")
    monkeypatch.setenv("ATTN_BACKENDS_BATCH_INVARIANT", "1")
    monkeypatch.setenv("ATTN_BACKENDS_MERGE", "torch")
    chosen = ab.select(spec)
    assert chosen.backend.spec.batch_invariant and chosen.merge == "torch"
    with pytest.raises(ab.UnsupportedCallError, match=r"deny \(environment\)"):
        ab.select(spec, backend="mine")
    config = ab.AttentionConfig(deny=(), batch_invariant=False, merge="auto")
    chosen = ab.select(spec, backend="mine", config=config)
    assert chosen.name == "mine" and not chosen.backend.spec.batch_invariant
    assert chosen.merge is None


def test_batch_invariance_is_added_never_taken_away() -> None:
    asked = ab.AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=8, batch_invariant=True)
    chosen = ab.select(asked, device="cpu", config=ab.AttentionConfig(batch_invariant=False))
    assert chosen.backend.spec.batch_invariant
