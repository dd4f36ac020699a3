"""An installed SGLang still has what the plug builds on.

Run where SGLang is installed, ``pytest tests/engines/sglang``: all other tests of this folder then
drive SGLang's own classes too, in place of the stand-in.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine
ROOT = Path(__file__).resolve().parents[3]


def find(path: str) -> Any:
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in filter(None, name.split(".")):
        found = getattr(found, part)
    return found


def moved(path: str) -> str:
    """Where this SGLang keeps what is recorded under a path."""
    if path == "sglang.srt.arg_groups.choices":
        try:
            importlib.import_module(path)
        except ModuleNotFoundError:
            return "sglang.srt.server_args"
    return path


def is_recorded_version(beside) -> bool:
    from importlib.metadata import version

    return version("sglang") == beside("recorded").SGLANG


def test_parameters(sglang, beside) -> None:
    for path, want in beside("recorded").PARAMETERS.items():
        if path.endswith("KVWriteLoc.for_batch") and not is_recorded_version(beside):
            continue  # older releases construct it; the plug does either
        parameters = list(inspect.signature(find(path)).parameters)
        missing = [name for name in want if name not in parameters]
        assert not missing, f"{path}: {missing}"
        if is_recorded_version(beside):
            assert parameters[: len(want)] == list(want), path


def test_fields(sglang, beside) -> None:
    for path, want in beside("recorded").FIELDS.items():
        names = {field.name for field in dataclasses.fields(find(path))}
        optional = (
            set()
            if is_recorded_version(beside)
            else {
                "physical",
                "out_cache_loc_is_physical",
            }
        )
        assert not set(want) - names - optional, path


def test_names(sglang, beside) -> None:
    for path, want in beside("recorded").NAMES.items():
        found = find(moved(path))
        assert not [name for name in want if not hasattr(found, name)], path


def test_settings(sglang, beside) -> None:
    from sglang.srt.server_args import ServerArgs

    if dataclasses.is_dataclass(ServerArgs):
        names = {field.name for field in dataclasses.fields(ServerArgs)}
    else:
        names = set(ServerArgs.__struct_fields__)
    assert not set(beside("recorded").SETTINGS) - names


def test_attributes_of_the_model_runner(sglang, beside) -> None:
    """The runner cannot be built without a GPU; its source says what it has."""
    source = Path(importlib.util.find_spec("sglang.srt.model_executor.model_runner").origin)
    text = source.read_text()
    for name in beside("recorded").RUNNER:
        if name == "kv_index_translator" and not is_recorded_version(beside):
            continue  # it came after 0.5.17
        assert re.search(rf"\bself\.{name}\b", text), name


def test_the_engine_counts_keys_before_the_own(sglang) -> None:
    """The window that models report is one less than the configured one."""
    from sglang.srt.models import gemma2

    text = inspect.getsource(gemma2.get_attention_sliding_window_size)
    assert re.search(r"sliding_window\s*-\s*1", text)


def test_the_pool_divides_in_place(sglang) -> None:
    """The trap that the plug steps around, so that the step can go once the trap is gone."""
    from types import SimpleNamespace

    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = MHATokenToKVPool(
        size=4,
        page_size=1,
        dtype=torch.float8_e4m3fn,
        head_num=1,
        head_dim=8,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    k = torch.ones(1, 1, 8)
    pool.set_kv_buffer(SimpleNamespace(layer_id=0), torch.tensor([2]), k, k.clone(), 2.0, 2.0)
    assert bool((k == 0.5).all())


#: A process as SGLang starts them: plugins first, then the command line.
LAUNCH = """
import sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.server_args import ServerArgs
import argparse
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
args = parser.parse_args(sys.argv[1:])
print("CHOSEN", args.attention_backend, args.decode_attention_backend)
print("FACTORY", ATTENTION_BACKENDS["attn_backends"].__module__)
print("IMPORTED", "attn_backends.engines.sglang.backend" in sys.modules)
"""


def launch(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``LAUNCH`` where the library's entry points are installed."""
    info = tmp_path / "attn_backends-0.0.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: attn-backends\nVersion: 0.0.0\n")
    text = (ROOT / "pyproject.toml").read_text()
    line = re.search(r'^attn_backends = "(attn_backends\.engines\.sglang.*)"$', text, re.M)
    assert line is not None
    (info / "entry_points.txt").write_text(
        f"[sglang.srt.plugins]\nattn_backends = {line.group(1)}\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", LAUNCH, "--model-path", "none", *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_the_command_line_accepts_the_name(sglang, tmp_path) -> None:
    done = launch(
        tmp_path,
        *("--attention-backend", "attn_backends", "--decode-attention-backend", "attn_backends"),
    )
    assert "CHOSEN attn_backends attn_backends" in done.stdout, done.stderr[-2000:]
    assert "FACTORY attn_backends.engines.sglang.registration" in done.stdout
    assert "IMPORTED False" in done.stdout


@pytest.mark.slow
def test_an_allow_list_without_the_plugin_leaves_the_name_unknown(sglang, tmp_path) -> None:
    arguments = ("--attention-backend", "attn_backends")
    done = launch(tmp_path, *arguments, SGLANG_PLUGINS="another")
    assert done.returncode == 2 and "invalid choice: 'attn_backends'" in done.stderr


def test_prefill_and_decode_may_be_of_different_makers(serve, sglang) -> None:
    """SGLang's own pairing of two backends reaches ours for the phase it was chosen for."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    import attn_backends as ab

    with ab.use("torch_native"):
        server = serve(page_size=4)
        ours = server.backend
        pair = HybridAttnBackend.__new__(HybridAttnBackend)
        pair.prefill_backend = pair.decode_backend = ours
        server.backend = pair
        server.step("EXTEND", {"a": 9})
        server.step("DECODE", {"a": 1})
        assert ours.forward_metadata.phase == "decode"
