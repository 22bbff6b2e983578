"""Decoupled DiLoCo: learners that never wait push fragments' changes to servers with an outer optimizer.

Douillard, Rush, Donchev, Charles et al., "Decoupled DiLoCo for resilient distributed pre-training", 2026, arXiv
2604.21428.

    w <- InnerOpt(w, g)                            every step of a learner, on its own
    d_m = b - w[p]                                 fragment p, every H steps of learner m; b: where these steps began
    D = sum_m a_m d_m / sum_m a_m                  at fragment p's server, once `quorum` learners have pushed
    W[p] <- OuterOpt(W[p], D)                      SGD with Nesterov's momentum
    w[p] <- W[p] + (w[p] - (b - d_m))              when a learner finds it merged; it keeps the steps taken since

H = `steps`. The weight of n images in s steps is a_m = n (n / s): more images count for more, and larger batches, too.
Several changes of a learner in a merge are one, the sum, with the sum of their weights. A fragment is a server's shard;
fragments are pushed in turn, H / `servers` steps apart. The run's model is W.

Messages; neither of them makes a learner wait for another one:

    learner ── PUSH(d_m, a_m) ─▶ server p: held until the quorum is complete
            ── FETCH ─▶  ◀─ PARAMETERS(W[p]), or nothing if d_m is not merged yet       while it computes a step

Departures from the paper:

- No grace window: a fragment is merged as soon as its quorum is complete, and a later learner is in the next merge.
  So a quorum below the number of learners gives more merges with older changes, and needs an outer optimizer of lower
  rate and momentum (`mlp` on `digits`, 3 learners on cluster office, steps=8: top-1 0.95 with all three, 0.44 with two,
  3 seeds each).
- d_m is averaged as it is; the paper may also average lengths and directions apart.
- Learners that left nothing to merge are not sent W[p]; they receive it after their next push.

With another number of workers, remaining learners keep their models, and new ones begin with W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from polyrhythm.errors import RequestError
from polyrhythm.specs import chosen
from polyrhythm.strategies.aggregators.weighted_mean import WeightedMean
from polyrhythm.strategies.parameter_server.composition.served import WithServers
from polyrhythm.strategies.parameter_server.elastic.averaging import PlainStep
from polyrhythm.strategies.parameter_server.serving.admission import admit_push_of_any_step
from polyrhythm.strategies.parameter_server.serving.gate import Decision, Gate
from polyrhythm.strategies.parameter_server.serving.own_model import FreeLink, OwnModelWorker, of_own_models
from polyrhythm.strategies.parameter_server.serving.rule import Applied, Contribution
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from polyrhythm.strategies.parameter_server.serving.shard import VALUES, OptimizedRule
from polyrhythm.strategies.resharding import (
    Held,
    Resharding,
)
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.strategies.state import OF_SERVER, OWN, Part, State, StateField, reset
from polyrhythm.strategies.strategy import Facts, Paper, Traits
from polyrhythm.strategies.worker_part import OptimizerSource, Step, WorkerPart, WorkerSetting
from polyrhythm.training.optimizer import OptimizerConfig
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.optimizers.sgd import SGD
from polyrhythm.training.quantities import Count


class DecoupledDiLoCo(WithServers):
    """Learners train on their own, and servers merge their changes of a fragment once enough have arrived.

    Attributes:
        steps: steps of a learner between two pushes of a fragment.
        quorum: learners with a change of a fragment that is merged; None: all present ones.
        outer: outer optimizer of the servers.
        servers: number of servers, each with a fragment of the model.
    """

    paper: ClassVar[Paper] = Paper(
        "Douillard, Rush, Donchev, Charles et al.",
        "Decoupled DiLoCo for resilient distributed pre-training",
        "arXiv",
        2026,
        "2604.21428",
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M/H",
        staleness="N/quorum-1",
        use_it="distant, uneven or failing machines that communicate only every few hundred steps and must not wait",
    )
    why_not_compressed: ClassVar[str] = (
        "servers merge changes of models that they do not know: use diloco, or leave compress out"
    )

    steps: Count = 16
    quorum: int | None = Field(default=None, ge=1)
    outer: Annotated[OptimizerConfig, chosen("outer optimizer", "polyrhythm.training.optimizers")] = SGD(
        lr=0.7, momentum=0.9, nesterov=True
    )
    servers: Count = 2

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        super().check(workers, plan)
        if self.quorum is not None and self.quorum > workers:
            raise RequestError(
                f"decoupled_diloco: quorum={self.quorum} is more than the {workers} workers: give at most {workers}"
            )
        if self.servers > self.steps:
            raise RequestError(
                f"decoupled_diloco: {self.servers} fragments cannot be pushed one after the other in {self.steps} "
                "steps: give servers at most as many as steps"
            )

    def due(self, fragment: int, step: int) -> bool:
        """Return whether a learner pushes a fragment after a step."""
        return (step + 1 + fragment * self.steps // self.servers) % self.steps == 0

    def traits(self, workers: int) -> Traits:
        return replace(
            super().traits(workers),
            lockstep=False,
            local_models=True,
            waits_for_slower=False,
            draws=True,
            exchange_every=self.steps,
            gradients=workers,
        )

    def resharding(self, before: int, after: int) -> Resharding:
        held, gate = (
            StateField(name, Part, reset(to, "server")) for name, to in (("held", []), ("gate", {"held": []}))
        )
        return of_own_models(Learner, after, (held, gate), _dropped)

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        return Learner(setting, self)

    def server(self, setting: ServerSetting) -> ServerPart:
        workers = setting.roles.workers
        quorum = self.quorum or len(workers)
        return ServerSession(workers, FragmentRule(QuorumGate(len(workers), quorum)))


class Learner(OwnModelWorker[FreeLink]):
    """Trains a model of its own; pushes changes of its fragments, and takes over what became of them."""

    fields = (
        *OwnModelWorker.fields,
        StateField("base", Tensor, OWN),
        StateField("pushed", list[int], reset(lambda start: [start.step], "worker")),
        StateField("waiting", list[int], reset([], "worker")),
        StateField("images", list[float], OWN),
        StateField("taken", list[int], OWN),
        StateField("", Part, OWN, at="_local"),
    )

    def __init__(self, setting: WorkerSetting, rhythm: DecoupledDiLoCo) -> None:
        flat = setting.flat
        outer = rhythm.outer.create([view.parameter for view in flat.views])
        super().__init__(setting, FreeLink(setting, OptimizerPlan.of(outer, flat)))
        self.follows = OptimizerSource.OBJECT
        self._rhythm = rhythm
        self._local = PlainStep(flat.vector, setting.plan)
        self._base = flat.vector.clone()
        """The model at the latest push or merge of each fragment: its next change begins there."""
        self._change = flat.vector.new_empty(flat.size)
        fragments = len(self._link.shards)
        self._pushed = [0] * fragments
        """Number of steps at the latest push of each fragment."""
        self._waiting: list[int] = []
        """Fragments with a change that is not merged yet, as far as this learner knows."""
        self._images = [0.0] * fragments
        """Images behind the next change of each fragment, in full batches, and steps that they were taken in."""
        self._taken = [0] * fragments
        self._stop = False

    @classmethod
    def fits(cls, step: int, pushed: list[int], known: Sequence[int]) -> bool:
        return list(known) == pushed

    def load_state(self, state: State) -> None:
        super().load_state(state)
        if len(self._pushed) == 1:  # the same of all fragments, after a change of the number of workers
            self._pushed *= len(self._taken)

    def take_over(self, values: Tensor, known: Sequence[int]) -> None:
        self._local.begin_from(values)
        self._base.copy_(values)
        self._pushed, self._waiting = list(known), []
        self._images, self._taken = [0.0] * len(known), [0] * len(known)

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        self._take()
        if step.weight > 0:
            self._local.update(self._flat.gradients, learning_rate)
            self._images = [images + step.weight for images in self._images]
            self._taken = [taken + 1 for taken in self._taken]
        self._done = step.number + 1
        for fragment in range(len(self._pushed)):
            if self._rhythm.due(fragment, step.number):
                self._push(fragment, stop=step.stop)
        self._link.fetch(self._waiting, stop=step.stop)
        return self._stop

    def settle(self) -> None:
        self._take()
        self._link.wait_for_pushes()

    def depart(self) -> None:
        self.settle()
        for fragment in range(len(self._pushed)):
            self._push(fragment)
        self._link.wait_for_pushes()
        self._link.leave()

    def _push(self, fragment: int, *, stop: bool = False) -> None:
        images, taken = self._images[fragment], self._taken[fragment]
        if not taken:
            return
        self._link.wait_for_push(fragment)
        shard = self._link.shards[fragment]
        change, base, own = self._change[shard], self._base[shard], self._local.own[shard]
        change.copy_(base).sub_(own)
        base.copy_(own)
        self._link.note_read()
        pushed = Step(self._done - 1, weight=images * images / taken, stop=stop)
        self._link.push(fragment, change, pushed, self._rhythm.outer.lr)
        self._pushed[fragment] = self._done
        self._images[fragment], self._taken[fragment] = 0.0, 0
        self._waiting = sorted({*self._waiting, fragment})

    def _take(self) -> None:
        """Continue from the merged fragments, with what this learner has changed since it pushed its own."""
        for fragment, merged, stop in self._link.take():
            self._stop |= stop
            if merged is None:
                continue
            shard = self._link.shards[fragment]
            base, own = self._base[shard], self._local.own[shard]
            own.sub_(base).add_(merged)
            base.copy_(merged)
            self._waiting.remove(fragment)


class FragmentRule(OptimizedRule):
    """The outer optimizer's step with the weighted mean of learners' changes."""

    admit = staticmethod(admit_push_of_any_step)
    fields = VALUES, StateField("outer", Part, OF_SERVER, at="_optimizer")

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate)
        self._mean = WeightedMean()

    def apply(self, batch: Sequence[Contribution], version: int) -> Applied:
        changes = [entry for entry in batch if entry.weight > 0]
        if not changes:
            return Applied(batch, 0, {})
        sums: dict[int, Tensor] = {}
        weights: dict[int, float] = {}
        for entry in changes:  # a learner ahead of the others has pushed several
            before = sums.get(entry.pusher)
            sums[entry.pusher] = entry.gradient if before is None else before + entry.gradient
            weights[entry.pusher] = weights.get(entry.pusher, 0.0) + entry.weight
        mean = self._mean.aggregate(list(sums.values()), list(weights.values()), None)
        self.step(mean, changes[0].rate)
        staleness: dict[int, int] = {}
        for entry in changes:
            age = version - entry.read_version
            staleness[age] = staleness.get(age, 0) + entry.fresh
        return Applied(batch, 1, staleness)


class QuorumGate(Gate):
    """A gate that applies changes together once enough learners have pushed one, and answers no push.

    Args:
        learners: number of learners.
        quorum: number of learners with a change that is applied; fewer where fewer are present.
    """

    fetches = True
    fields = (StateField("held", list[int], reset([], "server")),)

    def __init__(self, learners: int, quorum: int) -> None:
        self._quorum = quorum
        self._present = set(range(learners))
        self._held: list[int] = []

    def arrive(self, pusher: int, step: int) -> Decision:
        self._held.append(pusher)
        return self._decide()

    def fetch(self, pusher: int) -> Decision:
        return Decision(acknowledge=(pusher,)) if pusher in self._held else Decision(answer=(pusher,))

    def repeat(self, pusher: int, step: int, due: int) -> Decision:
        """Decide nothing: pushes are not answered."""
        return Decision()

    def leave(self, pusher: int) -> Decision:
        self._present.discard(pusher)
        return self._decide()

    def join(self, pusher: int) -> None:
        self._present.add(pusher)

    def _decide(self) -> Decision:
        if not self._held or len({*self._held}) < min(self._quorum, len(self._present)):
            return Decision()
        taken, self._held = tuple(sorted(self._held)), []
        return Decision(apply=taken)


def _dropped(held: Held) -> str:
    count = sum(len(facts["held"]) for _, facts in held.servers)
    return f"; {count} changes that servers had not merged yet are dropped" if count else ""
