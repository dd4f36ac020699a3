from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import attn_backends as ab

Register = Callable[..., Any]


def test_every_backend_is_listed_with_where_it_comes_from(register: Register) -> None:
    register("mine")
    infos = {info.name: info for info in ab.list_backends()}
    assert set(infos) == set(ab.ATTENTION_BACKENDS)
    native = infos["torch_native"]
    assert native.available and native.origin == "builtin" and native.summary.endswith(".")
    assert native.target == "attn_backends.torch_native.backend:TorchNativeBackend"
    assert native.capabilities is not None and "paged" in native.capabilities.features
    assert infos["mine"].origin == "registered" and infos["mine"].summary == "A toy for tests."


def test_what_does_not_load_is_listed_with_its_error() -> None:
    ab.register_attention_backend("broken", "no_such_module:Backend", install_hint="get it")
    info = {i.name: i for i in ab.list_backends()}["broken"]
    assert not info.available and info.capabilities is None
    text = str(info)
    assert "ModuleNotFoundError: No module named 'no_such_module'" in text and "get it" in text


def test_a_failing_check_is_listed_and_kills_nothing(register: Register) -> None:
    class Broken(register("base")):  # type: ignore[misc]
        @classmethod
        def dependency_reasons(cls, options: Any = None) -> Any:
            raise KeyError("table")

    Broken.name = "broken"
    ab.register_attention_backend("broken", Broken)
    info = {i.name: i for i in ab.list_backends()}["broken"]
    assert [str(r) for r in info.reasons] == ["check raised KeyError: 'table'"]


def test_a_device_that_is_not_here_is_a_reason(register: Register) -> None:
    register("elsewhere", devices=("xla",))
    info = {i.name: i for i in ab.list_backends()}["elsewhere"]
    assert not info.available and "(supported: xla)" in str(info.reasons[0])
    on_cpu = {i.name: i for i in ab.list_backends("cpu")}["elsewhere"]
    assert [str(r) for r in on_cpu.reasons] == ["device=cpu (supported: xla)"]
    assert {i.name: i for i in ab.list_backends(torch.device("xla"))}["elsewhere"].available


def test_a_factory_is_listed_without_capabilities() -> None:
    @ab.register_attention_backend("made")
    def make(spec: Any, *, device: Any = None, options: Any = None) -> Any:
        """Makes one."""

    info = {i.name: i for i in ab.list_backends()}["made"]
    assert info.available and info.capabilities is None and info.summary == "Makes one."


def test_the_listing_is_plain_data() -> None:
    data = json.loads(json.dumps([info.to_dict() for info in ab.list_backends()]))
    assert data[0]["name"] == "torch_native" and data[0]["reasons"] == []


def test_a_listing_that_is_asked_about_a_bad_device_says_so() -> None:
    with pytest.raises(ab.InvalidInputError, match="device='nowhere'"):
        ab.list_backends("nowhere")
