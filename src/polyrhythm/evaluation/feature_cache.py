"""Features of images under a frozen backbone, computed once by several processes and kept on disk.

    view 0      the image as in a test
    view v      its v-th augmentation: what an epoch v of training would show

They are float32, (views, n, D), in the user's cache, keyed by the body's weights, the images (paths, sizes and times
of files, otherwise their pixels), their size, the augmentation and the seed. The oldest go when all take over 4 GB.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from polyrhythm.data.cached_split import CachedSplit
from polyrhythm.data.dataset import Part, read_readable
from polyrhythm.data.decoded_files import DecodedFiles, files_digest
from polyrhythm.data.image_files import ImageFileSplit
from polyrhythm.data.resized import ResizedSplit, Uncut, WindowSplit
from polyrhythm.data.seeding import sample_keys
from polyrhythm.data.user_cache import cache_folder
from polyrhythm.errors import PolyrhythmError, RequestError, RunError
from polyrhythm.evaluation.start_methods import context_of
from polyrhythm.models.features import feature_function, head_layer
from polyrhythm.models.fine_tuning import head_of

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

    from polyrhythm.data.dataset import Split

_FORMAT = 1
_BATCH = 32
_MOST_BYTES = 4 << 30
_TRIES = 3
_LOOK_EVERY_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Request:
    """Request to compute features.

    Attributes:
        make_model: function that makes the network, on the CPU, with its weights.
        split: the images.
        image_shape: (C, H, W).
        views: views of each image, the plain one included.
        transform: transformation that makes the others.
        seed: seed of the run.
        device: device of the network.
    """

    make_model: Callable[[], nn.Module]
    split: Split
    image_shape: tuple[int, int, int]
    views: int
    transform: Callable[[Tensor, Tensor], Tensor] | None
    seed: int
    device: torch.device


def compute(
    request: Request,
    processes: int,
    *,
    start_method: str = "spawn",
    notify: Callable[[float], None] = lambda share: None,
) -> Tensor:
    """Return the features, (views, n, D) float32; read from disk if they are cached.

    Features of images that cannot be read, and may be left out, are NaN.

    Args:
        request: features to compute.
        processes: processes that share the images and the cores. One that dies is started again, twice at most.
        start_method: start method of these processes: `fork` or `spawn`.
        notify: callback with the completed share, at intervals.

    Raises:
        RequestError: the network has no linear head, or an image cannot be read.
        RunError: a process died three times, or the disk is full.
    """
    with torch.random.fork_rng(devices=[]):
        model = request.make_model()
    folder = cache_folder() / "features"
    path = folder / f"{_key(request, model)}.npy"
    shape = (request.views, len(request.split), head_layer(model).in_features)
    with suppress(OSError, ValueError):
        found = np.load(path)
        if found.shape == shape:
            os.utime(path)
            return torch.from_numpy(found)
    part = folder / f".{path.name}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        rows = np.lib.format.open_memmap(part, mode="w+", dtype=np.float32, shape=shape)
        del rows
        _compute_in(request, part, min(processes, shape[1]), context_of(start_method), notify)
        values = np.load(part)
        part.replace(path)
        _prune(folder, path)
    except OSError as error:
        raise RunError(f"features cannot be kept in {folder}: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)
    return torch.from_numpy(values)


def _compute_in(
    request: Request, path: Path, processes: int, context: BaseContext, notify: Callable[[float], None]
) -> None:
    count = len(request.split)
    edges = [count * number // processes for number in range(processes + 1)]
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    jobs = {
        number: Child(context, _fill, (request, path, *edges[number : number + 2], threads), counts=True)
        for number in range(processes)
    }
    tries = dict.fromkeys(jobs, 1)
    try:
        while not all(job.done for job in jobs.values()):
            for number, job in jobs.items():
                if job.wait(_LOOK_EVERY_S / processes) or job.alive:
                    continue
                if tries[number] == _TRIES:
                    raise RunError(
                        f"a process that computes features died {_TRIES} times (status {job.status})"
                    )
                tries[number] += 1
                jobs[number] = Child(context, job.function, job.arguments, counts=True)
            notify(sum(job.counted for job in jobs.values()) / (count * request.views))
    finally:
        for job in jobs.values():
            job.end()


def _fill(request: Request, path: Path, first: int, last: int, threads: int, count: Any) -> None:
    """Compute the features of images `first` to `last` into the array at `path`."""
    torch.set_num_threads(threads)
    torch.manual_seed(request.seed)
    model = request.make_model().eval()
    features = feature_function(model, request.image_shape)
    model.to(request.device)
    rows = np.load(path, mmap_mode="r+")
    for indices in torch.arange(first, last).split(_BATCH):
        for view in range(request.views):
            readable, images = read_readable(lambda some, view=view: view_of(request, some, view), indices)  # type: ignore[misc]
            rows[view, first : first + len(indices)] = np.nan
            rows[view, readable.numpy()] = features(images.to(request.device)).cpu().numpy()
            count.value += len(indices)
        first += len(indices)
    rows.flush()


def view_of(request: Request, indices: Tensor, view: int) -> Tensor:
    """Return a view of images, (B, C, H, W)."""
    split = request.split
    if view == 0 or request.transform is None:
        return split.images(indices)
    images = split.uncut(indices) if isinstance(split, Uncut) else split.images(indices)
    return request.transform(images, sample_keys("transform", request.seed, view, indices))


class Child:
    """A process that calls a function, and its result.

    Args:
        context: context of the start method.
        function: function called with the arguments; and, if it `counts`, a shared number that it may raise.
        arguments: arguments of the function.
        counts: whether it counts.
    """

    def __init__(
        self,
        context: BaseContext,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        *,
        counts: bool = False,
    ) -> None:
        self.function, self.arguments = function, arguments
        self._connection, far = context.Pipe()
        self._count = context.RawValue("q", 0)
        passed = (*arguments, self._count) if counts else arguments
        self._process = context.Process(target=_called, args=(far, function, passed), daemon=True)  # type: ignore[attr-defined]
        self._process.start()
        far.close()
        self.done = False
        self.result: Any = None

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return bool(self._process.is_alive())

    @property
    def status(self) -> int | None:
        """Its exit status; negative for a signal."""
        return self._process.exitcode  # type: ignore[no-any-return]

    @property
    def counted(self) -> int:
        """Value of the counter."""
        return int(self._count.value)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the result; return whether it has arrived. An error of the function is raised here."""
        if self.done:
            return True
        if not self._connection.poll(seconds):
            return False
        try:
            kind, value = self._connection.recv()
            self._connection.send("received")
        except EOFError:
            self._process.join()
            return False
        if kind == "error":
            raise value
        self.result, self.done = value, True
        return True

    def end(self) -> None:
        """End the process if it is still there."""
        if self.alive and not self.done:
            self._process.terminate()
        self._process.join()
        self._connection.close()


