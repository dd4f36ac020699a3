from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import attn_backends as ab
from attn_backends import environment
from attn_backends.config import PROCESS, current_merge_path
from attn_backends.registry.target import parse_options

SPEC = ab.AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8, dtype=torch.float32)


@pytest.fixture(autouse=True)
def isolated() -> Iterator[None]:
    before = ab.configure(None)
    PROCESS.environment = None
    environment._warned.clear()
    yield
    ab.configure(before)
    PROCESS.environment = None


# F32
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sofcap": 1}, ["sofcap"]),
        ({"batch_invariant": "true"}, ["batch_invariant", "true"]),
        ({"batch_invariant": 1}, ["batch_invariant"]),
        ({"merge": "nvcc"}, ["merge", "nvcc", "cuda", "triton", "torch"]),
        ({"allow": "torch_native"}, ["allow", "a list of names, as in [torch_native]"]),
        ({"allow": [3]}, ["allow", "3"]),
        ({"tuning_file": 3}, ["tuning_file"]),
        ({"options": []}, ["options"]),
        ({"options": {"torch_native": 3}}, ["options.torch_native"]),
        ({"options": {"torch_native": {"tile_k": "16"}}}, ["options.torch_native.tile_k", "'16'"]),
        ({"options": {"torch_native": {"tile_k": 16.0}}}, ["options.torch_native.tile_k"]),
        ({"options": {"torch_native": {"tile_k": 0}}}, ["options.torch_native.tile_k=0", "1"]),
        ({"options": {"torch_native": {"tile_k": True}}}, ["options.torch_native.tile_k"]),
        ({"options": {"torch_native": {"tile": 1}}}, ["torch_native.tile=1", "tile_k"]),
        ({"options": {"torch_native": {}, "TORCH_NATIVE": {}}}, ["each backend once"]),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        ab.AttentionConfig(**fields)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("field", ["backend", "prefill", "decode", "allow", "deny", "options"])
def test_an_unknown_backend_is_refused_with_field_and_closest(field: str) -> None:
    value: Any = "torch-native"
    if field in ("allow", "deny"):
        value = [value]
    elif field == "options":
        value = {value: {}}
    with pytest.raises(ab.UnknownBackendError) as caught:
        ab.AttentionConfig(**{field: value})
    text = str(caught.value)
    assert f"{field}='torch-native'" in text and text.endswith("the closest is torch_native")


def test_auto_is_no_member_of_lists() -> None:
    with pytest.raises(ab.UnknownBackendError, match="deny='auto'"):
        ab.AttentionConfig(deny=["auto"])
    assert ab.AttentionConfig(backend=" AUTO ").backend == "auto"


def test_names_are_stored_in_their_registered_spelling() -> None:
    config = ab.AttentionConfig(
        backend="Torch_Native", allow=[" torch_native"], options={"TORCH_NATIVE": {"tile_k": 3}}
    )
    assert config.backend == "torch_native" and config.allow == ("torch_native",)
    assert config.options == {"torch_native": {"tile_k": 3}}


def test_a_config_is_frozen_and_can_be_copied_pickled_and_hashed() -> None:
    config = ab.AttentionConfig(deny=[], options={"torch_native": {"tile_k": 3}})
    with pytest.raises(ValidationError):
        config.backend = "auto"  # type: ignore[misc]
    for other in (
        copy.copy(config),
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        config.model_copy(),
        ab.AttentionConfig(**config.model_dump()),
        ab.AttentionConfig.model_validate_json(config.model_dump_json()),
    ):
        assert other == config and hash(other) == hash(config)
    changed = config.model_copy(update={"backend": "TORCH_NATIVE"})
    assert changed.backend == "torch_native" and changed.options == config.options
    assert json.loads(changed.as_json)["backend"] == "torch_native"
    with pytest.raises(ab.UnknownBackendError):
        config.model_copy(update={"backend": "nope"})


