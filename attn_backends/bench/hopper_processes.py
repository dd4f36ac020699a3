"""Processes of the Hopper benchmark: a hang in one loses what it was doing, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MODULE = "attn_backends.bench.hopper"


def child(arguments: list[str], limit: float) -> tuple[str, str, float]:
    """Output, end ("ok", "exit N" or "timeout") and seconds of this program in a new process."""
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=limit)
        end = "ok" if process.returncode == 0 else f"exit {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        end = "timeout"
    if end != "ok":
        err = "\n".join(err.strip().splitlines()[-3:])
        out += "\n" + json.dumps({"status": "error", "error": err[-400:]})
    return out, end, time.monotonic() - start


def _lines(out: str) -> list[dict[str, Any]]:
    return [json.loads(x) for x in out.splitlines() if x.startswith("{")]


def run_checks(names: list[str], limit: float, jobs: int) -> list[dict[str, Any]]:
    """Run groups of cases side by side; one that started but never ended is reported as hung."""
    rows: list[dict[str, Any]] = []

    def one(name: str) -> tuple[str, str, str, float]:
        return name, *child(["--group", name], limit)

    with ThreadPoolExecutor(jobs) as pool:
        for name, out, end, seconds in pool.map(one, names):
            lines = _lines(out)
            done = [x for x in lines if x["status"] in ("passed", "failed")]
            names_done = {x["case"] for x in done}
            hung = [x for x in lines if x["status"] == "started" and x["case"] not in names_done]
            for x in hung:
                x["status"] = "hung" if end == "timeout" else "crashed"
            errors = [x["error"] for x in lines if x["status"] == "error"]
            if errors:
                (hung[-1] if hung else lines[-1])["error"] = errors[0]
            if not done and not hung:
                done = [{"group": name, "case": "-", "status": "failed", "error": str(errors)}]
            rows += done + hung
            print(f"{name:12s} {end:8s} {seconds:5.1f} s  ", end="")
            passed = [x for x in done if x["status"] == "passed"]
            worst = max((max(x["o"], x["lse"]) for x in passed), default=float("nan"))
            print(f"{len(passed)}/{len(done) + len(hung)} passed, worst error {worst:.2f} bounds")
            for x in done + hung:
                if x["status"] != "passed":
                    print("   ", x["status"], x["case"], x.get("where", ""), x.get("error", ""))
            sys.stdout.flush()
    return rows


def check_variants(
    sets: list[str], only: list[str], processes: int, limit: float
) -> list[dict[str, Any]]:
    """Compile every variant, and compare it with the plain kernel; one row per compiled kernel.

    A process that ends early is started again behind the kernel at which it ended.
    """
    begin = time.monotonic()

    def share(index: int) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        while (left := limit - (time.monotonic() - begin)) > 0:
            done = [x["kernel"] for x in rows]
            arguments = ["--share", f"{index}/{processes}", "--sets", *sets, "--skip", *done]
            arguments += ["--only", *only] if only else []
            out, end, _ = child(arguments, left)
            lines = _lines(out)
            rows += [x for x in lines if x["status"] in ("right", "wrong", "failed")]
            if end == "ok":
                break
            seen = {x["kernel"] for x in rows}
            lost = [x for x in lines if x["status"] == "started" and x["kernel"] not in seen]
            why = "hung" if any(x["status"] == "hung" for x in lines) else end
            rows += [{"kernel": x["kernel"], "status": why} for x in lost]
            if not lost:  # it never came to a kernel
                rows.append({"kernel": "-", "status": end, "error": lines[-1].get("error")})
                break
        return rows

    with ThreadPoolExecutor(processes) as pool:
        rows = [row for found in pool.map(share, range(processes)) for row in found]
    bad = [x for x in rows if x["status"] != "right"]
    print(
        f"variants: {len(rows) - len(bad)} right, {len(bad)} not, "
        f"{time.monotonic() - begin:.0f} s", flush=True,
    )  # fmt: skip
    for x in bad:
        print("   ", x["status"], x["kernel"], str(x.get("error", x.get("max_err", "")))[-160:])
    return rows


class Measuring:
    """One process per group of sets: they load at once, and measure in turns.

    Args:
        groups: Sets of each process.
        arguments: What else they are told.
        folder: For their files, which they rewrite after every point.
    """

    def __init__(self, groups: list[list[str]], arguments: list[str], folder: Path) -> None:
        self.ends: list[dict[str, Any]] = []
        self._bad = folder / "bad.json"
        self._started = []
        for i, sets in enumerate(groups):
            path = folder / f"{i}.json"
            command = [sys.executable, "-m", MODULE, "--measure", str(path), "--bad",
                       str(self._bad), "--sets", *sets, *arguments]  # fmt: skip
            process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
            self._started.append((sets, path, process))

    def found(self) -> dict[str, list[dict[str, Any]]]:
        """Rows and aims so far."""
        parts = [json.loads(path.read_text()) for _, path, _ in self._started if path.exists()]
        return {name: [x for part in parts for x in part[name]] for name in ("rows", "gates")}

    def run(self, bad: list[str], limit: float, progress: Callable[[], None]) -> None:
        """Let one after the other measure.

        Args:
            bad: Kernels that are wrong or hang.
            limit: Seconds that each may take.
            progress: Called every two seconds.
        """
        self._bad.write_text(json.dumps(bad))
        for sets, _, process in self._started:
            begin = time.monotonic()
            assert process.stdin is not None
            try:
                process.stdin.write("go\n")
                process.stdin.close()
            except OSError:  # it has ended already
                pass
            while process.poll() is None and time.monotonic() - begin < limit:
                try:
                    process.wait(2)
                except subprocess.TimeoutExpired:
                    progress()
            end = "ok" if process.poll() == 0 else f"exit {process.returncode}"
            if process.returncode is None:
                process.kill()
                process.wait()
                end = "timeout"
            seconds = round(time.monotonic() - begin, 1)
            self.ends.append({"sets": sets, "end": end, "seconds": seconds})
            print(f"[{', '.join(sets)}: {end}, {seconds} s]", flush=True)
            progress()

    def stop(self) -> None:
        """End the processes that still run."""
        for _, _, process in self._started:
            if process.poll() is None:
                process.kill()


__all__ = ["MODULE", "Measuring", "check_variants", "child", "run_checks"]
