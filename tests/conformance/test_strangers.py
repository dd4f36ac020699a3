"""Adapters around kernels of engines: they translate rightly, and say when there is no engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs/examples"
REQUIREMENTS = ("values", "lse", "empty_rows", "windows", "options", "poison", "strides")
BACKENDS = ("sglang_triton:SglangTriton", "vllm_triton:VllmTriton", "vllm_triton:VllmDecode")
#: Files as an engine's wheel has them; the functions are those of ``fake_engines``.
FAKES = {
    "sglang-9.8/sglang/kernels/ops/attention/decode_attention.py":
        "from fake_engines import sglang_decode as decode_attention_fwd\n"
        "from sglang.srt.utils import is_hip\nassert not is_hip()\n",
    "sglang-9.8/sglang/kernels/ops/attention/extend_attention.py":
        "from fake_engines import sglang_extend as extend_attention_fwd\n"
        "import sglang.kernels.ops.attention.decode_attention\n",
    "sglang-9.8/sglang/kernels/ops/attention/score_mod.py": "",
    "vllm-7.6/vllm/v1/attention/ops/triton_unified_attention.py":
        "from fake_engines import vllm_unified as unified_attention\n"
        "from vllm.v1.kv_cache_interface import KVQuantMode\n"
        "from vllm.platforms import current_platform\nassert not current_platform.is_rocm()\n",
    "vllm-7.6/vllm/v1/attention/ops/triton_attention_helpers.py": "",
    "vllm-7.6/vllm/v1/attention/ops/triton_decode_attention.py":
        "from fake_engines import vllm_decode as decode_attention_fwd\n",
}  # fmt: skip


def run(*command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: stand-ins for engines must not be seen by other tests."""
    path = os.pathsep.join(map(str, (ROOT, EXAMPLES, Path(__file__).parent)))
    env = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env=env, cwd=cwd, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture(scope="module")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels taken out of wheels, as the examples say."""
    folder = tmp_path_factory.mktemp("strangers")
    wheels = []
    for release in ("sglang-9.8", "vllm-7.6"):
        wheels.append(folder / f"{release}-py3-none-any.whl")
        with zipfile.ZipFile(wheels[-1], "w") as archive:
            for name, text in FAKES.items():
                if name.startswith(f"{release}/"):
                    archive.writestr(name.removeprefix(f"{release}/"), text)
            archive.writestr("other/heavy.py", "raise ImportError")
    script = str(EXAMPLES / "strangers/sources.py")
    done = run(script, str(folder / "src"), *map(str, wheels), cwd=folder)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == len(FAKES) + 2
    return folder / "src"


def test_adapters_hand_right_kernels_what_they_ask_for(extracted: Path, tmp_path: Path) -> None:
    """Around kernels that compute rightly, the rules of the suite are kept."""
    names = [f"strangers.{name}" for name in BACKENDS]
    rules = [word for name in REQUIREMENTS for word in ("--requirement", name)]
    arguments = ["-m", "attn_backends.conformance", *names, *rules, "--json", "out"]
    done = run(*arguments, cwd=tmp_path, STRANGERS_SOURCES=str(extracted))
    reports = [json.loads(p.read_text()) for p in sorted((tmp_path / "out").glob("*.json"))]
    assert [r["backend"] for r in reports] == ["sglang_triton", "vllm_decode", "vllm_triton"]
    for report, most in zip(reports, (100, 20, 90)):
        assert report["ok"], done.stdout
        assert report["counts"]["passed"] > most, report["counts"]
    versions = [r["meta"]["packages"] for r in reports]
    assert [versions[0]["sglang"], versions[1]["vllm"]] == ["9.8", "7.6"]
    assert done.returncode == 0


def test_without_an_engine_every_call_is_refused_and_says_what_is_missing(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('vllm', 'sglang'): sys.modules[name] = None\n"
        "import attn_backends as ab\n"
        "from strangers.vllm_triton import VllmTriton\n"
        "spec = ab.AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=64, page_size=16)\n"
        "print(*VllmTriton.unsupported_reasons(spec), sep='\\n')\n"
        "try: VllmTriton(spec)\n"
        "except ab.UnsupportedCallError as error: print(len(error.reasons))\n"
    )
    done = run("-c", code, cwd=tmp_path)
    reason, count = done.stdout.splitlines()
    assert reason.startswith("vllm.v1.attention.ops.triton_unified_attention=ModuleNotFoundError: ")
    assert reason.endswith("STRANGERS_SOURCES with its file)") and count == "1"
