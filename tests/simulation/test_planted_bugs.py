"""Three classic bugs, planted into a copy of the parameter server: trials find each, and repeat it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from polyrhythm.communication.message import Kind, Message
from polyrhythm.simulation.injection.fault import parse_faults
from polyrhythm.simulation.trials import play, try_seeds
from polyrhythm.strategies.parameter_server.parameter_server import ParameterServer
from polyrhythm.strategies.parameter_server.serving.rule import Applied, Contribution, Deferred, Reply
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from polyrhythm.strategies.parameter_server.serving.shard import Handling, ShardRule
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.verification.invariant import Violation
from sample import failures_of
from simulation.trying import trial

SEEDS = range(300)


class LosingRule(ShardRule):
    """Forgets the last number of its shard when others have updated four times since the pusher read."""

    def apply(self, batch: Sequence[Contribution], version: int) -> Applied | Deferred:
        kept = float(self.values[-1])
        applied = super().apply(batch, version)
        if any(version - entry.read_version > 4 for entry in batch):
            self.values[-1] = kept
        return applied


class MiscountingRule(ShardRule):
    """Counts the update itself among those that a gradient is behind."""

    def apply(self, batch: Sequence[Contribution], version: int) -> Applied | Deferred:
        return super().apply(batch, version + 1)


class LoyalSession(ServerSession):
    """Gives the answer that a dead worker is owed to its successor, as a queue by rank number would."""

    def on_loss(self, rank: int) -> list[Reply]:
        self._owed = {
            **getattr(self, "_owed", {}),
            rank: Message(Kind.PARAMETERS, self.values.clone(), version=self.version, step=self.steps[rank]),
        }
        return super().on_loss(rank)

    def on_message(self, source: int, message: Message) -> list[Reply]:
        owed = getattr(self, "_owed", {}).pop(source, None)
        replies = super().on_message(source, message)
        return replies if owed is None else [(source, owed), *replies]


class Planted(ParameterServer):
    """The parameter server with a bug."""

    bug: type[ShardRule | ServerSession] = ServerSession

    def server(self, setting: ServerSetting) -> ServerPart:
        workers = setting.roles.workers
        planted = self.bug if issubclass(self.bug, ShardRule) else ShardRule
        session = self.bug if issubclass(self.bug, ServerSession) else ServerSession
        return session(workers, planted(self.consistency, Handling(), len(workers), (), 0))


@pytest.mark.parametrize(
    ("bug", "found"),
    [
        (LosingRule, r"the sum of what was acknowledged, number 511 of 512 \(1 are wrong\)"),
        (MiscountingRule, "staleness of the gradients that an update takes"),
        (
            LoyalSession,
            "to a question of another rank, or to none|parameters for rank 0, the sum of what was acknowledged",
        ),
    ],
)
def test_trials_find_it_and_the_seed_repeats_it(bug: type[ShardRule | ServerSession], found: str) -> None:
    tried = trial(Planted(servers=2, bug=bug))
    result = try_seeds(tried, SEEDS, on_failure=lambda failure: False)
    assert result.failures, f"not found in {result.seeds} seeds"
    failure = result.failures[0]
    repeated = replace(tried, faults=parse_faults(failure.faults))
    with pytest.raises(Violation, match=found) as error:
        play(repeated, failure.seed, lambda event: None)
    assert str(error.value) == failure.what
    assert error.value.time_s == pytest.approx(failure.at_s)


def test_without_a_bug_the_same_copy_passes() -> None:
    assert failures_of(trial(Planted(servers=2)), range(40)) == ()
