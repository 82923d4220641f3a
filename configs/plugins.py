"""Plug-ins: stages, vendors, benchmarks, rewards and readers from outside the repository, and the registries of each.

A plug-in is an entry point of the group `nautile.REGISTRY` (name = "module:attribute"), or an entry
`REGISTRY=module:attribute` of the environment variable NAUTILE_PLUGINS, separated by commas; the attribute is then its
name. The environment and not a configuration, because the sections and the forms are made from the registries before
any configuration is read. Names are known without an import; what an entry declares is imported when it is used.
"""

import json
import os
import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from hashlib import sha256
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

from nautile.common.errors import ConfigError
from nautile.common.text import first_line

PLUGINS = "NAUTILE_PLUGINS"
REQUIRED = "NAUTILE_REQUIRED_PLUGINS"  # what `required` gave on the machine that a process works for, as JSON
REGISTRIES = ("stages", "vendors", "benchmarks", "rewards", "readers")
Entry = TypeVar("Entry")


@dataclass(frozen=True)
class PlugIn:
    """An entry that an installed package or NAUTILE_PLUGINS (`origin`) adds to a registry."""

    registry: str
    name: str
    reference: str  # module:attribute
    origin: str
    fault: str = ""  # why it cannot be used, as far as that is known without an import

    def __str__(self) -> str:
        return f"{self.registry}{'=' if self.reference else ''}{self.reference} of {self.origin}"

    def load(self) -> Any:
        """What the reference names. Raises `ConfigError` for whatever its import raises."""
        if self.fault:
            raise ConfigError(f"plug-in {self}: {self.fault}")
        try:
            return pkgutil.resolve_name(self.reference)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the code of a plug-in may raise anything, as a skipped test does
            what = f"{type(error).__name__}: {first_line(error)}"
            raise ConfigError(f"plug-in {self} cannot be imported ({what})") from error

    @property
    def digest(self) -> str:
        """Digest of its module's source: the version of an entry that declares none. Raises `ConfigError`."""
        return _digest(self)


@cache  # the source may be edited while a process works with what it has imported
def _digest(plug_in: PlugIn) -> str:
    module = plug_in.reference.partition(":")[0]
    try:
        spec = find_spec(module)
        source = Path(spec.origin or "").read_bytes() if spec else None
    except (Exception, SystemExit):  # of the code of the packages that it lies in
        source = None
    if source is None:
        raise ConfigError(f"plug-in {plug_in}: there is no source of the module {module!r}")
    return sha256(source).hexdigest()[:16]


@cache
def plug_ins() -> tuple[PlugIn, ...]:
    """All plug-ins of this process, in the order of `REGISTRIES`; also those with a fault (`check_plug_ins`)."""
    found = []
    installed = entry_points()  # once: it reads the metadata of all packages
    for registry in REGISTRIES:
        for entry in installed.select(group=f"nautile.{registry}"):
            package = "an installed package"
            with suppress(UnicodeDecodeError):  # in its metadata
                if entry.dist and entry.dist.name:
                    package = f"the package {entry.dist.name} {entry.dist.version}"
            found.append(PlugIn(registry, entry.name, entry.value, package))
    for text in filter(None, map(str.strip, os.environ.get(PLUGINS, "").split(","))):
        registry, _, reference = text.partition("=")
        found.append(PlugIn(registry.strip(), reference.rpartition(":")[2], reference.strip(), PLUGINS))
    known = [_checked(plug_in) for plug_in in dict.fromkeys(found)]
    return tuple(sorted(known, key=lambda plug_in: [*REGISTRIES, plug_in.registry].index(plug_in.registry)))


def _checked(plug_in: PlugIn) -> PlugIn:
    """The plug-in, with the fault of an entry that is none."""
    module, _, attribute = plug_in.reference.partition(":")
    named = (plug_in.name if plug_in.registry == "stages" else "a").isidentifier()  # a stage's is that of a section
    if plug_in.registry in REGISTRIES and module and attribute.isidentifier() and named:
        return plug_in
    return replace(plug_in, fault=f"it is not REGISTRY=module:attribute; the registries are {', '.join(REGISTRIES)}")


def known_plug_ins() -> list[PlugIn]:
    """All plug-ins, with the faults that the registries which this process has imported find."""
    refused = {(other.registry, other.reference): other for registry in _REGISTRIES for other in registry.refused}
    return [refused.get((plug_in.registry, plug_in.reference), plug_in) for plug_in in plug_ins()]


def version_of(plug_in: PlugIn) -> int | str:
    """As `Registry.version`. Raises `ConfigError` if the plug-in cannot be used."""
    entry = plug_in.load()
    for registry in _REGISTRIES:
        if registry.plug_ins.get(plug_in.name) == plug_in:
            return registry.version(plug_in.name)
    declared = declared_version(entry, str(plug_in))
    return plug_in.digest if declared is None else declared


