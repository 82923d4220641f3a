"""The compute environment of a process: machine, devices, and versions of the loaded libraries.

Results depend on it in the last bits, so they record the environment in which they were computed.
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
    *("xllamacpp", "py3langid", "rensa", "sympy", "reasoning_gym"),
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
            # Only what is loaded: a library that was not cannot have changed a result.
            **{name: version(name) for name in LIBRARIES if name in sys.modules},
        },
    }


def differences(a: Any, b: Any) -> list[str]:
    """Describe each part in which two environments differ, in a line; empty if one of them is unknown.

    A library that only one of them loaded is not a difference.
    """
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return []
    pairs = {part: (a.get(part), b.get(part)) for part in ("machine", "devices")}
    libraries = [environment.get("libraries") or {} for environment in (a, b)]
    pairs |= {name: (libraries[0][name], libraries[1][name]) for name in LIBRARIES if all(name in x for x in libraries)}
    return [f"{name}: {first} and {second}" for name, (first, second) in pairs.items() if first != second]


def cpu_field(*names: str) -> str:
    """The value of the first field of /proc/cpuinfo whose name begins with one of `names`; "" if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")
