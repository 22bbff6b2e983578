"""Inputs from public bug trackers of comparable tools, each as a small loop on two or three workers.

    python benchmarks/wrong-inputs/trackers.py [NAME …] [--out DIR]

Each has the link of the report that it comes from, and the value that is right: that of the same loop alone, or one
line of an error. Workers are threads of this process, over real links, as in the tests.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))  # whose workers these are

from polyrhythm.api.join import Group
from polyrhythm.errors import PolyrhythmError
from unit.api.alone import flat, network, points
from unit.api.loop.threads import Killed, run_in_threads


@dataclass(frozen=True)
class Input:
    """One report.

    Attributes:
        link: to it.
        run: returns what was found, and what is right.
    """

    link: str
    run: Callable[[], tuple[Any, Any]]


INPUTS: dict[str, Input] = {}


def report(link: str) -> Callable[[Callable[[], tuple[Any, Any]]], Callable[[], tuple[Any, Any]]]:
    """Note an input under the name of its function."""

    def note(run: Callable[[], tuple[Any, Any]]) -> Callable[[], tuple[Any, Any]]:
        INPUTS[run.__name__.replace("_", "-")] = Input(link, run)
        return run

    return note


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: Any, batches: Any, after: Callable[[], object] = lambda: None) -> None:
    for x, y in batches:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


def inside(
    workers: int, loop: Callable[[Group, nn.Module, Any], Any], strategy: str = "synchronous"
) -> list[Any]:
    """Run a loop with a distributed network on each worker."""
    models = [network() for _ in range(workers)]

    def whole(group: Group) -> Any:
        with group:
            model, optimizer = group.distribute(models[group.rank], sgd(models[group.rank]))
            return loop(group, model, optimizer)

    return run_in_threads(strategy, workers, whole)


def refused(run: Callable[[], object]) -> str:
    """Return the class of the error of a run, and whether its text is one line."""
    try:
        run()
    except PolyrhythmError as error:
        return "one line" if "\n" not in str(error) else "several lines"
    return "nothing said"


def counted(count: int, workers: int, batch_size: int) -> list[int]:
    """Return how many images each worker's sum over all has in a test."""

    def loop(group: Group, model: nn.Module, optimizer: Any) -> int:
        with torch.no_grad():
            seen = sum(len(y) for _, y in group.shard(DataLoader(points(count), batch_size)))
        return sum(group.gather(seen))

    return inside(workers, loop)


def close(first: Tensor, second: Tensor) -> bool:
    return bool(torch.allclose(first, second, rtol=1e-11, atol=1e-11))


@report("https://github.com/pytorch/pytorch/issues/25162")
def pytorch_25162() -> tuple[Any, Any]:
    """A sampler pads the test set, so that accuracy counts images twice."""
    return counted(13, 2, 2), [13, 13]


