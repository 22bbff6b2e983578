"""The worker's end of push and pull, over all shards at once.

`PushPull` exchanges a worker's flat vectors with the servers. `ServedWorker` is the worker of all strategies
whose workers push every gradient, and continue with what the servers answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.message import Kind, Message, message_of, pack_json
from polyrhythm.errors import LetGo, PeerLost
from polyrhythm.strategies.parameter_server.serving.admission import is_finite
from polyrhythm.strategies.state import State
from polyrhythm.strategies.worker_part import (
    CatchesUp,
    HearsOfStop,
    SkipsSteps,
    Step,
    UsesServers,
    WorkerPart,
    WorkerSetting,
)
from polyrhythm.training.flat_parameters import shards
from polyrhythm.training.optimizer_plan import OptimizerPlan

_PUSH, _LEAVE = Kind.PUSH, Kind.LEAVE


class PushPull:
    """Exchanges a worker's flat vectors with the servers.

    Args:
        setting: the worker's.
        plan: of the servers' optimiser; default: the user's.
        pushes: that every pusher makes in the whole run, where servers must know it; 0: nobody can tell.

    Attributes:
        reached: the step with which the servers last let this worker go on.
        stops: whether a pull was answered when someone had wanted to stop.
    """

    def __init__(self, setting: WorkerSetting, plan: OptimizerPlan | None = None, pushes: int = 0) -> None:
        self._network = setting.network
        self._servers = setting.cast.servers
        self._plan = setting.plan if plan is None else plan
        self._pushes = pushes
        self._shards = shards(setting.flat.size, len(self._servers))
        self.reached = 0
        self.stops = False
        self._under_way: list[Handle] = []
        self._versions = [0] * len(self._servers)
        self._parameters = [setting.flat.vector[shard] for shard in self._shards]
        self._flat, self._overwrite = setting.flat, setting.flat.overwrite
        self._sliced = setting.flat.gradients
        self._gradients = [self._sliced[shard] for shard in self._shards]

    def initialise(self) -> None:
        """Gives every server its shard and how to optimise it; one worker calls this, before anyone pushes."""
        for position, server in enumerate(self._servers):
            for message in self._beginning(position):
                self._network.send(server, message)

    def pull(self, final: bool = False) -> int:
        """Overwrites the flat vector with the servers' parameters.

        Args:
            final: wait until all pushers have left.

        Returns:
            How many of this pusher's gradients every server has applied.

        Raises:
            PeerLost: this is a successor, and the run that it would join is ending.
            LetGo: the servers do without this worker.
        """
        answers = self._asked(Message(Kind.PULL, stop=final))
        if all(answer.kind is Kind.JOIN for answer in answers):  # a successor, among those who go in step
            answers = self._asked(Message(Kind.JOIN, step=max(answer.step for answer in answers)))
        self.stops = self._take_answers(answers)
        return self.reached

    def _asked(self, question: Message) -> list[Message]:
        """Asks all servers; gives their answers."""
        for position in range(len(self._servers)):
            self._ask(position, question).wait()
        return [self._answer(position) for position in range(len(self._servers))]

    def push_and_pull(self, step: Step, weight: float, learning_rate: float) -> bool:
        """Pushes the flat gradients and overwrites the flat vector with the answers.

        Args:
            step: of this pusher.
            weight: samples behind the gradient, in units of a full batch.
            learning_rate: for the update.

        Returns:
            Whether this pusher must stop.
        """
        self.push(step, weight, learning_rate)
        return self.take()

    def push(self, step: Step, weight: float, learning_rate: float) -> None:
        """Starts to push the flat gradients, which must not change before the answers have been taken.

        Args:
            step: of this pusher.
            weight: samples behind the gradient, in units of a full batch.
            learning_rate: for the update.
        """
        number, stop, versions, under_way = step.number, step.stop, self._versions, []
        gradients_now = self._flat.gradients
        if gradients_now is not self._sliced:  # they have moved to other memory
            self._sliced, self._gradients = gradients_now, [gradients_now[shard] for shard in self._shards]
        for position, gradients in enumerate(self._gradients):
            message = (_PUSH, gradients, versions[position], number, weight, learning_rate, stop, 0)
            under_way.append(self._ask(position, message_of(message)))
        self._under_way = under_way

    def take(self) -> bool:
        """Overwrites the flat vector with the answers to a push, but for the shards of which an answer is empty.

        Returns:
            Whether this pusher must stop.
        """
        stop = self._take_answers()
        for push in self._under_way:
            push.wait()
        return stop

    def check_losses(self) -> None:
        """Takes note of servers that were lost while nothing was asked of them, where others have their shards."""

    def leave(self) -> None:
        """Tells all servers that nothing more will be pushed; after the final pull, that they may go."""
        for server in self._servers:
            self._network.send(server, Message(Kind.LEAVE))

    def _take_answers(self, answers: Sequence[Message] = ()) -> bool:
        """Takes the servers' answers; waits for them, unless they are there."""
        reached, anyone_stops = None, False
        for position, server in enumerate(self._servers):
            answer = answers[position] if answers else self._answer(position)
            kind, tensor, version, step, _, _, stop, _ = answer
            if kind is _LEAVE and stop:
                raise LetGo(server, "too many of its gradients in a row were not finite")
            if kind is _LEAVE:
                raise PeerLost(server, "joining a run that is ending")
            if tensor is not None:
                self._overwrite(self._parameters[position], tensor)
            self._versions[position] = version
            reached = step if reached is None or step < reached else reached
            anyone_stops |= stop
        assert reached is not None, "there are servers"
        self.reached = reached
        return anyone_stops

    def _beginning(self, position: int) -> list[Message]:
        """Gives what a server must be given first: how to optimise its shard, and the shard."""
        shard = self._shards[position]
        plan = self._plan.part(shard.start, shard.stop).to_json()
        return [
            Message(Kind.CONFIGURE, pack_json(plan), step=self._pushes),
            Message(Kind.PARAMETERS, self._parameters[position]),
        ]

    def _ask(self, position: int, message: Message) -> Handle:
        """Starts to ask the server of a shard."""
        return self._network.start_send(self._servers[position], message)

    def _answer(self, position: int) -> Message:
        """Waits for what the server of a shard answers."""
        return self._network.receive(self._servers[position])[1]


