"""Configuration: a frozen pydantic model, read from code, a file or the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from . import environment
from .errors import AttnBackendsError, BackendUnavailableError, InvalidInputError

if TYPE_CHECKING:
    from .settings import AttentionSettings


class FrozenDict(dict[str, Any]):
    """A dict that refuses changes, so that a cached answer cannot outlive its settings."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("a configuration does not change; make another with model_copy(update=)")

    __setitem__ = __delitem__ = update = setdefault = _refuse
    pop = popitem = clear = __ior__ = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self))  # values may be unhashable; equal dicts have equal keys

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return FrozenDict({key: _frozen(item) for key, item in value.items()})
    return [_frozen(item) for item in value] if isinstance(value, list) else value


def _as_tuple(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError(f"a list of names, as in [{value}]")
    return tuple(value) if isinstance(value, (list, set, frozenset)) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]


class AttentionConfig(BaseModel):
    """Which backends to use and how. A field left at None leaves that question to others.

    Each question is answered by the first that sets it: arguments, ``use()``, the configuration
    of the call or else of the process, the environment; what nobody sets is ``auto``.

    Raises:
        pydantic.ValidationError: A field is unknown or of another type; it is a ValueError.
        UnknownBackendError: A name that no backend has.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    backend: str | None = None
    """Backend of both phases: a name, or ``auto``."""
    prefill: str | None = None
    """Backend of prefill; goes before ``backend``."""
    decode: str | None = None
    """Backend of decode; goes before ``backend``."""
    allow: Names | None = None
    """No other backend may be used, not even by name."""
    deny: Names | None = None
    """These may not be used, not even by name."""
    batch_invariant: bool | None = None
    """True: the bits of a result do not depend on its batch mates. It adds to what a spec asks."""
    merge: Literal["auto", "cuda", "triton", "torch"] | None = None
    """Path of merges; None and ``auto`` choose by device, dtype and alignment."""
    options: dict[str, dict[str, Any]] = Field(default_factory=FrozenDict)
    """Options by backend name, checked by that backend's own ``Options`` model."""
    tuning_file: str | None = None
    """Measured ranking for ``auto``; relative to the file that names it."""

    @field_validator("backend", "prefill", "decode")
    @classmethod
    def _known_name(cls, value: str | None, info: Any) -> str | None:
        from .registry.registry import normalize

        return None if value is None else normalize(value, where=info.field_name)

    @field_validator("allow", "deny")
    @classmethod
    def _known_names(cls, value: tuple[str, ...] | None, info: Any) -> tuple[str, ...] | None:
        from .registry.registry import lookup

        return (
            None if value is None else tuple(lookup(n, where=info.field_name).name for n in value)
        )

    @field_validator("tuning_file", mode="before")
    @classmethod
    def _path(cls, value: Any) -> Any:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @field_validator("options")
    @classmethod
    def _known_options(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        from .registry.registry import lookup
        from .registry.target import parse_options

        result = {}
        for name, options in value.items():
            entry = lookup(name, where="options")
            try:
                parse_options(entry, options)
            except BackendUnavailableError:
                pass  # without its code the options cannot be checked; choosing it raises this
            if entry.name in result:
                raise InvalidInputError.of("options", repr(name), "each backend once")
            result[entry.name] = options
        frozen: dict[str, dict[str, Any]] = _frozen(result)
        return frozen

    @cached_property
    def as_json(self) -> str:
        """The fields as JSON; a plain attribute, so that a compiler can read it."""
        return self.model_dump_json(exclude_defaults=True)

    def model_post_init(self, context: Any, /) -> None:
        """Fill ``as_json`` in while it is cheap; a compiler cannot run pydantic.

        Args:
            context: What pydantic hands in; not used.
        """
        _ = self.as_json

    def model_copy(
        self, *, update: Mapping[str, Any] | None = None, deep: bool = False
    ) -> AttentionConfig:
        """A copy with some fields replaced, and checked like any other.

        Args:
            update: New values by field name.
            deep: Makes no difference, since a configuration does not change.

        Returns:
            The copy.

        Raises:
            pydantic.ValidationError: A field is unknown or of another type.
            UnknownBackendError: A name that no backend has.
        """
        fields = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**fields, **(update or {})})

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> AttentionConfig:
        """Read a YAML, TOML or JSON file.

        Args:
            path: Its suffix names the format: .yaml, .yml, .toml or .json.

        Returns:
            The configuration; a relative ``tuning_file`` is taken from the file's own folder.

        Raises:
            InvalidInputError: The file cannot be read, or a field is wrong; names file and field.
            UnknownBackendError: A name that no backend has; names file and field.
        """
        return cls(**read_file(path))


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check a configuration file; gives the fields it sets.

    Raises:
        InvalidInputError: As ``AttentionConfig.from_file``.
    """
    file = Path(path).expanduser()
    values = _parse_file(file)
    if not isinstance(values, dict):
        raise InvalidInputError.of(str(file), type(values).__name__, "a mapping of fields")
    for name in values:
        if not isinstance(name, str):  # YAML reads 1, yes and on as other things than words
            allowed = ", ".join(AttentionConfig.model_fields)
            raise InvalidInputError(f"{file}: {InvalidInputError.of('field', repr(name), allowed)}")
    tuning = values.get("tuning_file")
    if isinstance(tuning, str):
        values["tuning_file"] = str(file.parent / Path(tuning).expanduser())
    checked(AttentionConfig, values, f"{file}: ")
    return values


def checked(model: type[AttentionConfig], values: dict[str, Any], where: str) -> AttentionConfig:
    """Build a configuration; errors say where the values come from."""
    from .registry.target import invalid_fields

    try:
        return model(**values)
    except ValidationError as error:
        text = str(invalid_fields(error, "", model))
        raise InvalidInputError(where + text) from None
    except AttnBackendsError as error:
        raise type(error)(f"{where}{error}") from None


def _parse_file(file: Path) -> Any:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError.of("config file", file, "a readable file", str(error)) from None
    suffix = file.suffix.lower()
    try:
        if suffix == ".json":
            return json.loads(text)
        if suffix == ".toml":
            return _toml().loads(text)
        if suffix in (".yaml", ".yml"):
            return _yaml().safe_load(text) or {}
    except InvalidInputError:
        raise
    except Exception as error:  # each parser has its own errors
        raise InvalidInputError(f"{file}: not valid {suffix[1:].upper()}: {error}") from None
    raise InvalidInputError.of("config file", file, "a suffix of .yaml, .yml, .toml, .json")


def _toml() -> Any:
    for name in ("tomllib", "tomli"):  # of the standard library since Python 3.11
        try:
            return import_module(name)
        except ImportError:
            continue
    raise InvalidInputError("a TOML file needs Python 3.11 or the package tomli")


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise InvalidInputError(f"YAML needs the package pyyaml: {error}") from None
    return yaml


def environment_config() -> AttentionConfig:
    """The environment's configuration: single variables, then the file ``CONFIG`` names.

    Raises:
        InvalidInputError: A variable is empty or cannot be read; the message names it.
        UnknownBackendError: A variable names a backend that does not exist.
    """
    path = environment.variable("CONFIG")
    try:
        values = {} if path is None else read_file(path)
    except AttnBackendsError as error:
        raise type(error)(f"{environment.PREFIX}CONFIG: {error}") from None
    single = environment.read()
    checked_names(single)
    if "backend" in single:  # the variable goes before all that the file says of backends
        values = {key: item for key, item in values.items() if key not in ("prefill", "decode")}
    return checked(AttentionConfig, {**values, **single}, "environment ATTN_BACKENDS_*: ")


def checked_names(values: dict[str, Any]) -> None:
    """Check backend names, so that messages name the variable they stand in."""
    from .registry.registry import lookup, normalize

    for field in ("backend", "prefill", "decode"):
        if field in values:
            normalize(values[field], where=environment.PREFIX + field.upper())
    for field in ("allow", "deny"):
        for name in values.get(field, ()):
            lookup(name, where=environment.PREFIX + field.upper())


class _Process:
    """The configuration of the process, and the environment as it was last read.

    Attributes:
        config: What ``configure`` set.
        generation: Grows with every ``configure``, so that caches can tell.
        environment: Snapshot, stamps of the files read, and what they came to.
    """

    config: AttentionConfig | None = None
    generation: int = 0
    environment: tuple[Any, tuple[tuple[str, Any], ...], AttentionConfig] | None = None


PROCESS = _Process()


def configure(config: AttentionConfig | None) -> AttentionConfig | None:
    """Set the configuration of the process; None takes it away.

    A configuration given to a call replaces this one for that call.

    Args:
        config: What holds from now on, in every thread.

    Returns:
        The configuration that held before.

    Raises:
        InvalidInputError: ``config`` is neither an AttentionConfig nor None.
    """
    if config is not None and not isinstance(config, AttentionConfig):
        raise InvalidInputError.of("config", type(config).__name__, "an AttentionConfig or None")
    before = PROCESS.config
    PROCESS.config = config
    PROCESS.generation += 1
    return before


def current_config() -> AttentionConfig | None:
    """The configuration that ``configure`` set, or None."""
    return PROCESS.config


def stamp(path: str) -> tuple[int, ...] | None:
    """What changes when a file changes; None if it is not there."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def environment_layer() -> AttentionConfig:
    """The environment as a configuration, parsed again only when it or its file changed."""
    known = PROCESS.environment
    raw = environment.snapshot()
    if known is not None and known[0] == raw:
        if not known[1] or all(stamp(path) == then for path, then in known[1]):
            return known[2]
    path = environment.variable("CONFIG")
    # The stamp comes first: a file that changes while it is read is then read again.
    files = () if path is None else ((path, stamp(path)),)
    config = environment_config()
    PROCESS.environment = (raw, files, config)
    return config


def current_merge_path() -> str | None:
    """Path that the settings of the process ask for merges; None leaves it to the merge.

    The configuration of ``configure()`` goes before ``ATTN_BACKENDS_MERGE``. Cheap: the
    environment is parsed only if it can say anything of merges, and again only when it changed.

    Raises:
        InvalidInputError: ``ATTN_BACKENDS_MERGE`` names no path.
    """
    config = PROCESS.config
    path = config.merge if config is not None else None
    if path is None:
        if environment.leaves_merges_open():  # asked in every merge, and nearly always so
            return None
        path = environment_layer().merge
    return None if path == "auto" else path


def __getattr__(name: str) -> Any:
    if name == "AttentionSettings":  # pydantic-settings is loaded only by those who ask for it
        from .settings import AttentionSettings

        return AttentionSettings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AttentionConfig",
    "AttentionSettings",
    "checked",
    "configure",
    "current_config",
    "current_merge_path",
    "environment_config",
    "environment_layer",
    "read_file",
    "stamp",
]
