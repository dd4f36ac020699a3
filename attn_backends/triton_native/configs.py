"""Tile sizes per architecture, head dim and dtype. Fixed tables: nothing is tuned while serving.

Measured choices come from ``measured.py``, which
``python -m attn_backends.bench.attention configs`` writes from the rows of a tuning run. Where
nothing was measured, the rules below apply: they keep 24 to 64 KB of keys and values in flight per
multiprocessor and stay inside its shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from . import measured

#: Shared memory of one program in bytes, per compute capability; others take the smallest.
SHARED_MEMORY = {80: 166_912, 87: 166_912, 90: 232_448, 100: 232_448, 103: 232_448}
SMALLEST_SHARED_MEMORY = 101_376


@dataclass(frozen=True)
class SplitConfig:
    """A configuration of the split kernel.

    Attributes:
        block_m: Rows of a tile: query heads of the group times tokens.
        block_n: Keys per tile.
        warps: Warps per program.
        stages: Depth of the load pipeline.
        occupancy: Programs that run at once on a multiprocessor, for the model of waves.
        min_chunk: Keys that a part has at least.
        fuse: Whether a softmax term takes one fused step (``primitives.exponent_form``).
        lane_sums: Whether sums are kept per lane and added up at the end.
        phases: Whether tiles that every row sees run in a loop without masks.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    occupancy: int = 3
    min_chunk: int = 64
    fuse: bool = False
    lane_sums: bool = False
    phases: bool = False


