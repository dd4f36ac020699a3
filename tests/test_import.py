"""What importing, listing and running touch, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import attn_backends as ab

ROOT = Path(ab.__file__).resolve().parent.parent

PRELUDE = """
import json, sys, time
start = time.perf_counter()
import torch
of_torch = set(sys.modules)  # torch itself loads cuda.bindings where it is installed
middle = time.perf_counter()
import attn_backends as ab
seconds = time.perf_counter() - middle
"""

USE = (
    PRELUDE
    + """
loaded = sorted(sys.modules)
infos = {i.name: (i.available, [str(r) for r in i.reasons]) for i in ab.list_backends()}
initialized = torch.cuda.is_initialized()

# Zero queries: o is the mean of the visible j, lse the log of their number.
def values(n):
    return torch.arange(n, dtype=torch.float32)[:, None, None].expand(n, 1, 8).contiguous()

o, lse = ab.attention(torch.zeros(2, 2, 8), torch.zeros(5, 1, 8), values(5), causal=True)
both = ab.merge_state(o, lse, o, lse)
cache = torch.full((4, 2, 1, 8), float("nan"))
for page, start in ((3, 0), (1, 2)):
    cache[page, : 3 - start] = values(5)[start : start + 2][: 3 - start]
keys = torch.where(cache.isnan(), cache, 0.0)
paged = ab.attention(
    torch.zeros(1, 2, 8), keys, cache, page_table=torch.tensor([[3, 1]]), kv_lens=[3]
)
print(json.dumps({
    "seconds": seconds,
    "loaded": loaded,
    "infos": infos,
    "initialized": [initialized, torch.cuda.is_initialized()],
    "o": o[:, :, 0].tolist(), "lse": lse.tolist(),
    "merged_lse": both.lse.tolist(), "merged_o": both.o[:, :, 0].tolist(),
    "paged": [paged.o[0, 0, 0].item(), paged.lse[0, 0].item()],
}))
"""
)


def run(code: str, **env: str) -> Any:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ATTN_", "TRITON_"))}
    clean |= {"PYTHONPATH": str(ROOT), **env}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


BLOCK = "import sys\nfor name in ('triton', 'triton.language'): sys.modules[name] = None\n"


# F28
@pytest.mark.parametrize(
    ("before", "env"),
    [
        ("", {"CUDA_VISIBLE_DEVICES": ""}),
        (BLOCK, {"CUDA_VISIBLE_DEVICES": ""}),
        ("", {"CUDA_VISIBLE_DEVICES": "", "PATH": "", "CUDA_HOME": "", "CUDA_PATH": ""}),
    ],
    ids=["no-gpu", "no-triton", "no-nvcc"],
)
def test_everything_works_on_the_reference_without(before: str, env: dict[str, str]) -> None:
    result = run(before + USE, **env)
    assert result["initialized"] == [False, False]
    available, reasons = result["infos"]["torch_native"]
    assert available and not reasons
    for name, (available, reasons) in result["infos"].items():
        assert available or reasons, f"{name} is listed as unavailable without a reason"
    assert result["o"] == [[1.5, 1.5], [2.0, 2.0]]
    assert result["lse"][0] == pytest.approx([1.386294] * 2, abs=1e-6)
    assert result["lse"][1] == pytest.approx([1.609438] * 2, abs=1e-6)
    assert result["merged_o"] == [[1.5, 1.5], [2.0, 2.0]]
    assert result["merged_lse"][0] == pytest.approx([2.079442] * 2, abs=1e-6)
    assert result["paged"] == pytest.approx([1.0, 1.098612], abs=1e-6)


@pytest.mark.gpu
def test_import_and_listing_do_not_start_cuda_where_there_is_a_gpu() -> None:
    code = PRELUDE + "ab.list_backends(); print(json.dumps(torch.cuda.is_initialized()))"
    assert run(code) is False


def test_importing_is_cheap_and_loads_nothing_optional() -> None:
    code = (
        PRELUDE
        + """
for name in ab.__all__:
    if name != "AttentionSettings":  # the one that needs pydantic-settings
        getattr(ab, name)
everything = time.perf_counter() - middle
optional = ("triton", "pydantic_settings", "flash_attn", "flashinfer", "transformers", "cuda",
            "yaml", "typer", "rich", "matplotlib", "vllm", "sglang")
new = [m for m in set(sys.modules) - of_torch if m.split(".")[0] in optional]
print(json.dumps([seconds, everything, new, torch.cuda.is_initialized()]))
"""
    )
    best: list[Any] = min(run(code) for _ in range(2))  # the machine may be busy
    seconds, everything, new, initialized = best
    assert seconds < 0.3 and everything < 3.0
    assert new == [] and initialized is False


@pytest.mark.parametrize("folder", ["registry", "adapters"])
def test_a_bare_import_of_a_linked_folder_is_refused(folder: str) -> None:
    code = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
try:
    import {folder}
except ImportError as error:
    print(json.dumps(str(error)))
"""
    assert run(code) == f"import attn_backends.{folder} instead of {folder}"


def test_the_public_names_are_all_there() -> None:
    names = """AttentionSpec Batch Capacity AttentionOutput AttentionBackend BackendOptions Plan
        Capabilities IntSet Reason AttnBackendsError UnknownBackendError BackendUnavailableError
        UnsupportedCallError InvalidInputError AttentionConfig AttentionSettings
        register_attention_backend ATTENTION_BACKENDS select explain use configure attention
        merge_state merge_states merge_state_ apply_sinks choose_merge_path write_kv list_backends
        __version__"""
    for name in names.split():
        assert name in ab.__all__ and getattr(ab, name) is not None, name
        assert name in dir(ab)
    assert ab.__version__ == "0.1.0"
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ab.no_such_name
