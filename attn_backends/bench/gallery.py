"""The gallery of the documents: one picture for each results file, and a page about them.

``python -m attn_backends.bench.gallery docs/gallery`` draws every picture whose data changed and
writes ``index.md`` beside them; ``--check`` only tells what is stale. Results are read from
``../results/<gpu>/*.json`` beside the folder. Each picture carries a hash of the data it shows, so
freshness is a matter of data: pixels differ from one version of matplotlib to the next.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import gallery_distributed as distributed
from .gallery_data import (
    Rates,
    Ratios,
    Source,
    families,
    left_out,
    panels,
    rates,
    ratios,
    read,
    timed,
)

#: Goes up when pictures should be drawn anew though their data did not change.
DRAWING = 4
_KEY = "Data-SHA256"
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Picture:
    """One picture.

    Attributes:
        name: File name without its suffix.
        title: Heading on the page and in the picture.
        text: What it shows, in words.
        sources: Results files it is made from.
        draw: Makes the figure.
    """

    name: str
    title: str
    text: str
    sources: tuple[Source, ...]
    draw: Callable[[], Any]

    @property
    def hash(self) -> str:
        """SHA-256 of the data that is shown."""
        data = [{"meta": s.meta, "rows": s.rows} for s in self.sources]
        text = json.dumps([DRAWING, self.name, self.title, data], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


#: By benchmark: heading, field, unit, which roof, and what the lengths count.
_SPEED = {
    "decode": ("Decode", "gbps", "GB/s", "memory", "keys of the sequence"),
    "mla": ("MLA decode", "gbps", "GB/s", "memory", "keys of the sequence"),
    "prefill": ("Prefill", "tflops", "TFLOP/s", "tensor", "tokens of a sequence"),
    "extend": ("Extend over a paged prefix", "tflops", "TFLOP/s", "tensor", "keys"),
    "cascade": ("Decode over a shared prefix", "median_us", "us", "", "keys of a sequence"),
    "merge": ("Merge", "gbps", "GB/s", "memory", "tokens"),
}
_ORDER = [*_SPEED, "host"]
#: What a picture cannot say by itself.
_NOTES = {
    "mla": "Absorbed MLA computes 2 (576 + 512) FLOP a head on 1152 bytes of each key: 30 "
    "FLOP/byte with 16 heads, 242 with 128. An H200 is bound by arithmetic from 206 on; the "
    "dashed line is then out of reach.",
    "cascade": "Time of one layer, less is better. `plain` reads shared keys for every sequence, "
    "`cascade` once; `flashinfer-cascade` is FlashInfer's own.",
}


def pictures(results: Path) -> list[Picture]:
    """Every picture that the results give.

    Args:
        results: The folder with one folder for each GPU.

    Returns:
        Pictures in the order of the page.
    """
    found = []
    for folder in sorted(p for p in results.iterdir() if p.is_dir()):
        files = [read(path) for path in sorted(folder.glob("*.json"))]
        sources = [s for s in files if s.bench in _ORDER]
        sources.sort(key=lambda source: (_ORDER.index(source.bench), source.path.stem))
        found += [p for p in (_one(folder.name, source) for source in sources) if p is not None]
        found += _ratio_pictures(folder.name, sources)
        found += [_engine(folder.name, s, groups) for s in files if (groups := rates(s))]
        found += [_several(folder.name, s) for s in files if distributed.holds(s.rows)]
    return found


def _one(gpu: str, source: Source) -> Picture | None:
    if source.bench not in _SPEED:
        return _host(gpu, source)
    heading, field, unit, roof_kind, across = _SPEED[source.bench]
    shown = panels(timed(source.rows), field)
    if not shown:
        return None
    if field != "median_us":
        shown = families(shown)
    roof, roof_name = _roof(source, roof_kind)
    title = f"{heading} on one {source.meta.get('gpu', gpu)}"
    if source.path.stem != source.bench:
        title += f" ({source.path.stem})"
    compared = ratios(source)
    text = _NOTES.get(source.bench, "")
    text += "" if compared is None else f" {compared.sentence}"
    if missing := left_out(source.rows):
        text += f" {missing} rows without a right answer have no speed and are left out."

    def draw() -> Any:
        from .gallery_plots import speed

        return speed(title, shown, unit, roof, roof_name, across)

    return Picture(f"{gpu}-{source.path.stem}", title, text.strip(), (source,), draw)


def _roof(source: Source, kind: str) -> tuple[float | None, str]:
    gpu, dtype = source.gpu, source.rows[0]["case"].get("dtype", "")
    if gpu is None or not kind:
        return None, ""
    if kind == "memory":
        return gpu.bandwidth_tbs * 1e3, "memory, data sheet"
    rate = gpu.tflops.get(dtype)
    return rate, f"dense {dtype}, data sheet"


def _host(gpu: str, source: Source) -> Picture | None:
    rows = [
        {**r, "backend": f"{r['backend']}, {r['bench'].removeprefix('host-')}"}
        for r in timed(source.rows, "host")
    ]
    shown = panels(rows, "median_us")
    if not shown:
        return None
    title = f"Host time per call, {source.meta.get('gpu', gpu)}"

    def draw() -> Any:
        from .gallery_plots import speed

        return speed(title, shown, "us of the calling thread", None, "", "keys of the sequence")

    text = "Time of the calling thread, eager, without waiting for the device."
    return Picture(f"{gpu}-{source.path.stem}", title, text, (source,), draw)


def _engine(gpu: str, source: Source, groups: list[Rates]) -> Picture:
    case = next(r["case"] for r in source.rows if "tokens_per_s" in r)
    engine = source.path.stem.partition("-")[0]
    version = source.meta.get("packages", {}).get(engine, "")
    title = f"{engine} {version} on one {source.meta.get('gpu', gpu)} ({case['model']})"
    turns = next(r["turns"] for r in source.rows if "turns" in r)
    text = f"A whole engine by attention backend: median and range of {turns} turns."
    if any(group.ratios for group in groups):
        reference = next(r["reference"] for r in source.rows if "ratio" in r)
        text += f" Figures at the left: median ratio to {reference} within a turn."

    def draw() -> Any:
        from .gallery_plots import throughput

        return throughput(title, groups)

    return Picture(f"{gpu}-{source.path.stem}", title, text, (source,), draw)


def _several(gpu: str, source: Source) -> Picture:
    gpus = max(row["gpus"] for row in source.rows if "efficiency" in row)
    title = f"Context parallelism on {gpus} x {source.meta.get('gpu', gpu)}"

    def draw() -> Any:
        from .gallery_plots import efficiency

        return efficiency(title, distributed.bars(source.rows), distributed.bands(source.rows))

    return Picture(f"{gpu}-{source.path.stem}", title, distributed.TEXT, (source,), draw)


def _ratio_pictures(gpu: str, sources: Sequence[Source]) -> Iterator[Picture]:
    measured = [(s, r) for s in sources if (r := ratios(s)) is not None]
    for name, merges in (("ratios", False), ("merge-ratios", True)):
        chosen = [(s, r) for s, r in measured if (s.bench == "merge") == merges]
        if not chosen:
            continue
        kept = tuple(s for s, _ in chosen)
        what = "the better merge path" if merges else "triton"
        title = f"Speed of {what} against others on one {kept[0].meta.get('gpu', gpu)}"
        text = (
            "Time of the other library over ours in the same process: above 1, blue, ours is "
            "faster. Points are those of the pictures above."
        )
        yield Picture(f"{gpu}-{name}", title, text, kept, _heat(title, [r for _, r in chosen]))


def _heat(title: str, groups: list[Ratios]) -> Callable[[], Any]:
    def draw() -> Any:
        from .gallery_plots import heat_map

        return heat_map(title, groups)

    return draw


def page(found: Sequence[Picture], folder: Path) -> str:
    """The page of the gallery, as Markdown."""
    lines = [
        "# Gallery",
        "",
        "Pictures of the files in `docs/results/`, drawn by",
        "`python -m attn_backends.bench.gallery docs/gallery`. Medians of one CUDA-graph replay",
        "with a cold L2 unless a picture says otherwise, all backends interleaved in one process",
        "on random data; the tables are on the page about [performance](../performance.md).",
        "Dashed: what the vendor's data sheet promises, as memory bandwidth or as arithmetic.",
    ]
    for picture in found:
        lines += ["", f"## {picture.title}", ""]
        lines += [picture.text, ""] if picture.text else []
        lines += [f"![{picture.title}]({picture.name}.png)", ""]
        links = [_link(source, folder) for source in picture.sources]
        if len(links) > 1:
            lines.append(f"Data: {', '.join(links)}.")
            continue
        (source,) = picture.sources
        lines += [f"Data: {links[0]}, by `{source.meta.get('command', '')}`;", f"{source.facts}."]
    return "\n".join(lines) + "\n"


def _link(source: Source, folder: Path) -> str:
    path = os.path.relpath(source.path, folder).replace(os.sep, "/")
    return f"[{source.path.name}]({path})"


def stored_hash(path: Path) -> str | None:
    """The hash that a picture carries; None if it has none."""
    data = path.read_bytes()
    if not data.startswith(_SIGNATURE):
        return None
    at = len(_SIGNATURE)
    while at + 8 <= len(data):
        (size,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        if kind == b"tEXt":
            key, _, value = data[at + 8 : at + 8 + size].partition(b"\0")
            if key.decode("latin-1") == _KEY:
                return value.decode("latin-1")
        at += 12 + size
    return None


def stale(folder: Path, found: Sequence[Picture]) -> list[str]:
    """What of the gallery does not fit the results: missing, outdated or left over."""
    problems = []
    for picture in found:
        path = folder / f"{picture.name}.png"
        if not path.exists():
            problems.append(f"{path.name} is missing")
        elif stored_hash(path) != picture.hash:
            problems.append(f"{path.name} shows other data")
    names = {f"{p.name}.png" for p in found}
    left = [p.name for p in sorted(folder.glob("*.png")) if p.name not in names]
    problems += [f"{name} is of no results" for name in left]
    index = folder / "index.md"
    if not index.exists() or index.read_text(encoding="utf-8") != page(found, folder):
        problems.append("index.md is not what the results give")
    return problems


def write(folder: Path, found: Sequence[Picture], *, force: bool = False) -> list[str]:
    """Draw what is stale, remove what is left over, and write the page.

    Args:
        folder: The gallery.
        found: Its pictures.
        force: Draw all of them.

    Returns:
        Names of the pictures drawn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for picture in found:
        path = folder / f"{picture.name}.png"
        if not force and path.exists() and stored_hash(path) == picture.hash:
            continue
        metadata = {_KEY: picture.hash, "Title": picture.title, "Software": None}
        picture.draw().savefig(path, metadata=metadata, pil_kwargs={"optimize": True})
        drawn.append(picture.name)
    names = {f"{p.name}.png" for p in found}
    for path in folder.glob("*.png"):
        if path.name not in names:
            path.unlink()
    (folder / "index.md").write_text(page(found, folder), encoding="utf-8")
    return drawn


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw or check a gallery."""
    parser = argparse.ArgumentParser(prog="python -m attn_backends.bench.gallery")
    parser.add_argument("folder", type=Path, help="the gallery, for example docs/gallery")
    parser.add_argument("--results", type=Path, help="default: results beside the folder")
    parser.add_argument("--check", action="store_true", help="only tell what is stale")
    parser.add_argument("--force", action="store_true", help="draw all pictures anew")
    given = parser.parse_args(arguments)
    found = pictures(given.results or given.folder.parent / "results")
    if given.check:
        problems = stale(given.folder, found)
        print("\n".join(problems) or "fresh")
        return 1 if problems else 0
    drawn = write(given.folder, found, force=given.force)
    print(f"{len(drawn)} of {len(found)} pictures drawn: {', '.join(drawn) or 'all were fresh'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

__all__ = ["Picture", "main", "page", "pictures", "stale", "stored_hash", "write"]
