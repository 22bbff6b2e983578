"""How many compute threads a rank that torchrun has started should have: a host's cores, shared out among its workers.

torchrun says how many ranks it has started itself. There may be other torchruns on the same machine (two of them are a
usual way to try several hosts), so ranks tell each other in the store on which cores of which machine they may run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from polyrhythm.communication.transports.shared_memory.host import machine_key
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
from polyrhythm.errors import RequestError
from polyrhythm.launch.cores import threads_for_worker, usable_cores
from polyrhythm.launch.patience import Patience
from polyrhythm.strategies.cast import Cast
from polyrhythm.strategies.strategy import Strategy

_VARIABLE = "OMP_NUM_THREADS"
_TORCHRUNS_OWN = "1"
"""What torchrun sets, unless somebody has, where it starts several ranks."""


def threads_beside(
    rendezvous: Rendezvous,
    started: Sequence[int],
    cast: Cast,
    strategy: Strategy,
    patience: Patience | None = None,
) -> int:
    """Gives the compute threads of this rank, if it is a worker; every rank that was started must call it.

    Args:
        rendezvous: of this rank.
        started: the ranks that torchrun has started.
        cast: who does what.
        strategy: knows whether its servers need cores of their own.
        patience: with the others; None: that of ranks that are not told otherwise.
    """
    store = rendezvous.store
    store.set(f"cores/{rendezvous.rank}", json.dumps([machine_key(), sorted(usable_cores())]))
    told = map(json.loads, (patience or Patience()).keys(store, lambda rank: f"cores/{rank}", started))
    places = {rank: (machine, set(cores)) for rank, (machine, cores) in zip(started, told, strict=True)}
    return asked_threads(os.environ) or share_of_cores(rendezvous.rank, places, cast, strategy)


def share_of_cores(
    rank: int, places: Mapping[int, tuple[str, set[int]]], cast: Cast, strategy: Strategy
) -> int:
    """Shares the cores that a rank may use out among all that may use some of them.

    Args:
        rank: of a worker.
        places: of every rank, its machine and the cores that it may use.
        cast: who does what.
        strategy: of the run.
    """
    machine, cores = places[rank]
    beside = [other for other, (where, its) in places.items() if where == machine and its & cores]
    workers = sum(cast.works(other) for other in beside)
    return threads_for_worker(len(cores), max(1, workers), strategy, servers=len(beside) - workers)


def asked_threads(environment: Mapping[str, str]) -> int | None:
    """Gives the threads that somebody has asked for in the environment, if it was not torchrun itself.

    Raises:
        RequestError: they are no number.
    """
    # The first of a list is for what is not nested.
    asked = environment.get(_VARIABLE, "").partition(",")[0].strip()
    several = environment.get("LOCAL_WORLD_SIZE", "1") != "1"
    if not asked or (several and asked == _TORCHRUNS_OWN):
        return None
    if not (asked.isascii() and asked.isdecimal() and int(asked) > 0):
        raise RequestError(
            f"{_VARIABLE} is {asked!r} in the environment: it must be a whole number, 1 or more"
        )
    return int(asked)
