from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

import attn_backends as ab
from attn_backends.registry.builtin import builtin_entries
from attn_backends.torch_native.backend import TorchNativeBackend


def test_decorator_returns_what_it_decorates() -> None:
    class Mine(TorchNativeBackend):
        name = "mine"

    assert ab.register_attention_backend("mine")(Mine) is Mine
    assert ab.ATTENTION_BACKENDS["mine"].load() is Mine


def test_direct_form_returns_the_target() -> None:
    assert ab.register_attention_backend("mine", TorchNativeBackend) is TorchNativeBackend
    target = "attn_backends.torch_native.backend:TorchNativeBackend"
    assert ab.register_attention_backend("lazy", target) == target
    assert ab.ATTENTION_BACKENDS["lazy"].load() is TorchNativeBackend


def test_string_target_is_imported_only_when_needed(
    monkeypatch: pytest.MonkeyPatch, spec: ab.AttentionSpec
) -> None:
    ab.register_attention_backend("lazy", "late_module:Backend")  # does not exist yet
    module = ModuleType("late_module")
    module.Backend = TorchNativeBackend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "late_module", module)
    assert type(ab.select(spec, backend="lazy").backend) is TorchNativeBackend


def test_a_failed_import_is_remembered_with_its_message(spec: ab.AttentionSpec) -> None:
    ab.register_attention_backend("lazy", "no_such_module:Backend", install_hint="pip install it")
    for _ in range(2):
        with pytest.raises(ab.BackendUnavailableError, match=r"no_such_module.*pip install it"):
            ab.select(spec, backend="lazy")
    with pytest.raises(ab.BackendUnavailableError) as caught:
        ab.ATTENTION_BACKENDS["lazy"].load()
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_factory_may_stand_for_a_backend(spec: ab.AttentionSpec) -> None:
    calls: list[Any] = []

    @ab.register_attention_backend("made")
    def make(spec: ab.AttentionSpec, *, device: Any = None, options: Any = None) -> Any:
        calls.append((spec, device))
        return TorchNativeBackend(spec, device=device)

    chosen = ab.select(spec, backend="made", device="cpu")
    assert isinstance(chosen.backend, TorchNativeBackend)
    assert ab.select(spec, backend="made", phase="decode", device="cpu").backend is chosen.backend
    assert len(calls) == 1


def test_a_factory_that_refuses_or_fails_gives_its_reasons(spec: ab.AttentionSpec) -> None:
    reason = ab.Reason("head_dim", "16", "64")

    @ab.register_attention_backend("refuses")
    def refuses(spec: Any, *, device: Any = None, options: Any = None) -> Any:
        raise ab.UnsupportedCallError("no", backend="refuses", reasons=[reason])

    @ab.register_attention_backend("fails")
    def fails(spec: Any, *, device: Any = None, options: Any = None) -> Any:
        raise ZeroDivisionError("oops")

    @ab.register_attention_backend("lies")
    def lies(spec: Any, *, device: Any = None, options: Any = None) -> Any:
        return 7

    with pytest.raises(ab.UnsupportedCallError) as caught:
        ab.select(spec, backend="refuses")
    assert caught.value.reasons == (reason,)
    with pytest.raises(ab.UnsupportedCallError, match="check raised ZeroDivisionError: oops"):
        ab.select(spec, backend="fails")
    with pytest.raises(ab.UnsupportedCallError, match="TypeError: the factory of lies returned"):
        ab.select(spec, backend="lies")


def test_a_duplicate_raises_unless_override() -> None:
    class Other(TorchNativeBackend):
        name = "torch_native"

    with pytest.raises(ab.InvalidInputError, match="override=True"):
        ab.register_attention_backend("torch_native", Other)
    assert ab.ATTENTION_BACKENDS["torch_native"].load() is TorchNativeBackend
    ab.register_attention_backend("torch_native", Other, override=True)
    assert ab.ATTENTION_BACKENDS["torch_native"].load() is Other


@pytest.mark.parametrize("name", ["", "Mine", "my-backend", "1st", "a b", "auto", "none", "ä", 3])
def test_a_malformed_name_is_refused(name: Any) -> None:
    with pytest.raises(ab.InvalidInputError, match="name="):
        ab.register_attention_backend(name, TorchNativeBackend)


class _NotABackend:
    pass


class _NoRun(ab.AttentionBackend):
    name = "no_run"
    capabilities = TorchNativeBackend.capabilities


class _NoDeclaration(ab.AttentionBackend):
    def _run(self, *args: Any) -> Any:
        raise AssertionError


@pytest.mark.parametrize(
    "target", [_NotABackend, _NoRun, _NoDeclaration, 7, "nocolon", "a b:c", ""]
)
def test_a_target_that_cannot_be_a_backend_is_refused(target: Any) -> None:
    with pytest.raises(ab.InvalidInputError, match="target="):
        ab.register_attention_backend("mine", target)
    assert "mine" not in ab.ATTENTION_BACKENDS


def test_the_view_is_read_only_and_finds_any_spelling() -> None:
    view: Any = ab.ATTENTION_BACKENDS
    with pytest.raises(TypeError):
        view["mine"] = TorchNativeBackend
    with pytest.raises(TypeError):
        del view["torch_native"]
    assert view[" Torch_Native "].name == "torch_native"
    assert "TORCH_NATIVE" in view and "nope" not in view and 3 not in view
    assert view.get("nope") is None and len(view) == len(list(view)) == len(dict(view))
    with pytest.raises(AttributeError):
        view["torch_native"].target = None
    with pytest.raises(LookupError, match="torch_native"):
        view["nope"]


def test_every_builtin_target_exists() -> None:
    assert len(builtin_entries()) >= 7
    for entry in builtin_entries().values():
        target: Any = entry.load()
        assert issubclass(target, ab.AttentionBackend) and target.name == entry.name
