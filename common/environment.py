"""What a process computes on: the machine, its devices, the versions of the libraries it has loaded.

The same configuration gives other bits on another of these, so results say which they were made on.
"""

import os
import platform
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

LIBRARIES = (
    *("python", "jax", "jaxlib", "flax", "optax", "numpy", "scipy", "pyarrow", "tiktoken", "tokenizers", "onnxruntime"),
    *("xllamacpp", "py3langid", "rensa", "math_verify", "reasoning_gym"),
)


def environment() -> dict[str, Any]:
    """`machine`, `devices` (None without JAX) and `libraries` (name -> version) of this process, as plain JSON data."""
    jax = sys.modules.get("jax")
    kinds = Counter(device.device_kind for device in jax.devices()) if jax else {}
    processor = f"{platform.machine()} {cpu_field('model name')}".strip()
    return {
        "machine": f"{processor}, {os.cpu_count()} cores, {platform.system()}",
        "devices": ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())) or None,
        "libraries": {
            "python": platform.python_version(),
            **{name: version(name) for name in LIBRARIES if name in sys.modules},
        },
    }


def differences(a: Any, b: Any) -> list[str]:
    """A line for each part in which two environments differ; nothing unless both are known.

    A library that only one of them loaded is no difference.
    """
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return []
    pairs = {part: (a.get(part), b.get(part)) for part in ("machine", "devices")}
    libraries = [made_in.get("libraries") or {} for made_in in (a, b)]
    pairs |= {name: (libraries[0][name], libraries[1][name]) for name in LIBRARIES if all(name in x for x in libraries)}
    return [f"{name}: {first} and {second}" for name, (first, second) in pairs.items() if first != second]


def cpu_field(*names: str) -> str:
    """The first field of /proc/cpuinfo whose name begins with one of `names`; where there is none, a short text."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")
