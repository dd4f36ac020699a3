from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

import attn_backends as ab
from attn_backends.torch_native.backend import TorchNativeBackend

Register = Callable[..., type[TorchNativeBackend]]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_chosen_backend_is_bound_and_runs(phase: str, spec: ab.AttentionSpec) -> None:
    chosen = ab.select(spec, phase=phase, device="cpu")
    assert (chosen.phase, chosen.device) == (phase, torch.device("cpu"))
    batch = ab.Batch.from_lengths([1], [3])
    k = torch.zeros(3, 2, 16)
    o, lse = chosen.backend.run(torch.zeros(1, 4, 16), k, k, chosen.backend.plan(batch))
    assert not o.any() and torch.allclose(lse, torch.tensor(3.0).log())


def test_equal_questions_share_one_instance(spec: ab.AttentionSpec) -> None:
    first = ab.select(spec, device="cpu").backend
    assert ab.select(replace(spec), device=torch.device("cpu")).backend is first
    assert ab.select(spec, phase="decode", device="cpu", backend="torch_native").backend is first
    config = ab.AttentionConfig(options={"torch_native": {"tile_k": 7}})
    other = ab.select(spec, device="cpu", config=config).backend
    assert other is not first and other.options.tile_k == 7  # type: ignore[attr-defined]
    assert ab.select(spec, device="cpu", config=config.model_copy()).backend is other
    assert ab.select(replace(spec, causal=False), device="cpu").backend is not first


def test_threads_that_ask_at_once_share_one_instance(spec: ab.AttentionSpec) -> None:
    class Slow(TorchNativeBackend):
        name = "slow"

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(0.02)
            super().__init__(*args, **kwargs)

    ab.register_attention_backend("slow", Slow)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: ab.select(spec, backend="slow").backend, range(8)))
    assert len(set(map(id, found))) == 1


def test_options_with_lists_still_give_one_instance(spec: ab.AttentionSpec) -> None:
    class Options(ab.BackendOptions):
        tiles: list[int] = []

    class Mine(TorchNativeBackend):
        name = "mine"

    Mine.Options = Options  # type: ignore[assignment]
    Mine._attend = None  # type: ignore[assignment]
    ab.register_attention_backend("mine", Mine)
    config = ab.AttentionConfig(backend="mine", options={"mine": {"tiles": [1, 2]}})
    again = config.model_copy()
    assert ab.select(spec, config=config).backend is ab.select(spec, config=again).backend


def test_allow_and_deny_bind_auto_and_names_alike(
    spec: ab.AttentionSpec, register: Register
) -> None:
    register("one")
    register("two")
    allow = ab.AttentionConfig(allow=["one"])
    chosen = ab.select(spec, device="cpu", config=allow)
    assert chosen.name == "one"
    assert "it is not in allow (config argument)" in str(chosen.considered["torch_native"][0])
    with pytest.raises(ab.UnsupportedCallError, match=r"backend=two \(supported: one\)"):
        ab.select(spec, device="cpu", backend="two", config=allow)
    deny = ab.AttentionConfig(deny=["torch_native"])
    assert ab.select(spec, device="cpu", config=deny).name == "one"
    with pytest.raises(ab.UnsupportedCallError, match="it is in deny"):
        ab.select(spec, device="cpu", backend="torch_native", config=deny)


def test_a_denied_backend_is_not_even_loaded(spec: ab.AttentionSpec) -> None:
    ab.register_attention_backend("broken", "no_such_module:Backend")
    config = ab.AttentionConfig(deny=["broken", "torch_native"])
    with pytest.raises(ab.UnsupportedCallError, match="no backend can do this call") as caught:
        ab.select(spec, device="cpu", config=config)
    assert "no_such_module" not in str(caught.value)


def test_auto_with_nothing_left_lists_every_backend_with_its_reasons(
    spec: ab.AttentionSpec, register: Register
) -> None:
    register("one", head_dims=ab.IntSet((64,)), features=frozenset({"ragged"}))
    register("two", missing=(ab.Reason("toy_lib", "not installed", ">=2"),))
    ab.register_attention_backend("three", "no_such_module:Backend", install_hint="get it")
    config = ab.AttentionConfig(deny=["torch_native"])
    with pytest.raises(ab.UnsupportedCallError) as caught:
        ab.select(spec, device="cpu", config=config)
    error = caught.value
    lines = {line.strip().split(":")[0]: line for line in str(error).splitlines()[1:]}
    assert set(ab.ATTENTION_BACKENDS) == set(lines)
    assert "head_dim=16 (supported: 64); causal=True (supported: False)" in lines["one"]
    assert "toy_lib=not installed (supported: >=2)" in lines["two"]
    assert "No module named 'no_such_module'" in lines["three"] and "get it" in lines["three"]
    assert "phase=prefill, device=cpu, AttentionSpec(num_heads=4" in str(error)
    assert error.backend == "auto" and len(error.reasons) == 5


def test_a_missing_dependency_by_name_is_unavailable_and_keeps_all_reasons(
    spec: ab.AttentionSpec, register: Register
) -> None:
    missing = ab.Reason("toy_lib", "1.0", ">=2", "pip install 'toy_lib>=2'")
    register("one", missing=(missing,), head_dims=ab.IntSet((64,)))
    with pytest.raises(ab.BackendUnavailableError) as caught:
        ab.select(spec, backend="one")
    assert "toy_lib=1.0 (supported: >=2); pip install" in str(caught.value)
    assert "head_dim=16 (supported: 64)" in str(caught.value)


