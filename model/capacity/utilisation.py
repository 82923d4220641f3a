"""The share of a chip's peak (MFU) that a training step reaches: as measured, or as assumed for chips never run.

Measured: docs/results/device.md, one H200, rows of 1,024 tokens in bfloat16. Compiled: docs/tpu.md, what the compiler
estimates of one block of the published model on 32 chips.
"""

import math
from dataclasses import dataclass

from nautile.configs.model import ModelConfig
from nautile.model.capacity.topology import GPUS, Chip

_MEASURED = {  # (millions of parameters, fused, rematerialised) -> share of an H200's peak
    (109, True, True): 0.138,
    (109, False, True): 0.094,
    (109, True, False): 0.161,
    (109, False, False): 0.103,
    (371.9, True, True): 0.188,
    (371.9, False, True): 0.129,
    (371.9, True, False): 0.212,
    (371.9, False, False): 0.134,
}
_COMPILED = {  # chip -> share with the fused kernels, and with the chunked form in chunks of 128 and of 32
    "v4": (0.19, 0.14, 0.11),
    "v5e": (0.20, 0.16, 0.13),
    "v6e": (0.09, 0.06, 0.06),  # of 32 alone
}
UPDATE = 0.49  # a policy's update, of the utilisation of pretraining: 39,758 against 81,446 tokens/s on the H200
# Seconds of a layer in one step of decoding, at 1 and at 64 rows: 1.52 ms for 24 layers on the H200, bound by launches.
DECODED_LAYER_S = 1.52e-3 / 24


@dataclass(frozen=True)
class Utilisation:
    """A share of the peak, and in words where it comes from. `measured`: on this chip; else it is assumed for it."""

    share: float
    source: str
    measured: bool


def utilisation(chip: Chip, model: ModelConfig, parameters: int) -> Utilisation:
    """The utilisation of the nearest measured setting, or of the compiler's estimate for a TPU."""
    fused, remat = model.mixing == "fused", model.remat != "none"
    if chip.name in GPUS:
        millions = min((key[0] for key in _MEASURED), key=lambda size: abs(math.log(size * 1e6 / parameters)))
        form = f"{'fused' if fused else 'chunked'} mixing, {'with' if remat else 'without'} rematerialisation"
        source = f"measured on an H200 with {millions:g} M parameters, {form}"
        return Utilisation(_MEASURED[millions, fused, remat], source, chip.name == "h200")
    name = chip.name if chip.name in _COMPILED else "v4"
    source = f"the compiler's estimate of one block of the 371 M model on a {name}"
    return Utilisation(_COMPILED[name][0 if fused else 1 if model.chunk >= 128 else 2], source, False)