def call_in_process(start_method: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process of its own, so that this one has computed on no threads and can be forked.

    Raises:
        RunError: the process died.
    """
    child = Child(context_of(start_method), function, arguments)
    try:
        if not child.wait(None):
            raise RunError(f"a process of this run died (status {child.status})")
        return child.result
    finally:
        child.end()


def _called(connection: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        answer = ("result", function(*arguments))
    except PolyrhythmError as error:
        answer = ("error", error)
    except KeyboardInterrupt:
        return
    connection.send(answer)
    with suppress(EOFError, OSError):  # tensors are shared memory, which goes when this process ends
        connection.recv()


def measure(
    make_model: Callable[[], nn.Module], image_shape: tuple[int, int, int], batch: int, device: str
) -> Any:
    """Return the seconds an image of a forward pass, and of a training step, by one batch each.

    On a CPU one thread is measured, and all cores are taken to be that much faster: processes share the images.
    """
    place = torch.device(device)
    cores = len(os.sched_getaffinity(0)) if place.type == "cpu" else 1
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_model().to(place)
    images = torch.randn(batch, *image_shape, device=place)

    def seconds(act: Callable[[], object]) -> float:
        spent = []
        for _ in range(2):  # the first allocates memory and chooses algorithms
            start = monotonic()
            act()
            if place.type == "cuda":
                torch.cuda.synchronize(place)
            spent.append((monotonic() - start) / batch / cores)
        return min(spent)

    model.eval()
    with torch.no_grad():
        forward_s = seconds(lambda: model(images))
    model.train()
    step_s = seconds(lambda: model(images).float().logsumexp(-1).sum().backward())
    return forward_s, step_s


def _key(request: Request, model: nn.Module) -> str:
    """Return the name of the file, for the network that `make_model` made."""
    digest = sha256(repr((_FORMAT, type(model).__qualname__, request.image_shape, request.views)).encode())
    if request.views > 1:
        digest.update(repr((str(request.transform), request.seed)).encode())
    head = f"{head_of(model)}."
    for name, tensor in model.state_dict().items():
        if not name.startswith(head):
            digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return f"{digest.hexdigest()[:24]}-{_identity(request.split)[:24]}"


def _identity(split: Any) -> str:
    """Return a hash of a split's images: of its files' paths, sizes and times, otherwise of its pixels."""
    match split:
        case ImageFileSplit():
            return files_digest(split)
        case DecodedFiles():
            return files_digest(split.source)
        case CachedSplit():
            return _identity(split.source)
        case WindowSplit() | ResizedSplit():
            return sha256(f"{split.size} {_identity(split.larger)}".encode()).hexdigest()
        case Part():
            return sha256(_identity(split.whole_split).encode() + split.indices.numpy().tobytes()).hexdigest()
    digest = sha256()
    for indices in torch.arange(len(split)).split(256):
        digest.update(split.images(indices).contiguous().numpy().tobytes())
    return digest.hexdigest()


def _prune(folder: Path, newest: Path) -> None:
    files = sorted(folder.glob("*.npy"), key=lambda file: file.stat().st_mtime, reverse=True)
    total = newest.stat().st_size
    for file in files:
        if file == newest:
            continue
        total += file.stat().st_size
        if total > _MOST_BYTES:
            file.unlink(missing_ok=True)


def refuse_without_linear_head(model: nn.Module, image_shape: tuple[int, int, int]) -> None:
    """Raise `RequestError` for a network that does not end in a fully connected layer."""
    try:
        feature_function(model.eval(), image_shape)
    except RequestError as error:
        raise RequestError(f"fine_tuning takes a network with a linear head: {error}") from None
