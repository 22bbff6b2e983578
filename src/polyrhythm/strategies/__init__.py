"""Distribution strategies: one file per algorithm, one folder per family. The family folders are the list."""

FAMILIES = (
    "polyrhythm.strategies.allreduce",
    "polyrhythm.strategies.averaging",
    "polyrhythm.strategies.gossip",
    "polyrhythm.strategies.parameter_server",
    "polyrhythm.strategies.pipeline",
)