@report("https://github.com/pytorch/pytorch/issues/47163")
def pytorch_47163() -> tuple[Any, Any]:
    """Strides of gradients differ from those of the buckets: channels_last after the model was wrapped."""

    def net() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Conv2d(3, 4, 1), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)).double()

    images = torch.randn(16, 3, 4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    data = TensorDataset(images, torch.arange(16) % 3)
    plain = net()
    train(plain.to(memory_format=torch.channels_last), sgd(plain), DataLoader(data, 8))
    models = [net() for _ in range(2)]

    def loop(group: Group) -> bool:
        with group:
            model, optimizer = group.distribute(models[group.rank], sgd(models[group.rank]))
            train(model.to(memory_format=torch.channels_last), optimizer, group.shard(DataLoader(data, 4)))
        return close(flat(model), flat(plain))

    return run_in_threads("synchronous", 2, loop), [True, True]


@report("https://github.com/pytorch/pytorch/issues/31771")
def pytorch_31771() -> tuple[Any, Any]:
    """Without set_epoch each epoch has the same order."""

    def loop(group: Group, model: nn.Module, optimizer: Any) -> list[list[int]]:
        shard = group.shard(DataLoader(TensorDataset(torch.arange(22)), 5, shuffle=True))
        with torch.no_grad():
            return [[int(each) for (batch,) in shard for each in batch] for _ in range(2)]

    first, second = inside(2, loop)
    whole = [sorted(a + b) == list(range(22)) for a, b in zip(first, second, strict=True)]
    return [*whole, first[0] != first[1]], [True, True, True]


@report("https://github.com/pytorch/pytorch/issues/30509")
def pytorch_30509() -> tuple[Any, Any]:
    """Gradients have other bits in another run."""

    def loop(group: Group, model: nn.Module, optimizer: Any) -> list[float]:
        train(model, optimizer, group.shard(DataLoader(points(26), 4)))
        return flat(model).tolist()

    return inside(3, loop) == inside(3, loop), True


@report("https://github.com/pytorch/pytorch/issues/69031")
def pytorch_69031() -> tuple[Any, Any]:
    """Of accumulated gradients only those of parameters that the last pass uses are averaged."""

    def accumulated(model: Any, optimizer: Any, batches: Any, without_exchange: Callable[[], Any]) -> None:
        for number, (x, y) in enumerate(batches):
            if number % 2 == 0:
                with without_exchange():
                    (nn.functional.cross_entropy(model(x), y) / 2).backward()
            else:  # the first layer has no part in it
                hidden = model[0](x).detach()
                (nn.functional.cross_entropy(model[1:](hidden), y) / 2).backward()
                optimizer.step()
                optimizer.zero_grad()

    plain = network()
    accumulated(plain, sgd(plain), DataLoader(points(32), 8), nullcontext)

    def loop(group: Group, model: nn.Module, optimizer: Any) -> bool:
        accumulated(model, optimizer, group.shard(DataLoader(points(32), 4)), group.accumulate)
        return close(flat(model), flat(plain))

    return inside(2, loop), [True, True]


@report("https://github.com/Lightning-AI/pytorch-lightning/issues/20340")
def lightning_20340() -> tuple[Any, Any]:
    """The callback BackboneFinetuning thaws a backbone, whose gradients are then not averaged."""
    adapter = import_module(
        "polyrhythm.adapters.lightning"
    )  # before Lightning: it prepares torchvision for it
    from lightning.pytorch.callbacks import BackboneFinetuning

    from unit.adapters.lightning_task import BATCH_SIZE, Finetuned, fitted

    groups: dict[int, Group] = {}

    def thawing() -> Any:
        return BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)

    def joined(*_: Any, **__: Any) -> Group:
        return groups[threading.get_ident()]

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(adapter, "join", joined):
        plain = fitted(Path(folder, "plain"), 2 * BATCH_SIZE, module=Finetuned(), more=[thawing])
        modules = [Finetuned() for _ in range(2)]

        def loop(group: Group) -> bool:
            groups[threading.get_ident()] = group
            own = modules[group.rank]
            fitted(
                Path(folder), BATCH_SIZE, module=own, more=[thawing], strategy=adapter.PolyrhythmStrategy()
            )
            return close(flat(own), flat(plain))

        return run_in_threads("synchronous", 2, loop), [True, True]


@report("https://github.com/Lightning-AI/pytorch-lightning/issues/5060")
def lightning_5060() -> tuple[Any, Any]:
    """A validation set of a few samples depends on the number of workers."""
    return counted(3, 2, 2) + counted(5, 3, 4), [3, 3, 5, 5, 5]


@report("https://github.com/Lightning-AI/pytorch-lightning/issues/379")
def lightning_379() -> tuple[Any, Any]:
    """Early stopping on each process's own loss ends one of them earlier, and the others hang."""

    def loop(group: Group, model: nn.Module, optimizer: Any) -> None:
        shard = group.shard(DataLoader(points(24), 4))
        for epoch in range(3):
            train(model, optimizer, shard)
            if epoch == group.rank:
                break

    return refused(lambda: inside(2, loop)), "one line"


@report("https://github.com/Lightning-AI/pytorch-lightning/issues/8727")
def lightning_8727() -> tuple[Any, Any]:
    """ReduceLROnPlateau on each process's own metric."""

    def loop(group: Group, model: nn.Module, optimizer: Any) -> None:
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        shard = group.shard(DataLoader(points(24), 4))
        for epoch in range(4):
            train(model, optimizer, shard)
            plateau.step(float(epoch if group.rank else -epoch))

    return refused(lambda: inside(2, loop)), "one line"


