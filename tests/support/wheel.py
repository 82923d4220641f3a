"""The project's wheel, built from a copy of the checkout, and installed in a fresh environment."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(path.name for path in (ROOT / "src" / "nautile").iterdir() if path.is_symlink())
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
_TEMPORARY = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")


def checkout(folder: Path) -> Path:
    """A copy of what the wheel is built from: setuptools writes beside the sources."""
    for name in (*FOLDERS, "src"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=_TEMPORARY)
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, folder)
    return folder


def built(source: Path, out: Path) -> Path:
    """The wheel of a folder of sources, without its dependencies and without the network."""
    build = ["wheel", str(source), "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out)]
    subprocess.run([*PIP, *build], check=True, timeout=120)
    (wheel,) = out.glob("*.whl")
    return wheel


def fresh_environment(folder: Path, *wheels: Path) -> Path:
    """A new environment with these wheels; the packages that they depend on are this interpreter's. Its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    python = folder / "bin" / "python"
    (packages,) = (folder / "lib").glob("python*/site-packages")
    ours = Path(os.__file__).parent / "site-packages"
    own = [entry for entry in sys.path if entry.endswith("site-packages")] or [str(ours)]
    (packages / "dependencies.pth").write_text("".join(f"{entry}\n" for entry in own), encoding="utf-8")
    install = ["--python", str(python), "install", "--no-deps", "--no-index", "--ignore-installed", *map(str, wheels)]
    subprocess.run([*PIP, *install], check=True, timeout=120)
    return python
