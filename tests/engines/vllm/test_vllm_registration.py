"""One name of vLLM's leads to the library: idempotent, quiet, and never another plug's."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attn_backends.engines.vllm import backend_name, register
from attn_backends.engines.vllm.registration import OWN, SPARE, TARGET

ROOT = Path(__file__).parents[3]


@pytest.fixture
def registry(monkeypatch):
    """vLLM's registry, with nothing of ours in it."""
    from vllm.v1.attention.backends import registry

    table = registry._ATTN_OVERRIDES
    kept = dict(table)
    table.clear()
    yield registry
    table.clear()
    table.update(kept)


def test_the_name_leads_to_the_class_and_the_class_knows_its_name(registry):
    from attn_backends.engines.vllm.backend import Backend

    register()
    register()
    member = registry.AttentionBackendEnum.__members__[backend_name()]
    assert member.get_path() == TARGET == f"{Backend.__module__}.{Backend.__qualname__}"
    assert Backend.get_name() == backend_name()
    assert backend_name() in (OWN, SPARE)


def test_the_spare_name_of_another_plug_stays_its_own(registry, caplog):
    if backend_name() == OWN:
        pytest.skip("this vLLM gives every plug a name of its own")
    registry.register_backend(registry.AttentionBackendEnum.CUSTOM, "other.plug.Backend")
    with caplog.at_level(logging.WARNING, logger="vllm.attn_backends"):
        register()
    assert registry.AttentionBackendEnum.CUSTOM.get_path() == "other.plug.Backend"
    assert "already belongs to other.plug.Backend" in caplog.text


def test_a_registry_that_is_not_known_is_told_and_harms_nobody(registry, caplog, monkeypatch):
    monkeypatch.delattr(registry, "AttentionBackendEnum")
    with caplog.at_level(logging.WARNING, logger="vllm.attn_backends"):
        register()
    assert "not registered, this vLLM has another registry" in caplog.text


def test_registering_imports_no_kernel_and_no_backend():
    code = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("standin", sys.argv[1])
standin = sys.modules["standin"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(standin)
standin.install()
from attn_backends.engines.vllm import register
register()
new = [m for m in sys.modules if m.startswith("attn_backends.engines.vllm.")]
print(sorted(new), [m for m in ("triton", "flashinfer", "flash_attn") if m in sys.modules])
"""
    standin = Path(__file__).with_name("standin.py")
    done = subprocess.run(
        [sys.executable, "-c", code, str(standin)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    assert done.stdout.strip() == "['attn_backends.engines.vllm.registration'] []"


def test_the_package_tells_vllm_where_to_look():
    if sys.version_info < (3, 11):
        pytest.skip("needs tomllib")
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {
        "attn_backends": "attn_backends.engines.vllm:register"
    }


def reasons(**change):
    """What the class has against a layer, as vLLM asks it."""
    from attn_backends.engines.vllm.backend import Backend

    asked = {
        "head_size": 64,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": None,
        "use_mla": False,
        "has_sink": True,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": True,
        "device_capability": (9, 0),
        "attn_type": "decoder",
        **change,
    }
    return Backend.validate_configuration(**asked)


def test_layers_are_judged_before_they_are_built(monkeypatch):
    assert reasons() == []
    monkeypatch.setenv("ATTN_BACKENDS_BACKEND", "triton")
    assert reasons(kv_cache_dtype="fp8") == []
    assert reasons(kv_cache_dtype="fp8_e5m2") == [
        "kv_dtype=float8_e5m2 (supported: bfloat16, float8_e4m3fn)"
    ]
    assert reasons(head_size=1024) == [
        "head_dim=1024 (supported: 1..576)",
    ]
    assert reasons(attn_type="encoder_only") == ["attention type encoder_only not supported"]


def test_malformed_settings_are_told_in_full(monkeypatch):
    monkeypatch.setenv("ATTN_BACKENDS_DECODE", "tritn")
    (text,) = reasons()
    assert "ATTN_BACKENDS_DECODE" in text and "tritn" in text


@pytest.mark.parametrize(
    "prefill, decode, want",
    [
        ("auto", "auto", [1]),
        ("triton", "torch_native", [1]),
        ("flash_attention", "triton", [1]),
        ("triton", "torch_varlen", [256]),
    ],
)
def test_block_sizes_are_those_of_the_named_backends(monkeypatch, prefill, decode, want):
    from attn_backends.engines.vllm.backend import Backend

    monkeypatch.setenv("ATTN_BACKENDS_PREFILL", prefill)
    monkeypatch.setenv("ATTN_BACKENDS_DECODE", decode)
    assert [each.base for each in Backend.get_supported_kernel_block_sizes()] == want


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("layers", [False, True])
def test_orders_of_the_cache_are_permutations_with_the_head_dim_last(layout, layers):
    from attn_backends.engines.vllm.kv_cache import cache_shape, stride_order

    order = stride_order(layout, layers)
    assert sorted(order) == list(range(len(cache_shape(2, 16, 4, 64)) + layers))
    assert order[-1] == len(order) - 1


def test_keys_come_before_values_in_a_cache():
    from attn_backends.engines.vllm.kv_cache import cache_views

    older, newer = torch.randn(3, 2, 4, 5, 8), torch.randn(3, 5, 4, 16)
    k, v = cache_views(older, torch.float32)
    assert torch.equal(k, older[:, 0]) and torch.equal(v, older[:, 1])
    k, v = cache_views(newer, torch.float32)
    assert torch.equal(k, newer[..., :8].transpose(1, 2))
    assert torch.equal(v, newer[..., 8:].transpose(1, 2))


def test_a_cache_of_another_shape_is_refused():
    from attn_backends.engines.vllm.kv_cache import cache_views, stride_order
    from attn_backends.errors import UnsupportedCallError

    with pytest.raises(UnsupportedCallError, match=r"kv_cache\.shape=\[2, 3\]"):
        cache_views(torch.zeros(2, 3), torch.float32)
    with pytest.raises(UnsupportedCallError, match=r"kv_cache_layout=BHN \(supported: NHD, HND\)"):
        stride_order("BHN", False)
