"""Whole runs of NG-SGD against dense Fisher matrices in numpy, and means of models in between."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from conformance.jobs import batch, blobs, cosine, make_job, simulated, uneven, vector_of
from equivalence.dense_fisher import Dense
from polyrhythm.simulation.run import ConstantCluster
from tolerances import REORDERED

WORKERS = 3
LENGTH = 13  # steps of an epoch
STEPS = 2 * LENGTH


class Sides:
    """A layer's two estimates, of one worker: first used, then renewed, at every step of the first ten."""

    def __init__(self, rank, alpha, eta, update_every):
        self.rank, self.alpha, self.eta, self.update_every = rank, alpha, eta, update_every
        self.steps = 0
        self.sides = None

    def natural(self, gradient):
        rows = (gradient.T, gradient)
        if self.sides is None:
            self.sides = [Dense(side, min(self.rank, side.shape[1] - 1)) for side in rows]
        of_outputs, of_inputs = self.sides
        found = of_outputs.preconditioned(gradient.T, self.alpha).T
        found = of_inputs.preconditioned(found, self.alpha)
        if 0 < self.steps < 10 or (self.steps >= 10 and self.steps % self.update_every == 0):
            for side, new in zip(self.sides, rows, strict=True):
                side.update(new, self.eta)
        self.steps += 1
        return found * np.linalg.norm(gradient) / np.linalg.norm(found)


def plain_ng_sgd(job, every, **fisher):
    """Trains a model of every worker; gives their mean in the end."""
    models = []
    for _ in range(WORKERS):
        torch.manual_seed(job.learning.seed)
        models.append(job.make_model())
    optimizers = [job.learning.optimizer.create(model.parameters()) for model in models]
    layers = [
        {name: Sides(**fisher) for name, parameter in model.named_parameters() if parameter.ndim > 1}
        for model in models
    ]
    for step in range(STEPS):
        for worker, model in enumerate(models):
            images, labels = batch(job, step // LENGTH, step % LENGTH, worker, WORKERS)
            optimizers[worker].param_groups[0]["lr"] = cosine(job, step, STEPS)
            model.zero_grad()
            functional.cross_entropy(model(images.double()), labels).backward()
            for name, parameter in model.named_parameters():
                if name in layers[worker]:
                    natural = layers[worker][name].natural(parameter.grad.numpy())
                    parameter.grad = torch.tensor(natural)
            optimizers[worker].step()
        if (step + 1) % every == 0 or step + 1 == STEPS:
            mean = torch.stack([parameters_to_vector(model.parameters()).detach() for model in models]).mean(
                0
            )
            for model in models:
                vector_to_parameters(mean.clone(), model.parameters())
    return vector_of(models[0])


@pytest.mark.parametrize(
    "optimizer", ["sgd(lr=0.1, momentum=0)", "sgd(lr=0.05, momentum=0.8)", "adam(lr=0.01)"]
)
@pytest.mark.parametrize(
    ("rank", "alpha", "eta", "update_every", "every"),
    [(20, 4.0, 0.1, 4, 5), (2, 0.5, 0.3, 3, 4), (1, 0.0, 0.1, 1, 26)],
)
def test_ng_sgd(rank, alpha, eta, update_every, every, optimizer):
    """Also with more directions than the last layer's gradient has, whose rows add up to nothing."""
    fisher = {"rank": rank, "alpha": alpha, "eta": eta, "update_every": update_every}
    keys = ", ".join(f"{key}={value}" for key, value in fisher.items())
    job = make_job(
        f"ng_sgd(steps={every}, {keys})",
        WORKERS,
        dtype=torch.float64,
        dataset=blobs(train=4 * WORKERS * LENGTH),
        optimizer=optimizer,
    )
    found = vector_of(simulated(job, ConstantCluster(step_s=uneven)).models[0])
    expected = plain_ng_sgd(job, every, **fisher)
    torch.testing.assert_close(found, expected, **REORDERED)