def test_an_exception_in_a_check_becomes_a_reason(spec: ab.AttentionSpec) -> None:
    class Broken(TorchNativeBackend):
        name = "broken"

        @classmethod
        def extra_reasons(cls, *args: Any) -> Any:
            raise ValueError("bad table")

    ab.register_attention_backend("broken", Broken)
    with pytest.raises(ab.UnsupportedCallError, match="check raised ValueError: bad table"):
        ab.select(spec, backend="broken")
    choice = ab.explain(spec, device="cpu", phase="prefill")
    assert [str(r) for r in choice.rejected["broken"]] == ["check raised ValueError: bad table"]
    assert choice.name == "torch_native"


def test_a_check_that_gives_no_reasons_but_text_is_reported(spec: ab.AttentionSpec) -> None:
    class Sloppy(TorchNativeBackend):
        name = "sloppy"

        @classmethod
        def unsupported_reasons(cls, *args: Any) -> Any:
            return ["head size not supported"]

    ab.register_attention_backend("sloppy", Sloppy)
    with pytest.raises(ab.UnsupportedCallError, match=r"raised TypeError: .*instead of a Reason"):
        ab.select(spec, backend="sloppy")


def test_a_constructor_that_fails_is_unavailable_by_name_and_passed_by_auto(
    spec: ab.AttentionSpec, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(TorchNativeBackend):
        name = "broken"

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise OSError("no workspace")

    ab.register_attention_backend("broken", Broken)
    with pytest.raises(ab.BackendUnavailableError, match="OSError: no workspace"):
        ab.select(spec, backend="broken")
    config = ab.AttentionConfig(allow=["broken"])
    with pytest.raises(ab.UnsupportedCallError, match="constructor raised OSError: no workspace"):
        ab.select(spec, config=config)
    assert "no workspace" in caplog.text


def test_phases_are_reasons_too(spec: ab.AttentionSpec, register: Register) -> None:
    register("prefill_only", phases=("prefill",))
    assert ab.select(spec, backend="prefill_only", phase="prefill").name == "prefill_only"
    with pytest.raises(ab.UnsupportedCallError, match=r"phase=decode \(supported: prefill\)"):
        ab.select(spec, backend="prefill_only", phase="decode")


def test_batch_invariance_from_the_config_is_held_against_a_backend(
    spec: ab.AttentionSpec, register: Register
) -> None:
    features = TorchNativeBackend.capabilities.features - {"batch_invariant"}
    register("varies", features=features)
    config = ab.AttentionConfig(batch_invariant=True)
    with pytest.raises(ab.UnsupportedCallError, match="batch_invariant=True"):
        ab.select(spec, backend="varies", config=config)
    assert ab.select(spec, config=config).backend.spec == replace(spec, batch_invariant=True)


def test_auto_says_its_choice_once(
    spec: ab.AttentionSpec, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "attn_backends")
    for _ in range(3):
        ab.select(spec, device="cpu")
        ab.select(replace(spec, window=(3, 0)), device="cpu")
    said = [r.getMessage() for r in caplog.records if "auto chose" in r.getMessage()]
    assert said == [
        "auto chose torch_native for prefill on cpu "
        "(shipped ranking for cpu, declared, not measured)"
    ]


def test_auto_says_once_what_is_broken_and_moves_on(
    spec: ab.AttentionSpec, caplog: pytest.LogCaptureFixture
) -> None:
    ab.register_attention_backend("broken", "no_such_module:Backend")
    for window in (1, 2, 3):
        config = ab.AttentionConfig(allow=["broken"])
        with pytest.raises(ab.UnsupportedCallError):
            ab.select(replace(spec, window=(window, 0)), config=config)
    warned = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 1 and "no_such_module" in warned[0].getMessage()


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"phase": "both"}, "phase"),
        ({"phase": None}, "phase"),
        ({"phase": ["prefill"]}, "phase"),
        ({"device": "nowhere"}, "device"),
        ({"device": ["cpu"]}, "device"),
        ({"config": {"backend": "torch_native"}}, "config"),
    ],
)
def test_a_malformed_question_names_its_argument(
    spec: ab.AttentionSpec, arguments: dict[str, Any], field: str
) -> None:
    with pytest.raises(ab.InvalidInputError, match=rf"^{field}="):
        ab.select(spec, **arguments)
    with pytest.raises(ab.InvalidInputError, match=r"^spec="):
        ab.select("spec")  # type: ignore[arg-type]


def test_the_device_defaults_to_what_is_visible(spec: ab.AttentionSpec) -> None:
    want = "cuda" if torch.cuda.is_available() else "cpu"
    assert ab.select(spec, backend="torch_native").device.type == want


def test_cuda_is_refused_where_there_is_none(
    spec: ab.AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = r"device=cuda \(supported: a visible CUDA device\)"
    for asked in (None, "torch_native"):
        with pytest.raises(ab.UnsupportedCallError, match=text):
            ab.select(spec, device="cuda", backend=asked)


def test_cuda_is_refused_where_the_backend_does_not_run_there(
    spec: ab.AttentionSpec, register: Register
) -> None:
    register("cpu_only", devices=("cpu",))
    with pytest.raises(ab.UnsupportedCallError, match=r"device=cuda \(supported: cpu\)"):
        ab.select(spec, backend="cpu_only", device="cuda")