@report("https://github.com/Lightning-AI/pytorch-lightning/issues/19045")
def lightning_19045() -> tuple[Any, Any]:
    """A value is asked for on rank 0 only, and all hang."""

    def loop(group: Group, model: nn.Module, optimizer: Any) -> None:
        shard = group.shard(DataLoader(points(24), 4))
        train(model, optimizer, shard)
        if group.leads:
            group.average(1.0)
        train(model, optimizer, shard)

    return refused(lambda: inside(2, loop)), "one line"


@report("https://github.com/huggingface/accelerate/issues/2007")
def accelerate_2007() -> tuple[Any, Any]:
    """Nine samples in batches of five with drop_last: what is gathered is not what the loader gives."""

    def loop(group: Group, model: nn.Module, optimizer: Any) -> list[int]:
        shard = group.shard(DataLoader(TensorDataset(torch.arange(11)), 5, drop_last=True))
        with torch.no_grad():
            own = [int(each) for (batch,) in shard for each in batch]
        return sorted(number for each in group.gather(own) for number in each)

    return inside(2, loop), [list(range(10))] * 2


@report("https://github.com/huggingface/accelerate/issues/952")
def accelerate_952() -> tuple[Any, Any]:
    """The last batch is ignored where all are even."""
    return counted(128, 2, 16), [128, 128]


@report("https://github.com/huggingface/accelerate/issues/1674")
def accelerate_1674() -> tuple[Any, Any]:
    """A ratio over batches of uneven sizes."""

    def loop(group: Group, model: nn.Module, optimizer: Any) -> float:
        right = seen = 0
        with torch.no_grad():
            for (batch,) in group.shard(DataLoader(TensorDataset(torch.arange(101)), 8)):
                right += int((batch < 37).sum())
                seen += len(batch)
        return group.average(right / max(1, seen), seen)

    return [round(each, 12) for each in inside(3, loop)], [round(37 / 101, 12)] * 3


@report("https://github.com/huggingface/accelerate/issues/963")
def accelerate_963() -> tuple[Any, Any]:
    """A scheduler steps at every batch though gradients are accumulated over two."""

    def accumulated(model: nn.Module, optimizer: Any, batches: Any) -> tuple[list[float], float]:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for number, (x, y) in enumerate(batches, 1):
            (nn.functional.cross_entropy(model(x), y) / 2).backward()
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        return flat(model).tolist(), optimizer.param_groups[0]["lr"]

    plain = network()
    vector, rate = accumulated(plain, sgd(plain), DataLoader(points(32), 8))

    def loop(group: Group, model: nn.Module, optimizer: Any) -> tuple[bool, float]:
        found, own = accumulated(model, optimizer, group.shard(DataLoader(points(32), 4)))
        return close(torch.tensor(found), torch.tensor(vector)), own

    return inside(2, loop), [(True, rate)] * 2


@report("https://github.com/huggingface/accelerate/issues/3797")
def accelerate_3797() -> tuple[Any, Any]:
    """ReduceLROnPlateau lowers the rate once for each process."""

    def loop(group: Group, model: nn.Module, optimizer: Any) -> float:
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        for _ in range(2):
            plateau.step(group.average(1.0))
        return float(optimizer.param_groups[0]["lr"])

    return inside(3, loop), [0.05] * 3


@report("https://github.com/ray-project/ray/issues/22406")
def ray_22406() -> tuple[Any, Any]:
    """A loader that does not shuffle is shuffled when it is shared out."""

    def loop(group: Group, model: nn.Module, optimizer: Any) -> list[int]:
        with torch.no_grad():
            return [
                int(each)
                for (batch,) in group.shard(DataLoader(TensorDataset(torch.arange(8)), 2))
                for each in batch
            ]

    return inside(2, loop), [[0, 2, 4, 6], [1, 3, 5, 7]]


@report("https://github.com/meta-pytorch/torchft/pull/292")
def torchft_292() -> tuple[Any, Any]:
    """After the loss of a replica the samples of its share are missing."""
    seen: list[list[int]] = []

    def loop(group: Group) -> None:
        model = network()
        with group:
            model, optimizer = group.distribute(model, sgd(model))
            x, y = points(30).tensors
            shard = group.shard(DataLoader(TensorDataset(x, y, torch.arange(30)), 2))
            for epoch in group.epochs(3):
                own: list[int] = []
                for inputs, labels, numbers in shard:
                    if (group.rank, epoch, len(own)) == (2, 0, 4):
                        raise Killed
                    train(model, optimizer, [(inputs, labels)])
                    own += numbers.tolist() if shard.weight else []
                if epoch == 2:
                    seen.append(own)

    run_in_threads("synchronous", 3, loop)
    return sorted(number for own in seen for number in own), list(range(30))


