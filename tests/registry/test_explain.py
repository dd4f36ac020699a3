from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import attn_backends as ab

Register = Callable[..., Any]


def test_it_says_which_layer_won_and_all_reasons_against_the_others(
    spec: ab.AttentionSpec, register: Register
) -> None:
    register("able")
    register("unable", head_dims=ab.IntSet((64,)), group_sizes=ab.IntSet((1,)))
    with ab.use("able"):
        choice = ab.explain(spec, device="cpu", phase="decode")
    assert (choice.name, choice.layer) == ("able", "context")
    assert {"torch_native", "unable"} <= set(choice.rejected)
    assert set(choice.rejected) == set(ab.ATTENTION_BACKENDS) - {"able"}
    assert [str(r) for r in choice.rejected["unable"]] == [
        "head_dim=16 (supported: 64)",
        "num_heads/num_kv_heads=2 (supported: 1)",
    ]
    only = [str(r) for r in choice.rejected["torch_native"]]
    assert only == ["backend=torch_native (supported: able); chosen by use('able')"]


def test_it_agrees_with_select_whatever_the_settings(
    spec: ab.AttentionSpec, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    register("one", phases=("prefill",))
    register("two")
    configs = [
        None,
        ab.AttentionConfig(decode="two"),
        ab.AttentionConfig(deny=["torch_native"]),
        ab.AttentionConfig(allow=["one"]),
        ab.AttentionConfig(backend="one"),
    ]
    for variable in (None, "one", "auto"):
        if variable is not None:
            monkeypatch.setenv("ATTN_BACKENDS_BACKEND", variable)
        for config in configs:
            explanation = ab.explain(spec, device="cpu", config=config)
            for phase in ("prefill", "decode"):
                choice = explanation[phase]
                try:
                    chosen = ab.select(spec, device="cpu", phase=phase, config=config)
                except ab.AttnBackendsError as error:
                    assert choice.name is None and choice.error == str(error)
                    assert all(choice.rejected.values())
                    assert set(choice.rejected) == set(ab.ATTENTION_BACKENDS)
                else:
                    assert (choice.name, choice.layer) == (chosen.name, chosen.layer)
                    assert choice.setting == chosen.setting
                    assert set(choice.rejected) == set(ab.ATTENTION_BACKENDS) - {chosen.name}
                    assert all(choice.rejected.values())


def test_both_phases_are_explained_unless_one_is_asked_for(spec: ab.AttentionSpec) -> None:
    both = ab.explain(spec, device="cpu")
    assert [c.phase for c in both.choices] == ["prefill", "decode"]
    with pytest.raises(ab.InvalidInputError, match="phase"):
        _ = both.name
    one = ab.explain(spec, device="cpu", phase="decode")
    assert one.name == one["decode"].name == "torch_native" and one.layer == "auto"
    with pytest.raises(ab.InvalidInputError, match="phase='prefill'"):
        one["prefill"]
    with pytest.raises(ab.InvalidInputError, match="phase='neither'"):
        ab.explain(spec, phase="neither")


def test_it_is_readable_and_plain_data(spec: ab.AttentionSpec, register: Register) -> None:
    register("unable", head_dims=ab.IntSet((64,)))
    ab.register_attention_backend("broken", "no_such_module:Backend")
    explanation = ab.explain(spec, device="cpu")
    text = str(explanation)
    assert "prefill: torch_native (chosen by auto)" in text
    assert "order: shipped ranking for cpu, declared, not measured" in text
    assert "head_dim=16 (supported: 64)" in text and "no_such_module" in text
    data = json.loads(json.dumps(explanation.to_dict()))
    assert data["phases"]["decode"]["name"] == "torch_native"
    assert data["phases"]["decode"]["rejected"]["unable"] == ["head_dim=16 (supported: 64)"]
    assert data["device"] == "cpu"


def test_a_denied_backend_is_not_loaded_to_explain(spec: ab.AttentionSpec) -> None:
    ab.register_attention_backend("broken", "no_such_module:Backend")
    config = ab.AttentionConfig(deny=["broken"])
    choice = ab.explain(spec, device="cpu", phase="prefill", config=config)
    assert [r.fix for r in choice.rejected["broken"]] == ["it is in deny (config argument)"]


def test_a_refused_call_is_explained_not_raised(spec: ab.AttentionSpec, register: Register) -> None:
    register("unable", head_dims=ab.IntSet((64,)))
    choice = ab.explain(spec, device="cpu", phase="prefill", backend="unable")
    assert choice.name is None and choice.layer == "argument"
    error = choice["prefill"].error
    assert error is not None and "head_dim=16 (supported: 64)" in error
    assert "refused" in str(choice)
    with pytest.raises(ab.UnknownBackendError):
        ab.explain(spec, backend="nope")


def test_the_kernels_of_the_chosen_backend_and_what_stands_against_better_ones_are_shown():
    pytest.importorskip("triton")
    from attn_backends.triton_native.backend import TritonBackend, TritonOptions

    cuda = torch.device("cuda")
    spec = ab.AttentionSpec(32, 8, 96, dtype=torch.bfloat16)
    lines = TritonBackend.kernels(spec, "prefill", cuda)
    assert any("head_dim=96 (supported: 64, 128, 192, 256)" in line for line in lines)
    off = TritonBackend.kernels(spec, "prefill", cuda, TritonOptions(hopper=False))
    assert any("hopper=False (supported: None, True)" in line for line in off)
    assert "split-KV" in TritonBackend.kernels(spec, "decode", cuda)[0]

    choice = ab.registry.PhaseChoice(
        "prefill", "triton", "auto", "", None, None, {}, kernels=("one", "two")
    )
    assert "  by: one\n  by: two" in str(choice)
    assert choice.to_dict()["kernels"] == ["one", "two"]


def test_kernels_are_asked_about_the_spec_as_the_settings_demand_it(
    spec: ab.AttentionSpec, register: Register
) -> None:
    toy = register("told")
    toy.kernels = classmethod(lambda cls, spec, *rest: [f"invariant={spec.batch_invariant}"])
    for demanded in (False, True):
        config = ab.AttentionConfig(backend="told", batch_invariant=demanded)
        choice = ab.explain(spec, device="cpu", phase="decode", config=config)["decode"]
        assert choice.kernels == (f"invariant={demanded}",)


def test_a_backend_that_cannot_name_its_kernels_is_explained_all_the_same(
    spec: ab.AttentionSpec, register: Register
) -> None:
    def broken(cls: type, *arguments: Any) -> list[str]:
        raise KeyError("table")

    register("broken_words").kernels = classmethod(broken)
    choice = ab.explain(spec, device="cpu", phase="decode", backend="broken_words")["decode"]
    assert choice.name == "broken_words"
    assert choice.kernels == ("kernels raised KeyError: 'table'",)


def test_an_able_backend_is_told_which_one_comes_before_it(
    spec: ab.AttentionSpec, register: Register
) -> None:
    register("later")
    choice = ab.explain(spec, device="cpu", phase="decode")["decode"]
    (reason,) = choice.rejected["later"]
    assert str(reason) == "rank=2 (supported: 1); able, but torch_native comes before it"
