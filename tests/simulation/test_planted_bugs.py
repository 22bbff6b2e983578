"""Three classic bugs, planted into a copy of the parameter server: trials find each, and repeat it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from polyrhythm.communication.message import Kind, Message
from polyrhythm.simulation.injection.fault import parse_faults
from polyrhythm.simulation.trials import play, try_seeds
from polyrhythm.strategies.parameter_server.parameter_server import ParameterServer
from polyrhythm.strategies.parameter_server.serving.gate import Consistency
from polyrhythm.strategies.parameter_server.serving.shard import Pushed
from polyrhythm.strategies.parameter_server.serving.shard_server import Reply, ShardServer
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.verification.invariant import Violation
from simulation.trying import trial

SEEDS = range(300)


class OneWayServer(ShardServer):
    """Applies a gradient that comes alone as it does several, so that what is planted in `planted` is met by all."""

    def __init__(self, pushers: tuple[int, ...], consistency: Consistency) -> None:
        super().__init__(pushers, consistency)
        self.apply = self._executor.apply
        self._executor.apply = self.planted  # type: ignore[method-assign]
        self._executor.apply_alone = lambda entry: self.planted([entry], None)  # type: ignore[method-assign]

    def planted(self, gradients: list[Pushed], distances: Tensor | None) -> None:
        raise NotImplementedError


class LosingServer(OneWayServer):
    """Forgets the last number of its shard when others have updated four times since the pusher read."""

    def planted(self, gradients: list[Pushed], distances: Tensor | None) -> None:
        if any(self.version - entry.message.version > 4 for entry in gradients):
            kept = float(self.values[-1])
            self.apply(gradients, distances)
            self.values[-1] = kept
        else:
            self.apply(gradients, distances)


class MiscountingServer(OneWayServer):
    """Counts the update itself among those that a gradient is behind."""

    def planted(self, gradients: list[Pushed], distances: Tensor | None) -> None:
        self._updates.version += 1
        self.apply(gradients, distances)
        self._updates.version -= 1


class LoyalServer(ShardServer):
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

    server_type: type[ShardServer] = ShardServer

    def server(self, setting: ServerSetting) -> ServerPart:
        return self.server_type(setting.cast.workers, self.consistency)


@pytest.mark.parametrize(
    ("bug", "found"),
    [
        (LosingServer, r"the sum of what was acknowledged, number 511 of 512 \(1 are wrong\)"),
        (MiscountingServer, "staleness of the gradients that an update takes"),
        (
            LoyalServer,
            "to a question of another, or of nobody|parameters for rank 0, the sum of what was acknowledged",
        ),
    ],
)
def test_trials_find_it_and_the_seed_repeats_it(bug: type[ShardServer], found: str) -> None:
    tried = trial(Planted(servers=2, server_type=bug))
    result = try_seeds(tried, SEEDS, on_failure=lambda failure: False)
    assert result.failures, f"not found in {result.seeds} seeds"
    failure = result.failures[0]
    repeated = replace(tried, faults=parse_faults(failure.faults))
    with pytest.raises(Violation, match=found) as error:
        play(repeated, failure.seed, lambda event: None)
    assert str(error.value) == failure.what
    assert error.value.time_s == pytest.approx(failure.at_s)


def test_without_a_bug_the_same_copy_passes() -> None:
    assert try_seeds(trial(Planted(servers=2)), range(40)).failures == ()
