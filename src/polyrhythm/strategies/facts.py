"""What the generated tables say of a strategy."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Facts:
    """What the generated table says of a strategy: M bytes of the model, N workers, R replicas in a group.

    Attributes:
        bytes_per_step: that all ranks together send for each step of one worker.
        staleness: mean, of equal workers.
        use_it: when to choose it.
        when_a_worker_dies: what happens.
    """

    bytes_per_step: str
    staleness: str
    use_it: str
    when_a_worker_dies: str = field(
        default="the run stops and names it; `--resume` goes on from the last checkpoint"
    )
