"""Optional packages: whether each one really loads, and why not.

Finding a package on disk proves little: a wheel built for another torch is found, and fails only
when it is imported. So a probe imports, once per process, and keeps the original message.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from dataclasses import dataclass
from functools import cache
from types import ModuleType

from .errors import Reason


@dataclass(frozen=True)
class Probe:
    """What importing an optional package gave.

    Attributes:
        name: Module that was asked for, for example ``"flash_attn"``.
        module: The module, or None if it cannot be used.
        version: Installed version, known even where the import fails; None if unknown.
        error: Why it cannot be used, with the original message; None if it can.
        installed: Whether something by that name is there, working or not.
        want: What would be accepted, in the words of a ``Reason``.
    """

    name: str
    module: ModuleType | None
    version: str | None
    error: str | None
    installed: bool
    want: str

    @property
    def ok(self) -> bool:
        """Whether the module can be used."""
        return self.error is None

    @property
    def broken(self) -> bool:
        """Whether it is installed and nevertheless cannot be used."""
        return self.installed and self.error is not None

    def reason(self, fix: str | None = None) -> Reason | None:
        """The reason against a backend that needs this package; None if it can be used.

        Args:
            fix: What the user can do, for example ``pip install flashinfer-python``.
        """
        if self.error is None:
            return None
        got = self.error
        if self.installed:
            got = f"{self.version or 'unknown version'}, {self.error}"
        return Reason(self.name, got, self.want, fix)


def version_tuple(version: str) -> tuple[int, ...]:
    """The release numbers at the start of a version: ``"2.8.3.post1"`` gives ``(2, 8, 3)``."""
    match = re.match(r"\s*v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in match.group(1).split(".")) if match else ()


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except Exception:  # metadata of a half-removed package raises more than PackageNotFoundError
        return None


_broken: set[str] = set()


@cache
def _probe(
    module: str, attribute: str | None, min_version: str | None, distribution: str | None
) -> Probe:
    result = _import(module, attribute, min_version, distribution)
    if result.broken:
        _broken.add(module)
    return result


def probe(
    module: str,
    *,
    attribute: str | None = None,
    min_version: str | None = None,
    distribution: str | None = None,
) -> Probe:
    """Import an optional module, catching whatever it raises; the answer is cached.

    Args:
        module: Dotted name, for example ``"flash_attn"``.
        attribute: What the module must have, for example ``"flash_attn_varlen_func"``.
        min_version: Oldest accepted version, compared by release numbers.
        distribution: Name on the package index, if it is not the module's first part.

    Returns:
        The probe; ``probe(...).module`` is None if anything is missing.
    """
    return _probe(module, attribute, min_version, distribution)


def _import(
    module: str, attribute: str | None, min_version: str | None, distribution: str | None
) -> Probe:
    want = "installed" if min_version is None else f">={min_version}"
    version = installed_version(distribution or module.split(".")[0])
    try:
        loaded = importlib.import_module(module)
    except Exception as error:  # undefined symbols, missing libraries, failing set-up code
        if isinstance(error, ModuleNotFoundError) and _is_part(error.name, module):
            installed = version is not None and error.name == module.split(".")[0]
            text = "not importable" if installed else "not installed"
            return Probe(module, None, version, text, installed, want)
        text = f"import raised {type(error).__name__}: {error}"
        return Probe(module, None, version, text, True, f"{want}, loadable with {_torch()}")
    try:  # a lazy module may raise whatever it likes on any attribute
        if version is None:
            own = getattr(loaded, "__version__", None)
            version = own if isinstance(own, str) else None
        missing = attribute is not None and not hasattr(loaded, attribute)
    except Exception as error:
        problem: str | None = f"an attribute raised {type(error).__name__}: {error}"
    else:
        problem = _problem(version, min_version)
        if problem is None and missing:
            problem, want = "incomplete", f"a version with {module}.{attribute}"
    return Probe(module, loaded if problem is None else None, version, problem, True, want)


def _problem(version: str | None, min_version: str | None) -> str | None:
    if min_version is None:
        return None
    if version is None:
        return "whose version cannot be told"
    return "too old" if version_tuple(version) < version_tuple(min_version) else None


def forget_probes() -> None:
    """Probe again when next asked; for tests, and after an installation in a running process."""
    _probe.cache_clear()
    _broken.clear()


def is_broken(module: str) -> bool:
    """Whether a probe of this process found the module installed and yet unusable."""
    return module in _broken


def _is_part(name: str | None, module: str) -> bool:
    """Whether ``name`` is ``module`` or a package above it, rather than one of its imports."""
    return name is not None and (module == name or module.startswith(name + "."))


def _torch() -> str:
    return f"torch {installed_version('torch') or 'unknown'}"


__all__ = ["Probe", "forget_probes", "installed_version", "is_broken", "probe", "version_tuple"]
