"""doctor: a backend that is wrong, raises, or is absent is told apart from one that works."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attn_backends.bench.tables import table
from attn_backends.capabilities import Capabilities, IntSet
from attn_backends.cli.health import cases, expected
from attn_backends.registry import register_attention_backend
from attn_backends.spec import AttentionSpec
from attn_backends.torch_native.backend import TorchNativeBackend

from . import toys

Cli = Callable[..., object]


def test_a_backend_that_works_passes_both_phases_and_both_layouts(cli: Cli) -> None:
    answer = cli("doctor", "--backend", "torch_native", "--json")
    assert answer.code == 0 and answer.json["ok"] is True
    (native,) = answer.json["backends"]
    assert native["status"] == "PASS"
    cpu = {c["phase"]: c for c in native["checks"] if c["device"] == "cpu"}
    assert set(cpu) == {"prefill", "decode"}
    assert "ragged" in cpu["prefill"]["case"] and "pages of 16" in cpu["decode"]["case"]
    for check in cpu.values():
        assert check["status"] == "PASS"
        assert 0 < check["error_o"] <= check["tolerance_o"] < 1e-4
        assert 0 < check["error_lse"] <= check["tolerance_lse"] < 1e-4


@pytest.mark.parametrize(
    ("toy", "word"),
    [
        (toys.Wrong, "o by"),
        (toys.Base2, "lse by"),
        (toys.Unwritten, "o by nan"),
        (toys.Raises, "RuntimeError: ptxas fatal: no such architecture"),
    ],
)
def test_a_broken_backend_fails_and_the_exit_code_says_so(
    cli: Cli, own_table: None, toy: type, word: str
) -> None:
    register_attention_backend(toy.name, toy)
    answer = cli("doctor", "--backend", toy.name, "--json")
    assert answer.code == 1 and answer.json["ok"] is False
    (backend,) = answer.json["backends"]
    assert backend["status"] == "FAIL"
    assert all(c["status"] == "FAIL" and word in c["message"] for c in backend["checks"])
    people = cli("doctor", "--backend", toy.name)
    assert people.code == 1
    assert "FAIL" in people.stdout and word in people.stdout


def test_an_exception_is_shown_with_its_traceback(cli: Cli, own_table: None) -> None:
    register_attention_backend("toy_raises", toys.Raises)
    text = cli("doctor", "--backend", "toy_raises").stdout
    assert "Traceback" in text and "toys.py" in text


def test_an_absent_backend_is_no_failure_and_its_fix_is_shown(cli: Cli, own_table: None) -> None:
    register_attention_backend("toy_absent", toys.Absent)
    answer = cli("doctor", "--backend", "toy_absent", "--json")
    assert answer.code == 0
    (backend,) = answer.json["backends"]
    assert backend["status"] == "unavailable" and backend["checks"] == []
    assert backend["fixes"] == ["pip install toylib"]
    people = cli("doctor").stdout
    assert "unavailable" in people and "pip install toylib" in people


def test_one_broken_backend_does_not_hide_the_others(cli: Cli, own_table: None) -> None:
    register_attention_backend("toy_raises", toys.Raises)
    backends = {b["name"]: b["status"] for b in cli("doctor", "--json").json["backends"]}
    assert backends["torch_native"] == "PASS"
    assert backends["toy_raises"] == "FAIL"


def test_a_factory_that_crashes_fails(cli: Cli, own_table: None) -> None:
    def factory(spec, *, device=None, options=None):
        raise TypeError("the toolchain is gone")

    register_attention_backend("toy_factory", factory)
    answer = cli("doctor", "--backend", "toy_factory", "--json")
    assert answer.code == 1
    assert "the toolchain is gone" in answer.json["backends"][0]["checks"][0]["message"]


def test_a_denied_backend_is_not_run(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BACKENDS_DENY", "torch_native")
    answer = cli("doctor", "--backend", "torch_native", "--json")
    assert answer.code == 0
    checks = answer.json["backends"][0]["checks"]
    assert {c["status"] for c in checks} == {"unsupported"}
    assert "deny" in checks[0]["message"]


def test_an_unknown_backend_is_an_error(cli: Cli) -> None:
    answer = cli("doctor", "--backend", "torch_nativ")
    assert answer.code == 2 and "torch_native" in answer.stderr


def test_every_library_behind_a_name_is_run(
    cli: Cli, own_table: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    register_attention_backend("toy_many", toys.Many)
    answer = cli("doctor", "--backend", "toy_many", "--json")
    checks = [c for c in answer.json["backends"][0]["checks"] if c["device"] == "cpu"]
    found = {(c["options"]["version"], c["status"]) for c in checks}
    assert found == {("1", "PASS"), ("2", "FAIL")}, checks[0]["message"]
    assert answer.code == 1
    assert "toy_many:version=2" in cli("doctor", "--backend", "toy_many").stdout
    rows = table({**answer.json, "meta": {}}).splitlines()
    assert any(row.startswith("| toy_many:version=1 | PASS |") for row in rows)
    assert any(row.startswith("| toy_many:version=2 | FAIL |") for row in rows)


def test_versions_are_told(cli: Cli) -> None:
    answer = cli("doctor", "--backend", "torch_native", "--json").json
    assert answer["date"].count("-") == 2 and "commit" in answer
    environment = answer["environment"]
    assert environment["torch"] == torch.__version__
    assert environment["python"].startswith("3.")
    assert "flash-attn" in environment["packages"]
    text = cli("doctor", "--backend", "torch_native").stdout
    assert torch.__version__ in text and "ATTN_BACKENDS_BACKEND" in text


class Latent(TorchNativeBackend):
    """Does only what latent attention needs."""

    name = "toy_latent"
    capabilities = Capabilities(
        devices=("cpu", "cuda"),
        dtypes=(torch.bfloat16,),
        head_dims=IntSet((576,)),
        head_dims_v=IntSet((512,)),
        head_dim_pairs=((576, 512),),
        page_sizes=IntSet((64,)),
        group_sizes=IntSet((16, 128)),
        phases=("decode",),
        features=frozenset({"paged", "causal"}),
    )


def test_a_narrow_backend_is_run_on_what_it_declares(cli: Cli, own_table: None) -> None:
    register_attention_backend("toy_latent", Latent)
    answer = cli("doctor", "--backend", "toy_latent", "--json")
    checks = {c["phase"]: c for c in answer.json["backends"][0]["checks"] if c["device"] == "cpu"}
    assert checks["decode"]["status"] == "PASS", checks["decode"]["message"]
    assert "dim 576/512, pages of 64" in checks["decode"]["case"]
    assert checks["prefill"]["status"] == "unsupported"
    assert "phase=prefill" in checks["prefill"]["message"]
    assert answer.code == 0


def test_the_expected_values_are_those_of_the_definition() -> None:
    spec = AttentionSpec(1, 1, 4, dtype=torch.float64)
    q = torch.tensor([[[2.0, 0, 0, 0]], [[0.0, 0, 0, 0]]], dtype=torch.float64)
    k = torch.tensor([[[1.0, 0, 0, 0]], [[3.0, 0, 0, 0]]], dtype=torch.float64)
    v = torch.tensor([[[1.0, 0, 0, 0]], [[0.0, 1, 0, 0]]], dtype=torch.float64)
    o, lse, largest = expected(spec, q, [k], [v], [2])
    assert o[0, 0].tolist() == [1, 0, 0, 0] and lse[0, 0].item() == 1.0  # sees one key: s = 2*1/2
    assert o[1, 0].tolist() == [0.5, 0.5, 0, 0]
    assert lse[1, 0].item() == pytest.approx(0.6931471805599453)
    assert largest == 3.0


def test_every_small_case_is_small() -> None:
    declared = TorchNativeBackend.capabilities
    for phase in ("prefill", "decode"):
        specs = list(cases(declared, "cpu", phase))
        assert 0 < len(specs) < 1000
        assert all(s.num_heads * s.head_dim <= 16 * 576 for s in specs)
