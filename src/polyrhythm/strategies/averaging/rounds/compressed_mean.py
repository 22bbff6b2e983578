"""Mean of a group's models, with compressed changes.

    x' = w + mean_i decode(C(x_i - w + e_i))        w: start of the round, the same on all; x_i: member i's model

e_i = the compression error of member i in earlier rounds (see `strategies.compressed_mean`).
"""

from __future__ import annotations

from torch import Tensor

from polyrhythm.communication.collective import Collective
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.log import Result
from polyrhythm.compression.compressor import Compressor
from polyrhythm.strategies.averaging.rounds.model_mean import ModelMean
from polyrhythm.strategies.compressed_mean import CompressedMean
from polyrhythm.strategies.state import Part, StateField
from polyrhythm.strategies.worker_part import Step
from polyrhythm.training.flat_parameters import FlatParameters


class CompressedModelMean(ModelMean):
    """`ModelMean` with compressed changes at the end of a round.

    Args:
        group: communicator of the members; all must call at the same steps.
        flat: parameters of this member.
        collective: all-reduce algorithm for uncompressed numbers.
        compressor: compressor of the changes.
    """

    fields = (StateField("", Part, at="_movement"),)

    def __init__(
        self, group: Communicator, flat: FlatParameters, collective: Collective, compressor: Compressor
    ) -> None:
        super().__init__(group, flat, collective)
        self._compressor = compressor
        self._moved = flat.another()
        self._movement = CompressedMean(group, self._moved, compressor, collective)

    def over(self, group: Communicator) -> CompressedModelMean:
        made = CompressedModelMean(group, self._flat, self._sum.passed_on(), self._compressor)
        made._movement = self._movement.over(group)
        return made

    def prepare(self) -> None:
        super().prepare()
        self._movement.prepare()

    def at_end(self, beginning: Tensor | None, step: int, stop: bool, weight: float) -> Result:
        if beginning is None or self.size == 1:
            return self.take(stop, weight)
        moved = self._moved.gradients
        moved.copy_(self._flat.vector - beginning)
        total, stops = self._movement.finish(Step(step, weight, stop))
        return Result(beginning + moved if total > 0 else None, total, stops)

    def commit(self) -> None:
        self._movement.commit()
