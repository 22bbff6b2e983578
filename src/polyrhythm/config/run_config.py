"""Everything that a run can be told, with the default of each: a recipe's keys and the command line's options.

The same options as typed keyword arguments (`RunOptions` and its like), so that an editor shows them and mypy
checks them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field

from polyrhythm.errors import RequestError, unknown

_DAY_S = 86_400
_MOST_PIXELS = 16_384
_MOST_WORKERS = 100_000
"""All workers of a simulation live in one process."""


class RunConfig(BaseModel):
    """The configuration of a run. Every default is one that learns.

    `data` and `model` may be objects of the user's own in Python; everything else is text or a number.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, validate_default=True
    )

    data: Any = Field(
        default="fashion-mnist",
        description="A name (fashion-mnist, digits), a folder of images, a manifest (photos.csv) or tar shards.",
    )
    model: Any = Field(
        default="lenet5", description="A network: mlp, lenet5, deep_image, or any of torchvision and timm."
    )
    strategy: Any = Field(
        default="synchronous", description="How workers share the work; see `polyrhythm strategies`."
    )
    workers: int = Field(default=2, ge=1, le=_MOST_WORKERS, description="How many workers train.")
    min_workers: int = Field(
        default=1, ge=1, description="With fewer left, and no restarts, the run ends with a checkpoint."
    )
    restarts: int = Field(
        default=3,
        ge=0,
        description="How many lost workers and servers are started again, where the strategy goes on without them; and "
        "how often the whole run, from its last checkpoint, where it does not.",
    )
    silence_s: float = Field(
        default=3.0,
        gt=0,
        le=_DAY_S,
        description="Seconds that a rank may be silent at least before the watchdog speaks; after four times as "
        "long it is taken for lost.",
    )
    gather_s: float = Field(
        default=1800.0,
        gt=0,
        le=365 * _DAY_S,
        description="Seconds for which ranks that torchrun has started wait for each other at the start; then the run "
        "ends, and says who never came.",
    )
    on_loss: Literal["keep_batch", "rescale"] = Field(
        default="keep_batch",
        description="When a worker that goes in step with others is lost: they share its part of a step, or leave it "
        "out and rescale the learning rate.",
    )
    epochs: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Passes over the training images (default: the data's own).",
    )
    batch_size: int = Field(default=64, ge=1, le=10_000_000, description="Images in a worker's batch.")
    optimizer: Any = Field(
        default=None,
        description="For example adam(lr=0.001) (default: sgd, with a rate that fits the strategy).",
    )
    schedule: Any = Field(
        default="cosine", description="How the learning rate changes, for example cosine(warmup_epochs=1)."
    )
    batch_schedule: Any = Field(
        default="constant",
        description="How the batch size changes, for example step(at=[0.5, 0.75], growth=2).",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Fixes everything that can be fixed.")
    weights: str | None = Field(
        default=None,
        description="A file (safetensors or state dict), a run folder, or what others trained to start from: "
        "efficientnet_lite0, torchvision(weights='…') or hub(repository='…').",
    )
    freeze: str = Field(
        default="none",
        description="Parts that are not trained: body (all but the head), norms, or names, as conv_stem,blocks.0.",
    )
    freeze_epochs: int | None = Field(
        default=None,
        ge=1,
        description="Epochs for which they are frozen, before all but norms is trained (default: all).",
    )
    rate_decay: float = Field(
        default=1.0, gt=0, le=1, description="Each stage's learning rate over that of the stage after it."
    )
    augment: str = Field(
        default="none", description="Random changes of training images, for example crop(padding=2); flip."
    )
    image_size: int | None = Field(
        default=None,
        ge=1,
        le=_MOST_PIXELS,
        description="Pixels a side (default: as the data are; folders 224).",
    )
    scale: int | None = Field(
        default=None,
        ge=1,
        le=_MOST_PIXELS,
        description="Pixels a side that pictures are scaled to, for windows of the image size to be cut out of: at "
        "random in training, in the middle for tests (default: no windows).",
    )
    size_schedule: str = Field(
        default="constant",
        description="How large training pictures are, for example progressive(sizes=[128, 160], until=[0.4, 0.7]); "
        "tests see the image size.",
    )
    loss: Any = Field(
        default="cross_entropy",
        description="What is minimised: cross_entropy; bootstrapping or small_loss for wrong labels; ensemble or "
        "oracle for a treenet.",
    )
    class_weights: Literal["none", "balanced"] = Field(
        default="none", description="balanced: rare classes count as much as frequent ones."
    )
    teacher: str | None = Field(
        default=None, description="Runs or weights to learn from besides the labels, with ; between."
    )
    temperature: float = Field(
        default=4.0,
        gt=0,
        allow_inf_nan=False,
        description="Temperature of the teachers' and the student's softmax.",
    )
    teacher_share: float = Field(
        default=0.7, ge=0, le=1, description="Share of the loss that is the teachers'."
    )
    pixels: Literal["imagenet", "centred"] | None = Field(
        default=None,
        description="How image files are normalised: imagenet, or centred, (x - 127) / 128 (default: as the weights "
        "want it, else imagenet).",
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=1, description="Share of every target spread over all classes."
    )
    weight_average: float = Field(
        default=0.0, ge=0, lt=1, description="Decay of the moving average of weights; 0: none."
    )
    precision: str = Field(
        default="auto", description="float32, bfloat16, float16, or auto: the fastest the device has."
    )
    device: str = Field(default="auto", description="cpu, cuda, or auto: GPUs where there are some.")
    cache: str = Field(
        default="auto",
        description="Memory (of the GPU, if there is one) for decoded training images: none, a size as 4GB, or auto: "
        "half of what is free.",
    )
    decoded: str | None = Field(
        default=None,
        description="A folder where decoded image files are kept for this run and later ones (default: they are not).",
    )
    compile: bool = Field(
        default=False,
        description="Send full batches through torch.compile: slower to start, then often faster.",
    )
    channels_last: bool = Field(
        default=False,
        description="Hold pictures with their channels innermost in memory, on which many convolutions are faster.",
    )
    keep_checkpoints: int = Field(
        default=2, ge=0, description="How many of the newest checkpoints stay; 0 writes none."
    )
    keep_best: bool = Field(
        default=False, description="Keep the checkpoint of the highest test accuracy besides the newest."
    )
    skip_unreadable: bool = Field(default=False, description="Leave out images that cannot be read.")
    timings: bool = Field(
        default=False,
        description="Tell where the time of every worker's steps goes, as a table and in trace.json.",
    )
    tensorboard: bool = Field(default=False, description="Write TensorBoard files into the run folder.")
    threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Compute threads of a worker (default: its share of the cores).",
    )
    port: int = Field(
        default=0, ge=0, le=65535, description="Where local ranks meet, on loopback; 0 takes a free one."
    )
    listen: str | None = Field(
        default=None,
        description="HOST:PORT of this host, or a PORT of loopback, where others may join (`polyrhythm join`); port 0 "
        "takes a free one (default: nobody can).",
    )
    token_file: str | None = Field(
        default=None,
        description="The file of the run token that they must know (default: POLYRHYTHM_TOKEN in the environment, else "
        "a new one in the run folder).",
    )
    vacant: int = Field(
        default=0,
        ge=0,
        description="How many of the workers' places are left to those who join; under torchrun they come on top.",
    )
    notice_s: float | None = Field(
        default=None,
        gt=0,
        le=_DAY_S,
        description="Seconds between SIGTERM and the end of a host that is preempted: the run writes a checkpoint "
        "within them, and leaves with status 75.",
    )


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