@report("https://github.com/learning-at-home/hivemind/issues/446")
def hivemind_446() -> tuple[Any, Any]:
    """Weights are loaded on one peer, and the others go on from their own."""
    weights = {name: value * 0.5 for name, value in network().state_dict().items()}
    plain = network()
    plain.load_state_dict(weights)
    train(plain, sgd(plain), DataLoader(points(16), 8))

    def loop(group: Group, model: nn.Module, optimizer: Any) -> bool:
        if group.rank == 0:
            model.load_state_dict(weights)
        train(model, optimizer, group.shard(DataLoader(points(16), 4)))
        return close(flat(model), flat(plain))

    return inside(2, loop), [True, True]


@report("https://github.com/learning-at-home/hivemind/pull/428")
def hivemind_428() -> tuple[Any, Any]:
    """Frozen parameters are exchanged as well, and exhaust the memory."""

    def loop(group: Group) -> int:
        model = network()
        model[0].requires_grad_(False)
        with group:
            trained = [each for each in model.parameters() if each.requires_grad]
            group.distribute(model, torch.optim.SGD(trained, lr=0.1))
            assert group._replica is not None
            return group._replica.flat.size

    return run_in_threads("synchronous", 2, loop), [8 * 3 + 3] * 2


@report("https://github.com/huggingface/pytorch-image-models/issues/245")
def timm_245() -> tuple[Any, Any]:
    """The moving average of the weights is another one than alone."""

    def averaged(model: nn.Module, optimizer: Any, batches: Any) -> Tensor:
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        train(model, optimizer, batches, lambda: average.update_parameters(model))
        return flat(average)

    plain = network()
    expected = averaged(plain, sgd(plain), DataLoader(points(48), 8))

    def loop(group: Group, model: nn.Module, optimizer: Any) -> bool:
        return close(averaged(model, optimizer, group.shard(DataLoader(points(48), 4))), expected)

    return inside(2, loop), [True, True]


@report("https://github.com/huggingface/pytorch-image-models/pull/62")
def timm_62() -> tuple[Any, Any]:
    """Statistics of batch norms differ between processes, and the saved ones are those of rank 0."""
    models = [nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double() for _ in range(2)]

    def loop(group: Group) -> list[list[float]]:
        model = models[group.rank]
        with group:
            model, optimizer = group.distribute(model, sgd(model))
            train(model, optimizer, group.shard(DataLoader(points(32), 4)))
            own = group.gather(model[1].running_mean.tolist())
        mean = torch.tensor(own, dtype=torch.float64).mean(0)
        return [bool(torch.allclose(model[1].running_mean, mean, rtol=1e-12))]

    return run_in_threads("synchronous", 2, loop), [[True], [True]]


def clipped(group: Any, model: nn.Module, optimizer: Any, batches: Any, passes: int) -> list[float]:
    """Train with gradients accumulated over some passes and clipped once a step; return the norms."""
    norms = []
    for number, (x, y) in enumerate(batches, 1):
        with nullcontext() if group is None or number % passes == 0 else group.accumulate():
            (nn.functional.cross_entropy(model(x), y) / passes).backward()
        if number % passes == 0:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
            optimizer.step()
            optimizer.zero_grad()
    return norms


def clipped_as_alone(passes: int) -> tuple[Any, Any]:
    """Return whether norms and weights of two workers are those of one process, and that they are to be."""
    plain = network()
    norms = clipped(None, plain, sgd(plain), DataLoader(points(32), 8), passes)

    def loop(group: Group, model: nn.Module, optimizer: Any) -> list[bool]:
        found = clipped(group, model, optimizer, group.shard(DataLoader(points(32), 4)), passes)
        return [close(torch.tensor(found), torch.tensor(norms)), close(flat(model), flat(plain))]

    return inside(2, loop), [[True, True]] * 2


@report("https://github.com/modelscope/twinkle/pull/290")
def twinkle_290() -> tuple[Any, Any]:
    """The norm of gradients is summed over workers though they hold the mean already, and clips too much."""
    return clipped_as_alone(1)


