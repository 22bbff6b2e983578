"""Sandblaster L-BFGS.

Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.2 and the appendix's coordinator.

    g = mean of a batch's gradients, of `portions` steps of every worker, all at w
    r = H g, by the two-loop recursion over the latest `memory` pairs (s, y) = (w' - w, g' - g) with s'y > 0
    w' = w + t s, s = an optimizer's step with r
    t = 1, then slope(0) / (slope(0) - slope(1)), slope(t) = g(w + t s)'s

Servers keep w and all pairs in shards. Scalar products travel between them, once a batch. The two-loop
recursion runs on coefficients (Chen, Wang, Zhou, NIPS 2014).

The first step along a line is that of the user's optimizer, with r in place of g. So learning rate, schedule
and weight decay mean what they always do. SGD's momentum m would bend the line; here it makes that step
1/(1-m) times as long. Optimizers that scale every number by itself (Adam) undo what r knows: use SGD.

It is a method of very large batches: its paper gives each update thousands of processors. With 3 workers an
epoch of 64 images a step has half as many updates as steps, some of them corrections, and curvature measured
between batches of 384 images is mostly noise: `lenet5` reaches a test accuracy of 0.71 on Fashion-MNIST in
its first epoch and 0.76 in its third; with `portions=1, memory=0, trials=0`, which is gradient descent, 0.80
in the first (`benchmarks/first-epoch`).

Departures from the paper:

- Every worker takes equally many portions of a batch, since its data are its own. So the slowest decides how
  long a batch takes. A lost worker's portions are dealt again to its replacement, in later batches; until then
  others have smaller batches.
- There is no coordinator: all servers decide the same from the same numbers.
- The paper's line search needs the loss. This one needs the slope, which the next batch's gradient gives, so
  each trial costs a batch.

A worker adds up the gradients of its portions, and pushes their mean at the end of a batch:

    step     0   1   2   3 ┃ 4   5   6   7 ┃ 8 …        portions = 4
    push                 ──┃             ──┃            then continue with the servers' answer

A server gathers the means of all workers, and makes its shard's part of an L-BFGS step:

    all workers ── PUSH(mean) ─▶ the batch's gradient ─▶ scalar products ── VECTOR ─▶ all other servers
                ◀─ PARAMETERS ── a step along the line, or along the next ◀── their sum ──

After the loss of a worker, a batch consists of the remaining ones, and of the lost one's pushes if all
servers have them; otherwise its portions are computed again. Its replacement enters at the same batch on all
servers. With another number of workers, a batch in progress is divided again, and the curvature stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite, sqrt
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.strategies.aggregator import mean
from polyrhythm.strategies.parameter_server.composition.served import WithServers
from polyrhythm.strategies.parameter_server.serving.admission import admit_push_of_any_step
from polyrhythm.strategies.parameter_server.serving.distance_exchange import DistanceExchange, summed
from polyrhythm.strategies.parameter_server.serving.gate import Decision, RoundsGate
from polyrhythm.strategies.parameter_server.serving.push_pull import PushPull
from polyrhythm.strategies.parameter_server.serving.rule import Applied, Contribution, Deferred
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from polyrhythm.strategies.parameter_server.serving.shard import OptimizedRule
from polyrhythm.strategies.resharding import EVERYTHING_OF_SERVER, STEPS, Resharding, steps_of_servers
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.strategies.state import OF_SERVER, OWN, Part, State, StateField
from polyrhythm.strategies.strategy import Facts, Paper, Traits
from polyrhythm.strategies.worker_part import WORKER, Step, WorkerPart, WorkerSetting
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.quantities import Count, NonNegative


class Sandblaster(WithServers):
    """Workers add up gradients of a large batch, and servers take an L-BFGS step with it, each on its shard.

    Attributes:
        portions: steps of every worker that make a batch.
        memory: pairs that estimate the curvature; 0: none, r is g.
        trials: corrections of a step along its line, at most; each costs a batch.
        tolerance: share of the slope that may remain when a line is over.
    """

    paper: ClassVar[Paper] = Paper(
        "Dean, Corrado, Monga, Chen, Devin et al.", "Large Scale Distributed Deep Networks", "NIPS", 2012
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M/portions",
        staleness="0",
        use_it="large batches and a network that is much slower than computing",
    )
    why_not_compressed: ClassVar[str] = (
        "its line search compares exact losses along exact gradients: use parameter_server"
    )

    portions: Count = 2
    memory: int = Field(default=10, ge=0)
    trials: int = Field(default=1, ge=0)
    tolerance: NonNegative = 0.9

    def traits(self, workers: int) -> Traits:
        return replace(super().traits(workers), exchange_every=self.portions, gradients=workers)

    def resharding(self, before: int, after: int) -> Resharding:
        return Resharding(
            after=after,
            text=(
                "the servers continue with their parameters and curvature estimates; a batch in progress is "
                "left out"
            ),
            servers=(STEPS, EVERYTHING_OF_SERVER),
            count=steps_of_servers,
        )

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        return BatchWorker(setting, self.portions)

    def server(self, setting: ServerSetting) -> ServerPart:
        return batch_session(setting, self)


_MOST = torch.finfo(torch.float32).max
"""Servers refuse a greater rate; with this one, the error of a loss that is not finite shows the remedy."""


class BatchWorker(WorkerPart):
    """Contributes portions to batches; between two batches its parameters do not change.

    Args:
        portions: portions of a batch, that this worker takes.
    """

    fields = (
        WORKER,
        StateField("weight", float, OWN),
        StateField("pushed", int, OWN),
        StateField("sum", Tensor, OWN, absent=None),
        StateField("last", tuple[int, float] | None, OWN),
    )

    def __init__(self, setting: WorkerSetting, portions: int) -> None:
        super().__init__()
        self._rank = setting.workers.rank
        self._distributes = setting.initializes
        self._flat = setting.flat
        self._servers = PushPull(setting, without_momentum(setting.plan))
        self._portions = portions
        self._sum = torch.zeros_like(setting.flat.vector) if portions > 1 else None
        self._weight = 0.0
        self._pushed = 0
        self._last: tuple[int, float] | None = None
        """Number and learning rate of the latest step."""
        self._stop_requested = False

    def start(self, step: int) -> int:
        """Take the servers' parameters; a resumed worker continues in its batch, if they are unchanged."""
        if self._distributes:
            self._servers.initialize()
        known = self._servers.pull()
        if self.restored and known == self._pushed:
            return step
        self._pushed, self._weight = known, 0.0
        if self._sum is not None:
            self._sum.zero_()
        return known

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        if self._sum is not None and step.weight > 0:
            self._flat.add_gradients_to(self._sum, step.weight)
        self._weight += step.weight
        self._stop_requested |= step.stop
        self._last = step.number, learning_rate
        return self._push() if (step.number + 1) % self._portions == 0 else False

    def end(self) -> None:
        if self._last is not None and self._last[0] >= self._pushed:
            self._push()
        self._servers.leave()
        if self._rank == 0:
            self._servers.pull(final=True)

    def release(self) -> None:
        self._servers.leave()

    def _push(self) -> bool:
        assert self._last is not None, "a batch has a step"
        number, learning_rate = self._last
        if self._sum is not None:
            if self._weight > 0:
                self._flat.take_gradients_of(self._sum, self._weight)
            self._sum.zero_()
        weight, self._weight, self._pushed = self._weight, 0.0, number + 1
        return self._servers.push_and_pull(Step(number, stop=self._stop_requested), weight, learning_rate)


