"""The ``ATTN_BACKENDS_*`` variables: which exist, their raw values, and what they mean.

Reading them is split in two. ``snapshot`` gives the raw values in well under a microsecond and is
part of the key of every cache, so that a change between two calls is always seen. ``read`` parses
them, and runs only when the snapshot changed.
"""

from __future__ import annotations

import difflib
import logging
import os
import warnings
from typing import Any

from .errors import InvalidInputError

PREFIX = "ATTN_BACKENDS_"

#: Every variable and what it does; docs and warnings are made from this table.
VARIABLES = {
    "BACKEND": "Backend of both phases: a name, or auto.",
    "PREFILL": "Backend of prefill; goes before BACKEND.",
    "DECODE": "Backend of decode; goes before BACKEND.",
    "ALLOW": "Comma-separated names: no other backend may be used.",
    "DENY": "Comma-separated names that may not be used.",
    "BATCH_INVARIANT": "1 or 0: results must not depend on batch mates, bit by bit.",
    "MERGE": "Path of merges: auto, cuda, triton or torch.",
    "TUNING_FILE": "Measured ranking, as `attn-backends tune` writes it.",
    "CONFIG": "A configuration file (YAML, TOML or JSON); single variables go before it.",
    "PLUGINS": "Comma-separated plugins that may be loaded, or none; unset allows all.",
    "VALIDATE": "1 checks device tensors too, with a sync.",
    "LOG": "Level of the library's log: trace, debug, info, warning or error.",
    "STATS": "1 counts plans and calls; see `stats()`.",
    "RANGES": "1 names plans and calls in traces of torch.profiler.",
    "CACHE": "Folder for the models that `attn-backends generate` fetches.",
}
_NAMES, _LISTS = ("BACKEND", "PREFILL", "DECODE"), ("ALLOW", "DENY")
_MERGES = ("auto", "cuda", "triton", "torch")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
#: Below debug: every call, with its inputs.
TRACE = 5
_LEVELS = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

_ENCODED = tuple(
    os.fsencode(PREFIX + name) if os.name == "posix" else PREFIX + name for name in VARIABLES
)
_MERGE, _CONFIG = (_ENCODED[list(VARIABLES).index(name)] for name in ("MERGE", "CONFIG"))
_warned: set[str] = set()


def snapshot() -> int | tuple[Any, ...]:
    """Raw values of all variables, and the size of the environment, as a cheap cache key.

    The size is there because a misspelt variable changes nothing else.
    """
    raw = getattr(os.environ, "_data", None)
    if type(raw) is not dict:  # another implementation of os.environ: slower, the same meaning
        return (len(os.environ), *(os.environ.get(PREFIX + name) for name in VARIABLES))
    if raw.keys().isdisjoint(_ENCODED):  # nearly always: none is set
        return len(raw)
    return (len(raw), *map(raw.get, _ENCODED))


def leaves_merges_open() -> bool:
    """Whether no variable can name a path of merges, as a look at two of them; in doubt False."""
    try:
        raw: Any = os.environ._data  # type: ignore[attr-defined]
    except AttributeError:
        return False
    return type(raw) is dict and _MERGE not in raw and _CONFIG not in raw


def variable(name: str) -> str | None:
    """Value of ``ATTN_BACKENDS_<name>``, stripped; None if unset.

    Raises:
        InvalidInputError: It is set to nothing, which could mean off, default or a mistake.
    """
    text = os.environ.get(PREFIX + name)
    if text is None:
        return None
    if not text.strip():
        fix = "unset the variable to leave the choice open"
        raise InvalidInputError.of(PREFIX + name, repr(text), _allowed(name), fix)
    return text.strip()