def test_the_schema_can_be_published() -> None:
    schema = ab.AttentionConfig.model_json_schema()
    assert set(schema["properties"]) == set(ab.AttentionConfig.model_fields)
    assert schema["additionalProperties"] is False


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "backend": st.sampled_from(["auto", "torch_native"]),
        "prefill": st.sampled_from(["auto", "torch_native"]),
        "decode": st.sampled_from(["auto", "torch_native"]),
        "allow": st.lists(st.just("torch_native"), max_size=2),
        "deny": st.lists(st.just("torch_native"), max_size=2),
        "batch_invariant": st.booleans(),
        "merge": st.sampled_from(["auto", "cuda", "triton", "torch"]),
        "options": st.fixed_dictionaries(
            {}, optional={"torch_native": st.fixed_dictionaries({"tile_k": st.integers(1, 4096)})}
        ),
        "tuning_file": st.text(min_size=1, max_size=5),
    },
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(fields=FIELDS)
def test_every_valid_config_survives_json(fields: dict[str, Any]) -> None:
    config = ab.AttentionConfig(**fields)
    assert ab.AttentionConfig.model_validate_json(config.as_json) == config
    for name, value in fields.items():
        got = getattr(config, name)
        assert got == (tuple(value) if isinstance(value, list) else value)


JUNK = st.one_of(st.integers(), st.floats(), st.binary(), st.lists(st.floats(), min_size=1))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(field=st.sampled_from(sorted(ab.AttentionConfig.model_fields)), value=JUNK)
def test_no_field_takes_values_of_another_type(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        ab.AttentionConfig(**{field: value})


TEXTS = {
    "yaml": """
backend: torch_native
deny: []
merge: torch
options:
  torch_native:
    tile_k: 7
""",
    "yml": "{backend: torch_native, deny: [], merge: torch, options: {torch_native: {tile_k: 7}}}",
    "toml": """
backend = "torch_native"
deny = []
merge = "torch"
[options.torch_native]
tile_k = 7
""",
    "json": json.dumps(
        {
            "backend": "torch_native",
            "deny": [],
            "merge": "torch",
            "options": {"torch_native": {"tile_k": 7}},
        }
    ),
}


@pytest.mark.parametrize("suffix", TEXTS)
def test_a_file_is_read_in_each_format(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"config.{suffix}"
    path.write_text(TEXTS[suffix])
    want = ab.AttentionConfig(
        backend="torch_native", deny=[], merge="torch", options={"torch_native": {"tile_k": 7}}
    )
    assert ab.AttentionConfig.from_file(path) == ab.AttentionConfig.from_file(str(path)) == want


def test_an_empty_yaml_file_sets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("# nothing yet\n")
    assert ab.AttentionConfig.from_file(path) == ab.AttentionConfig()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("c.yaml", "backend: [", ["YAML"]),
        ("c.toml", "backend = ", ["TOML"]),
        ("c.json", "{", ["JSON"]),
        ("c.json", "[1]", ["list", "mapping"]),
        ("c.ini", "", [".yaml, .yml, .toml, .json"]),
        ("c.json", '{"sofcap": 1}', ["sofcap=1", "only the fields backend"]),
        ("c.yaml", "batch_invariant: 'yes'", ["batch_invariant='yes'"]),
        ("c.yaml", "options: {torch_native: {tile_k: '16'}}", ["options.torch_native.tile_k='16'"]),
        ("c.toml", "allow = 'torch_native'", ["allow='torch_native'"]),
        ("missing.json", None, ["No such file"]),
        (".", None, ["config file"]),
    ],
)
def test_a_wrong_file_is_refused_by_name_and_field(
    tmp_path: Path, name: str, text: str | None, words: list[str]
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ab.InvalidInputError) as caught:
        ab.AttentionConfig.from_file(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_an_unknown_backend_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("deny: [torch-native]")
    with pytest.raises(ab.UnknownBackendError, match=r"c\.yaml: deny='torch-native'"):
        ab.AttentionConfig.from_file(path)


def test_a_missing_yaml_package_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("backend: auto")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ab.InvalidInputError, match="pyyaml"):
        ab.AttentionConfig.from_file(path)