@report("https://github.com/huggingface/diffusers/pull/721")
def diffusers_721() -> tuple[Any, Any]:
    """Gradients are clipped at every pass though they are accumulated over two."""
    return clipped_as_alone(2)


@report("https://github.com/wyim-pgl/transgenic/issues/59")
def transgenic_59() -> tuple[Any, Any]:
    """A run that is resumed inside an epoch shuffles it anew: some samples come twice, others never."""
    saved: list[dict[str, Any]] = []

    def images(group: Group, model: nn.Module, optimizer: Any, *, first: bool) -> list[int]:
        x, y = points(64).tensors
        shard = group.shard(DataLoader(TensorDataset(x, y, torch.arange(64)), 4, shuffle=True))
        if not first:
            group.load_state_dict(saved[group.rank])
        seen: list[int] = []
        for _ in group.epochs(1):
            for number, (inputs, labels, numbers) in enumerate(shard, 1):
                seen += numbers.tolist()
                train(model, optimizer, [(inputs, labels)])
                if first and number == 3:
                    states[group.rank] = group.state_dict()
                    return seen
        return seen

    states: dict[int, dict[str, Any]] = {}
    before = inside(2, lambda *given: images(*given, first=True))
    saved = [states[0]] * 2
    after = inside(2, lambda *given: images(*given, first=False))
    return sorted(number for own in before + after for number in own), list(range(64))


@report("https://github.com/lhotse-speech/lhotse/pull/1277")
def lhotse_1277() -> tuple[Any, Any]:
    """Fewer samples than workers: duplicates fill the last batch."""
    return counted(2, 3, 4), [2, 2, 2]


@report("https://github.com/horovod/horovod/issues/2897")
def horovod_2897() -> tuple[Any, Any]:
    """An accuracy with ignored labels: workers count different numbers of them."""

    def loop(group: Group, model: nn.Module, optimizer: Any) -> float:
        right = counted_labels = 0
        with torch.no_grad():
            for (label,) in group.shard(DataLoader(TensorDataset(torch.arange(40)), 4)):
                used = label % 3 != group.rank % 2  # others on each worker
                counted_labels += int(used.sum())
                right += int((used & (label < 17)).sum())
        every = group.gather([right, counted_labels])
        mean = group.average(right / counted_labels, counted_labels)
        return abs(mean - sum(a for a, _ in every) / sum(b for _, b in every))

    return [each < 1e-12 for each in inside(2, loop)], [True, True]


@report("https://github.com/horovod/horovod/issues/1095")
def horovod_1095() -> tuple[Any, Any]:
    """Rank 0 alone knows the validation loss, and lowers its rate."""

    def loop(group: Group, model: nn.Module, optimizer: Any) -> None:
        shard = group.shard(DataLoader(points(24), 4))
        for _ in group.epochs(3):
            train(model, optimizer, shard)
            if group.leads:
                optimizer.param_groups[0]["lr"] *= 0.5

    return refused(lambda: inside(2, loop)), "one line"


