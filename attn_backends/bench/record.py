"""Run a command and keep what it says of itself beside the other results.

    python -m attn_backends.bench.record OUT.json -- python -m pytest tests/merge -m gpu

The row holds the command, its exit status, seconds, and the counts of pytest's closing line if
there is one. The command's own output is shown as it comes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from typing import Any

from .report import save

_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed)")


def counts(output: str) -> dict[str, int]:
    """Counts of pytest's closing line: passed, failed, skipped and the like."""
    lines = [line for line in output.splitlines() if _COUNT.search(line) and " in " in line]
    return {kind: int(number) for number, kind in _COUNT.findall(lines[-1])} if lines else {}


def run(command: list[str]) -> dict[str, Any]:
    """Run a command; a row of the results file."""
    start = time.monotonic()
    shown: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            shown.append(line)
    seconds = round(time.monotonic() - start, 1)
    row = {"bench": "tests", "command": " ".join(command), "status": process.returncode}
    return {**row, "seconds": seconds, **counts("".join(shown))}


def main(arguments: list[str]) -> int:
    """Entry point; exits as the command did."""
    if len(arguments) < 3 or arguments[1] != "--":
        print("usage: python -m attn_backends.bench.record OUT.json -- COMMAND...", file=sys.stderr)
        return 2
    row = run(arguments[2:])
    save(arguments[0], "attn_backends.bench.record", [row])
    return int(row["status"])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