class EvaluateOptions(PictureOptions, total=False):
    """Options of `evaluate` besides its own arguments; see `Views` for the first four."""

    dense: bool
    ten_crop: bool
    flip: bool
    scales: Sequence[int]
    best: bool
    greedy: bool


class RunOptions(TypedDict, total=False):
    """What `train` and `simulate` take besides their own arguments; `RunConfig` has what each means and its default."""

    data: Any
    model: Any
    strategy: Any
    workers: int
    min_workers: int
    restarts: int
    silence_s: float
    gather_s: float
    on_loss: Literal["keep_batch", "rescale"]
    epochs: int | None
    batch_size: int
    optimizer: Any
    schedule: Any
    batch_schedule: Any
    seed: int
    weights: str | None
    freeze: str
    freeze_epochs: int | None
    rate_decay: float
    augment: str
    image_size: int | None
    scale: int | None
    size_schedule: str
    loss: Any
    class_weights: Literal["none", "balanced"]
    teacher: str | None
    temperature: float
    teacher_share: float
    pixels: Literal["imagenet", "centred"] | None
    label_smoothing: float
    weight_average: float
    precision: str
    device: str
    cache: str
    decoded: str | None
    compile: bool
    channels_last: bool
    keep_checkpoints: int
    keep_best: bool
    skip_unreadable: bool
    timings: bool
    tensorboard: bool
    threads: int | None
    port: int
    listen: str | None
    token_file: str | None
    vacant: int
    notice_s: float | None


def refuse_unknown(options: Iterable[str], known: type) -> None:
    """Refuse unknown options in the same words as `RunConfig` does.

    Args:
        options: names of the options given.
        known: one of the option classes.

    Raises:
        RequestError: an option is unknown.
    """
    names = known.__annotations__
    for name in options:
        if name not in names:
            raise unknown("option", name, names)


def refuse_real_only(options: Iterable[str]) -> None:
    """Refuse options of `REAL_ONLY` in a simulation.

    Raises:
        RequestError: one of them was given.
    """
    for name in options:
        if name in REAL_ONLY:
            raise RequestError(
                f"simulated ranks meet at no port, and nobody joins them: leave --{name.replace('_', '-')} out"
            )
