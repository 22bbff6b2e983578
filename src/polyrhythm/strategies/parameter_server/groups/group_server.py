"""The server of groups: each pushes under one name, whichever member sends.

    speaker ── PUSH ─▶ under the group's name: shard, gate ─▶ answer ─▶ the present speaker
    speaker lost            the gate waits for it no more, as for a lost pusher
    another's PULL          the same pusher continues: after what had been taken of it, and with nothing twice
    all of a group lost     the pusher is lost

A new speaker's pull waits until the old one's loss is known here; no message of the old one can follow.

The first server also makes the views of groups, from reports on the members' logs (see `communication.log`):

    member interrupts a step ──▶ StepBroken(view, report) ─┐
    replacement of a lost one ─▶ StepBroken(generation) ───┼─▶ all present members have sent one ─▶ MembershipView
    a member is lost ──────────────────────────────────────┘

A group that has finished its run has nothing to regroup for: a member that asks is dismissed. Its last step
may be on one shard and not on another, if its speaker died in the meantime; so once a member is lost, the
other servers report to the first how many steps they have of a group. A group that was asked to stop by the
first server may have had no answer of another yet when its speaker died: the first notifies that one, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from polyrhythm.communication.control_message import VIEW_TAG, ControlMessage, MembershipView, StepBroken
from polyrhythm.communication.log import Formed, Report, form
from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.strategies.parameter_server.serving.admission import admit_bare
from polyrhythm.strategies.parameter_server.serving.gate import Consistency
from polyrhythm.strategies.parameter_server.serving.rule import Reply
from polyrhythm.strategies.parameter_server.serving.shard import Handling, shard_session
from polyrhythm.strategies.server_part import CountsLatestStaleness, ServerSetting, ServerStats
from polyrhythm.strategies.state import OF_SERVER, Part, StateField, Stateful


@dataclass(frozen=True)
class SomeoneWaits(ControlMessage):
    """Notice to the speaker of a group that a worker waits for admission.

    Attributes:
        number: number of the group's present view.
    """

    KIND = Kind.REGROUP_AT
    TAG = VIEW_TAG
    number: int


@dataclass(frozen=True)
class Dismissal(ControlMessage):
    """Notice to members of a finished group, for which there is no further view.

    Attributes:
        steps: number of steps in the group's contributions.
    """

    KIND = Kind.LEAVE
    TAG = VIEW_TAG
    steps: int


@dataclass(frozen=True)
class GroupSteps:
    """A server's number of steps of a group; the first server sends it for a group that does not continue.

    Attributes:
        name: name of the group, the rank of its first member.
        steps: number of steps.
    """

    name: int
    steps: int

    def message(self) -> Message:
        """Pack it to be sent."""
        return Message(Kind.REPORT, version=self.name, step=self.steps)

    @classmethod
    def of(cls, message: Message) -> GroupSteps:
        """Unpack the result of `message`."""
        return cls(message.version, message.step)


_NOBODY = -1


class Roster:
    """Keeps track of one group's members, from view to view.

    Attributes:
        ranks: ranks of the present view, with those that have been lost since, in order of their seniority.
        number: number of the present view.
        gone: lost ones among the ranks.
        waiting: reports of the members that have interrupted a step.
        absent: per rank, ranges of contributions, `[first, last + 1]`, of views without it; the end of the last
            range is None until the rank is back.
        missed: stretches of steps, `[rank, first, one past the last]`, with a member's part that is in no
            model.

    Args:
        ranks: ranks of its members.
        first: index of the first member among all workers of the run.
        steps: steps of a contribution.
    """

    def __init__(self, ranks: tuple[int, ...], first: int = 0, steps: int = 1) -> None:
        self.ranks = self._everyone = ranks
        self._first = first
        self._steps = steps
        self.number = 0
        self.gone: set[int] = set()
        self.waiting: dict[int, Report] = {}
        self._entering: dict[int, int] = {}
        self._generations = dict.fromkeys(ranks, 0)
        self._called = False
        self.absent: dict[int, list[list[int | None]]] = {}
        self.missed: list[list[int]] = []

    @property
    def is_empty(self) -> bool:
        """Whether no member of the group is present."""
        return self.gone.issuperset(self.ranks) and not self._entering

    @property
    def is_complete(self) -> bool:
        """Whether all present members wait for the next view."""
        return bool(self.waiting or self._entering) and self.waiting.keys() >= set(self._staying)

    @property
    def _staying(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.gone]

    def on_message(self, rank: int, word: StepBroken) -> None:
        """Record that a member has interrupted a step, or that a replacement asks for admission.

        Reports of earlier views are ignored.

        Raises:
            RefusedMessage: a replacement asks while its predecessor is present.
        """
        if word.generation > self._generations[rank]:
            if rank in self._staying:
                raise RefusedMessage(Reason.ORDER, f"rank {rank} requested admission, and is present")
            self._entering[rank] = word.generation
        elif word.number == self.number and rank in self._staying:
            self.waiting[rank] = word.report

    def lose(self, rank: int) -> None:
        """Strike a rank off."""
        self._entering.pop(rank, None)
        self.waiting.pop(rank, None)
        self.gone.add(rank)

    def to_call(self) -> int | None:
        """Return the member to notify, once a view, that a worker waits for admission; None if there is none."""
        speaker = self.ranks[0]
        if not self._entering or self._called or speaker in self.gone or speaker in self.waiting:
            return None
        self._called = True
        return speaker

    def form(self, contributions: int) -> MembershipView:
        """Make the next view of all waiting members, in order of their seniority: the first is the group's sender.

        Without a member that has a state, all begin with the servers'.

        Args:
            contributions: contributions of the group that a server has.
        """
        reports = {rank: self.waiting[rank] for rank in self._staying} | dict.fromkeys(
            self._entering, Report()
        )
        of = {rank: self._everyone.index(rank) for rank in reports}
        nobody = Formed((), _NOBODY)
        formed = form({of[rank]: report for rank, report in reports.items()}) or nobody
        newest = Report() if formed is nobody else reports[self._everyone[formed.newest]]
        if self._steps > 1:
            self._note_missed(newest)
        self.ranks = (*self._staying, *sorted(self._entering))
        self._generations |= self._entering
        self.number += 1
        self._note_absent(contributions)
        self._begin()
        first = self._first
        return MembershipView(
            number=self.number,
            workers=tuple(first + of[rank] for rank in self.ranks),
            generations=tuple(self._generations[rank] for rank in self.ranks),
            step=newest.steps,
            over=newest.over,
            begins=formed.begins,
            gives=tuple((first + giver, first + taker) for giver, taker in formed.gives),
            hands=tuple((entry, first + giver, first + taker) for entry, giver, taker in formed.hands),
        )

    def dismiss(self) -> list[int]:
        """Return the waiting members, for which there will be no view."""
        waiting = sorted({*self.waiting, *self._entering})
        self.waiting.clear()
        self._entering.clear()
        return waiting

    def _note_missed(self, newest: Report) -> None:
        """Record the lost parts of a round in progress, and those of new members, with models that do not count yet."""
        first, taken = newest.since, newest.steps + newest.inside
        if taken > first:
            last = first + self._steps
            self.missed += [[rank, first, taken] for rank in sorted(self.gone)]
            self.missed += [[rank, taken, last] for rank in sorted(self._entering)]
            # Those that had not begun when another had.
            self.missed += [[rank, first, last] for rank in self._staying if self.waiting[rank].fresh]

    def _note_absent(self, contributions: int) -> None:
        for rank in self._everyone:
            stretches = self.absent.setdefault(rank, [])
            is_open = bool(stretches) and stretches[-1][1] is None
            if rank in self.ranks and is_open:
                stretches[-1][1] = contributions
            elif rank not in self.ranks and not is_open:
                stretches.append([contributions, None])

    def _begin(self) -> None:
        self.waiting.clear()
        self._entering.clear()
        self.gone.clear()
        self._called = False


_PUSH, _PULL, _LEAVE = Kind.PUSH, Kind.PULL, Kind.LEAVE


class GroupServer(CountsLatestStaleness, Stateful):
    """One server; see `ServerPart`. A group goes by the rank of the member that is its first at the beginning.

    In front of a session with the groups as pushers: it translates between members and groups, and itself
    handles the members' messages about their group.

    Args:
        groups: ranks of the members of each group.
        consistency: consistency, which makes the gate, with groups as pushers.
        round_steps: number of steps in one push of a group.
    """

    fields = (StateField("", Part, OF_SERVER, at="_session"),)

    def __init__(
        self,
        groups: Sequence[tuple[int, ...]],
        consistency: Consistency,
        handling: Handling,
        setting: ServerSetting,
        round_steps: int = 1,
    ) -> None:
        servers = setting.roles.servers
        names = tuple(ranks[0] for ranks in groups)
        self._session = shard_session(names, consistency, handling, servers, setting.index)
        self._servers = servers
        self._leader = names[0]
        self._is_first = setting.index == 0
        self._name_of = {rank: ranks[0] for ranks in groups for rank in ranks}
        self._speakers = {ranks[0]: ranks[0] for ranks in groups}
        self._round_steps = round_steps
        workers = setting.roles.workers
        self._rosters = {ranks[0]: Roster(ranks, workers.index(ranks[0]), round_steps) for ranks in groups}
        self._undisturbed = True
        self._silent: set[int] = set()
        self._through: set[int] = set()
        """Groups that have left, or were asked to stop."""
        self._have_left: set[int] = set()
        self._pulls_ahead: dict[int, int] = {}
        """Ranks that have pulled for a group while its speaker is not known to be lost."""
        self._contributions = 0
        self._latest: dict[tuple[int, int], int] = {}
        """Number of steps that another server has reported of a group."""

    @property
    def done(self) -> bool:
        """Whether all groups have left, and worker 0 has let the servers go."""
        return self._session.done

    def stats(self) -> ServerStats:
        """Return its counters."""
        missed = [stretch for roster in self._rosters.values() for stretch in roster.missed]
        return replace(self._session.stats(), steps=self.steps, absent=self.absent, missed=missed)

    def latest_staleness(self) -> dict[int, int]:
        return self._session.latest_staleness()

    @property
    def steps(self) -> dict[int, int]:
        """Number of steps of each worker's group that need not be repeated."""
        named = self._session.steps
        return {rank: named[name] * self._round_steps for rank, name in self._name_of.items()}

    @property
    def absent(self) -> dict[int, list[list[int]]]:
        """For each rank, the stretches of its group's steps, `[first, one past the last]`, taken without it."""
        steps, each, found = self.steps, self._round_steps, {}
        for roster in self._rosters.values():
            for rank, stretches in roster.absent.items():
                found[rank] = [
                    [(first or 0) * each, steps[rank] if after is None else after * each]
                    for first, after in stretches
                ]
        return found

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Handle a message from a rank and return the replies; raise `RefusedMessage` if no rank sends it now."""
        name, kind = self._name_of.get(source), message.kind
        if name is None:
            return self._handle_other(source, message)
        if self._speakers[name] == source:
            return self._handle_speaker(name, message)
        if self._is_final_request(source, message):
            return self._addressed(self._session.on_message(source, message))
        if kind is _PULL and not message.stop:
            admit_bare(message)
            return self._handle_next_speaker(name, source)
        if kind is Kind.BROKEN:
            return self._handle_member(name, source, message)
        raise RefusedMessage(
            Reason.SENDER, f"a server received {kind.name} from rank {source}, which is no group's sender"
        )

    def on_loss(self, rank: int) -> list[Reply]:
        """Forget a group without members; else wait until another member sends for it.

        Raises:
            RunError: more groups are lost than the consistency can spare.
        """
        name = self._name_of.get(rank)
        if name is None:
            return []
        self._undisturbed = False
        if self._session.final == rank:
            self._session.forget_final()
        roster, speaks = self._rosters[name], self._speakers[name] == rank
        roster.lose(rank)
        replies = self._lose_speaker(name) if speaks else []
        replies += self._notify_first(name)
        if roster.is_empty or (speaks and self._is_through(name)):
            replies += self._lose_group(name)
        if self._pulls_ahead.get(name) == rank:
            del self._pulls_ahead[name]
        elif speaks and name in self._pulls_ahead:
            replies += self._begin_to_speak(name, self._pulls_ahead.pop(name))
        self._through.update(to for to, reply in replies if reply.stop and to in self._speakers)
        return self._addressed(replies) + self._settle(name)

    def _handle_speaker(self, name: int, message: Message) -> list[Reply]:
        kind = message.kind
        if kind is Kind.BROKEN:
            return self._handle_member(name, self._speakers[name], message)
        if kind is Kind.CONFIGURE:
            self._contributions = max(0, message.step)
        session = self._session
        before = kind is _LEAVE and not session.is_there(name)
        replies = [] if before and session.final != name else session.on_message(name, message)
        if session.stop and kind in (_PUSH, Kind.JOIN):  # an entering member may end a round for others
            self._through.update(to for to, reply in replies if reply.stop)
        if kind is _LEAVE:
            self._through.add(name)
            self._have_left.add(name)
            return self._addressed(replies) + self._settle(name)
        if self._undisturbed:
            return replies
        outgoing = self._notify_first(name) if kind is _PUSH and self._has_all(name) else []
        return self._addressed(replies) + outgoing + (self._settle(name) if kind is _PUSH else [])

    def _is_final_request(self, source: int, message: Message) -> bool:
        """Return whether worker 0, speaker of its group or not, asks for the final parameters or ends the run."""
        if source != self._leader:
            return False
        ends = message.kind is _LEAVE and self._session.final == source
        return ends or (message.kind is _PULL and message.stop)

    def _handle_next_speaker(self, name: int, source: int) -> list[Reply]:
        if self._speakers[name] == _NOBODY:
            return self._addressed(self._begin_to_speak(name, source))
        self._pulls_ahead[name] = source
        return []

    def _lose_speaker(self, name: int) -> list[Reply]:
        """Stop waiting for a group."""
        self._speakers[name] = _NOBODY
        if name in self._have_left:
            return []
        self._silent.add(name)
        return self._session.silence(name)

    def _notify_first(self, name: int) -> list[Reply]:
        if self._is_first:
            return []
        return [(self._servers[0], GroupSteps(name, self._session.steps_of(name)).message())]

    def _notify_of_end(self, name: int, steps: int) -> list[Reply]:
        """Notify the other servers that a group does not continue, though not all its steps are done."""
        outgoing = GroupSteps(name, steps).message()
        return [(server, outgoing) for server in self._servers[1:]]

    def _lose_group(self, name: int) -> list[Reply]:
        if not self._session.is_there(name):
            return []
        return self._session.dismiss(name, lost=not self._is_through(name))

    def _begin_to_speak(self, name: int, source: int) -> list[Reply]:
        """Handle a pull of another member: it continues after the group's recorded steps."""
        self._speakers[name] = source
        if not self._is_first:
            self._rosters[name].gone.discard(source)
        session = self._session
        is_there = session.is_there(name)
        if not is_there and session.final is not None and self._has_all(name):
            return session.admit_late(name)  # a step of it may be missing on another shard
        if is_there and name in self._silent:
            session.readmit(name)
        self._silent.discard(name)
        return session.on_message(name, Message(_PULL))

    def _addressed(self, replies: list[Reply]) -> list[Reply]:
        """Address replies for a group to its speaker, if there is one; the final parameters to rank 0."""
        found: list[Reply] = []
        for to, reply in replies:
            if to in self._speakers and not self._is_final(to):
                to = self._speakers[to]
            if to != _NOBODY:
                found.append((to, reply))
        return found

    def _is_final(self, to: int) -> bool:
        return self._session.final == to and not self._session.is_there(to)

    def _has_all(self, name: int) -> bool:
        return 0 < self._contributions <= self._session.steps_of(name)

    def _is_through(self, name: int) -> bool:
        return name in self._through or self._has_all(name)

    def _handle_other(self, source: int, message: Message) -> list[Reply]:
        listens = source in self._servers and (self._is_first or source == self._servers[0])
        if not listens or message.kind is not Kind.REPORT:
            return self._session.on_message(source, message)
        outgoing = GroupSteps.of(message)
        name = self._name_of.get(outgoing.name)
        if message.tensor is not None or name is None:
            raise RefusedMessage(
                Reason.NUMBERS, f"a server announced rank {outgoing.name}, which is no worker"
            )
        if not self._is_first:
            return self._handle_end(name)
        self._latest[source, outgoing.name] = outgoing.steps
        return self._settle(name)

    def _handle_end(self, name: int) -> list[Reply]:
        """Handle the end of a group that the first server has asked to stop: it has no speaker here any more."""
        self._through.add(name)
        return self._addressed(self._lose_group(name)) if self._speakers[name] == _NOBODY else []

    def _handle_member(self, name: int, source: int, message: Message) -> list[Reply]:
        roster = self._rosters[name]
        if not self._is_first:
            raise RefusedMessage(
                Reason.KIND, f"{message.kind.name} from rank {source} is not for this server"
            )
        roster.on_message(source, StepBroken.from_message(message))
        return self._settle(name)

    def _settle(self, name: int) -> list[Reply]:
        """Send the waiting members of a group their decision, if there is one."""
        if not self._is_first:
            return []
        roster = self._rosters[name]
        if self._is_over(name):
            steps = self._session.steps_of(name)
            word = Dismissal(steps * self._round_steps).message()
            dismissed: list[Reply] = [(rank, word) for rank in roster.dismiss()]
            if not dismissed:
                return []
            if (
                self._speakers[name] == _NOBODY
            ):  # its last push was held when the speaker was lost: no leave will follow
                self._through.add(name)
                dismissed += self._addressed(self._lose_group(name))
            return dismissed + (self._notify_of_end(name, steps) if name in self._through else [])
        if roster.is_complete:
            view = roster.form(self._session.steps_of(name)).message()
            return [(rank, view) for rank in roster.ranks]
        called = roster.to_call()
        return [] if called is None else [(called, SomeoneWaits(roster.number).message())]

    def _is_over(self, name: int) -> bool:
        """Return whether a group takes no step any more, on any shard, nor has one to take again."""
        if name in self._through:
            return True
        outgoing = [self._latest.get((server, name), 0) for server in self._servers[1:]]
        return self._has_all(name) and all(steps >= self._contributions for steps in outgoing)
