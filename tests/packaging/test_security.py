"""What the notes on security promise: no pickle, no network, no code out of files."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from building import ROOT, sources

FILES = [path for path in sources() if path.suffix == ".py"]
#: Modules that make objects of whatever a file says, or that reach out.
FORBIDDEN = {
    "unpickles": ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"),
    "networks": ("urllib", "urllib3", "http", "socket", "ssl", "ftplib", "smtplib", "xmlrpc",
                 "requests", "httpx", "aiohttp", "huggingface_hub", "paramiko"),
}  # fmt: skip
#: Calls that run text, or read objects.
CALLS = ("eval", "exec", "os.system", "os.popen", "torch.load", "torch.hub.load", "yaml.load",
         "yaml.unsafe_load", "yaml.full_load", "numpy.load", "np.load", "torch.hub.download",
         "pickle.load", "pickle.loads")  # fmt: skip
#: Programs that the library starts, where, and why. All with lists of arguments, never a shell.
PROGRAMS = {
    "attn_backends/bench/": "workers that may hang, the compiler's own tools",
    "attn_backends/cli/doctor.py": "nvidia-smi, for the driver's version",
    "attn_backends/cli/model_files.py": "pip download, when a person asks for a model",
    "attn_backends/provenance.py": "nvidia-smi and git, for the origin of results",
    "attn_backends/triton_native/offline.py": "ptxas, for developers",
    "attn_backends/triton_native/hopper_offline.py": "ptxas and cuobjdump, for developers",
}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    """Every module that is imported, wherever it stands."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module
        elif isinstance(node, ast.Call) and name_of(node.func).endswith("import_module"):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant))


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call))


@pytest.mark.parametrize("kind", FORBIDDEN)
def test_no_module_of_the_library(kind: str) -> None:
    found = [
        f"{path}: {name}"
        for path in FILES
        for name in imports(path)
        if name.partition(".")[0] in FORBIDDEN[kind]
    ]
    assert found == []


def test_no_text_is_run_and_no_objects_are_read() -> None:
    found = [f"{p}: {name_of(c.func)}" for p in FILES for c in calls(p) if name_of(c.func) in CALLS]
    assert found == []


def test_the_search_would_find_what_it_looks_for(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("import os, urllib.request\nfrom pickle import loads\nx = torch.load(y)\n")
    assert set(imports(bad)) == {"os", "urllib.request", "pickle"}
    assert [name_of(call.func) for call in calls(bad)] == ["torch.load"]


def test_models_are_read_from_local_files_only() -> None:
    """``from_pretrained`` reaches out unless it is told not to. Benchmarks are given folders."""
    for path in (p for p in FILES if "bench" not in p.parts):
        if any(name_of(call.func).endswith("from_pretrained") for call in calls(path)):
            text = (ROOT / path).read_text()
            local = ('"local_files_only": True', "local_files_only=True")
            assert any(words in text for words in local), path
            assert "trust_remote_code" not in text, path


def test_programs_are_started_where_the_notes_say_and_never_by_a_shell() -> None:
    for path in FILES:
        if "subprocess" not in {name.partition(".")[0] for name in imports(path)}:
            continue
        assert any(str(path).startswith(place) for place in PROGRAMS), f"{path} starts programs"
        for call in calls(path):
            given = {k.arg: k.value for k in call.keywords}
            shell = given.get("shell")
            assert shell is None or (isinstance(shell, ast.Constant) and shell.value is False), path
    notes = (ROOT / "docs/security.md").read_text()
    for program in ("nvidia-smi", "git", "ptxas", "pip download"):
        assert f"`{program}`" in notes


WATCHED = """
import json, os, sys
seen = []
WATCHED = ("socket.connect", "socket.getaddrinfo", "urllib.Request", "pickle.find_class",
           "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "webbrowser.open")
import torch, triton  # what they do themselves is theirs
sys.addaudithook(lambda event, args: event in WATCHED and seen.append((event, repr(args)[:200])))
import attn_backends as ab
infos = ab.list_backends()
q, kv = torch.randn(5, 4, 16), torch.randn(9, 2, 16)
for name in ("torch_native", "triton"):
    state = ab.attention(q, kv, kv, causal=True, backend=name)
    merged = state.merge(state)
spec = ab.AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
ab.explain(spec, device="cpu")
with ab.use("torch_native"):
    ab.select(spec, device="cpu")
config = ab.AttentionConfig.from_file(sys.argv[1])
ab.attention(q, kv, kv, config=config)
print(json.dumps({"seen": seen, "backends": len(infos)}))
"""


def test_a_process_that_attends_neither_connects_nor_unpickles_nor_starts_programs(
    tmp_path: Path,
) -> None:
    """What the interpreter itself reports of opened sockets, read pickles and new processes."""
    (tmp_path / "config.yaml").write_text("backend: torch_native\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(tmp_path / "config.yaml")],
        env=env, capture_output=True, text=True, timeout=240, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == {"seen": [], "backends": found["backends"]} and found["backends"] >= 7


def test_a_yaml_configuration_makes_plain_data_only(tmp_path: Path) -> None:
    import attn_backends as ab

    path = tmp_path / "config.yaml"
    path.write_text("backend: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ab.InvalidInputError):
        ab.AttentionConfig.from_file(path)


def test_files_that_are_kept_are_written_whole() -> None:
    """Each place that writes for a later process renames a finished file into place."""
    for place in ("registry/tuning.py", "attn_backends/cli/model_files.py"):
        names = {name_of(call.func) for call in calls(Path(place))}
        assert "os.replace" in names and "tempfile" in set(imports(Path(place)))
