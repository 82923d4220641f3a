"""Plug-ins: stages, vendors, benchmarks, rewards and readers from outside the repository, and the registries of each.

A plug-in is an entry point of the group `nautile.REGISTRY` (name = "module:attribute"), or an entry
`REGISTRY=module:attribute` of the environment variable NAUTILE_PLUGINS, separated by commas; the attribute is then its
name. The environment and not a configuration, because the sections and the forms are made from the registries before
any configuration is read. Names are known without an import; what an entry declares is imported when it is used.
"""

import os
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

from nautile.common.errors import ConfigError
from nautile.common.text import first_line

PLUGINS = "NAUTILE_PLUGINS"
REGISTRIES = ("stages", "vendors", "benchmarks", "rewards", "readers")
Entry = TypeVar("Entry")


@dataclass(frozen=True)
class PlugIn:
    """An entry that an installed package or NAUTILE_PLUGINS (`origin`) adds to a registry."""

    registry: str
    name: str
    reference: str  # module:attribute
    origin: str

    def __str__(self) -> str:
        return f"{self.registry}={self.reference} of {self.origin}"

    def load(self) -> Any:
        """What the reference names. Raises `ConfigError` for whatever its import raises."""
        try:
            return pkgutil.resolve_name(self.reference)
        except Exception as error:  # the code of a plug-in may raise anything
            what = f"{type(error).__name__}: {first_line(error)}"
            raise ConfigError(f"plug-in {self} cannot be imported ({what})") from error

    @property
    def digest(self) -> str:
        """Digest of its module's source: the version of an entry that declares none. Raises `ConfigError`."""
        module = self.reference.partition(":")[0]
        try:
            spec = find_spec(module)
            source = Path(spec.origin or "").read_bytes() if spec else None
        except (ImportError, AttributeError, ValueError, OSError):
            source = None
        if source is None:
            raise ConfigError(f"plug-in {self}: there is no source of the module {module!r}")
        return sha256(source).hexdigest()[:16]


@cache
def plug_ins() -> tuple[PlugIn, ...]:
    """All plug-ins of this process, in the order of `REGISTRIES`. Raises `ConfigError` for an entry that is none."""
    found = []
    installed = entry_points()  # once: it reads the metadata of all packages
    for registry in REGISTRIES:
        for entry in installed.select(group=f"nautile.{registry}"):
            package = f"the package {entry.dist.name} {entry.dist.version}" if entry.dist else "an installed package"
            found.append(PlugIn(registry, entry.name, entry.value, package))
    for text in filter(None, map(str.strip, os.environ.get(PLUGINS, "").split(","))):
        registry, _, reference = text.partition("=")
        module, _, name = reference.partition(":")
        if registry not in REGISTRIES or not module or not name.isidentifier():
            raise ConfigError(
                f"{PLUGINS}: {text!r} is not REGISTRY=module:attribute; the registries are {', '.join(REGISTRIES)}"
            )
        found.append(PlugIn(registry, name, reference, PLUGINS))
    return tuple(dict.fromkeys(sorted(found, key=lambda plug_in: REGISTRIES.index(plug_in.registry))))


class Registry(Mapping[str, Entry], Generic[Entry]):
    """The entries of one registry: the shipped ones, then those of plug-ins. A mapping from name to entry.

    An entry may be a reference `module:attribute`, which is imported when the entry is asked for: the names alone need
    no import. `kind`: the class of the entries, or the reference of it. Raises `ConfigError` if two have one name.
    """

    def __init__(self, registry: str, kind: type[Entry] | str, shipped: Mapping[str, Entry | str]) -> None:
        self._kind = kind
        self._entries: dict[str, Entry | str] = dict(shipped)
        self.shipped = tuple(shipped)
        self.plug_ins: dict[str, PlugIn] = {}
        for plug_in in (plug_in for plug_in in plug_ins() if plug_in.registry == registry):
            other = self.plug_ins.get(plug_in.name)
            if plug_in.name in shipped or (other and other.reference != plug_in.reference):
                raise ConfigError(
                    f"plug-in {plug_in}: {other or 'the project itself'} has an entry {plug_in.name!r} too"
                )
            self.plug_ins[plug_in.name] = plug_in

    def __iter__(self) -> Iterator[str]:
        return iter((*self._entries, *self.plug_ins))

    def __len__(self) -> int:
        return len(self._entries) + len(self.plug_ins)

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self.plug_ins

    def __getitem__(self, name: str) -> Entry:
        """The entry of that name. Raises `KeyError` if there is none, `ConfigError` if a plug-in's cannot be used."""
        if name not in self.plug_ins:
            shipped = self._entries[name]
            entry: Entry = pkgutil.resolve_name(shipped) if isinstance(shipped, str) else shipped
            return entry
        entry = self.plug_ins[name].load()
        kind = pkgutil.resolve_name(self._kind) if isinstance(self._kind, str) else self._kind
        if not isinstance(entry, kind):
            raise ConfigError(
                f"plug-in {self.plug_ins[name]} is of the class {type(entry).__name__}, and not {kind.__name__}"
            )
        return entry

    def reference(self, name: str) -> str:
        """The reference `module:attribute` of an entry that has one."""
        entry = self.plug_ins[name].reference if name in self.plug_ins else self._entries[name]
        assert isinstance(entry, str), name
        return entry

    def version(self, name: str) -> int | str:
        """The `version` that the entry declares; else of a plug-in's the digest of its source, of a shipped one 1."""
        declared: int | None = getattr(self[name], "version", None)
        if declared is not None:
            return declared
        return self.plug_ins[name].digest if name in self.plug_ins else 1