def declared_version(entry: Any, name: str) -> int | None:
    """The `version` that an entry declares, which goes into keys. Raises `ConfigError` for what is no whole number."""
    try:
        declared = getattr(entry, "version", None)
    except Exception as error:  # a property of a plug-in
        raise ConfigError(f"plug-in {name}: no `version` ({type(error).__name__}: {first_line(error)})") from error
    if declared is not None and type(declared) is not int:
        raise ConfigError(f"plug-in {name}: its `version` is of the class {type(declared).__name__}, and not int")
    return declared


def check_plug_ins() -> None:
    """Raise `ConfigError` for the first entry that is none, or whose name another one has; it imports no plug-in.

    And for the first that the machine requires which this process works for (REQUIRED), and that is not the same here.
    """
    for plug_in in known_plug_ins():
        if plug_in.fault:
            raise ConfigError(f"plug-in {plug_in}: {plug_in.fault}")
    if text := os.environ.get(REQUIRED):
        refuse_others(json.loads(text))


def required() -> list[dict[str, str]]:
    """The plug-ins of this process with digests of their sources, as JSON data for machines that work for it."""
    return [asdict(plug_in) | {"digest": plug_in.digest} for plug_in in plug_ins()]


def refuse_others(wanted: list[dict[str, str]], here: str = "this machine") -> None:
    """Raise `ConfigError` if a plug-in of `required` is missing here, or has another source.

    Its results would depend on where it runs. `here`: this machine, in messages.
    """
    own = {(plug_in.registry, plug_in.name): plug_in for plug_in in plug_ins()}
    for entry in wanted:
        name = f"{entry['registry']}={entry['reference']}"
        found = own.get((entry["registry"], entry["name"]))
        if found is None or found.reference != entry["reference"]:
            problem = f"has no plug-in {name}" if found is None else f"has {found} in place of the plug-in {name}"
        else:
            try:
                problem = "" if found.digest == entry["digest"] else f"has another source of the plug-in {name}"
            except ConfigError:
                problem = f"cannot import the module of the plug-in {name}"
        if problem:
            what = entry["origin"].removeprefix("the package ")
            install = f"the file of its module, and name it in {PLUGINS}" if what == PLUGINS else f"the package {what}"
            raise ConfigError(f"{here} {problem}: install there {install}, as where the run was started")


def _refusal(plug_in: PlugIn, other: str) -> PlugIn:
    return replace(plug_in, fault=f"{other} has an entry {plug_in.name!r} too")


_REGISTRIES: "list[Registry[Any]]" = []  # those that this process has imported


class Registry(Mapping[str, Entry], Generic[Entry]):
    """The entries of one registry: the shipped ones, then those of plug-ins. A mapping from name to entry.

    An entry may be a reference `module:attribute`, which is imported when the entry is asked for: the names alone need
    no import. `kind`: the class of the entries, or the reference of it. Of two with one name the first counts, and the
    other is in `refused`, for which `check_plug_ins` raises.
    """

    def __init__(self, registry: str, kind: type[Entry] | str, shipped: Mapping[str, Entry | str]) -> None:
        self.name = registry
        self._kind = kind
        self._entries: dict[str, Entry | str] = dict(shipped)
        self.shipped = tuple(shipped)
        _REGISTRIES.append(self)

    @cached_property
    def _added(self) -> tuple[dict[str, PlugIn], list[PlugIn]]:
        """`plug_ins` and `refused`, looked for when they are asked for: a command that uses no entry does not wait."""
        found: dict[str, PlugIn] = {}
        refused = []
        for plug_in in plug_ins():
            if plug_in.registry != self.name or plug_in.fault:
                continue
            other = found.get(plug_in.name)
            if plug_in.name in self.shipped:
                refused.append(_refusal(plug_in, "the project itself"))
            elif other and other.reference != plug_in.reference:
                refused.append(_refusal(plug_in, str(other)))
            else:
                found[plug_in.name] = plug_in
        return found, refused

    @property
    def plug_ins(self) -> dict[str, PlugIn]:
        return self._added[0]

    @property
    def refused(self) -> list[PlugIn]:
        return self._added[1]

    def refuse(self, plug_in: PlugIn, other: str) -> None:
        """Leave out a plug-in whose name `other` has."""
        self.refused.append(_refusal(plug_in, other))
        if self.plug_ins.get(plug_in.name) == plug_in:
            del self.plug_ins[plug_in.name]

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
        declared = declared_version(self[name], str(self.plug_ins.get(name, name)))
        if declared is not None:
            return declared
        return self.plug_ins[name].digest if name in self.plug_ins else 1