def without_momentum(plan: OptimizerPlan) -> OptimizerPlan:
    """Return SGD with steps as long as those with momentum are for constant gradients.

    Momentum would bend the searched line. Other optimizers stay as they are.
    """
    if plan.kind != "SGD":
        return plan
    spans = []
    for span in plan.spans:
        rate, momentum = span.options["lr"], span.options.get("momentum", 0)
        longer = (1 - span.options.get("dampening", 0)) / (1 - momentum) if momentum else 1.0
        rate = min(rate * longer, _MOST)
        without = {"lr": rate, "momentum": 0, "nesterov": False, "dampening": 0}
        options = {key: without.get(key, value) for key, value in span.options.items()}
        spans.append(replace(span, options=options))
    return replace(plan, spans=tuple(spans))


def batch_session(setting: ServerSetting, search: Sandblaster) -> ServerSession:
    """Make one server."""
    return ServerSession(setting.roles.workers, BatchRule(setting, search))


class BatchRule(OptimizedRule):
    """L-BFGS on a shard; the scalar products of a batch are over all servers.

    Args:
        setting: index of this server, and the workers with gradients.
    """

    defers = True
    admit = staticmethod(admit_push_of_any_step)  # a batch may end at any step
    fields = (*OptimizedRule.fields, StateField("curvature", Part, OF_SERVER, under=""))

    def __init__(self, setting: ServerSetting, search: Sandblaster) -> None:
        workers = len(setting.roles.workers)
        super().__init__(BatchGate(workers))
        self._workers = workers
        self._curvature = Curvature(self, search)
        self._exchange = DistanceExchange(setting.roles.servers, setting.index)
        self._agreed: Sequence[Contribution] | None = None
        """Contributions of the batch in progress that all servers have, once they have reported them."""

    def apply(self, batch: Sequence[Contribution], version: int) -> Deferred:
        """Send the others this shard's part of all products; without a worker, first the present names."""
        whole = len(batch) == self._workers and _weighs(batch)
        return Deferred(self._exchange.offer(self._products(batch) if whole else _names(batch)))

    def on_peer(self, peer: int, message: Message) -> None:
        if message.kind is not Kind.VECTOR or not self._exchange.knows(peer):
            super().on_peer(peer, message)
        else:
            self._exchange.on_message(peer, message)

    def resume(self, batch: Sequence[Contribution], version: int) -> Applied | Deferred | None:
        """Step, once all servers' products are there; a batch that is empty here has no effect."""
        parts = self._exchange.all()
        if parts is None:
            return None
        if not batch:
            return Applied(batch, 0, {})
        common = batch if self._agreed is None else self._agreed
        if all(part.dim() == 2 for part in parts):
            self._agreed = None
            return self._step_along(common, summed(parts), version)
        named = [part.tolist() for part in parts if part.dim() == 1]
        # A lost worker's gradients are repeated unless all servers have them.
        common = [entry for entry in common if all(entry.pusher in names for names in named)]
        if not _weighs(common):
            return Applied(common, 0, {})
        self._agreed = common
        return Deferred(self._exchange.offer(self._products(common)))

    def _products(self, batch: Sequence[Contribution]) -> Tensor:
        gradient = mean([entry.gradient for entry in batch], [entry.weight for entry in batch])
        return self._curvature.products(gradient)

    def _step_along(self, batch: Sequence[Contribution], gram: Tensor, version: int) -> Applied:
        self._curvature.advance(gram, max(entry.rate for entry in batch))
        staleness: Counter[int] = Counter()
        for entry in batch:
            if entry.weight > 0:
                staleness[version - entry.read_version] += entry.fresh
        return Applied(batch, 1, staleness)


