"""All options of a run, each written once, in `RunConfig`: name, type, default, limits, description and help panel.

Recipes and the command line read them from there when they start. `scripts/generate_docs.py` writes them again as the
typed keyword arguments `RunOptions`, because a type checker cannot derive a TypedDict from a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field, field_validator

from polyrhythm.errors import RequestError, unknown

_DAY_S = 86_400
_MOST_PIXELS = 16_384
_MOST_WORKERS = 100_000
"""All workers of a simulation live in one process."""
FORMER_KEYS = {"deal": "batches"}
FORMER_ASSIGNMENTS = {"drawn": "dynamic", "fixed": "static"}
FORMER_PIXELS = {"centred": "centered"}
"""Options and values by their names of earlier versions, accepted until 0.2.0."""


def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with former names replaced by today's.

    Raises:
        RequestError: an option is given by both names.
    """
    for former, key in FORMER_KEYS.items():
        if values.get(former) is not None and values.get(key) is not None:
            raise RequestError(f"{former} is the former name of {key}: leave it out")
    return {FORMER_KEYS.get(key, key): value for key, value in values.items()}


def _panel(title: str) -> Callable[..., Any]:
    """Return pydantic's `Field` for options that `--help` shows in this panel."""
    return partial(Field, json_schema_extra={"panel": title})


_job = _panel("Job")
_learning = _panel("Learning")
_start = _panel("Fine-tuning")
_pictures = _panel("Images")
_speed = _panel("Speed")
_output = _panel("Output")
_faults = _panel("Failures")
_network = _panel("Network")