def seen_around_a_stop(before: int, after: int) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Stop in the middle of the second of three epochs, and resume with another number of workers.

    Returns:
        The samples of each epoch before the stop and after it, and the epochs that were resumed.
    """
    states: list[dict[str, Any]] = []

    def images(group: Group, model: nn.Module, optimizer: Any, *, first: bool) -> list[tuple[int, int]]:
        x, y = points(60).tensors
        shard = group.shard(DataLoader(TensorDataset(x, y, torch.arange(60)), 3, shuffle=True))
        if not first:
            group.load_state_dict(states[0])
        seen: list[tuple[int, int]] = []
        for epoch in group.epochs(3):
            for number, (inputs, labels, numbers) in enumerate(shard, 1):
                seen += [(epoch, each) for each in numbers.tolist()]
                train(model, optimizer, [(inputs, labels)])
                if first and (epoch, number) == (1, 2):
                    state = group.state_dict()
                    states.extend([state] * group.leads)
                    return seen
        return seen

    once = inside(before, lambda *given: images(*given, first=True))
    again = inside(after, lambda *given: images(*given, first=False))
    of_epochs = [
        [sorted(number for own in part for epoch, number in own if epoch == which) for which in range(3)]
        for part in (once, again)
    ]
    return *of_epochs, sorted({epoch for own in again for epoch, _ in own})  # type: ignore[return-value]


@report("https://github.com/horovod/horovod/issues/3399")
def horovod_3399() -> tuple[Any, Any]:
    """After a worker has left in good order, the others see samples of the epoch again."""
    before, after, _ = seen_around_a_stop(3, 2)
    return [sorted(a + b) for a, b in zip(before, after, strict=True)], [list(range(60))] * 3


@report("https://github.com/horovod/horovod/issues/2844")
def horovod_2844() -> tuple[Any, Any]:
    """After workers were added, training resumes in the wrong epoch."""
    before, after, epochs = seen_around_a_stop(2, 3)
    return [sorted(before[1] + after[1]), epochs], [list(range(60)), [1, 2]]


@report("https://github.com/pytorch/ignite/issues/1242")
def ignite_1242() -> tuple[Any, Any]:
    """A metric where some processes have no batch at all."""

    def loop(group: Group, model: nn.Module, optimizer: Any) -> float:
        total = seen = 0
        with torch.no_grad():
            for (batch,) in group.shard(DataLoader(TensorDataset(torch.arange(2)), 2)):
                total += int(batch.sum())
                seen += len(batch)
        return group.average(total / max(1, seen), seen)

    return inside(3, loop), [0.5] * 3


@report("https://github.com/pytorch/ignite/pull/2120")
def ignite_2120() -> tuple[Any, Any]:
    """A loader whose sampler shares out already is shared out again, so that most samples are never seen."""

    def loop(group: Group, model: nn.Module, optimizer: Any) -> None:
        data = points(24)
        sampler = torch.utils.data.DistributedSampler(data, group.workers, group.rank)
        group.shard(DataLoader(data, 4, sampler=sampler))

    return refused(lambda: inside(2, loop)), "one line"


@report("https://github.com/pytorch/ignite/issues/1191")
def ignite_1191() -> tuple[Any, Any]:
    """A weighted sampler of a length that the workers do not divide."""

    def loop(group: Group, model: nn.Module, optimizer: Any) -> int:
        weights = torch.ones(50).index_fill(0, torch.arange(25), 2.0)
        sampler = torch.utils.data.WeightedRandomSampler(
            weights.tolist(), 50, generator=torch.Generator().manual_seed(0)
        )
        with torch.no_grad():
            shard = group.shard(DataLoader(TensorDataset(torch.arange(50)), 4, sampler=sampler))
            own = [int(each) for (batch,) in shard for each in batch]
        every = sorted(number for part in group.gather(own) for number in part)
        plain = torch.multinomial(weights.double(), 50, True, generator=torch.Generator().manual_seed(0))
        return int(every == sorted(plain.tolist()))

    return inside(8, loop), [1] * 8


class Numbers(IterableDataset[Any]):
    """A stream of numbers."""

    def __iter__(self) -> Any:
        return iter(range(26))


@report("https://github.com/huggingface/datasets/issues/5360")
def datasets_5360() -> tuple[Any, Any]:
    """Each worker iterates over the whole stream."""

    def loop(group: Group, model: nn.Module, optimizer: Any) -> list[int]:
        with torch.no_grad():
            own = [int(each) for batch in group.shard(DataLoader(Numbers(), 3)) for each in batch]
        return sorted(number for part in group.gather(own) for number in part)

    return inside(3, loop), [list(range(26))] * 3


def schedules(group: Group | None, model: nn.Module, optimizer: Any, state: Any, epochs: int) -> list[float]:
    """Train with a scheduler for so many epochs, from a state if there is one; return the rates."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    batches: Any = DataLoader(points(16), 4)
    if group is not None:
        batches = group.shard(DataLoader(points(16), 2))
        if state:
            group.load_state_dict(state, scheduler)
    rates = []
    for _ in range(epochs):
        train(model, optimizer, batches)
        scheduler.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
    if group is not None and not state:
        rates.append(group.state_dict(scheduler))  # type: ignore[arg-type]
    return rates


