"""Convolutions cut by channels or by height: the gradients, statistics and bytes of the uncut network."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.cost import hybrid
from polyrhythm.errors import RequestError
from polyrhythm.partition.cut import cut
from polyrhythm.partition.hybrid_pass import HybridPass
from polyrhythm.partition.ownership import Ownership, divided_trunk
from polyrhythm.training.flat_parameters import FlatParameters
from tolerances import REORDERED

CLASSES, IMAGE = 5, (2, 11, 9)
HOW = ["channels", "height"]


class Skipping(nn.Module):
    """Two convolutions with a skip connection around them, as in a residual network."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(2, 7, 3, padding=1, bias=False),
            nn.BatchNorm2d(7),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        self.first = nn.Conv2d(7, 7, 3, padding=2, dilation=2)
        self.norm = nn.BatchNorm2d(7, momentum=None)
        self.second = nn.Conv2d(7, 7, 3, padding=1, groups=7)
        self.act = nn.ReLU(inplace=True)
        self.mean = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(28, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        y = self.second(self.act(self.norm(self.first(x))))
        y += x
        return self.head(torch.flatten(self.mean(self.act(y)), 1))


def plain():
    return nn.Sequential(
        nn.Conv2d(2, 5, 5, stride=2, padding=2),
        nn.Tanh(),
        nn.AvgPool2d(2, 1, 1),
        nn.Conv2d(5, 4, (3, 2), stride=(2, 1), padding=(0, 1)),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(4 * 3 * 7, 6),
        nn.ReLU(),
        nn.Linear(6, CLASSES),
    )


class Copying(nn.Module):
    """Copies pictures into another order of memory, as `lenet5` does."""

    def forward(self, x):
        return torch.empty_like(x, memory_format=torch.channels_last).copy_(x)


NETWORKS = {"plain": plain, "skipping": Skipping, "copying": lambda: nn.Sequential(Copying(), *plain())}


def made(name):
    torch.manual_seed(3)
    return NETWORKS[name]().double().train()


def batch(worker, size):
    generator = torch.Generator().manual_seed(100 + worker)
    images = torch.randn(size, *IMAGE, generator=generator, dtype=torch.float64)
    return images, torch.randint(CLASSES, (size,), generator=generator)


def passed(name, how, scheme, sizes):
    """Runs one pass of every worker; gives their networks, losses, received bytes and what they own."""
    time = VirtualTime()
    cluster = SimulatedCluster(time, ConstantNetwork(time, 1e-3, 1e6), len(sizes))
    found = {}

    def play(rank):
        model = made(name)
        image = torch.zeros(1, *IMAGE, dtype=torch.float64)
        parts = cut(model, image)
        divided = divided_trunk(parts, image, how, len(sizes))
        flat = FlatParameters(model)
        ownership = Ownership.of(flat, parts, len(sizes), divided)
        hybrid = HybridPass(parts, cluster.communicator(rank), scheme, divided)
        images, labels = batch(rank, sizes[rank])
        value = hybrid.run(
            images,
            lambda logits, place: functional.cross_entropy(logits, labels[place]),
            sizes[rank] / max(sizes),
        )
        received = hybrid.received_bytes
        hybrid.complete()
        found[rank] = model, value, received, flat, ownership, divided

    for rank in range(len(sizes)):
        time.spawn(f"worker {rank}", lambda rank=rank: play(rank))
    time.run()
    return [found[rank] for rank in range(len(sizes))]


def together(found, sizes):
    """Puts the gradients together: shared pieces are added up, of others each worker has its own."""
    whole = torch.zeros_like(found[0][3].gradients)
    for rank, (_, _, _, flat, ownership, _) in enumerate(found):
        for piece in ownership.shared:
            whole[piece] += flat.gradients[piece]
        others = flat.gradients.clone()
        for piece in (*ownership.shared, *ownership.pieces(rank)):
            others[piece] = 0
        assert not others.any(), "a worker has no gradients of what others own"
        for piece in ownership.pieces(rank):
            whole[piece] += flat.gradients[piece]
    return whole / (sum(sizes) / max(sizes))


def by_rounds(name, scheme, sizes):
    """Gives the plain network's gradients, losses and statistics, with the examples of every round as one batch."""
    model, count = made(name), sum(sizes)
    batches = [batch(rank, size) for rank, size in enumerate(sizes)]
    if scheme == "a":
        rounds = [[(rank, slice(0, size)) for rank, size in enumerate(sizes)]]
    elif scheme == "b":
        rounds = [[(rank, slice(0, size))] for rank, size in enumerate(sizes)]
    else:
        workers = len(sizes)
        rounds = [
            [(rank, slice(size * r // workers, size * (r + 1) // workers)) for rank, size in enumerate(sizes)]
            for r in range(workers)
        ]
    losses = [0.0] * len(sizes)
    for each in rounds:
        images = torch.cat([batches[rank][0][place] for rank, place in each])
        labels = torch.cat([batches[rank][1][place] for rank, place in each])
        if not len(images):
            continue
        found = functional.cross_entropy(model(images), labels, reduction="none")
        (found.sum() / count).backward()
        for (rank, _), part in zip(each, found.split([p.stop - p.start for _, p in each]), strict=True):
            losses[rank] += float(part.detach().sum()) / max(1, sizes[rank])
    return model, losses


@pytest.mark.parametrize("sizes", [[4, 4], [3, 3, 2], [2, 0, 3], [3] * 8], ids=str)
@pytest.mark.parametrize("scheme", ["a", "b", "c"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_of_the_uncut_network(name, how, scheme, sizes):
    reference, losses = by_rounds(name, scheme, sizes)
    found = passed(name, how, scheme, sizes)
    assert [each[1] for each in found] == pytest.approx(losses, rel=1e-10)
    gradients = torch.cat([parameter.grad.flatten() for parameter in reference.parameters()])
    assert gradients.abs().max() > 1e-3
    torch.testing.assert_close(together(found, sizes), gradients, **REORDERED)
    for each in found:
        for (key, buffer), own in zip(reference.named_buffers(), each[0].buffers(), strict=True):
            torch.testing.assert_close(own, buffer, **REORDERED, msg=key)


@pytest.mark.parametrize("scheme", ["a", "c"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", NETWORKS)
def test_bytes_are_those_that_shapes_say(name, how, scheme):
    workers, size = 3, 6
    found = passed(name, how, scheme, [size] * workers)
    divided = found[0][5]
    parts = cut(made(name), None)
    features, *widths = parts.sizes
    for worker, each in enumerate(found):
        counts = [size] * workers
        of_trunk = 0
        for what in divided.exchanges():
            rounds = workers if what.kind == "fixed" and scheme == "c" else 1
            of_trunk += rounds * sum(what.sent(source, worker, counts) for source in range(workers))
        of_head = 2 * hybrid.examples(workers, size, features) + hybrid.between_layers(
            workers, size, widths, worker
        )
        assert each[2] == 8 * (of_trunk + of_head)


def test_by_height_a_worker_keeps_rows_of_pictures_only():
    """Of 4 workers each computes a fourth of every value of the first layers, as `held` says."""
    model = made("plain")
    divided = divided_trunk(cut(model, None), torch.zeros(1, *IMAGE, dtype=torch.float64), "height", 4)
    node = divided.operations[0].node
    assert [part.stop - part.start for part in divided.held(node)] == [1, 2, 1, 2]
    assert divided.shape(node) == (5, 6, 5)
    # Rows that 5 rows of kernel, at a stride of 2, reach beyond one's own.
    assert divided.needs(divided.operations[0])[1] == slice(0, 7)
    assert divided.held(divided.image)[1] == slice(2, 5)


def test_what_cannot_be_cut_is_refused_in_a_line():
    image = torch.zeros(1, 1, 6, 6)
    perceptron = nn.Sequential(nn.Flatten(), nn.Linear(36, 4))
    flattened = nn.Sequential(nn.Conv2d(1, 2, 3, padding="same"), nn.Flatten(), nn.Linear(72, 4))
    cases = [
        (perceptron, "height", 2, "no convolution of the network can be cut by height"),
        (flattened, "channels", 2, "no convolution of the network can be cut by channels: it ends at '0'"),
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 4)),
            "height",
            7,
            "ask for 6 workers at most",
        ),
    ]
    for model, how, workers, words in cases:
        with pytest.raises(RequestError, match=words) as caught:
            divided_trunk(cut(model, image), image, how, workers)
        assert "\n" not in str(caught.value)


def test_layers_that_cannot_be_cut_are_left_to_the_owners_of_the_examples():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 7 * 5, CLASSES),
    ).double()
    parts = cut(model, None)
    image = torch.zeros(1, *IMAGE, dtype=torch.float64)
    assert divided_trunk(parts, image, "channels", 2).ends == ("0", "1")
    assert divided_trunk(parts, image, "height", 2).ends == ("2", "3")