def test_a_tuning_file_is_relative_to_the_file_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"tuning_file": "tuned/h200.json"}')
    want = str(tmp_path / "tuned" / "h200.json")
    assert ab.AttentionConfig.from_file(path).tuning_file == want
    assert ab.AttentionConfig(tuning_file=Path("x.json")).tuning_file == "x.json"


def test_the_environment_fills_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"merge": "torch", "decode": "torch_native", "deny": []}')
    values = {
        "CONFIG": str(path),
        "PREFILL": " Torch_Native ",
        "ALLOW": "torch_native, TORCH_NATIVE",
        "BATCH_INVARIANT": "On",
        "TUNING_FILE": "~/tuned.json",
    }
    for name, value in values.items():
        monkeypatch.setenv(f"ATTN_BACKENDS_{name}", value)
    config = ab.AttentionSettings()
    assert isinstance(config, ab.AttentionConfig)
    assert config.prefill == config.decode == "torch_native" and config.backend is None
    assert config.allow == ("torch_native", "torch_native") and config.deny == ()
    assert config.batch_invariant is True and config.merge == "torch"
    assert config.tuning_file == os.path.expanduser("~/tuned.json")
    monkeypatch.setenv("ATTN_BACKENDS_MERGE", "TRITON")
    assert ab.AttentionSettings().merge == "triton"
    over = ab.AttentionSettings(merge="cuda", backend="auto")
    assert over.merge == "cuda" and over.backend == "auto" and over.decode is None
    assert ab.AttentionSettings() == ab.AttentionSettings()
    ab.configure(ab.AttentionSettings())
    assert current_merge_path() == "triton"
    with pytest.raises(ValidationError, match="sofcap"):
        ab.AttentionSettings(sofcap=1)


def test_a_file_whose_field_is_no_word_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("on: triton\n")  # which YAML reads as True
    with pytest.raises(ab.InvalidInputError, match=r"c\.yaml: field=True \(allowed: backend, "):
        ab.AttentionConfig.from_file(path)


@pytest.mark.parametrize("suffix", [".yaml", ".toml", ".json"])
def test_a_file_can_set_an_option_that_is_a_tuple(tmp_path: Path, suffix: str) -> None:
    given = [16, 64, 4, 3, 3, 64, True]
    values = {"options": {"triton": {"split_config": given}}}
    path = tmp_path / f"c{suffix}"
    text = json.dumps(values)
    if suffix == ".toml":
        text = f"[options.triton]\nsplit_config = {json.dumps(given)}\n"
    path.write_text(text)
    config = ab.AttentionConfig.from_file(path)
    parsed = parse_options(ab.ATTENTION_BACKENDS["triton"], config.options["triton"])
    assert parsed.split_config == tuple(given)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("BACKEND", "", ["valid: auto", "torch_native", "leave it unset"]),
        ("DECODE", " ", ["valid: auto", "torch_native"]),
        ("DENY", "", ["valid: ", "torch_native"]),
        ("ALLOW", "torch_native,,", ["valid: ", "torch_native", "a comma too many"]),
        ("BATCH_INVARIANT", "", ["1, true, yes, on, 0, false, no, off"]),
        ("BATCH_INVARIANT", "2", ["'2'", "1, true, yes, on, 0, false, no, off"]),
        ("MERGE", "", ["auto, cuda, triton, torch"]),
        ("MERGE", "nvcc", ["ATTN_BACKENDS_MERGE='nvcc'", "auto, cuda, triton, torch"]),
        ("TUNING_FILE", "", ["the path of a file"]),
        ("CONFIG", "", ["the path of a file"]),
        ("CONFIG", "/nowhere/c.json", ["ATTN_BACKENDS_CONFIG", "/nowhere/c.json"]),
        ("LOG", "loud", ["trace, debug, info, warning, error"]),
        ("LOG", "", ["trace, debug, info, warning, error"]),
    ],
)
def test_a_wrong_variable_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: list[str]
) -> None:
    monkeypatch.setenv(f"ATTN_BACKENDS_{name}", value)
    for ask in (lambda: ab.select(SPEC), ab.AttentionSettings):
        with pytest.raises(ab.AttnBackendsError) as caught:
            ask()
        for word in words:
            assert word in str(caught.value)
        if "nowhere" not in value:
            assert "ATTN_BACKENDS_" in str(caught.value)