@report("https://github.com/pytorch/torchtitan/pull/4598")
def torchtitan_4598() -> tuple[Any, Any]:
    """After a restore the scheduler has the rate of the checkpoint, and the optimizer another."""
    plain = network()
    rates = schedules(None, plain, sgd(plain), None, 6)
    *first, state = inside(2, lambda *given: schedules(*given, None, 3))[0]
    then = inside(2, lambda *given: schedules(*given, state, 3))
    return [first + own == rates for own in then], [True, True]


@report("https://github.com/ray-project/ray/pull/61937")
def ray_61937() -> tuple[Any, Any]:
    """Options of param groups are restored as tensors, and the next step fails."""
    models = [network() for _ in range(2)]
    states: list[Any] = []

    def loop(group: Group) -> list[str]:
        own = models[group.rank]
        with group:
            model, optimizer = group.distribute(own, torch.optim.AdamW(own.parameters(), betas=(0.8, 0.9)))
            if states:
                group.load_state_dict(states[0])
            train(model, optimizer, group.shard(DataLoader(points(16), 4)))
            state = group.state_dict()
        if group.leads and not states:
            states.append(state)
        return [type(each).__name__ for each in optimizer.param_groups[0]["betas"]]

    run_in_threads("synchronous", 2, loop)
    models = [network() for _ in range(2)]
    return run_in_threads("synchronous", 2, loop), [["float", "float"]] * 2


@report("https://github.com/vllm-project/speculators/pull/759")
def speculators_759() -> tuple[Any, Any]:
    """One tensor stands under two names of a dict of metrics, and is reduced twice in place."""

    def loop(group: Group, model: nn.Module, optimizer: Any) -> list[float]:
        count = torch.tensor(float(group.rank + 1))
        metrics = {"full": count, "conditional": count}
        means = [group.average(value) for value in metrics.values()]
        return [*means, float(count)]

    return inside(2, loop), [[1.5, 1.5, 1.0], [1.5, 1.5, 2.0]]


def accumulated_otherwise(
    around: Callable[[int, Any], Any], only_backward: bool, divide: bool = True
) -> list[bool]:
    """Return whether two workers train as one process where gradients are accumulated over two passes."""

    def passes(group: Any, model: nn.Module, optimizer: Any, batches: Any) -> Tensor:
        for number, (x, y) in enumerate(batches):
            quiet = group.accumulate if group is not None else nullcontext
            with nullcontext() if only_backward else around(number, quiet):
                loss = nn.functional.cross_entropy(model(x), y) / (2 if divide else 1)
                with around(number, quiet) if only_backward else nullcontext():
                    loss.backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return flat(model)

    plain = network()
    expected = passes(None, plain, sgd(plain), DataLoader(points(32), 8))
    loops = inside(2, lambda group, *given: passes(group, *given, group.shard(DataLoader(points(32), 4))))
    return [close(each, expected) for each in loops]


@report("https://github.com/modelscope/FunASR/pull/3472")
def funasr_3472() -> tuple[Any, Any]:
    """Gradients are exchanged after the first of two passes, and not after the last."""
    found = accumulated_otherwise(
        lambda number, quiet: quiet() if number % 2 else nullcontext(), only_backward=False
    )
    return found, [True, True]


@report("https://github.com/karpathy/build-nanogpt/pull/30")
def build_nanogpt_30() -> tuple[Any, Any]:
    """Only the backward pass is inside of what puts the exchange off."""
    found = accumulated_otherwise(
        lambda number, quiet: nullcontext() if number % 2 else quiet(), only_backward=True
    )
    return found, [True, True]


@report("https://github.com/learning-at-home/hivemind/pull/220")
def hivemind_220() -> tuple[Any, Any]:
    """Updates are scaled by the number of accumulated passes, beside what the loop does itself."""
    found = accumulated_otherwise(
        lambda number, quiet: nullcontext() if number % 2 else quiet(), only_backward=False, divide=False
    )
    return found, [True, True]


@report("https://github.com/mosaicml/composer/issues/3725")
def composer_3725() -> tuple[Any, Any]:
    """Runs that are resumed several times diverge from one that was not interrupted."""

    def loop(group: Group, model: nn.Module, optimizer: Any, state: Any, stop: int) -> list[Any]:
        generator = torch.Generator().manual_seed(5)
        shard = group.shard(DataLoader(points(48), 3, shuffle=True, generator=generator))
        if state:
            group.load_state_dict(state)
        for epoch in group.epochs(3):
            for number, batch in enumerate(shard, 1):
                train(model, optimizer, [batch])
                if (epoch, number) == (stop, 2):
                    return [group.state_dict()]
        return flat(model).tolist()

    whole = inside(2, lambda *given: loop(*given, None, -1))
    state = None
    for stop in (0, 1, 2):  # a resumed epoch counts its batches from where it was
        state = inside(2, lambda *given, state=state, stop=stop: loop(*given, state, stop))[0][0]
    return inside(2, lambda *given: loop(*given, state, -1)) == whole, True


