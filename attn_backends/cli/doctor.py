"""``attn-backends doctor``: does each backend really work here, and what to do if not."""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import Annotated, Any

import torch
import typer

from ..packages import installed_version
from ..provenance import provenance
from ..registry import BackendInfo, list_backends
from ..registry.registry import lookup
from ..version import __version__
from .console import EXIT_BAD_ANSWER, JsonFlag, guarded, print_json, stderr, stdout, table
from .health import Check, check_backend

NAME = "doctor"
#: Distributions whose versions matter to some backend or engine.
PACKAGES = (
    "triton",
    "numpy",
    "transformers",
    "flash-attn",
    "flashinfer-python",
    "cuda-core",
    "cuda-bindings",
    "vllm",
    "sglang",
)
ADVICE = (
    "To make a backend the default: export ATTN_BACKENDS_BACKEND=<name> (or _PREFILL, _DECODE), "
    "write `backend: <name>` in a file that ATTN_BACKENDS_CONFIG names, or call "
    "attn_backends.configure(AttentionConfig(backend=<name>)). `attn-backends explain` shows "
    "which setting wins."
)


@guarded
def command(
    backend: Annotated[
        list[str] | None, typer.Option(help="Only this backend; may be repeated.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run a tiny real call on every backend and compare it with a float64 computation.

    Both phases, on the CPU and on CUDA if there is one. Exit code 1 if an available backend fails;
    one that is not available is no failure, and its reasons and fixes are shown.
    """
    wanted = None if backend is None else [lookup(name).name for name in backend]
    infos = [i for i in list_backends() if wanted is None or i.name in wanted]
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    versions = environment()
    checks: dict[str, list[Check]] = {}
    with stderr().status("starting") as status:
        for info in infos:
            status.update(f"{info.name}: running")
            checks[info.name] = check_backend(info, devices) if info.available else []
    failed = [c for found in checks.values() for c in found if c.status == "FAIL"]
    if as_json:
        backends = [_to_dict(info, checks[info.name]) for info in infos]
        meta = provenance("attn-backends doctor --json")
        found = {"ok": not failed, "date": meta["date"], "commit": meta["commit"]}
        print_json({**found, "environment": versions, "backends": backends})
    else:
        _show(infos, checks, versions, failed)
    if failed:
        raise typer.Exit(EXIT_BAD_ANSWER)


def environment() -> dict[str, Any]:
    """Versions and devices; asks the driver, but runs nothing on a GPU."""
    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            name = torch.cuda.get_device_name(index)
            gpus.append({"name": name, "compute_capability": f"{major}.{minor}"})
    return {
        "attn_backends": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "driver": _driver() if gpus else None,
        "gpus": gpus,
        "packages": {name: installed_version(name) for name in PACKAGES},
    }


def _driver() -> str | None:
    """Version of the NVIDIA driver, as its own tool tells; None if that tool is not there."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None


def status_of(info: BackendInfo, checks: list[Check]) -> str:
    """One word for a backend: PASS, FAIL or unavailable."""
    if not info.available:
        return "unavailable"
    found = {check.status for check in checks}
    return "FAIL" if "FAIL" in found else "PASS" if "PASS" in found else "unavailable"


def _to_dict(info: BackendInfo, checks: list[Check]) -> dict[str, Any]:
    return {
        **info.to_dict(),
        "status": status_of(info, checks),
        "fixes": _fixes(info),
        "checks": [check.to_dict() for check in checks],
    }


def _fixes(info: BackendInfo) -> list[str]:
    """What can be done about a backend that is not available, each thing once."""
    fixes = [reason.fix for reason in info.reasons if reason.fix]
    return list(dict.fromkeys(fixes))


def _show(
    infos: list[BackendInfo],
    checks: dict[str, list[Check]],
    versions: dict[str, Any],
    failed: list[Check],
) -> None:
    out = stdout()
    rows = []
    for info in infos:
        for check in checks[info.name]:
            rows.append(_row(check))
        if not info.available:
            why = "\n".join(map(str, info.reasons))
            rows.append([info.name, "", "", "unavailable", why, "", "", ""])
    head = ["backend", "device", "phase", "result", "case", "o error", "lse error", "seconds"]
    out.print(table("Tiny calls against float64", head, rows))
    for check in failed:
        out.print(f"{check.backend}, {check.device}, {check.phase}: {check.message}", style="red")
        if check.trace:
            out.print(check.trace.rstrip(), style="dim", soft_wrap=True)
    for info in infos:
        for fix in _fixes(info):
            out.print(f"{info.name}: {fix}", soft_wrap=True)
    gpus = [f"{g['name']} (compute capability {g['compute_capability']})" for g in versions["gpus"]]
    facts = {**versions, "gpus": ", ".join(gpus) or "none"}
    packages = facts.pop("packages")
    lines = [[name, "none" if value is None else str(value)] for name, value in facts.items()]
    lines += [[name, version or "not installed"] for name, version in packages.items()]
    out.print(table("Environment", ["", ""], [*lines, ["executable", sys.executable]]))
    out.print(ADVICE, soft_wrap=True)


def _row(check: Check) -> list[str]:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.1e}"

    seconds = "" if check.seconds is None else f"{check.seconds:.2f}"
    what = check.case or check.message
    errors = [number(check.error_o), number(check.error_lse), seconds]
    chosen = ",".join(f"{name}={value}" for name, value in check.options.items())
    name = f"{check.backend}:{chosen}" if chosen else check.backend
    return [name, check.device, check.phase, check.status, what, *errors]


__all__ = ["ADVICE", "NAME", "command", "environment", "status_of"]
