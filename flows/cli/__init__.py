"""The command line of `nautile`."""

from nautile.common.processes import relax_collector

# Before the modules of the commands are imported: by default the collector takes a tenth of a listing's time meanwhile.
relax_collector()