class RunConfig(BaseModel):
    """The configuration of a run. Every default is one that learns.

    `data` and `model` may be objects of the user's own in Python; everything else is text or a number.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, validate_default=True
    )

    data: Any = _job(
        default="fashion-mnist",
        description=(
            "Training data: a name (fashion-mnist, digits), a folder of images, a manifest (photos.csv) or "
            "tar shards."
        ),
    )
    model: Any = _job(
        default="lenet5",
        description="Network: mlp, lenet5, deep_image, or any classifier of torchvision and timm.",
    )
    strategy: Any = _job(
        default="synchronous",
        description="Training algorithm across workers; `polyrhythm strategies` lists all.",
    )
    compress: Any = _job(
        default=None,
        description=(
            "Compression of messages, where the strategy allows it, as top_k(density=0.01) (default: none)."
        ),
    )
    workers: int = _job(default=2, ge=1, le=_MOST_WORKERS, description="Number of workers.")
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
        description=(
            "Length of the run instead of epochs: steps of a synchronous run, batches of all workers of an "
            "asynchronous one."
        ),
    )
    until: str | None = _job(
        default=None,
        description="Test result that ends the run early: top1=0.9, top5=0.99 or loss=0.3.",
    )
    batch_size: int = _job(
        default=64,
        ge=1,
        le=10_000_000,
        description="Images per worker and step; with --accumulate, per pass.",
    )
    accumulate: int = _job(
        default=1,
        ge=1,
        le=100_000,
        description="Passes of --batch-size images with gradients accumulated for a step.",
    )
    drop_last: bool = _job(
        default=False,
        description=(
            "Drop the incomplete last batch of an epoch (default: batch sizes differ by at most one image "
            "instead)."
        ),
    )
    balance: Any = _job(
        default="auto",
        description=(
            "Per-worker shares of the global batch in synchronous training: off (equal), measured (by speed;"
            " measured(profile='FILE') starts from a cluster file), given(weights=[3, 1]), or auto: equal"
            " until measurements show that workers are uneven, then measured."
        ),
    )
    batches: Literal["auto", "dynamic", "static"] = _job(
        default="auto",
        description=(
            "Assignment of batches: dynamic (the next free worker gets the next batch), static (each worker has "
            "its own share), or auto: dynamic in asynchronous training."
        ),
    )
    label_skew: float | None = _job(
        default=None,
        gt=0,
        le=1_000_000,
        allow_inf_nan=False,
        description=(
            "Different classes for each worker, by a Dirichlet distribution of this concentration: 0.1 leaves a few "
            "classes to each, 100 nearly the same to all (default: all workers see all classes alike)."
        ),
    )
    clients: int | None = _job(
        default=None,
        ge=1,
        le=1_000_000,
        description=(
            "Number of clients with skewed labels; workers are a sample of them in each round (default: clients are "
            "the workers)."
        ),
    )
    seed: int = _job(default=0, ge=0, lt=2**63, description="Random seed of everything that is random.")

    optimizer: Any = _learning(
        default=None,
        description=(
            "Optimizer, as adam(lr=0.001) (default: sgd, with a learning rate and momentum that fit the "
            "strategy)."
        ),
    )
    clip_norm: float | None = _learning(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description=(
            "Bound of the total norm of all gradients of an update, as torch.nn.utils.clip_grad_norm_ (default: "
            "none)."
        ),
    )
    svrg: Literal["none", "own", "all"] = _learning(
        default="none",
        description=(
            "Variance reduction: correct each gradient by that of the same batch at an anchor, once per epoch, with a "
            "full gradient over the worker's own images (own: three times the computation) or over those of all "
            "workers (all: for asynchronous training)."
        ),
    )
    schedule: Any = _learning(
        default="cosine", description="Learning rate schedule, as cosine(warmup_epochs=1)."
    )
    batch_schedule: Any = _learning(
        default="constant",
        description=(
            "Batch size schedule, as step(at=[0.5, 0.75], growth=2); auto: growth with the gradient noise "
            "scale."
        ),
    )
    batch_norm: Any = _learning(
        default="plain",
        description=(
            "Batch normalization statistics: plain (per worker), ghost(size=32) (per slice of a batch), or "
            "synchronized (over all workers)."
        ),
    )
    loss: Any = _learning(
        default="cross_entropy",
        description=(
            "Loss function; bootstrapping and small_loss tolerate wrong labels, ensemble and oracle belong "
            "to treenet."
        ),
    )
    class_weights: Literal["none", "balanced"] = _learning(
        default="none",
        description="Class weights of the loss; balanced: rare classes count as much as frequent ones.",
    )
    label_smoothing: float = _learning(
        default=0.0, ge=0, lt=1, description="Share of every target that is spread over all classes."
    )
    weight_average: float = _learning(
        default=0.0, ge=0, lt=1, description="Decay of the exponential moving average of weights; 0: none."
    )
    teacher: str | None = _learning(
        default=None, description="Runs or weights to distill from, separated by ;."
    )
    temperature: float = _learning(
        default=4.0,
        gt=0,
        allow_inf_nan=False,
        description="Softmax temperature of distillation.",
    )
    teacher_share: float = _learning(
        default=0.7, ge=0, le=1, description="Share of the distillation loss in the total loss."
    )

    distill: str | None = _learning(
        default=None,
        description=(
            "With --strategy ensemble(members=4): network that is distilled from its members, as lenet5."
        ),
    )

    weights: str | None = _start(
        default=None,
        description=(
            "Initial weights: a file (safetensors or state dict), a run folder, or a pretrained model: "
            "efficientnet_lite0, torchvision(weights='…') or hub(repository='…')."
        ),
    )
    fine_tuning: Literal["auto", "none", "head", "staged"] = _start(
        default="auto",
        description=(
            "head: linear probe on features of the frozen backbone; staged: then unfreeze the backbone step "
            "by step while held-out accuracy gains; none: train all weights; auto: staged with pretrained "
            "weights and no other choice about learning, else none."
        ),
    )
    views: int | None = _start(
        default=None,
        ge=1,
        le=100,
        description=(
            "Augmented views of each training image for the linear probe, the plain one included (default: "
            "more for fewer images)."
        ),
    )
    freeze: str = _start(
        default="none",
        description="Frozen parameters: body (all but the head), norms, or names, as conv_stem,blocks.0.",
    )
    freeze_epochs: int | None = _start(
        default=None,
        ge=1,
        description="Epochs for which --freeze holds, before all but norms is trained (default: all).",
    )
    rate_decay: float = _start(
        default=1.0, gt=0, le=1, description="Learning rate of each stage over that of the stage after it."
    )

    augment: str = _pictures(default="none", description="Data augmentation, as crop(padding=2); flip.")
    image_size: int | None = _pictures(
        default=None,
        ge=1,
        le=_MOST_PIXELS,
        description="Height and width of images in pixels (default: those of the data, up to 224 for files).",
    )
    scale: int | None = _pictures(
        default=None,
        ge=1,
        le=_MOST_PIXELS,
        description=(
            "Height and width in pixels to which images are scaled before crops of --image-size: random in "
            "training, central in tests (default: no crops)."
        ),
    )
    size_schedule: str = _pictures(
        default="constant",
        description=(
            "Image size schedule in training, as progressive(sizes=[128, 160], until=[0.4, 0.7]); tests use "
            "--image-size."
        ),
    )
    pixels: Literal["imagenet", "centered"] | None = _pictures(
        default=None,
        description=(
            "Normalization of image files: imagenet, or centered, (x - 127) / 128 (default: as the weights "
            "need it, else imagenet)."
        ),
    )
    skip_unreadable: bool = _pictures(default=False, description="Skip images that cannot be read.")

    device: str = _speed(
        default="auto",
        description="cpu, cuda, or auto: GPUs if there are any; or one for each worker, as cuda,cpu,cpu.",
    )
    precision: str = _speed(
        default="auto", description="float32, bfloat16, float16, or auto: the fastest of the device."
    )
    threads: int | None = _speed(
        default=None,
        ge=1,
        le=1024,
        description="Compute threads of a worker (default: its share of the cores).",
    )
    cache: str = _speed(
        default="auto",
        description=(
            "Memory (of the GPU, if there is one) for decoded training images: none, a size as 4GB, or auto:"
            " half of the free memory."
        ),
    )
    decoded: str | None = _speed(
        default=None,
        description="Folder for decoded image files, reused by later runs (default: none).",
    )
    compile: bool = _speed(
        default=False,
        description="Compile the network with torch.compile: slower start, often faster steps.",
    )
    channels_last: bool = _speed(
        default=False,
        description="Store images in channels-last memory format, which is faster for many convolutions.",
    )
    activation_checkpointing: bool = _speed(
        default=False,
        description="Recompute the activations of each block in the backward pass: less memory, slower steps.",
    )

    evaluation: Literal["in_place", "async", "auto"] = _speed(
        default="in_place",
        description=(
            "Tests during a run: in_place (steps wait), async (a process of its own tests a copy of the model while "
            "steps continue), or auto: async where cores are free."
        ),
    )

    keep_checkpoints: int = _output(
        default=2, ge=0, description="Number of newest checkpoints to keep; 0: no checkpoints."
    )
    checkpoint_every: str = _output(
        default="1epoch",
        description="Interval between checkpoints: 100steps, 10min (s, h) or 1epoch.",
    )
    checkpoint_mirror: str | None = _output(
        default=None,
        description=(
            "Location for copies of the newest checkpoints, as s3://bucket/run (any of fsspec), from which --resume "
            "auto continues on another machine."
        ),
    )
    keep_best: bool = _output(
        default=False, description="Keep the checkpoint with the highest test accuracy, too."
    )
    timings: bool = _output(
        default=False,
        description="Measure the phases of every worker's steps: a table and trace.json.",
    )
    tensorboard: bool = _output(default=False, description="Write TensorBoard files into the run folder.")

    restarts: int = _faults(
        default=3,
        ge=0,
        description=(
            "Number of restarts: of each failed worker or server within an hour if the strategy continues without "
            "it, else of the whole run from its last checkpoint."
        ),
    )
    min_workers: int = _faults(
        default=1,
        ge=1,
        description=(
            "Number of workers below which the run ends with a checkpoint, once the restarts of the others are used up."
        ),
    )
    on_loss: Literal["keep_batch", "rescale"] = _faults(
        default="keep_batch",
        description=(
            "Failure of a synchronous worker: keep_batch (the others take over its share) or rescale (leave "
            "it out and rescale the learning rate)."
        ),
    )
    silence_s: float = _faults(
        default=3.0,
        gt=0,
        le=_DAY_S,
        description=(
            "Seconds without a message after which a rank is reported as unresponsive; after four times as "
            "long it counts as failed."
        ),
    )
    digest_every: int = _faults(
        default=100,
        ge=0,
        description=(
            "Steps between two comparisons of the workers' parameters and optimizer states, where they must be equal "
            "bit for bit; a worker that differs receives the state of the others. 0: none."
        ),
    )
    on_not_finite: Literal["end", "skip"] = _faults(
        default="end",
        description=(
            "Loss or gradient that is infinite or not a number: end (of the run) or skip (the worker takes no part in "
            "the step; if it is so on all, no worker makes an update)."
        ),
    )
    gather_s: float = _faults(
        default=1800.0,
        gt=0,
        le=365 * _DAY_S,
        description=(
            "Seconds for which ranks under torchrun wait for each other at the start; then the run ends and "
            "names the missing ones."
        ),
    )
    notice_s: float | None = _faults(
        default=None,
        gt=0,
        le=_DAY_S,
        description=(
            "Seconds between SIGTERM and the end of a preempted host, within which the run writes a "
            "checkpoint and exits with status 75."
        ),
    )

    listen: str | None = _network(
        default=None,
        description=(
            "HOST:PORT of this host, or a PORT of loopback, for workers that join (`polyrhythm join`); port "
            "0: any free one (default: no joining)."
        ),
    )
    token_file: str | None = _network(
        default=None,
        description=(
            "File of the run token that joining workers need (default: POLYRHYTHM_TOKEN in the environment, "
            "else a new file in the run folder)."
        ),
    )
    vacant: int = _network(
        default=0,
        ge=0,
        description="Number of the workers that join later; under torchrun in addition to its ranks.",
    )
    port: int = _network(
        default=0, ge=0, le=65535, description="Loopback port at which local ranks meet; 0: any free one."
    )

    @field_validator("batches", mode="before")
    @classmethod
    def _by_todays_name(cls, value: Any) -> Any:
        return FORMER_ASSIGNMENTS.get(value, value) if isinstance(value, str) else value

    @field_validator("pixels", mode="before")
    @classmethod
    def _in_todays_spelling(cls, value: Any) -> Any:
        return FORMER_PIXELS.get(value, value) if isinstance(value, str) else value

    @property
    def worker_batch(self) -> int:
        """Images in a gradient of a worker: those of all its passes."""
        return self.batch_size * self.accumulate


REAL_ONLY = ("port", "gather_s", "listen", "token_file", "vacant", "notice_s")
"""Options that need real processes: `simulate` refuses them."""


class NetworkOptions(TypedDict, total=False):
    """The network and the data it was trained on, where the weights do not record them."""

    data: Any
    model: Any


class ImageOptions(TypedDict, total=False):
    """Options of reading the test images of a trained network; see `RunOptions`."""

    image_size: int | None
    scale: int | None
    skip_unreadable: bool


class TrainedOptions(NetworkOptions, ImageOptions, total=False):
    """Options of opening a trained network and its test images."""


class ViewOptions(TypedDict, total=False):
    """The views of an image with averaged probabilities; see `Views`."""

    dense: bool
    ten_crop: bool
    flip: bool
    scales: Sequence[int]


class EvaluateOptions(ImageOptions, ViewOptions, total=False):
    """Options of `evaluate` other than its own arguments."""

    best: bool
    greedy: bool
    calibrate: bool


class PredictOptions(NetworkOptions, ViewOptions, total=False):
    """Options of `predict` other than its own arguments."""


# options: generated by scripts/generate_docs.py
class RunOptions(TypedDict, total=False):
    """Options of `train` and `simulate` other than their own arguments; see `RunConfig`."""

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
    batches: Literal["auto", "dynamic", "static"]
    label_skew: float | None
    clients: int | None
    seed: int
    optimizer: Any
    clip_norm: float | None
    svrg: Literal["none", "own", "all"]
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
    pixels: Literal["imagenet", "centered"] | None
    skip_unreadable: bool
    device: str
    precision: str
    threads: int | None
    cache: str
    decoded: str | None
    compile: bool
    channels_last: bool
    activation_checkpointing: bool
    evaluation: Literal["in_place", "async", "auto"]
    keep_checkpoints: int
    checkpoint_every: str
    checkpoint_mirror: str | None
    keep_best: bool
    timings: bool
    tensorboard: bool
    restarts: int
    min_workers: int
    on_loss: Literal["keep_batch", "rescale"]
    silence_s: float
    digest_every: int
    on_not_finite: Literal["end", "skip"]
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
                f"simulated ranks have no port, and workers cannot join them: leave --{name.replace('_', '-')} out"
            )
