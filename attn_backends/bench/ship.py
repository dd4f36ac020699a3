"""Turn tuning files into the shipped rankings: ``registry/shipped.py``.

    attn-backends tune --out docs/results/h200/tuning.json
    python -m attn_backends.bench.ship docs/results/*/tuning.json

A kind of shape that was measured takes the order of its row; others of the architecture take the
order over all rows (``order_of``). Every file given is written, and nothing else stays.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ..registry import load_tuning, shipped
from .tune import order_of

#: Keys of ``registry.ranking.SHIPPED`` by what a GPU is called.
ARCHITECTURES = {"H100": "sm90", "H200": "sm90", "A100": "sm80", "B200": "sm100", "B300": "sm100"}
#: Written before the table; the rest of the module stays as it is.
START = "MEASURED: dict[str, Measured] = {"
#: Comes last whatever its time: it is what answers when nothing else can.
REFERENCE = "torch_native"


def architecture_of(gpu: str) -> str:
    """The architecture of a GPU by its name.

    Raises:
        SystemExit: It is not among those known here.
    """
    for name, key in ARCHITECTURES.items():
        if name in gpu.split():
            return key
    raise SystemExit(f"gpu={gpu} (known: {', '.join(ARCHITECTURES)}); add it to bench/ship.py")


def table(files: Sequence[str]) -> str:
    """The assignment that ends ``registry/shipped.py``.

    Args:
        files: Tuning files, at most one per architecture.
    """
    lines = [START]
    seen: set[str] = set()
    for file in sorted(files):
        tuning = load_tuning(file)
        for gpu in dict.fromkeys(row.device for row in tuning.rows):
            key = architecture_of(gpu)
            if key in seen:
                raise SystemExit(f"{file}: {key} was in a file before it")
            seen.add(key)
            origin = tuning.meta["devices"][gpu]
            where = "/".join(Path(file).resolve().parts[-4:])
            lines += [
                f'    "{key}": Measured(', f"        gpu={_text(gpu)},",
                f"        date={_text(origin['date'])},",
                f"        commit={_text(origin['commit'])},", f"        file={_text(where)},",
                "        orders={",
            ]  # fmt: skip
            for phase in ("prefill", "decode"):
                names = [n for n in order_of(tuning, gpu, phase) if n != REFERENCE]
                if names:
                    inside = ", ".join(map(_text, names)) + ("," if len(names) == 1 else "")
                    lines.append(f'            "{phase}": ({inside}),')
            lines += ["        },", "        rows={"]
            for row in tuning.rows:
                if row.device != gpu:
                    continue
                lines.append(f'            ("{row.phase}", "{row.bucket}"): {{')
                for name in sorted(row.median_us, key=row.median_us.__getitem__):
                    lines.append(f"                {_text(name)}: {row.median_us[name]!r},")
                lines.append("            },")
            lines += ["        },", "    ),"]
    return "\n".join([*lines, "}"]) + "\n" if len(lines) > 1 else START + "}\n"


def _text(value: str) -> str:
    return f'"{value}"'


def written(files: Sequence[str]) -> str:
    """The whole module for these files."""
    module = Path(shipped.__file__).read_text(encoding="utf-8")
    return module.split(START)[0] + table(files)


def main(files: list[str]) -> int:
    """Entry point."""
    if not files:
        print("usage: python -m attn_backends.bench.ship TUNING.json ...", file=sys.stderr)
        return 2
    Path(shipped.__file__).write_text(written(files), encoding="utf-8")
    print(f"wrote {shipped.__file__}")
    return 0


__all__ = ["ARCHITECTURES", "architecture_of", "table", "written"]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