def test_the_merge_path_follows_configuration_then_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert current_merge_path() is None
    monkeypatch.setenv("ATTN_BACKENDS_MERGE", "torch")
    assert current_merge_path() == "torch"
    ab.configure(ab.AttentionConfig(merge="triton"))
    assert current_merge_path() == "triton"
    ab.configure(ab.AttentionConfig(merge="auto"))
    assert current_merge_path() is None
    ab.configure(ab.AttentionConfig())
    assert current_merge_path() == "torch"
    monkeypatch.setenv("ATTN_BACKENDS_MERGE", "auto")
    assert current_merge_path() is None
    monkeypatch.delenv("ATTN_BACKENDS_MERGE")
    path = tmp_path / "c.json"
    path.write_text('{"merge": "cuda"}')
    monkeypatch.setenv("ATTN_BACKENDS_CONFIG", str(path))
    assert current_merge_path() == "cuda"


@pytest.mark.parametrize("path", ["cuda", "triton", "torch"])
def test_the_merge_takes_the_configured_path_or_refuses(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    o, lse = torch.ones(2, 1, 8, dtype=torch.float64), torch.zeros(2, 1)  # float64: torch only
    for configure in (
        lambda: ab.configure(ab.AttentionConfig(merge=path)),
        lambda: monkeypatch.setenv("ATTN_BACKENDS_MERGE", path),
    ):
        ab.merge_state(o, lse, o, lse)  # a plan of the same layouts must not answer later
        configure()
        if path == "torch":
            assert ab.choose_merge_path(o).reason == "asked for"
            ab.merge_state(o, lse, o, lse)
        else:
            for call in (
                lambda: ab.choose_merge_path(o),
                lambda: ab.merge_state(o, lse, o, lse),
                lambda: ab.merge_states([(o, lse), (o, lse)]),
                lambda: ab.merge_state_(o, lse, o.clone(), lse.clone()),
            ):
                with pytest.raises(ab.UnsupportedCallError, match=f"merge path '{path}'"):
                    call()
            ab.merge_state(o, lse, o, lse, path="torch")  # an argument goes before settings
        ab.configure(None)


def test_configure_takes_only_configurations() -> None:
    with pytest.raises(ab.InvalidInputError, match="config=dict"):
        ab.configure({"backend": "auto"})  # type: ignore[arg-type]


def test_the_log_level_can_be_set_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("attn_backends")
    before = logger.level
    monkeypatch.setenv("ATTN_BACKENDS_LOG", "Debug")
    try:
        ab.select(SPEC)
        assert logger.level == logging.DEBUG
    finally:
        logger.setLevel(before)


def test_selection_reads_the_environment_without_pydantic_settings() -> None:
    code = (
        "import sys; sys.modules['pydantic_settings'] = None\n"
        "import attn_backends as ab\n"
        "spec = ab.AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8)\n"
        "print(ab.select(spec, device='cpu').layer)\n"
    )
    root = str(Path(ab.__file__).resolve().parent.parent)
    env = {**os.environ, "ATTN_BACKENDS_BACKEND": "torch_native", "PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "environment"
