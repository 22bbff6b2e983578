"""Label skew: workers with different mixtures of classes, as the clients of federated learning have.

Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution for federated visual classification", 2019,
arXiv 1909.06335.

    q_i ~ Dirichlet(alpha * p)      mixture of worker i, p = frequencies of the classes among all images

Every worker owns as many images as any other, to one, and the same ones in every epoch of a number of workers. Where a
class has no images left, a worker gets others by its mixture. A small `alpha` leaves one class to a worker, a large one
the same mixture to all.

    order      a0 b0 c0 a1 b1 c1 …      of an epoch: the position p holds an image of worker p mod N
    worker 0   a0       a1              takes these positions, as of any order (see `data.dealing`)

With `clients` more than workers, images belong to clients, and each worker is another one after the other, so that a
round of local steps has a sample of the clients (McMahan et al., AISTATS 2017, arXiv 1602.05629). An epoch has each
client once: worker i is clients p_i, p_(i+N), … of a permutation p, drawn for each epoch.

Departure from the paper: the number of images per class is the rounded expectation, not a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, exp, log
from random import Random

import torch
from torch import Tensor

from polyrhythm.data.seeding import generator_for, seed_for


@dataclass(frozen=True)
class LabelSkew:
    """Assignment of images to workers by their classes.

    Attributes:
        alpha: concentration of the Dirichlet distribution; more than 0.
        seed: seed of the mixtures, and of the orders.
        clients: number of owners of images, at least as many as workers; None: the workers.
    """

    alpha: float
    seed: int
    clients: int | None = None
    _owned: dict[int, list[Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def order(self, labels: Tensor, epoch: int, workers: int) -> Tensor:
        """Return an epoch's order, (n,) int64; a pure function of its arguments, `alpha` and `seed`.

        Args:
            labels: classes of all images, (n,) int64.
            epoch: number of the epoch.
            workers: number of workers.
        """
        clients = max(self.clients or 0, workers)
        shuffled = []
        for client, own in enumerate(self.owned(labels, clients)):
            generator = generator_for("order of a worker", self.seed, epoch, client)
            shuffled.append(own[torch.randperm(len(own), generator=generator)])
        if clients == workers:
            played = shuffled
        else:
            draw = generator_for("clients of an epoch", self.seed, epoch)
            sampled = torch.randperm(clients, generator=draw).tolist()
            played = [torch.cat([shuffled[client] for client in sampled[i::workers]]) for i in range(workers)]
        sizes = [len(range(worker, len(labels), workers)) for worker in range(workers)]
        # Clients have unequally many images, to one: the last ones of some workers complete the shares of others.
        surplus = torch.cat([own[size:] for own, size in zip(played, sizes, strict=True)])
        order = torch.empty(len(labels), dtype=torch.int64)
        for worker, (own, size) in enumerate(zip(played, sizes, strict=True)):
            missing = max(0, size - len(own))
            order[worker::workers] = torch.cat([own[:size], surplus[:missing]])
            surplus = surplus[missing:]
        return order

    def owned(self, labels: Tensor, workers: int) -> list[Tensor]:
        """Return the images of every worker, or of every client; together each image once.

        Args:
            labels: classes of all images, (n,) int64, the same in every call.
            workers: number of owners.
        """
        if workers not in self._owned:
            self._owned[workers] = self._drawn(labels, workers)
        return self._owned[workers]

    def _drawn(self, labels: Tensor, workers: int) -> list[Tensor]:
        random = Random(seed_for("label skew", self.seed, workers))
        shuffled = torch.randperm(len(labels), generator=generator_for("label skew", self.seed, workers))
        classes = labels[shuffled].unique(return_counts=True)
        members = [shuffled[labels[shuffled] == label] for label in classes[0]]
        frequencies = [count / len(labels) for count in classes[1].tolist()]
        owned = []
        for worker in range(workers):
            size = len(range(worker, len(labels), workers))
            mixture = _mixture(random, [self.alpha * each for each in frequencies])
            taken = _taken(mixture, [len(each) for each in members], size)
            owned.append(torch.cat([each[:count] for each, count in zip(members, taken, strict=True)]))
            members = [each[count:] for each, count in zip(members, taken, strict=True)]
        return owned


def _mixture(random: Random, concentrations: Sequence[float]) -> list[float]:
    """Draw from a Dirichlet distribution; return logarithms up to a constant, since small numbers would be 0."""
    # Marsaglia, Tsang (2000): a variate of concentration a is one of a + 1 times u ** (1 / a).
    return [
        log(random.gammavariate(each + 1, 1.0)) + log(1 - random.random()) / each for each in concentrations
    ]


def _taken(mixture: Sequence[float], left: Sequence[int], size: int) -> list[int]:
    """Return the number of images to take of each class, `size` in all.

    Args:
        mixture: logarithms of the weights of the classes.
        left: images left of each class; at least `size` in all.
        size: images to take.
    """
    taken = [0] * len(left)
    while missing := size - sum(taken):
        rest = {number: left[number] - own for number, own in enumerate(taken) if left[number] > own}
        most = max(mixture[number] for number in rest)
        weights = {number: exp(mixture[number] - most) for number in rest}
        total = sum(weights.values())
        for number in sorted(rest, key=lambda number: (-weights[number], number)):
            asked = ceil(missing * weights[number] / total)
            taken[number] += min(asked, rest[number], size - sum(taken))
    return taken
