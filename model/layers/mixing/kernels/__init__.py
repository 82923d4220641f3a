"""Pallas kernels of the mixing operator: a head's chunk in `tile`, grids in `tpu` and `gpu`, entry in `dispatch`."""
