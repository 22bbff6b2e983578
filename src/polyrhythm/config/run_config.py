"""All options of a run, each written once, in `RunConfig`: name, type, default, limits, description and help panel.

Recipes and the command line read them from there when they start. `scripts/generate_docs.py` writes them again as the
typed keyword arguments `RunOptions`, because a type checker cannot derive a TypedDict from a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field

from polyrhythm.errors import RequestError, unknown

_DAY_S = 86_400
_MOST_PIXELS = 16_384
_MOST_WORKERS = 100_000
"""All workers of a simulation live in one process."""


def _panel(title: str) -> Callable[..., Any]:
    """Return pydantic's `Field` for options that `--help` shows in this panel."""
    return partial(Field, json_schema_extra={"panel": title})


_job = _panel("The job")
_learning = _panel("Learning")
_start = _panel("Starting from other weights")
_pictures = _panel("Pictures")
_speed = _panel("Speed")
_output = _panel("What the run leaves")
_faults = _panel("When something dies")
_network = _panel("The network")


class RunConfig(BaseModel):
    """The configuration of a run. Every default is one that learns.

    `data` and `model` may be objects of the user's own in Python; everything else is text or a number.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, validate_default=True
    )

    data: Any = _job(
        default="fashion-mnist",
        description="A name (fashion-mnist, digits), a folder of images, a manifest (photos.csv) or tar shards.",
    )
    model: Any = _job(
        default="lenet5", description="A network: mlp, lenet5, deep_image, or any of torchvision and timm."
    )
    strategy: Any = _job(
        default="synchronous", description="How workers share the work; see `polyrhythm strategies`."
    )
    compress: Any = _job(
        default=None,
        description="What shrinks what ranks send, where the strategy allows it: top_k(density=0.01), power_sgd, qsgd "
        "(default: nothing).",
    )
    workers: int = _job(default=2, ge=1, le=_MOST_WORKERS, description="How many workers train.")
    epochs: int | None = _job(
        default=None,
        ge=1,
        le=1_000_000,
        description="Passes over the training images (default: the data's own).",
    )
    updates: int | None = _job(
        default=None,
        ge=1,
        le=1_000_000_000,
        description="How long the whole run is, in place of epochs: steps where workers go in step, batches of all of "
        "them elsewhere.",
    )
    until: str | None = _job(
        default=None,
        description="A test result that ends training before its last epoch: top1=0.9, top5=0.99 or loss=0.3.",
    )
    batch_size: int = _job(
        default=64,
        ge=1,
        le=10_000_000,
        description="Images in a worker's batch; with accumulate, in each of its passes.",
    )
    accumulate: int = _job(
        default=1,
        ge=1,
        le=100_000,
        description="Passes of batch-size images whose gradients a worker adds up for a step.",
    )
    drop_last: bool = _job(
        default=False,
        description="Leave out the images of an epoch that make no full step, so that all batches are full (default: "
        "they are spread, and batches differ by at most one image).",
    )
    balance: Any = _job(
        default="auto",
        description="Parts of a global batch where workers go in step: off (equal), measured (by speed; "
        "measured(profile='FILE') begins as a cluster file says), given(weights=[3, 1]), or auto: measured if an epoch "
        "shows that workers are uneven by more than a tenth.",
    )
    deal: Literal["auto", "drawn", "fixed"] = _job(
        default="auto",
        description="How batches come to workers: drawn by whoever is free, or a fixed share of every epoch for each "
        "(auto: drawn where workers go at their own pace).",
    )
    seed: int = _job(default=0, ge=0, lt=2**63, description="Fixes everything that can be fixed.")

    optimizer: Any = _learning(
        default=None,
        description="For example adam(lr=0.001) (default: sgd, with a rate and a momentum that fit the strategy).",
    )
    schedule: Any = _learning(
        default="cosine", description="How the learning rate changes, for example cosine(warmup_epochs=1)."
    )
    batch_schedule: Any = _learning(
        default="constant",
        description="How the batch size changes, for example step(at=[0.5, 0.75], growth=2); auto: it grows with the "
        "gradient noise scale.",
    )
    batch_norm: Any = _learning(
        default="plain",
        description="Of which pictures batch normalisation takes its statistics in training: plain (a worker's batch, "
        "or a pass of it), ghost(size=32), slices of so many, or synchronised, all workers' batches.",
    )
    loss: Any = _learning(
        default="cross_entropy",
        description="What is minimised: cross_entropy; bootstrapping or small_loss for wrong labels; ensemble or "
        "oracle for a treenet.",
    )
    class_weights: Literal["none", "balanced"] = _learning(
        default="none", description="balanced: rare classes count as much as frequent ones."
    )
    label_smoothing: float = _learning(
        default=0.0, ge=0, lt=1, description="Share of every target spread over all classes."
    )
    weight_average: float = _learning(
        default=0.0, ge=0, lt=1, description="Decay of the moving average of weights; 0: none."
    )
    teacher: str | None = _learning(
        default=None, description="Runs or weights to learn from besides the labels, with ; between."
    )
    temperature: float = _learning(
        default=4.0,
        gt=0,
        allow_inf_nan=False,
        description="Temperature of the teachers' and the student's softmax.",
    )
    teacher_share: float = _learning(
        default=0.7, ge=0, le=1, description="Share of the loss that is the teachers'."
    )

    distill: str | None = _learning(
        default=None,
        description="With --strategy ensemble(members=4): the network that learns from its members in a last stage, "
        "such as lenet5.",
    )

    weights: str | None = _start(
        default=None,
        description="A file (safetensors or state dict), a run folder, or what others trained to start from: "
        "efficientnet_lite0, torchvision(weights='…') or hub(repository='…').",
    )
    fine_tuning: Literal["auto", "none", "head", "staged"] = _start(
        default="auto",
        description="head: fit the last layer on kept features of the frozen body; staged: then train more and more "
        "of the body, as long as held-out pictures gain; none: train as from scratch (default: staged with weights "
        "of others and no choice about learning, else none).",
    )
    views: int | None = _start(
        default=None,
        ge=1,
        le=100,
        description="Views of each training picture that the head is fitted on, the plain one and others by the "
        "augmentation (default: more for fewer pictures).",
    )
    freeze: str = _start(
        default="none",
        description="Parts that are not trained: body (all but the head), norms, or names, as conv_stem,blocks.0.",
    )
    freeze_epochs: int | None = _start(
        default=None,
        ge=1,
        description="Epochs for which they are frozen, before all but norms is trained (default: all).",
    )
    rate_decay: float = _start(
        default=1.0, gt=0, le=1, description="Each stage's learning rate over that of the stage after it."
    )

    augment: str = _pictures(
        default="none", description="Random changes of training images, for example crop(padding=2); flip."
    )
    image_size: int | None = _pictures(
        default=None,
        ge=1,
        le=_MOST_PIXELS,
        description="Pixels a side (default: as the data are; folders 224).",
    )
    scale: int | None = _pictures(
        default=None,
        ge=1,
        le=_MOST_PIXELS,
        description="Pixels a side that pictures are scaled to, for windows of the image size to be cut out of: at "
        "random in training, in the middle for tests (default: no windows).",
    )
    size_schedule: str = _pictures(
        default="constant",
        description="How large training pictures are, for example progressive(sizes=[128, 160], until=[0.4, 0.7]); "
        "tests see the image size.",
    )
    pixels: Literal["imagenet", "centred"] | None = _pictures(
        default=None,
        description="How image files are normalised: imagenet, or centred, (x - 127) / 128 (default: as the weights "
        "want it, else imagenet).",
    )
    skip_unreadable: bool = _pictures(default=False, description="Leave out images that cannot be read.")

    device: str = _speed(
        default="auto",
        description="cpu, cuda, or auto: GPUs where there are some; or one for each worker, as in cuda,cpu,cpu.",
    )
    precision: str = _speed(
        default="auto", description="float32, bfloat16, float16, or auto: the fastest the device has."
    )
    threads: int | None = _speed(
        default=None,
        ge=1,
        le=1024,
        description="Compute threads of a worker (default: its share of the cores).",
    )
    cache: str = _speed(
        default="auto",
        description="Memory (of the GPU, if there is one) for decoded training images: none, a size as 4GB, or auto: "
        "half of what is free.",
    )
    decoded: str | None = _speed(
        default=None,
        description="A folder where decoded image files are kept for this run and later ones (default: they are not).",
    )
    compile: bool = _speed(
        default=False,
        description="Send full batches through torch.compile: slower to start, then often faster.",
    )
    channels_last: bool = _speed(
        default=False,
        description="Hold pictures with their channels innermost in memory, on which many convolutions are faster.",
    )

    keep_checkpoints: int = _output(
        default=2, ge=0, description="How many of the newest checkpoints stay; 0 writes none."
    )
    keep_best: bool = _output(
        default=False, description="Keep the checkpoint of the highest test accuracy besides the newest."
    )
    timings: bool = _output(
        default=False,
        description="Tell where the time of every worker's steps goes, as a table and in trace.json.",
    )
    tensorboard: bool = _output(default=False, description="Write TensorBoard files into the run folder.")

    restarts: int = _faults(
        default=3,
        ge=0,
        description="How many lost workers and servers are started again, where the strategy goes on without them; and "
        "how often the whole run, from its last checkpoint, where it does not.",
    )
    min_workers: int = _faults(
        default=1, ge=1, description="With fewer left, and no restarts, the run ends with a checkpoint."
    )
    on_loss: Literal["keep_batch", "rescale"] = _faults(
        default="keep_batch",
        description="When a worker that goes in step with others is lost: they share its part of a step, or leave it "
        "out and rescale the learning rate.",
    )
    silence_s: float = _faults(
        default=3.0,
        gt=0,
        le=_DAY_S,
        description="Seconds that a rank may be silent at least before the watchdog speaks; after four times as "
        "long it is taken for lost.",
    )
    gather_s: float = _faults(
        default=1800.0,
        gt=0,
        le=365 * _DAY_S,
        description="Seconds for which ranks that torchrun has started wait for each other at the start; then the run "
        "ends, and says who never came.",
    )
    notice_s: float | None = _faults(
        default=None,
        gt=0,
        le=_DAY_S,
        description="Seconds between SIGTERM and the end of a host that is preempted: the run writes a checkpoint "
        "within them, and leaves with status 75.",
    )

    listen: str | None = _network(
        default=None,
        description="HOST:PORT of this host, or a PORT of loopback, where others may join (`polyrhythm join`); port 0 "
        "takes a free one (default: nobody can).",
    )
    token_file: str | None = _network(
        default=None,
        description="The file of the run token that they must know (default: POLYRHYTHM_TOKEN in the environment, else "
        "a new one in the run folder).",
    )
    vacant: int = _network(
        default=0,
        ge=0,
        description="How many of the workers' places are left to those who join; under torchrun they come on top.",
    )
    port: int = _network(
        default=0, ge=0, le=65535, description="Where local ranks meet, on loopback; 0 takes a free one."
    )

    @property
    def worker_batch(self) -> int:
        """Images of which a worker makes a gradient: those of all its passes."""
        return self.batch_size * self.accumulate


REAL_ONLY = ("port", "gather_s", "listen", "token_file", "vacant", "notice_s")
"""Options that need real processes: `simulate` refuses them."""


class NetworkOptions(TypedDict, total=False):
    """The network and the data it was trained on, where the weights do not record them."""

    data: Any
    model: Any


class PictureOptions(TypedDict, total=False):
    """How the test pictures of a trained network are read; as in `RunOptions`."""

    image_size: int | None
    scale: int | None
    skip_unreadable: bool


class TrainedOptions(NetworkOptions, PictureOptions, total=False):
    """How a trained network and its test pictures are opened."""


class ViewOptions(TypedDict, total=False):
    """The views of a picture whose probabilities are averaged; see `Views`."""

    dense: bool
    ten_crop: bool
    flip: bool
    scales: Sequence[int]


class EvaluateOptions(PictureOptions, ViewOptions, total=False):
    """Options of `evaluate` besides its own arguments."""

    best: bool
    greedy: bool
    calibrate: bool


class PredictOptions(NetworkOptions, ViewOptions, total=False):
    """Options of `predict` besides its own arguments."""


# options: generated by scripts/generate_docs.py
class RunOptions(TypedDict, total=False):
    """What `train` and `simulate` take besides their own arguments; see `RunConfig`."""

    data: Any
    model: Any
    strategy: Any
    compress: Any
    workers: int
    epochs: int | None
    updates: int | None
    until: str | None
    batch_size: int
    accumulate: int
    drop_last: bool
    balance: Any
    deal: Literal["auto", "drawn", "fixed"]
    seed: int
    optimizer: Any
    schedule: Any
    batch_schedule: Any
    batch_norm: Any
    loss: Any
    class_weights: Literal["none", "balanced"]
    label_smoothing: float
    weight_average: float
    teacher: str | None
    temperature: float
    teacher_share: float
    distill: str | None
    weights: str | None
    fine_tuning: Literal["auto", "none", "head", "staged"]
    views: int | None
    freeze: str
    freeze_epochs: int | None
    rate_decay: float
    augment: str
    image_size: int | None
    scale: int | None
    size_schedule: str
    pixels: Literal["imagenet", "centred"] | None
    skip_unreadable: bool
    device: str
    precision: str
    threads: int | None
    cache: str
    decoded: str | None
    compile: bool
    channels_last: bool
    keep_checkpoints: int
    keep_best: bool
    timings: bool
    tensorboard: bool
    restarts: int
    min_workers: int
    on_loss: Literal["keep_batch", "rescale"]
    silence_s: float
    gather_s: float
    notice_s: float | None
    listen: str | None
    token_file: str | None
    vacant: int
    port: int


# /options


def refuse_unknown(options: Iterable[str], known: type) -> None:
    """Refuse options that are no key of `known` in the same words as `RunConfig` does."""
    names = known.__annotations__
    for name in options:
        if name not in names:
            raise unknown("option", name, names)


def refuse_real_only(options: Iterable[str]) -> None:
    """Refuse options of `REAL_ONLY` in a simulation."""
    for name in options:
        if name in REAL_ONLY:
            raise RequestError(
                f"simulated ranks meet at no port, and nobody joins them: leave --{name.replace('_', '-')} out"
            )