class BatchGate(RoundsGate):
    """Holds gradients until each present worker has one, and no batch is in progress."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._owed: set[int] = set()
        """Workers that wait for the batch in progress."""
        self._busy = False

    def ask(self, pusher: int, step: int) -> Decision:
        return Decision(answer=(pusher,), at_once=True)

    def repeat(self, pusher: int, step: int, due: int) -> Decision:
        return self.ask(pusher, due)

    def check_turn(self, pusher: int) -> None:
        if pusher in self.held or pusher in self._owed:
            raise RefusedMessage(Reason.ORDER, "a gradient arrived although its batch is not over")

    def arrive(self, pusher: int, step: int) -> Decision:
        self.held.add(pusher)
        return self.decide()

    def leave(self, pusher: int) -> Decision:
        """Wait for a worker no longer; what it has pushed still counts."""
        self.rounds.forget(pusher)
        self.present.discard(pusher)
        self._owed.discard(pusher)
        return self.decide()

    def join(self, pusher: int) -> None:
        self.rounds.invite(pusher, later=pusher in self.held)

    def applied(self) -> Decision:
        self._busy, self._owed = False, set()
        return self.decide()

    def decide(self) -> Decision:
        if self._busy or self.rounds.held_up:
            return Decision(at_once=True)
        entered = self.admit(alone=False)
        if not self.present:  # others may have had the batches before that of a replacement
            forget, self.held = tuple(self.held), set()
            entered += self.admit(alone=True)
            return Decision(answer=tuple(entered), forget=forget, at_once=True)
        if not self.held >= self.present:
            return Decision(answer=tuple(entered), at_once=True)
        self.rounds.number += 1
        apply, self.held = tuple(sorted(self.held)), set()
        self._busy, self._owed = True, set(self.present)
        return Decision(apply=apply, answer=tuple(sorted(self.present)))


def _weighs(batch: Sequence[Contribution]) -> bool:
    return any(entry.weight > 0 for entry in batch)


def _names(batch: Sequence[Contribution]) -> Tensor:
    return torch.tensor([entry.pusher for entry in batch], dtype=torch.int64)


SHORTEST, LONGEST = 0.1, 10.0
"""Bounds of a trial's factor: slopes of different data may be arbitrary."""


