"""`make audit`: a software bill of materials of the locks, and known advisories for their packages.

    python bench/operation/audit.py OUT [PIP_AUDIT]

writes OUT/sbom.json (CycloneDX 1.6: every package of every lock with its digests, and the licence of those installed
here) and, with the path of pip-audit, OUT/advisories.json with the date. A package that the index does not know counts
as not looked up, never as free of advisories. Exit code 1 if there is an advisory, 2 if no package was looked up.
"""

import json
import re
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_PINNED = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(\[[^]]*\])?==(?P<version>[^\s;\\]+)\s*(;\s*(?P<marker>[^\\]+))?")
_DIGEST = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True)
class Package:
    """A package as a lock pins it, the sha256 of each of its files, and where it is installed (empty: everywhere)."""

    name: str
    version: str
    lock: str
    marker: str
    digests: tuple[str, ...]


def packages(lock: Path) -> Iterator[Package]:
    """The packages of a lock that some platform installs."""
    # An entry begins in the first column; its digests are indented lines below.
    for entry in re.split(r"\n(?=[A-Za-z0-9])", lock.read_text(encoding="utf-8")):
        pinned = _PINNED.match(entry)
        marker = (pinned["marker"] or "").strip() if pinned else ""
        # Packages that the project overrides away (pyproject.toml) are in the lock with a marker that no platform
        # meets.
        if pinned and "sys_platform == 'never'" not in marker:
            digests = tuple(_DIGEST.findall(entry))
            yield Package(pinned["name"].lower(), pinned["version"], lock.name, marker, digests)


def bill_of_materials(pinned_packages: list[Package], moment: datetime) -> dict[str, Any]:
    """The CycloneDX document. Its serial number follows from the packages: the same locks have the same."""
    versions = json.dumps(sorted({(package.name, package.version) for package in pinned_packages}))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, versions)}",
        "version": 1,
        "metadata": {
            "timestamp": moment.isoformat(timespec="seconds"),
            "component": {"type": "application", "name": "nautile", "version": metadata.version("nautile")},
        },
        "components": [_component(package) for package in pinned_packages],
    }


def advisories(pinned_packages: list[Package], pip_audit: str) -> list[dict[str, Any]]:
    """What pip-audit answers for each package: `vulns`, or `skip_reason` if it was not looked up.

    Raises `RuntimeError` with its message if it ends without an answer.
    """
    versions: dict[str, list[str]] = {}
    for name, version in sorted({(package.name, package.version) for package in pinned_packages}):
        versions.setdefault(name, []).append(version)
    answers = []
    # pip-audit takes each name once, so other versions (of other locks or platforms) need further rounds.
    for number in range(max(map(len, versions.values()), default=0)):
        pins = [f"{name}=={several[number]}\n" for name, several in versions.items() if number < len(several)]
        answers += _run_pip_audit(pins, pip_audit)
    return answers


def report(answers: list[dict[str, Any]], moment: datetime) -> tuple[str, int]:
    """The printed lines, and the exit code."""
    known = [answer for answer in answers if "skip_reason" not in answer]
    bad = [(answer, entry) for answer in known for entry in answer["vulns"]]
    lines = [f"{moment:%Y-%m-%d}: {len(bad)} advisories for {len(known)} packages that were looked up"]
    if unknown := len(answers) - len(known):
        lines.append(f"{unknown} packages could not be looked up: the index has no advisories, or does not answer")
    for answer, entry in bad:
        fixed = ", ".join(entry["fix_versions"]) or "no version yet"
        lines.append(f"  {answer['name']} {answer['version']}: {entry['id']}, fixed in {fixed}")
    return "\n".join(lines), 1 if bad else 0 if known else 2


def main(out: Path, pip_audit: str | None) -> int:
    moment = datetime.now(UTC)
    pinned_packages = [package for lock in sorted(ROOT.glob("requirements/*.lock")) for package in packages(lock)]
    out.mkdir(parents=True, exist_ok=True)
    (out / "sbom.json").write_text(
        json.dumps(bill_of_materials(pinned_packages, moment), indent=1) + "\n", encoding="utf-8"
    )
    print(f"{out / 'sbom.json'}: {len(pinned_packages)} packages of {len({p.lock for p in pinned_packages})} locks")
    if pip_audit is None:
        return 0
    answers = advisories(pinned_packages, pip_audit)
    result = {"date": moment.isoformat(timespec="seconds"), "dependencies": answers}
    (out / "advisories.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    text, code = report(answers, moment)
    print(text)
    return code


def _run_pip_audit(pins: list[str], pip_audit: str) -> list[dict[str, Any]]:
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.writelines(pins)
        file.flush()
        command = [pip_audit, "--requirement", file.name, "--no-deps", "--disable-pip", "--format", "json"]
        completed = subprocess.run([*command, "--progress-spinner", "off"], capture_output=True, text=True, check=False)
    try:
        return json.loads(completed.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (completed.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"pip-audit ended with {completed.returncode}: {last}") from None


def _component(package: Package) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": f"{package.lock}:{package.name}@{package.version}",
        "name": package.name,
        "version": package.version,
        "purl": f"pkg:pypi/{package.name}@{package.version}",
        "hashes": [{"alg": "SHA-256", "content": digest} for digest in package.digests],
        "properties": [{"name": "lock", "value": package.lock}, {"name": "marker", "value": package.marker}],
    }
    try:
        fields = metadata.metadata(package.name)
    except metadata.PackageNotFoundError:
        return component  # of another lock or platform
    if (licence := fields.get("License-Expression")) or (licence := fields.get("License")):
        component["licenses"] = [{"license": {"name": licence.strip().splitlines()[0][:100]}}]
    return component


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2] if sys.argv[2:] else None))
