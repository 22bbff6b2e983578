"""Why a run has failed: of all that its ranks say, what explains the rest."""

from __future__ import annotations

from polyrhythm.errors import RequestError, RunError
from polyrhythm.launch.children.child import BUG, PEER, REQUEST, RUN
from polyrhythm.launch.children.ranks import Child, Ranks
from polyrhythm.launch.children.restarting import RankLost
from polyrhythm.roles.job import Job


def verdict(failed: list[Child], ranks: Ranks, job: Job, *, others_lost: bool = False) -> Exception:
    """Chooses the failure that explains the others: a lost peer is only an echo of one.

    Args:
        failed: ranks of the run.
        ranks: all of them.
        job: of the run.
        others_lost: whether others were lost before, which may have been too many.
    """
    folder = f" {job.keeping.folder}" if job.keeping.folder is not None else ""
    for child in failed:
        if child.kind == REQUEST:
            return RequestError(child.error)
    for child in failed:  # one that was killed could not say so, and the others' collectives broke
        if not child.kind and child.process.exitcode is not None:
            return RankLost(f"{ranks.name(child.rank)} {child.death}", f"continue with --resume{folder}")
    for child in failed:
        if child.kind in (RUN, BUG):
            return RunError(f"{ranks.name(child.rank)}: {child.error}")
    assert failed[0].kind == PEER
    if others_lost:
        return RankLost(f"{ranks.name(failed[0].rank)}: {failed[0].error}", f"continue with --resume{folder}")
    return RunError(f"{ranks.name(failed[0].rank)}: {failed[0].error}")
