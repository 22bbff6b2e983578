"""Resuming a run with another strategy than the one that wrote its checkpoint.

    before      replicas, shards, optimizers ─▶ one model and one optimizer, as of a single worker (`Resharding`)
    images      of an unfinished epoch       ─▶ divided among the present number of workers
    now         servers as worker 0 opens them with that model ─▶ their counts at the next step (`Resharding`)
                optimizers of workers and servers ─▶ each its part of that one

So strategies do not depend on each other, or on this module. Further state of the previous strategy (clocks,
compression errors, the model at the beginning of a round) is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Communicator, Handle, LentMemory
from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import RequestError
from polyrhythm.roles.checkpointing.archive import Snapshot, counted_steps, dealt_out
from polyrhythm.roles.job import Job
from polyrhythm.strategies.resharding import Held
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.strategies.state import State, below
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.strategies.worker_part import WorkerSetting
from polyrhythm.training.flat_optimizer import Packed
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.optimizer_state import recut_optimizer

_OPTIMIZER = "optimizer."


@dataclass(frozen=True)
class Learned:
    """Model and optimizer that a strategy leaves to the next one.

    Attributes:
        parameters: `(n,)`.
        pieces: pieces of the vector, in order, each with an optimizer; empty where no optimizer state is known.
        packed: states of the optimizers.
    """

    parameters: Tensor
    pieces: tuple[slice, ...] = ()
    packed: tuple[Packed, ...] = ()


def _before(snapshot: Snapshot, job: Job) -> Job:
    """Return the job that wrote a checkpoint of another strategy."""
    assert snapshot.was is not None, "the checkpoint is of another strategy"
    return replace(
        job, strategy=snapshot.was, workers=snapshot.by, begun=snapshot.begun, draws=bool(snapshot.deal)
    )


def learned_by(snapshot: Snapshot, job: Job) -> Learned:
    """Return the model and the optimizer of a checkpoint of another strategy: its servers', or all its workers'.

    Args:
        snapshot: snapshot returned by `Archive.load`.
        job: job that resumes.
    """
    old = _before(snapshot, job)
    held, _ = counted_steps(snapshot, old, old.strategy.resharding(old.workers, old.workers))
    return learned_from(held, old.strategy, snapshot.presented)


def learned_from(held: Held, strategy: Strategy, presented: Tensor | None = None) -> Learned:
    """Return the model and the optimizer from the states of a strategy's workers and servers.

    Args:
        held: states of all of them.
        strategy: strategy of these states.
        presented: tested model, where it differs from worker 0's; None: it is worker 0's.
    """
    with suppress(RequestError):  # not all strategies can continue with one worker
        held = strategy.resharding(len(held.steps), 1).merged(held, 0).held
    size = len(held.parameters)
    local = _packed(held.workers.get(0, ({}, {})))
    pieces: tuple[slice, ...] = (slice(0, size),) if local is not None else ()
    packed: tuple[Packed, ...] = () if local is None else (local[1],)
    serving = _of_all_shards([state for state in held.servers if "values" in state[0]], size)
    if not serving:
        parameters = held.parameters if presented is None else presented
        return Learned(parameters, pieces, packed)
    parameters = torch.cat([tensors["values"] for tensors, _ in serving])
    of_servers = [found for found in map(_packed, serving) if found is not None]
    if len(of_servers) == len(serving):
        ends = list(accumulate((len(tensors["values"]) for tensors, _ in serving), initial=0))
        pieces = tuple(slice(start, stop) for start, stop in pairwise(ends))
        packed = tuple(found[1] for found in of_servers)
    return Learned(parameters, pieces, packed)


def adopted(snapshot: Snapshot, job: Job, plan: OptimizerPlan) -> tuple[Snapshot, str]:
    """Return a checkpoint of another strategy as if the job's had written it, and a remark on the change.

    Args:
        snapshot: snapshot returned by `Archive.load`.
        job: job that resumes.
        plan: plan of the job's optimizer.

    Raises:
        RequestError: the unfinished epoch cannot be divided among the new strategy's workers.
    """
    old = _before(snapshot, job)
    if job.learning.updates is not None:
        raise RequestError(
            f"a run of {job.learning.updates} updates was begun with {old.strategy}, and {job.strategy} makes others: "
            "resume with that strategy, or give --epochs in place of --updates in a new run"
        )
    held, steps = counted_steps(snapshot, old, old.strategy.resharding(old.workers, old.workers))
    rest = dealt_out(snapshot, old, job, held, steps)
    learned = learned_by(snapshot, job)
    workers, servers, kept = begun_with(
        learned, job.strategy, job.workers, lambda: FlatParameters(job.make_model()), plan, rest.step
    )
    states = {}
    for index in range(job.workers):
        own = snapshot.workers.get(index, snapshot.workers[0])
        account = replace(
            own.account,
            worker=index,
            step=rest.step,
            staleness={},
            stopped=False,
            final=False,
            through=False,
        )
        tensors, facts = workers.get(index, ({}, {}))
        states[index] = replace(own, account=account, part=tensors, part_facts=facts)
    now = replace(
        snapshot,
        epoch=rest.epoch,
        step=rest.step,
        parameters=learned.parameters,
        presented=None,
        workers=states,
        servers=servers,
        begun=rest.begun,
        deal=rest.deal,
        was=None,
    )
    momenta = "with its optimizer's state" if kept else "without an optimizer's state"
    epochs = f"{rest.epoch} epoch{'s' * (rest.epoch != 1)}"
    text = f"{job.strategy} continues from the model of {old.strategy} after {epochs}, {momenta}"
    if old.workers != job.workers:
        text += f", with {job.workers} workers in place of {old.workers}"
    return now, text + (f"; {rest.text}" if rest.text else "")


def _of_all_shards(states: Sequence[State], size: int) -> list[State]:
    """Return the first servers that together hold the vector; none where no first ones do."""
    found: list[State] = []
    held = 0
    for state in states:
        found.append(state)
        held += len(state[0]["values"])
        if held == size:
            return found
    return []


def _packed(state: State) -> tuple[str, Packed] | None:
    """Return an optimizer's state from a part's state, and the prefix of its tensors' names there."""
    tensors, facts = state
    inner = facts.get("optimizer")
    if isinstance(inner, dict) and "shapes" in inner:
        named = below(_OPTIMIZER, tensors)
        if named or not any(name.startswith("state.") for name in tensors):
            return _OPTIMIZER, (named, inner)
        facts = inner
    if "shapes" not in facts:
        return None
    return "", ({name: value for name, value in tensors.items() if name.startswith("state.")}, facts)