@report("https://github.com/pytorch/xla/issues/8396")
def xla_8396() -> tuple[Any, Any]:
    """Processes begin with weights of their own, which are not made equal."""
    models = []
    for seed in range(3):
        models.append(network())
        for each in models[-1].parameters():
            nn.init.normal_(each, generator=torch.Generator().manual_seed(seed))
    plain = network()
    plain.load_state_dict(models[0].state_dict())
    train(plain, sgd(plain), DataLoader(points(24), 12))

    def loop(group: Group) -> bool:
        with group:
            model, optimizer = group.distribute(models[group.rank], sgd(models[group.rank]))
            train(model, optimizer, group.shard(DataLoader(points(24), 4)))
        return close(flat(model), flat(plain))

    return run_in_threads("synchronous", 3, loop), [True] * 3


@report("https://github.com/meta-pytorch/torchrec/pull/1866")
def torchrec_1866() -> tuple[Any, Any]:
    """Parameters are drawn again after the model was wrapped, other ones in each process."""

    def loop(group: Group, model: nn.Module, optimizer: Any) -> list[float]:
        with torch.no_grad():
            for each in model.parameters():
                each.normal_(generator=torch.Generator().manual_seed(group.rank))
        train(model, optimizer, group.shard(DataLoader(points(16), 4)))
        return flat(model).tolist()

    first, second = inside(2, loop)
    return first == second, True


@report("https://github.com/davda54/sam/issues/78")
def sam_78() -> tuple[Any, Any]:
    """An optimizer of two steps, whose first moves the weights along each process's own gradient."""
    optimizers = import_module("unit.api.loop.test_own_optimizers")

    def steps(model: nn.Module, optimizer: Any, batches: Any) -> Tensor:
        for x, y in batches:
            for step in (optimizer.first_step, optimizer.second_step):
                nn.functional.cross_entropy(model(x), y).backward()
                step(zero_grad=True)
        return flat(model)

    plain = network()
    expected = steps(plain, optimizers.SAM(plain.parameters(), 0.1), DataLoader(points(32), 8))
    models = [network() for _ in range(2)]

    def loop(group: Group) -> bool:
        with group:
            own = models[group.rank]
            model, optimizer = group.distribute(own, optimizers.SAM(own.parameters(), 0.1))
            return close(steps(model, optimizer, group.shard(DataLoader(points(32), 4))), expected)

    return run_in_threads("synchronous", 2, loop), [True, True]


@report("https://github.com/facebookresearch/fairchem/pull/75")
def fairchem_75() -> tuple[Any, Any]:
    """Counts so far are reduced in every iteration, and grow exponentially."""

    def loop(group: Group, model: nn.Module, optimizer: Any) -> list[float]:
        total, means = torch.zeros(()), []
        for number in range(4):
            total += group.rank + number
            means.append(group.average(total))
        return means

    return inside(2, loop), [[0.5, 2.0, 4.5, 8.0]] * 2


def main() -> None:
    """Try every input, or those that are named, and write what each came to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(INPUTS)}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    chosen = parser.parse_args()
    if unknown := [name for name in chosen.names if name not in INPUTS]:
        parser.error(f"no such input: {', '.join(unknown)}")
    rows = []
    for name in chosen.names or INPUTS:
        found, right = INPUTS[name].run()
        rows.append({"input": name, "link": INPUTS[name].link, "right": found == right})
        print(
            f"{'right' if found == right else f'WRONG: {found}, not {right}':8} {name} {INPUTS[name].link}",
            flush=True,
        )
    if not chosen.names:
        text = json.dumps(rows, indent=2) + "\n"
        (chosen.out / "trackers.json").write_text(text, encoding="utf-8")
    sys.exit(not all(row["right"] for row in rows))


if __name__ == "__main__":
    main()
