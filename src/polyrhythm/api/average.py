"""The mean of several trained networks' weights, for the verb `average`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from polyrhythm.config.run_config import TrainedOptions
from polyrhythm.config.trained import Trained, load_trained
from polyrhythm.data.dataset import Dataset
from polyrhythm.data.seeding import generator_for
from polyrhythm.errors import RequestError
from polyrhythm.evaluation.evaluate import Evaluation, evaluate, evaluate_scores, in_evaluation_mode
from polyrhythm.models.weights import read_metadata, save_weights
from polyrhythm.roles.checkpointing.archive import FOLDER
from polyrhythm.training.checkpoint import load_checkpoint
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.weight_averaging import mean_weights, recompute_batch_norms
from polyrhythm.user_files import check_new_file

BATCH_NORM_IMAGES = 10_000
_BATCH = 100
State = dict[str, Tensor]


def average(
    weights: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    greedy: bool = False,
    device: str = "auto",
    **options: Unpack[TrainedOptions],
) -> dict[str, Any]:
    """Average weights into one file, recompute batch-norm statistics, and test the result.

    Args:
        weights: runs or files of weights of one network; a single run stands for its checkpoints, one per epoch.
        out: the safetensors file to write.
        greedy: add weights in order of accuracy, leaving out those that lower it, judged on every second test image;
            the result is tested on the others.
        device: `cpu`, `cuda` or `auto`.
        **options: `data`, `model`, `image_size` and `skip_unreadable`, as for `evaluate`.

    Returns:
        `file`, `averaged` (the weights in the mean), `images`, `test_loss`, `test_top1` and `test_top5`.

    Raises:
        RequestError: the request is invalid; nothing has been written.
    """
    path = Path(out)
    check_new_file(path)
    paths = [weights] if isinstance(weights, str | Path) else list(weights)
    trained = load_trained(paths[0], device=device, **options)
    states = _states(paths, trained, options)
    model, dataset = trained.model, trained.dataset
    chosen = list(states)
    if greedy:
        chosen = _greedy(states, lambda mixture: _accuracy(_filled(model, mixture, dataset), trained, 0))
    filled = _filled(model, mean_weights(states[name] for name in chosen), dataset)
    tested = _tested(filled, trained, odd_only=greedy)
    save_weights(filled, path, read_metadata(trained.file))
    return {"file": str(path), "averaged": chosen, **tested}


def _states(paths: Sequence[str | Path], trained: Trained, options: TrainedOptions) -> dict[str, State]:
    if len(paths) == 1:
        return _checkpoints(trained)
    states = {str(trained.path): _copied(trained.model)}
    for path in paths[1:]:
        other = load_trained(path, **options)
        if other.model_name != trained.model_name:
            raise RequestError(
                f"{path} is {other.model_name} and {trained.path} {trained.model_name}: only one network's weights can "
                "be averaged; let several vote: polyrhythm evaluate RUN1 RUN2"
            )
        states[str(path)] = {name: value.to(trained.device) for name, value in _copied(other.model).items()}
    return states


def _checkpoints(trained: Trained) -> dict[str, State]:
    """Return the states of a run's checkpoints, the oldest first."""
    files = sorted((trained.path / FOLDER).glob("step-*.safetensors")) if trained.path.is_dir() else []
    if len(files) < 2:
        raise RequestError(
            f"{trained.path} keeps fewer than two checkpoints: name several runs, or train with --keep-checkpoints 5"
        )
    flat, states = FlatParameters(trained.model), {}
    for file in files:
        vector = load_checkpoint(file)[0].get("parameters")
        if vector is None or vector.shape != flat.vector.shape:
            raise RequestError(f"{file} is of another network than {trained.file}")
        flat.vector.copy_(vector)
        states[file.stem] = _copied(trained.model)
    return states


def _copied(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _filled(model: nn.Module, state: State, dataset: Dataset) -> nn.Module:
    model.load_state_dict(state)
    # Statistics of averaged weights are not the average of statistics: Izmailov et al., SWA, UAI 2018.
    recompute_batch_norms(model, _training_batches(model, dataset))
    return model


def _training_batches(model: nn.Module, dataset: Dataset) -> Iterator[Tensor]:
    device = next(model.parameters()).device
    order = torch.randperm(len(dataset.train), generator=generator_for("batch norms"))[:BATCH_NORM_IMAGES]
    # Only full batches: a ragged last one would count as much as the others in the mean of statistics.
    whole = len(order) // _BATCH * _BATCH or len(order)
    for indices in order[:whole].split(_BATCH):
        yield dataset.train.images(indices).to(device)


def _greedy(states: dict[str, State], accuracy: Callable[[State], float]) -> list[str]:
    alone = {name: accuracy(state) for name, state in states.items()}
    ranked = sorted(states, key=lambda name: -alone[name])
    chosen, best = ranked[:1], alone[ranked[0]]
    for name in ranked[1:]:
        found = accuracy(mean_weights(states[each] for each in [*chosen, name]))
        if found >= best:
            chosen, best = [*chosen, name], found
    return chosen


def _accuracy(model: nn.Module, trained: Trained, first: int) -> float:
    return _half(model, trained, first).top1


def _tested(model: nn.Module, trained: Trained, *, odd_only: bool) -> dict[str, Any]:
    if odd_only:
        found = _half(model, trained, 1)
    else:
        dataset = trained.dataset
        found = evaluate(model, dataset.test, classes=dataset.classes, device=trained.device)
    return {
        "images": found.images,
        "test_loss": found.loss,
        "test_top1": found.top1,
        "test_top5": found.top5,
    }


def _half(model: nn.Module, trained: Trained, first: int) -> Evaluation:
    """Test on every second image, beginning with number `first`."""
    test = trained.dataset.test
    counted = torch.arange(first, len(test), 2)
    with in_evaluation_mode(model):
        return evaluate_scores(
            lambda indices: model(test.images(counted[indices]).to(trained.device)),
            test.labels[counted],
            classes=trained.dataset.classes,
        )