class ServedWorker(WorkerPart, SkipsSteps, CatchesUp, UsesServers, HearsOfStop):
    """Pushes the gradients of every step and goes on with what the servers answer.

    Args:
        setting: this worker's.
        servers: its way to the servers, where it is another than the plain one.
        own_updates: whether it updates its own copy, in case that an answer is empty.
        dropped_late: whether servers drop a gradient that comes late. Others may then wait for another one of whoever
            stops, which for its part may wait for their states; so it leaves before that.
    """

    def __init__(
        self,
        setting: WorkerSetting,
        servers: PushPull | None = None,
        *,
        own_updates: bool = False,
        dropped_late: bool = False,
    ) -> None:
        super().__init__()
        self._leaves_at_once = dropped_late
        self._has_left = False
        self._leads = setting.workers.rank == 0
        self._hands_out = self._leads and not setting.succeeds
        self._servers = servers or PushPull(setting)
        self._flat = setting.flat
        self._optimizer = setting.plan.build(setting.flat.vector) if own_updates else None

    def start(self, step: int) -> int:
        """Worker 0 hands out the shards; everyone takes the servers' parameters, and leaves if it is told to stop.

        Others may wait for a gradient of it in the step under way, while as worker 0 it waits for them to stop.
        """
        if self._hands_out:
            self._servers.initialise()
        reached = self._servers.pull()
        if self._servers.stops:
            self._leave()
        return reached

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Pushes, and takes the answers, which overwrite an update of its own where they are not empty.

        Servers leave out a gradient that is not finite; so it is not taken into the worker's own copy either.
        """
        self._servers.push(step, step.weight, learning_rate)
        if self._optimizer is not None and step.weight > 0 and is_finite(self._flat.gradients):
            self._optimizer.step(self._flat.gradients, learning_rate)
        stops = self._servers.take()
        if stops and self._leaves_at_once:
            self._leave()
        return stops

    def check_servers(self) -> None:
        """Takes note of servers that were lost while nothing was asked of them."""
        self._servers.check_losses()

    def next_step(self, step: int) -> int:
        """Where the servers are, if they did not wait for this worker."""
        reached = self._servers.reached
        return reached if reached > step else step + 1

    @property
    def has_stopped(self) -> bool:
        """Whether the answer to its last pull said so; a successor's push would wait for those who push no more."""
        return self._servers.stops

    def catch_up(self) -> None:
        """Takes the newest parameters; a gradient of old ones would be as stale as this worker was long away.

        Who has left takes none: it pushes no more, and servers would let it in again.
        """
        if not self._has_left:
            self._servers.pull()

    def end(self) -> None:
        """Leaves; worker 0 waits for the final parameters."""
        self._leave()
        if self._leads:
            self._servers.pull(final=True)

    def _leave(self) -> None:
        if not self._has_left:
            self._servers.leave()
            self._has_left = True

    def let_go(self) -> None:
        """Tells the servers that nobody needs them any more."""
        self._servers.leave()

    def state(self) -> State:
        """The state of the optimiser of its own, if it has one; parameters come from the servers."""
        return self._optimizer.state() if self._optimizer is not None else ({}, {})

    def load_state(self, state: State) -> None:
        """Restore what `state` returned."""
        if self._optimizer is not None:
            self._optimizer.load_state(*state)
