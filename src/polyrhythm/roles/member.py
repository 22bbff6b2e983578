"""The control plane of workers other than 0: messages to the coordinator, which wait until a failed one is replaced.

A replacement is admitted by the coordinator, which sends it all that no server holds:

replacement              coordinator                      servers
  EnterWorker ─────────▶ registers it
  ◀──── Welcome ──────── untrained tensors, time, progress of epochs
  PULL ────────────────────────────────────────────▶ register it
  ◀──── parameters, and the number of its steps that count ──
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from torch import Tensor

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.control_message import VIEW_TAG, MembershipView, StepBroken
from polyrhythm.communication.message import Kind, Message
from polyrhythm.data.dealing import Begun
from polyrhythm.errors import PeerLost
from polyrhythm.events import Event
from polyrhythm.roles.checkpoint_interval import Interval, Milestones
from polyrhythm.roles.checkpointing.worker_state import WorkerState
from polyrhythm.roles.control_messages import (
    CALL_TAG,
    GATHERED_TAG,
    STATE_TAG,
    WELCOME_TAG,
    EnterWorker,
    EventReport,
    FinalModel,
    Introduction,
    RegroupNow,
    StateAt,
    StateDigests,
    StatesGathered,
    TakenBatches,
    Welcome,
)
from polyrhythm.roles.control_plane import Boundary, ControlPlane, Entry, EvaluatesPart
from polyrhythm.roles.digests import Gathering
from polyrhythm.roles.leader_channel import LeaderChannel
from polyrhythm.roles.regroup import NEVER, GroupRegroup, Regroup
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.tree_of_members import children_of, parent_of, pays
from polyrhythm.roles.world import LEADER, RankExited, World
from polyrhythm.strategies.strategy import Strategy

_STEPS_ON_THE_WAY = 20
"""Steps within which digests have reached the coordinator: those below a member are there a step later at most."""


class Member(ControlPlane):
    """The control plane of a worker other than worker 0; see `ControlPlane`.

    Args:
        world: context of the rank.
        strategy: strategy; its fault policy decides which failures the run survives.
        replica: replica of this worker; None in a dry run, or where a user's loop makes it later.
        resumes: whether the coordinator first sends a checkpoint.
        dry: whether this is a dry run: replacements receive no state, and workers send accounts instead of
            states.
        awaits_model: whether the coordinator sends the final model.
        every: interval between checkpoints; None: none are written.

    Attributes:
        replica: the given replica, or the one set before `enter`.
    """

    def __init__(
        self,
        world: World,
        strategy: Strategy,
        replica: Replica | None = None,
        *,
        resumes: bool = False,
        dry: bool = False,
        awaits_model: bool = False,
        every: Interval | None = None,
    ) -> None:
        self.replica = replica
        self._world = world
        self._strategy = strategy
        self._resumes = resumes
        self._dry = dry
        self._channel = LeaderChannel(world, strategy)
        self._awaits_word = awaits_model or self._channel.survives_leader
        self._leaving: list[Handle] = []  # kept: dropping the handle of a send may cancel it
        self._requested = StateAt(NEVER)
        self._milestones: Milestones | None = None
        self._polls_requests = False
        if every is not None and every.unit != "epochs":  # the ends of epochs are boundaries of their own
            self.save_every(every)
        self._behind = False
        self._last: Message | None = None
        self._regroup: Regroup | None = None
        self._gathering = Gathering(world.roles.workers.index(world.network.rank))
        self._sent_on: StateDigests | None = None
        self._held: list[Message] = []
        self._unconfirmed: StatesGathered | None = None

    def wait_with(self, regroup: Regroup) -> None:
        """Set the regrouping of all workers; a new coordinator then gets an introduction even after the last step."""
        if not isinstance(regroup, GroupRegroup):  # a group that regroups on its own needs no wait here
            self._regroup = regroup
            if self._dry or self.replica is not None:
                self._introduce_from_now_on()

    def await_leader(self, loss: PeerLost) -> bool:
        return self._channel.recovers_from(loss)

    def call_due(self, number: int, step: int, *, wait: bool, repairs: bool = True) -> bool:
        """Whether the coordinator has requested a regrouping before this step."""
        call = self._channel.call
        return call is not None and call.number == number and step >= call.step

    def next_view(self, word: StepBroken) -> MembershipView:
        """Report this worker's progress to the coordinator, and wait for the next view.

        A replacement's request to join contains the same facts; it is repeated if that coordinator fails.
        """
        self._send_directly()
        newcomer = word.generation and word.view is None and word.fresh
        if newcomer and (view := self._answer()) is not None:
            return view
        while True:
            self._channel.await_leader()
            known = word.view is None or word.view.leader == self._channel.leader
            self._channel.answer((replace(word, view=None) if known else word).message())
            if (view := self._answer()) is not None:
                return view

    def enter(self) -> Entry:
        if self._world.rejoins:
            return self._rejoin()
        if self.replica is not None:
            share_untrained(self._world, self._strategy, self.replica)
        if not self._resumes:
            return Entry()
        state = WorkerState.from_message(self._channel.control.receive(LEADER)[1])
        self._behind = state.behind
        return Entry(state, begun=Begun.from_json(state.begun))

    def begin(self, epoch: int) -> None:
        self._introduce_from_now_on()

    def after_step(self) -> None:
        """Check for a new coordinator; leave if this worker was asked to, counting the finished step."""
        if self._dry:
            return
        self._channel.check()
        self._unconfirmed = None  # the coordinator took part in this step once it had them
        while self._gathering.open and (word := self._channel.poll(StateDigests.TAG)) is not None:
            self._gather(StateDigests.from_message(word))
        if self._world.stop.leave_requested:
            raise RankExited("it was asked to")

    def save_every(self, every: Interval, since: tuple[int, int] | None = None) -> None:
        """Send this worker's state at this interval from now on.

        Args:
            every: interval between checkpoints.
            since: steps and epochs done when the run began; None: those of the first call of `state_due`.
        """
        traits = self._strategy.traits(len(self._world.roles.workers))
        if every.unit != "s" and traits.lockstep:
            self._milestones = Milestones(every, max(1, traits.exchange_every))
            if since is not None:
                self._milestones.passed(*since)
        else:
            self._polls_requests = True

    def state_due(self, done: int, epochs: int = 0) -> bool:
        if self._milestones is not None:
            return self._milestones.passed(done, epochs)
        if not self._polls_requests:
            return False
        while (word := self._channel.poll(STATE_TAG)) is not None:
            self._requested = StateAt.from_message(word)
        due = done >= self._requested.step
        if due:
            self._requested = StateAt(NEVER)
        return due

    def report(self, fact: Event | TakenBatches | StateDigests, *, before_state: bool = False) -> None:
        if isinstance(fact, StateDigests):
            self._gather(fact)
            return
        message = (EventReport(fact) if isinstance(fact, Event) else fact).message()
        if self._dry and not self._channel.survives_leader:
            # Not waited for: the strategy's messages are sent first, and the next step may begin.
            self._leaving.append(self._channel.control.start_send(LEADER, message))
            return
        self._channel.check()
        regroup = self._regroup
        if before_state and not self._dry and regroup is not None and pays(len(regroup.members)):
            self._held.append(message)
        else:
            self._send(message)

    def boundary(
        self,
        why: Boundary,
        record: WorkerState,
        epochs: int = 0,
        presented: Tensor | None = None,
        test: EvaluatesPart | None = None,
        *,
        together: bool = False,
    ) -> None:
        """Send the state, with this worker's share of the test result; nothing in a dry run."""
        if self._dry:
            return
        if why is Boundary.EPOCH:  # no other state of this step is wanted
            self.state_due(record.account.step)
        if test is not None:
            with self._world.activity.doing("testing the model", takes_long=True):
                record = replace(record, tested=test().tensors())
        # Where the coordinator requests states, some learn of a request too late, and send theirs after another step.
        together &= why is Boundary.EPOCH or self._milestones is not None
        if together and self._regroup is not None and self._regroup.gathers(record.account.step):
            self._gather_states(self._regroup, record)
        else:
            self._send_state(record)

    def work_done(self, record: WorkerState) -> bool:
        """Return True: the unfinished work of a worker that fails from now on goes to others."""
        return True

    def attend(self) -> bool:
        """Handle the coordinator's messages; return whether it requests regrouping, has failed, or was replaced."""
        regroup, called = self._regroup, False
        while (word := self._channel.poll(CALL_TAG)) is not None:
            # A request of an earlier view is obsolete: this worker has regrouped since.
            called |= regroup is not None and RegroupNow.from_message(word).number == regroup.number
        self._channel.check()
        return called or (regroup is not None and (self._channel.leader_lost or self._leader_changed))

    def leave(self, record: WorkerState) -> FinalModel | None:
        for sending in self._leaving:  # the last state is shorter, and might be there first
            sending.wait()
        self._send_last_digests(record.account.step)
        self._send_state(record)
        if not self._awaits_word:
            return None
        if self._regroup is None:
            word = self._channel.await_last_word()
        else:
            if self._leader_changed:  # it announced itself before there was a last state
                self._regroup.reform()
            word = self._channel.await_last_word(self._regroup.reform)
        return FinalModel.from_message(word) if word.kind is Kind.FINAL_MODEL else None

    @property
    def _leader_changed(self) -> bool:
        """Whether the coordinator is not the one that made this worker's view."""
        return self._regroup is not None and self._channel.leader > self._regroup.leader

    def _answer(self) -> MembershipView | None:
        """Wait for the coordinator's answer; None if it fails."""
        if self._channel.leader_lost:
            return None
        try:
            return MembershipView.from_message(self._channel.receive(VIEW_TAG))
        except PeerLost:
            if not self._channel.survives_leader:
                raise
            return None

    def _rejoin(self) -> Entry:
        if self._dry:
            if self._regroup is not None:  # elsewhere its first report announces it
                self._channel.control.send(LEADER, EnterWorker(self._world.generation).message())
            return Entry()
        welcome = self._welcome()
        assert self.replica is not None, "a worker that is welcomed has a model"
        load_untrained(self.replica, welcome.untrained)
        self._introduce_from_now_on()
        return Entry(elapsed_s=welcome.time_s, begun=Begun.from_json(welcome.begun))

    def _welcome(self) -> Welcome:
        while True:
            try:
                self._channel.control.send(LEADER, EnterWorker(self._world.generation).message())
                return Welcome.from_message(self._channel.receive(WELCOME_TAG))
            except PeerLost:
                if not self._channel.survives_leader:
                    raise
                self._channel.mark_leader_lost()
                self._channel.await_leader()

    def _send_state(self, record: WorkerState) -> None:
        self._send(self._message_of(record))

    def _message_of(self, record: WorkerState) -> Message:
        message = (record.account if self._dry else record).message()
        if self._channel.survives_leader:
            self._last = message
        return message

    def _send(self, message: Message) -> None:
        for each in (*self._held, message):
            self._channel.send(each)
        self._held = []

    def _gather_states(self, regroup: Regroup, record: WorkerState) -> None:
        """Send this worker's reports and state along the tree of the members, with those of all below it.

        A failure ends the wait for them: each that has sent its own to a failed member sends it to the coordinator
        before it takes part in the next view.
        """
        messages, self._held = [*self._held, self._message_of(record)], []
        own = StatesGathered.of(regroup.worker, self._world.generation, record.account.step, messages)
        self._unconfirmed = own
        workers, others = regroup.workers, list[StatesGathered]()
        try:
            for child in children_of(workers.rank, workers.size):
                others.append(StatesGathered.from_message(workers.receive(child, GATHERED_TAG)[1]))
            if (parent := parent_of(workers.rank)) != 0:
                workers.send(parent, own.joined(others).message()._replace(tag=GATHERED_TAG))
                return
        except PeerLost:  # the next exchange raises it as well
            pass
        self._channel.send(own.joined(others).message())

    def _send_directly(self) -> None:
        """Send the coordinator what waits for a state, and what a failed member may not have sent on."""
        unconfirmed, self._unconfirmed = self._unconfirmed, None
        held, self._held = self._held, []
        for message in (*([] if unconfirmed is None else [unconfirmed.message()]), *held):
            self._channel.send(message)

    def _gather(self, digests: StateDigests) -> None:
        """Record digests, and send them on once those of all workers below this one are there."""
        regroup = self._regroup
        assert regroup is not None, "digests are compared where all workers regroup together"
        gathered = self._gathering.add(digests, regroup.number, regroup.members)
        if gathered is None:
            return
        self._sent_on = gathered
        parent = self._gathering.parent
        if parent == LEADER:
            self._channel.answer(gathered.message())
        else:
            with suppress(PeerLost):  # members of the next view compare theirs again
                self._channel.control.send(self._world.roles.workers[parent], gathered.message())

    def _send_last_digests(self, steps: int) -> None:
        """Send the coordinator the digests of the last steps, which others may not send on, since they leave."""
        gathering, latest = self._gathering, self._sent_on
        for digests in gathering.incomplete():
            self._channel.answer(digests.message())
        if latest is not None and gathering.parent != LEADER and latest.step + _STEPS_ON_THE_WAY >= steps:
            self._channel.answer(latest.message())

    def _introduce_from_now_on(self) -> None:
        self._channel.introduction = self._introduction

    def _introduction(self) -> list[Message]:
        untrained = {} if self.replica is None else self.replica.untrained
        follows = [] if self._last is None else [self._last]
        here = Introduction(self._world.generation, self._behind, bool(follows), untrained)
        return [here.message(), *follows]


def load_untrained(replica: Replica, untrained: dict[str, Tensor]) -> None:
    """Overwrite a replica's untrained tensors (batch-norm statistics, frozen parameters), given by name."""
    for name, value in replica.untrained.items():
        value.copy_(untrained[name])


def share_untrained(world: World, strategy: Strategy, replica: Replica) -> None:
    """Overwrite untrained tensors with those of worker 0.

    Where the run survives failures this is not a collective, which the failure of a worker would break.
    """
    if not strategy.faults(len(world.roles.workers)).continues:
        replica.share_untrained()
    elif replica.untrained and world.leads:
        control, message = world.control(), Welcome(replica.untrained, 0.0).message()
        for rank in world.roles.workers:
            if rank != LEADER:
                with suppress(PeerLost):  # a failure is handled where a message is received
                    control.send(rank, message)
    elif replica.untrained:
        received = world.control().receive(LEADER, WELCOME_TAG)[1]
        load_untrained(replica, Welcome.from_message(received).untrained)