@dataclass(frozen=True)
class PrefillConfig:
    """A configuration of the prefill kernel.

    Attributes:
        block_m: Query rows of a tile.
        block_n: Keys per tile.
        warps: Warps per program.
        stages: Depth of the load pipeline.
        phases: Whether tiles that every row sees run in a loop without masks.
        heads_inner: Whether heads change fastest in the grid, else tiles within a KV head.
        fuse: As in ``SplitConfig``, like ``lane_sums``.
        lane_sums: The same.
        registers: Most registers of a thread, so that more programs fit; 0 leaves it open.
        maps: Whether keys and values come through tensor maps, where they can.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    phases: bool = True
    heads_inner: bool = True
    fuse: bool = False
    lane_sums: bool = False
    registers: int = 0
    maps: bool = False


def split_lanes(width: int) -> tuple[int, int]:
    """Cut a head dim into two power-of-two tiles where that wastes fewer lanes than one."""
    whole = max(16, 1 << (width - 1).bit_length())
    low = whole // 2
    if width == whole or low < 16:
        return whole, 0
    rest = max(16, 1 << (width - low - 1).bit_length())
    return (low, rest) if low + rest < whole else (whole, 0)


def _shared_memory(arch: int) -> int:
    return SHARED_MEMORY.get(arch, SMALLEST_SHARED_MEMORY)


def _row_bytes(d: int, dv: int, kv_bytes: int, share_kv: bool) -> int:
    return (sum(split_lanes(d)) + (0 if share_kv else sum(split_lanes(dv)))) * kv_bytes


def _fit(config, arch: int, d: int, dv: int, q_bytes: int, kv_bytes: int, share_kv: bool):
    """Lower the pipeline depth, then the key tile, until the tiles fit shared memory."""
    room = _shared_memory(arch)
    while True:
        query = config.block_m * sum(split_lanes(d)) * q_bytes
        scores = config.block_m * config.block_n * q_bytes
        tiles = config.stages * config.block_n * _row_bytes(d, dv, kv_bytes, share_kv)
        if query + scores + tiles <= room:
            return config
        if config.stages > 2:
            config = replace(config, stages=config.stages - 1)
        elif config.block_n > 16:
            config = replace(config, block_n=config.block_n // 2)
        elif config.stages > 1:
            config = replace(config, stages=1)
        else:
            return config


def fit_stages(config: SplitConfig, arch: int, d: int, dv: int, q_bytes: int, kv_bytes: int) -> int:
    """Deepest pipeline up to the configuration's that fits with separate key and value tiles."""
    query = config.block_m * (sum(split_lanes(d)) + config.block_n) * q_bytes
    tile = config.block_n * _row_bytes(d, dv, kv_bytes, False)
    return max(min(config.stages, (_shared_memory(arch) - query) // tile), 1)


@cache
def split_config(
    arch: int, rows: int, d: int, dv: int, q_bytes: int, kv_bytes: int, share_kv: bool,
    invariant: bool = False,
) -> SplitConfig:  # fmt: skip
    """Configuration of the split kernel.

    Args:
        arch: Compute capability, major times ten plus minor.
        rows: Most rows (tokens times group) of a sequence.
        d: Head dim D.
        dv: Value dim DV.
        q_bytes: Bytes of an element in the products: 2 or 4.
        kv_bytes: Bytes of a stored key element: 1, 2 or 4.
        share_kv: Whether one tile serves as keys and values (MLA).
        invariant: Whether chunks are folded inside the program.
    """
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if q_bytes == 4:
        # fp32 products have no tensor cores: small tiles, so that the operands stay in registers.
        config = SplitConfig(16, 16 if max(d, dv) > 64 else 32, 4, 2)
        return _fit(config, arch, d, dv, q_bytes, kv_bytes, share_kv)
    key = (arch, block_m, d, dv, q_bytes, kv_bytes, share_kv)
    if key in measured.SPLIT and not invariant:
        return SplitConfig(block_m, *measured.SPLIT[key])
    widest = max(d, dv)
    if widest > 256:
        small = block_m < 64
        config = SplitConfig(
            block_m, 32 if small else 64, 4 if small else 8, 3 if small else 2, 2 if small else 1,
            fuse=not small, lane_sums=small, phases=small,
        )  # fmt: skip
        if not share_kv and not small:
            config = replace(config, block_n=32)
    elif widest > 128:
        config = SplitConfig(block_m, 32, 4, 3)
    elif widest > 64:
        config = SplitConfig(block_m, 64, 4, 3)
    else:
        config = SplitConfig(block_m, 128, 4, 3)
    if invariant and widest > 64:
        config = replace(config, warps=8)  # two accumulators: of the chunk and of all before it
    if kv_bytes == 1 and widest <= 128 and arch >= 89:  # older: converting takes registers
        config = replace(config, block_n=128)
    return _fit(config, arch, d, dv, q_bytes, kv_bytes, share_kv)


@cache
def many_config(
    arch: int, block_m: int, d: int, dv: int, q_bytes: int, kv_bytes: int
) -> SplitConfig | None:
    """Small tiles of which many programs fit, for batches that fill one wave of theirs.

    None where none were measured to help: see ``cuts.prefers_many``.
    """
    if arch < 90 or block_m > 16 or q_bytes != 2 or kv_bytes != 2 or max(d, dv) > 128:
        return None
    if max(d, dv) > 64:
        return SplitConfig(block_m, 32, 1, 3, 7)
    return SplitConfig(block_m, 64, 2, 4, 5)


@cache
def few_configs(
    arch: int, block_m: int, d: int, dv: int, q_bytes: int, kv_bytes: int
) -> tuple[tuple[int, SplitConfig], ...]:
    """Tiles for so few keys that all programs run at once, each with the most keys it is for.

    Keys are counted per multiprocessor. Empty where none were measured to help. From the sweeps in
    docs/results/h200/forms.json and decode-forms.json: one large tile a program, then one program a
    multiprocessor, then two of small tiles, deeply pipelined.
    """
    if arch < 90 or block_m > 16 or q_bytes != 2 or kv_bytes != 2:
        return ()
    if 64 < max(d, dv) <= 128:
        return (
            (128, SplitConfig(block_m, 128, 8, 2, 2, 128, lane_sums=True)),
            (256, SplitConfig(block_m, 64, 4, 3, 1, 64)),
            (512, SplitConfig(block_m, 32, 4, 4, 2, 64)),
        )
    if max(d, dv) > 256:
        return ((64, SplitConfig(block_m, 64, 8, 2, 1, 64, fuse=True, lane_sums=True)),)
    return ()


@cache
def prefill_config(
    arch: int, small: bool, d: int, dv: int, q_bytes: int, kv_bytes: int, has_mask: bool = False,
    paged: bool = False,
) -> PrefillConfig:  # fmt: skip
    """Configuration of the prefill kernel.

    Args:
        arch: Compute capability, major times ten plus minor.
        small: Whether tiles of 128 rows would leave multiprocessors without work, or waste much of
            it on the diagonal of short sequences.
        d: Head dim D.
        dv: Value dim DV.
        q_bytes: Bytes of an element in the products: 2 or 4.
        kv_bytes: Bytes of a stored key element: 1, 2 or 4.
        has_mask: Whether mask bits are loaded beside the scores, which takes registers.
        paged: Whether keys have pages, which takes registers too.
    """
    if q_bytes == 4:
        tile = 16 if max(d, dv) > 64 else 32
        config = PrefillConfig(tile, tile, 4, 2)
        return _fit(config, arch, d, dv, q_bytes, kv_bytes, False)
    key = (arch, small, d, dv, q_bytes, kv_bytes)
    if key in measured.PREFILL and not has_mask:
        config = PrefillConfig(*measured.PREFILL[key])
        if paged and config.registers:
            # One program a multiprocessor, deeper pipelined; fused exponents are slower then.
            config = replace(config, stages=config.stages + 1, registers=0, fuse=False)
        return config
    widest = max(d, dv)
    if widest > 256:
        config = PrefillConfig(64, 32, 8, 2)
    elif widest > 128:
        # With 256 lanes, a second loop or 64 keys would spill.
        config = PrefillConfig(128, 32, 8, 2, phases=False)
        if widest <= 192:
            config = PrefillConfig(128, 64, 8, 2)
        if arch < 90:
            config = PrefillConfig(64, 32, 8, 2, phases=False)
    elif arch < 90:
        config = PrefillConfig(64, 32, 4, 3) if small else PrefillConfig(128, 32, 8, 3)
    else:
        config = PrefillConfig(128, 64, 8, 3)
        if small:
            config = PrefillConfig(64, 32, 4, 3, fuse=True)
    if has_mask and widest > 64:
        block_n = min(config.block_n, 32)
        config = replace(config, block_m=64, warps=8, block_n=block_n, fuse=False, registers=0)
    return _fit(config, arch, d, dv, q_bytes, kv_bytes, False)


__all__ = [
    "PrefillConfig",
    "SplitConfig",
    "few_configs",
    "fit_stages",
    "many_config",
    "prefill_config",
    "split_config",
    "split_lanes",
]
