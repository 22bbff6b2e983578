"""The collectives of one communicator whose members share a host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from polyrhythm.communication.transports.collective_broken import CollectiveBroken
from polyrhythm.communication.transports.shared_memory.arena import Arena
from polyrhythm.communication.transports.shared_memory.barrier import Barrier
from polyrhythm.communication.transports.shared_memory.exchange import Exchange
from polyrhythm.communication.transports.shared_memory.lifelines import Lifelines
from polyrhythm.communication.transports.shared_memory.order import InOrder, OrderedWork
from polyrhythm.errors import RequestError


class SharedMemoryCollectives:
    """One member's side. Tensors live on the CPU; collectives are done in the order of their start.

    Args:
        arena: shared by all members.
        member: this one.
        members: the ranks of all members, among all ranks of the run.
        lifelines: of the members' processes, in the same order.

    What is raised, by the call or by the handle's `wait`: `RequestError` on all members if they disagree about what
    to do, after which they may go on; `CollectiveBroken` if one of them is gone, from then on.
    """

    def __init__(self, arena: Arena, member: int, members: tuple[int, ...], lifelines: Lifelines) -> None:
        self._barrier = Barrier(arena.words, member, members, lifelines)
        self._exchange = Exchange(arena, self._barrier, member, members)
        self._rank = members[member]
        self._lifelines = lifelines
        self._order = InOrder(self._be_patient)
        self._broken: CollectiveBroken | None = None

    def start_all_reduce(self, tensor: Tensor, finish: Callable[[], None] | None = None) -> OrderedWork:
        """Starts to add up over all members, in place; `finish` is called when it has ended well."""

        def run() -> None:
            self._on_vector(tensor, self._exchange.all_reduce)
            if finish is not None:
                finish()

        return self._order.start(lambda: self._guarded(run))

    def all_reduce(self, tensor: Tensor) -> None:
        """Adds up over all members, in place."""
        self._do(lambda: self._on_vector(tensor, self._exchange.all_reduce))

    def sums_in_place(self, like: Tensor) -> bool:
        """Whether vectors of this size are worth `add_rows`: smaller ones are added up as a whole by everyone."""
        return like.nbytes > self._exchange.small_bytes

    def add_rows(self, rows: Sequence[Tensor]) -> Tensor:
        """Takes vectors of all members that all of them see, to be added up where they lie; gives this member's."""
        return self._exchange.in_place.add(rows)

    def reduce_scatter(self, vector: Tensor) -> Tensor:
        """Adds up this member's slice of a contiguous vector of shape `(n,)`, in place, and gives the slice.

        Slices are those of `torch.tensor_split`; the others are left as they are.
        """
        slices: list[Tensor] = []
        self._do(lambda: slices.append(self._exchange.reduce_scatter(vector)))
        return slices[0]

    def all_gather(self, vector: Tensor) -> None:
        """Overwrites every slice of a contiguous vector of shape `(n,)` with the one of its member."""
        self._do(lambda: self._exchange.all_gather(vector))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrites a tensor with member `root`'s."""
        self._do(lambda: self._on_vector(tensor, lambda vector: self._exchange.broadcast(vector, root)))

    def barrier(self) -> None:
        """Returns when all members have called it."""
        self._do(self._exchange.barrier)

    def together(self, run: Callable[[Exchange], None]) -> None:
        """Does several things as one work, on a thread beside one that computes; who fails in it fails for all."""
        self._barrier.patient = True
        self._do(lambda: run(self._exchange))

    def give_up(self, reason: CollectiveBroken) -> None:
        """Ends all collectives, also those under way, here and on the other members; called on any thread."""
        if self._broken is None:
            self._barrier.broken = reason
            self._give_up(reason)

    def close(self) -> None:
        """Leaves; the others must not wait for this member any more."""
        self._order.close()
        self._barrier.leave()
        self._lifelines.close()

    def _do(self, run: Callable[[], None]) -> None:
        self._order.do(lambda: self._guarded(run))

    def _guarded(self, run: Callable[[], None]) -> None:
        if self._broken is not None:
            raise CollectiveBroken(self._broken.reason, self._broken.rank)
        try:
            run()
        except RequestError:  # all members have raised it, at the same barrier
            raise
        except CollectiveBroken as error:
            self._give_up(error)
            raise
        except BaseException as error:
            self._give_up(
                CollectiveBroken(f"rank {self._rank} was stopped by {type(error).__name__}", self._rank)
            )
            raise

    def _give_up(self, reason: CollectiveBroken) -> None:
        self._broken = CollectiveBroken(reason.reason, reason.rank)
        self._barrier.give_up(reason.rank)

    def _be_patient(self, patient: bool) -> None:
        self._barrier.patient = patient

    @staticmethod
    def _on_vector(tensor: Tensor, run: Callable[[Tensor], None]) -> None:
        tensor = tensor.detach()
        if tensor.is_contiguous():
            run(tensor.view(-1))
        else:
            copy = tensor.contiguous()
            run(copy.view(-1))
            tensor.copy_(copy)
