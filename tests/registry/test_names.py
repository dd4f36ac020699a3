from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import attn_backends as ab

Register = Callable[..., Any]
DOORS = ["argument", "context", "config", "process", "environment", "file", "environment_file"]


@pytest.fixture
def through(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spec: ab.AttentionSpec
) -> Callable[[str, str], ab.Selection]:
    """Choose a backend by name through one of the doors."""

    def choose(door: str, name: str, **fields: Any) -> ab.Selection:
        asked = ab.AttentionSpec(**{**vars_of(spec), **fields})
        if door == "argument":
            return ab.select(asked, backend=name, device="cpu")
        if door == "context":
            with ab.use(name):
                return ab.select(asked, device="cpu")
        if door == "environment":
            monkeypatch.setenv("ATTN_BACKENDS_BACKEND", name)
            return ab.select(asked, device="cpu")
        if door in ("file", "environment_file"):
            path = tmp_path / "config.json"
            path.write_text(json.dumps({"backend": name}))
            if door == "file":
                config = ab.AttentionConfig.from_file(path)
                return ab.select(asked, config=config, device="cpu")
            monkeypatch.setenv("ATTN_BACKENDS_CONFIG", str(path))
            return ab.select(asked, device="cpu")
        config = ab.AttentionConfig(backend=name)
        if door == "config":
            return ab.select(asked, config=config, device="cpu")
        ab.configure(config)
        return ab.select(asked, device="cpu")

    return choose


def vars_of(spec: ab.AttentionSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__match_args__}


@pytest.mark.parametrize("name", ["fa", "fa2", "FA3", " fa4"])
def test_the_names_of_engines_for_flash_attention_lead_to_it(register: Register, name: str) -> None:
    register("flash_attention")
    with pytest.raises(ab.UnknownBackendError, match="it is flash_attention, whose option version"):
        ab.select(ab.AttentionSpec(8, 2, 64), backend=name)


# F29
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "name", ["toy_infer", "Toy_Infer", "TOY_INFER", " toy_infer ", "\ttoy_infer\n"]
)
def test_any_case_and_blanks_are_accepted(
    through: Callable[..., ab.Selection], register: Register, door: str, name: str
) -> None:
    register("toy_infer")
    chosen = through(door, name)
    assert chosen.name == "toy_infer"
    layer = {"process": "config", "file": "config", "environment_file": "environment"}
    assert chosen.layer == layer.get(door, door)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", ["toy-infer", "toyinfer", "nope", ""])
def test_an_unknown_name_lists_the_valid_ones_and_the_closest(
    through: Callable[..., ab.Selection], register: Register, door: str, name: str
) -> None:
    register("toy_infer")
    with pytest.raises(ab.UnknownBackendError) as caught:
        through(door, name)
    message = str(caught.value)
    assert repr(name) in message
    valid = re.search(r"valid: ([a-z0-9_, ]+)\)", message)
    assert valid is not None
    names = valid.group(1).split(", ")
    assert {"auto", "torch_native", "toy_infer"} <= set(names)
    if name.startswith("toy"):
        assert message.endswith("the closest is toy_infer")
    if door == "environment":
        assert "ATTN_BACKENDS_BACKEND" in message
    if door.endswith("file"):
        assert "config.json" in message


def test_every_name_in_a_message_is_accepted_as_input(
    spec: ab.AttentionSpec, register: Register
) -> None:
    register("toy_infer", head_dims=ab.IntSet((256,)))
    with pytest.raises(ab.UnknownBackendError) as caught:
        ab.select(spec, backend="nope")
    names = re.search(r"valid: ([a-z0-9_, ]+)\)", str(caught.value)).group(1).split(", ")  # type: ignore[union-attr]
    for name in names:
        try:
            ab.select(spec, backend=name, device="cpu")
        except (ab.UnsupportedCallError, ab.BackendUnavailableError) as refusal:
            assert name in str(refusal)  # known, and refused for a reason of its own
    message = str(ab.explain(spec, device="cpu", phase="prefill"))
    for name in re.findall(r"not ([a-z_]+):", message):
        assert name in ab.ATTENTION_BACKENDS


@pytest.mark.parametrize("door", DOORS)
def test_a_forced_backend_that_cannot_do_the_call_is_refused_and_not_replaced(
    through: Callable[..., ab.Selection], register: Register, door: str
) -> None:
    register(
        "toy_infer",
        head_dims=ab.IntSet((64, 128, 256)),
        page_sizes=ab.IntSet(multiple_of=256),
        dtypes=(torch.bfloat16,),
    )
    with pytest.raises(ab.UnsupportedCallError) as caught:
        through(door, "toy_infer", head_dim=72, page_size=16)
    message = str(caught.value)
    for part in (
        "toy_infer",
        "dtype=float32 (supported: bfloat16)",
        "head_dim=72 (supported: 64, 128, 256)",
        "page_size=16 (supported: multiples of 256)",
    ):
        assert part in message
    assert [r.argument for r in caught.value.reasons] == ["dtype", "head_dim", "page_size"]


@pytest.mark.parametrize("name", [3, None, b"torch_native", ["torch_native"]])
def test_a_name_that_is_no_text_is_refused(spec: ab.AttentionSpec, name: Any) -> None:
    if name is not None:  # None leaves the choice to the next layer
        with pytest.raises(ab.InvalidInputError, match="backend="):
            ab.select(spec, backend=name)
        with pytest.raises(ValueError, match="backend"):
            ab.AttentionConfig(backend=name)