def _optimizer_of(learned: Learned, plan: OptimizerPlan, piece: slice) -> Packed | None:
    """Return the optimizer's state of a piece of the vector; None where none is known that fits the plan."""
    if not learned.pieces or any(facts["optimizer"] != plan.kind for _, facts in learned.packed):
        return None
    if learned.pieces == (piece,):
        return learned.packed[0]
    if any(
        facts["shapes"] != _shapes(plan.part(cut.start, cut.stop))
        for cut, (_, facts) in zip(learned.pieces, learned.packed, strict=True)
    ):
        return None
    return recut_optimizer(learned.packed, plan, learned.pieces, piece)


def _with_optimizer(state: State, plan: OptimizerPlan, learned: Learned, piece: slice) -> State | None:
    """Return a part's state with the learned optimizer state of its piece of the vector; None where it has no place.

    Options, such as learning rates, stay as they are.
    """
    found = _packed(state)
    known = _optimizer_of(learned, plan, piece) if found is not None else None
    if found is None or known is None:
        return None
    prefix, (_, facts) = found
    stated = {"state": known[1]["state"]}
    if facts["shapes"] != known[1]["shapes"]:
        if not _by_parameter(facts["shapes"], known[1]["shapes"]):
            return None
        stated |= {name: known[1][name] for name in ("shapes", "groups")}
    tensors = dict(state[0]) | {prefix + name: value.clone() for name, value in known[0].items()}
    own = facts | stated
    return tensors, state[1] | ({"optimizer": own} if facts is state[1].get("optimizer") else own)


def _by_parameter(shapes: list[list[list[int]]], of_spans: list[list[list[int]]]) -> bool:
    """Return whether an optimizer is a user's own object, which accepts states of spans (`OptimizerPlan`), too."""
    every = [shape for group in shapes for shape in group]
    numbers = sum(size for group in of_spans for (size,) in group)
    return any(len(shape) != 1 for shape in every) and sum(map(prod, every)) == numbers


def _shapes(plan: OptimizerPlan) -> list[list[list[int]]]:
    return [[[span.stop - span.start]] for span in plan.spans]


def begun_with(
    learned: Learned,
    strategy: Strategy,
    workers: int,
    make_flat: Callable[[], FlatParameters],
    plan: OptimizerPlan,
    step: int,
) -> tuple[dict[int, State], list[State], bool]:
    """Return the initial states of a strategy's workers and servers, and whether they contain an optimizer's state.

    Args:
        learned: model and optimizer of another strategy.
        strategy: strategy that continues.
        workers: number of workers.
        make_flat: returns the parameters of a model like theirs, which will be changed.
        plan: plan of its optimizer.
        step: first step of all workers.
    """
    size = len(learned.parameters)
    part, servers = opened(strategy, workers, make_flat(), plan, learned.parameters)
    own = _with_optimizer(part, plan, learned, slice(0, size))
    kept = own is not None
    states = {} if part == ({}, {}) else {index: _of_worker(own or part, index) for index in range(workers)}
    start = 0
    for number, state in enumerate(servers):
        values = state[0].get("values")
        if values is None:
            continue
        found = _with_optimizer(state, plan, learned, slice(start, start + len(values)))
        if found is not None:
            servers[number], kept = found, True
        start = (start + len(values)) % size
    held = Held(learned.parameters, (0,) * workers, states, servers)
    if not states and not servers:
        return {}, [], kept
    merged = strategy.resharding(workers, workers).merged(held, step).held
    return merged.workers if states else {}, merged.servers, kept


