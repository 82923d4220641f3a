"""Pallas kernels of the mixing operator: one head's chunk in `tile`, its grids in `tpu` and `gpu`, the entry in `fused`."""