def correction(slope_before: float, slope: float, tolerance: float) -> float | None:
    """Return the factor of a trial step that would bring a linear slope to 0.

    Args:
        slope_before: along the line, where it begins.
        slope: slope at the trial.
        tolerance: share of the slope that may remain.

    Returns:
        The factor; None where the trial is good enough, or the line does not lead downhill.
    """
    usable = isfinite(slope_before) and isfinite(slope) and slope_before < 0
    if not usable or abs(slope) <= tolerance * -slope_before:
        return None
    if slope <= slope_before:  # it still gets steeper: the minimum is nowhere in sight
        return LONGEST
    return min(max(slope_before / (slope_before - slope), SHORTEST), LONGEST)


Pair = tuple[int, int]


def two_loop(gram: Tensor, pairs: Sequence[Pair], gradient: int) -> Tensor:
    """Return the gradient times the inverse Hessian's estimate.

        q = g;  newest to oldest:  a_i = s_i'q / s_i'y_i,  q = q - a_i y_i
        r = (s_k'y_k / y_k'y_k) q, of the newest pair k
        oldest to newest:  r = r + s_i (a_i - y_i'r / s_i'y_i)

    Nocedal, "Updating quasi-Newton matrices with limited storage", Mathematics of Computation 35, 1980; on scalars:
    Chen, Wang, Zhou, "Large-scale L-BFGS using MapReduce", NIPS 2014. Every vector is a combination of those given: a
    scalar product with it is one of a row of the Gram matrix with its coefficients.

    Args:
        gram: `(k, k)`, float64, the scalar products of all vectors with each other.
        pairs: positions of s_i and y_i, the oldest pair first; s_i'y_i > 0.
        gradient: position of g.

    Returns:
        `(k,)`, float64: how much of each vector is in r.
    """
    found = torch.zeros(len(gram), dtype=gram.dtype)
    found[gradient] = 1.0
    shares: list[Tensor] = []
    for s, y in reversed(pairs):
        shares.append(gram[s] @ found / gram[s, y])
        found[y] -= shares[-1]
    if pairs:
        s, y = pairs[-1]
        found *= gram[s, y] / gram[y, y]
    for s, y in pairs:
        found[s] += shares.pop() - gram[y] @ found / gram[s, y]
    return found


_BLOCK = 1 << 14
"""Numbers of each vector at a time: few enough for a processor's cache."""


def gram_of(vectors: Sequence[Tensor], known: Sequence[int], products: Tensor) -> Tensor:
    """Return all scalar products of vectors, `(k, k)`, float64, added up in blocks, so that no vector is copied.

    Args:
        vectors: vectors, each `(n,)`.
        known: positions of the vectors with known `products`.
        products: `(len(known), len(known))`, float64, these.
    """
    count = len(vectors)
    new = [number for number in range(count) if number not in known]
    rows = torch.zeros(len(new), count, dtype=torch.float64)
    for start in range(0, len(vectors[0]), _BLOCK):
        block = torch.stack([vector[start : start + _BLOCK] for vector in vectors]).double()
        rows += block[new] @ block.T
    total = torch.zeros(count, count, dtype=torch.float64)
    old = torch.tensor(known, dtype=torch.long)
    total[old[:, None], old] = products
    total[new, :] = rows
    total[:, new] = rows.T
    return total


def combined(vectors: Sequence[Tensor], shares: Tensor) -> Tensor:
    """Return so much of each vector, `(n,)` in their dtype, added up in float64."""
    total = torch.zeros_like(vectors[0], dtype=torch.float64)
    for vector, share in zip(vectors, shares.tolist(), strict=True):
        if share != 0.0:
            total.add_(vector, alpha=share)
    return total.to(vectors[0].dtype)


_LEAST_COSINE = 1e-8
"""Between s and y of a pair that is kept."""
_S, _Y, _LINE, _PRODUCTS = "pair.s.", "pair.y.", "line.", "pair.products"