def _of_worker(state: State, index: int) -> State:
    """Return worker 0's state as another worker's; some states contain the index."""
    tensors, facts = state
    return tensors, facts | ({"worker": index} if "worker" in facts else {})


def opened(
    strategy: Strategy, workers: int, flat: FlatParameters, plan: OptimizerPlan, parameters: Tensor
) -> tuple[State, list[State]]:
    """Return the states of worker 0's part and of the servers, once worker 0 has sent the initial model to all.

    Args:
        strategy: strategy of the run.
        workers: number of workers.
        flat: parameters of a model like theirs; they are changed.
        plan: plan of the optimizer.
        parameters: `(n,)`, parameters of the model.
    """
    traits = strategy.traits(workers)
    count = traits.servers
    roles = RoleAssignment(tuple(range(workers)), tuple(range(workers, workers + count)))
    servers = {rank: strategy.server(ServerSetting(index, roles)) for index, rank in enumerate(roles.servers)}
    network = _Opening(servers, workers + count)
    flat.vector.copy_(parameters)
    setting = WorkerSetting(
        cast(Communicator, network), cast(Communicator, network.of(workers)), roles, flat, plan
    )
    part = strategy.worker(setting)
    if traits.cuts_network:  # what a part holds follows from what it cuts
        return ({}, {}), []
    with suppress(_Opened):
        part.start(0)
    tensors, facts = part.state()
    own = {name: value.clone() for name, value in tensors.items()}, facts
    return own, [server.state() for server in servers.values()]


class _Opened(Exception):
    """Raised once worker 0 has sent all that servers need, where it would wait for them."""


class _Opening:
    """Network of worker 0 while it opens the servers: messages arrive at once.

    Args:
        servers: server parts, by rank.
        size: number of ranks.
    """

    rank = 0

    def __init__(self, servers: dict[int, ServerPart], size: int) -> None:
        self.size = size
        self.clock = self.traffic = self  # time is constant
        self.bytes_sent = self.bytes_inside = 0
        self._servers = servers
        self._answers: list[tuple[int, Message]] = []

    def now(self) -> float:
        """Return the constant time."""
        return 0.0

    def of(self, size: int) -> _Opening:
        """Return the communicator of the first ranks."""
        return _Opening(self._servers, size)

    def subgroup(self, name: str, ranks: Sequence[int]) -> _Opening:
        """Return the communicator of some ranks, in which this one is the first."""
        return self.of(len(ranks))

    def send(self, to: int, message: Message) -> None:
        """Deliver a message that opens a server; raise `_Opened` for any other."""
        if message.kind not in (Kind.CONFIGURE, Kind.PARAMETERS):
            raise _Opened
        self._deliver(self.rank, to, message)

    def start_send(self, to: int, message: Message) -> Handle:
        """Send a message as `send` does."""
        self.send(to, message)
        return _Sent()

    def receive(self, source: int | None = None, tag: int = 0) -> tuple[int, Message]:
        """Return a pending answer; raise `_Opened` where worker 0 would wait."""
        for place, (rank, _) in enumerate(self._answers):
            if source in (None, rank):
                return self._answers.pop(place)
        raise _Opened

    def receive_into(self, target: Tensor, source: int, tag: int = 0) -> Message:
        """As `receive`."""
        return self.receive(source, tag)[1]

    def poll(self, source: int | None = None, tag: int = 0) -> None:
        """Return None: there are only answers."""

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Do nothing: all have worker 0's model."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Raise `_Opened`: the other workers would have to take part."""
        raise _Opened

    def start_all_reduce(self, tensor: Tensor) -> Handle:
        """As `all_reduce`."""
        raise _Opened

    def start(self, work: Callable[[], Any]) -> Handle:
        """Raise `_Opened`, as `all_reduce`: there are no background tasks yet."""
        raise _Opened

    def shared_vector(self, name: str, like: Tensor, *, later: bool = False) -> Tensor:
        """Raise `_Opened`, as `all_reduce`: there are no other workers to share memory with."""
        raise _Opened

    def vector_to_sum(self, name: str, like: Tensor) -> Tensor | None:
        """Return None: ordinary memory is used."""
        return None

    def lent_memory(self) -> LentMemory | None:
        """Return None: messages are copied here."""
        return None

    def _deliver(self, source: int, to: int, message: Message) -> None:
        if to == self.rank:
            self._answers.append((source, message))
        if to not in self._servers:
            return
        if message.tensor is not None:  # the sender continues to use its own
            message = message._replace(tensor=message.tensor.clone())
        for rank, reply in self._servers[to].on_message(source, message):
            self._deliver(to, rank, reply)


class _Sent:
    def done(self) -> bool:
        return True

    def wait(self) -> Any:
        return None
