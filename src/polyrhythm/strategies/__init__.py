"""What is exchanged, and when: one file an algorithm, grouped by family. The family folders are the list."""

FAMILIES = (
    "polyrhythm.strategies.allreduce",
    "polyrhythm.strategies.averaging",
    "polyrhythm.strategies.gossip",
    "polyrhythm.strategies.parameter_server",
    "polyrhythm.strategies.pipeline",
)