class Curvature:
    """The pairs and the line of one shard.

        batch k      gradient at w_k        ─▶ a trial: the optimizer steps along r
        batch k + 1  gradient at the trial  ─▶ slopes: good enough, or a better multiple of the same step ─▶ …
        then         (s, y) = (w - w_k, g - g_k) is kept if s'y > 0, and the next direction begins here

    All decisions follow from the Gram matrix, which is the sum of all shards' parts; so all servers decide alike.

    Args:
        shard: the parameters, and the optimizer that makes a direction a step.
    """

    def __init__(self, shard: OptimizedRule, search: Sandblaster) -> None:
        self._shard = shard
        self._search = search
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._begin: tuple[Tensor, Tensor] | None = None
        self._trials = 0
        self._vectors: list[Tensor] = []
        self._part = self._of_pairs = torch.zeros(0, 0, dtype=torch.float64)

    @property
    def pairs(self) -> int:
        """Number of kept pairs."""
        return len(self._pairs)

    def products(self, gradient: Tensor) -> Tensor:
        """Take a batch's gradient, `(n,)`; return this shard's part of all scalar products, `(k, k)`, float64."""
        steps, changes = [s for s, _ in self._pairs], [y for _, y in self._pairs]
        if self._begin is not None:
            steps.append(self._shard.values - self._begin[0])
            changes.append(gradient - self._begin[1])
        self._vectors = [*steps, *changes, gradient]
        count, old = len(steps), range(len(self._pairs))
        known = [*old, *(count + number for number in old)]
        self._part = gram_of(self._vectors, known, self._of_pairs)
        return self._part

    def advance(self, gram: Tensor, learning_rate: float) -> None:
        """Correct the step along its line, or take one along the next; `gram` is the sum of all shards' `products`."""
        vectors, self._vectors = self._vectors, []
        newest = len(vectors) // 2 - 1
        if self._begin is not None:
            slope = float(gram[newest, -1])
            factor = correction(slope - float(gram[newest, -2]), slope, self._search.tolerance)
            if factor is not None and self._trials < self._search.trials:
                self._trials += 1
                self._retry(vectors[newest], factor)
                return
        kept = self._kept(gram, newest)
        self._keep(vectors, kept)
        self._walk(vectors, gram, kept, learning_rate)

    def state(self) -> State:
        """Return the pairs and the line."""
        tensors = {f"{_S}{number}": s for number, (s, _) in enumerate(self._pairs)}
        tensors |= {f"{_Y}{number}": y for number, (_, y) in enumerate(self._pairs)}
        if self._begin is not None:
            tensors |= {f"{_LINE}values": self._begin[0], f"{_LINE}gradient": self._begin[1]}
        tensors[_PRODUCTS] = self._of_pairs.flatten()
        return tensors, {"pairs": len(self._pairs), "trials": self._trials}

    def load_state(self, state: State) -> None:
        """Restore what `state` returned."""
        tensors, facts = state
        self._pairs = [
            (tensors[f"{_S}{number}"], tensors[f"{_Y}{number}"]) for number in range(facts["pairs"])
        ]
        if f"{_LINE}values" in tensors:
            self._begin = tensors[f"{_LINE}values"], tensors[f"{_LINE}gradient"]
        self._trials = facts["trials"]
        self._of_pairs = tensors[_PRODUCTS].reshape(2 * facts["pairs"], -1 if facts["pairs"] else 0)

    def _kept(self, gram: Tensor, newest: int) -> list[Pair]:
        """Return which vectors are pairs from now on, the oldest first."""
        count = len(gram) // 2
        pairs = [(number, count + number) for number in range(count)]
        if self._begin is not None:
            s, y = pairs[-1]
            if not float(gram[s, y]) > _LEAST_COSINE * sqrt(float(gram[s, s]) * float(gram[y, y])):
                pairs.pop()
        return pairs[max(0, len(pairs) - self._search.memory) :]

    def _keep(self, vectors: Sequence[Tensor], pairs: Sequence[Pair]) -> None:
        """Forget all other pairs; the products of those that stay need not be made again."""
        self._pairs = [(vectors[s], vectors[y]) for s, y in pairs]
        order = [s for s, _ in pairs] + [y for _, y in pairs]
        self._of_pairs = self._part[order][:, order]

    def _retry(self, walked: Tensor, factor: float) -> None:
        assert self._begin is not None, "a line has a beginning"
        point = self._begin[0] + factor * walked

        def move(values: Tensor) -> None:
            values.copy_(point)

        self._shard.change(move)

    def _walk(
        self, vectors: Sequence[Tensor], gram: Tensor, pairs: Sequence[Pair], learning_rate: float
    ) -> None:
        shares = two_loop(gram, pairs, len(vectors) - 1)
        gradient = vectors[-1]
        if pairs and not float(gram[-1] @ shares) > 0:  # rounding has eaten the curvature
            pairs = ()
            self._keep(vectors, pairs)
        direction = gradient if not pairs else combined(vectors, shares)
        self._begin, self._trials = (self._shard.values.clone(), gradient.clone()), 0
        self._shard.step(direction, learning_rate)