def read() -> dict[str, Any]:
    """Parse the variables that stand for fields of ``AttentionConfig``.

    Also warns, once each, of variables with the prefix that nobody reads, and starts or ends what
    they say of the log, of counters and of ranges.

    Returns:
        The fields that are set, as ``AttentionConfig`` takes them; backend names are unchecked.

    Raises:
        InvalidInputError: A value cannot be read; the message names the variable.
    """
    warn_unknown()
    _apply_observation()
    values: dict[str, Any] = {}
    for name in (*_NAMES, *_LISTS):
        if (text := os.environ.get(PREFIX + name)) is not None:
            values[name.lower()] = text if name in _NAMES else split_names(text)
    if (text := variable("BATCH_INVARIANT")) is not None:
        values["batch_invariant"] = boolean("BATCH_INVARIANT", text)
    if (text := variable("MERGE")) is not None:
        if text.lower() not in _MERGES:
            raise InvalidInputError.of(PREFIX + "MERGE", repr(text), _allowed("MERGE"))
        values["merge"] = text.lower()
    if (path := variable("TUNING_FILE")) is not None:
        values["tuning_file"] = os.path.expanduser(path)
    return values


def split_names(text: str) -> tuple[str, ...]:
    """Split a comma-separated list."""
    return tuple(item.strip() for item in text.split(","))


def allowed_plugins() -> tuple[str, ...] | None:
    """Plugins that ``ATTN_BACKENDS_PLUGINS`` lets in, lower case; None lets in all."""
    text = variable("PLUGINS")
    if text is None:
        return None
    return () if text.lower() == "none" else tuple(n.lower() for n in split_names(text))


def warn_unknown() -> None:
    """Warn, once per name, of set variables with our prefix that mean nothing."""
    for full in list(os.environ):
        if not full.startswith(PREFIX) or full.removeprefix(PREFIX) in VARIABLES:
            continue
        if full in _warned:
            continue
        _warned.add(full)
        known = [PREFIX + name for name in VARIABLES]
        close = difflib.get_close_matches(full, known, n=1, cutoff=0.5)
        hint = f"; the closest that exists is {close[0]}" if close else ""
        warnings.warn(
            f"{full} is set but no such setting exists{hint} (known: {', '.join(known)})",
            stacklevel=2,
        )


_observed: list[str | None] = [None, None, None]


def _apply_observation() -> None:
    """Have plans and calls observed as the variables say, if that changed."""
    now = [variable(name) for name in ("LOG", "STATS", "RANGES")]
    if now == _observed:
        return
    if now[0] is not None:
        log_level(now[0], PREFIX + "LOG")
    from .observation import follow_environment  # not before it is wanted

    follow_environment()
    _observed[:] = now


def log_level(text: str, field: str) -> int:
    """The level of the log by its name.

    Raises:
        InvalidInputError: There is no such level.
    """
    if not isinstance(text, str) or text.lower() not in _LEVELS:
        raise InvalidInputError.of(field, repr(text), ", ".join(_LEVELS))
    return _LEVELS[text.lower()]


def set_log_level(text: str) -> None:
    """Set the level of the ``attn_backends`` logger, and show the log if nobody else does."""
    logger = logging.getLogger("attn_backends")
    level = log_level(text, "log")
    if level == TRACE and logging.getLevelName(TRACE) == f"Level {TRACE}":
        logging.addLevelName(TRACE, "TRACE")
    logger.setLevel(level)
    if not logger.hasHandlers():  # nobody set up logging: show what was asked for
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)


def boolean(name: str, text: str) -> bool:
    """Read ``ATTN_BACKENDS_<name>=text`` as on or off.

    Raises:
        InvalidInputError: It is neither.
    """
    if text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    raise InvalidInputError.of(PREFIX + name, repr(text), _allowed(name))


def _allowed(name: str) -> str:
    if name in ("BATCH_INVARIANT", "VALIDATE", "STATS", "RANGES"):
        return ", ".join(_TRUE + _FALSE)
    if name == "LOG":
        return ", ".join(_LEVELS)
    return {
        "MERGE": ", ".join(_MERGES),
        "PLUGINS": "names of plugins between commas, or none",
        "CACHE": "the path of a folder",
    }.get(name, "the path of a file")


__all__ = [
    "PREFIX",
    "TRACE",
    "VARIABLES",
    "allowed_plugins",
    "boolean",
    "leaves_merges_open",
    "log_level",
    "read",
    "set_log_level",
    "snapshot",
    "split_names",
    "variable",
    "warn_unknown",
]
