"""Synchronized batch normalization on real workers: a run of two is a plain loop over their batches together."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from conformance.jobs import make_job, plain_loop
from on_processes.commands import finished
from polyrhythm.data.dataset import Dataset, TensorSplit

SCRIPT = """
import sys

import polyrhythm

sys.path.insert(0, {tests!r})
from on_processes.test_batch_norm_together import network, part

if __name__ == "__main__":
    polyrhythm.train(
        data=(part(67, 1), part(30, 2)), model=network(), workers=2, batch_size=6, epochs=2,
        batch_norm="synchronized", optimizer="sgd(lr=0.02)", out="run", keep_checkpoints=0,
    )
    print("{{}}")
"""


def part(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Makes pictures of three classes of brightness."""
    images = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    return images, (4 * images.mean(dim=(1, 2, 3))).long().clamp(0, 2)


def network() -> nn.Module:
    """Makes a small network with a layer of batch normalization."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


def test_a_run_of_two_is_a_plain_loop_over_their_batches(tmp_path: Path) -> None:
    """67 images in steps of 12 are batches of 5 and 6: the larger counts for more."""
    (tmp_path / "script.py").write_text(SCRIPT.format(tests=str(Path(__file__).parents[1])))
    finished([sys.executable, tmp_path / "script.py"], tmp_path)
    splits = [TensorSplit(*part(count, seed)) for count, seed in ((67, 1), (30, 2))]
    data = Dataset("own", *splits, ("0", "1", "2"), (1, 4, 4), default_epochs=2)
    made = network()
    job = make_job(
        "synchronous",
        dataset=data,
        model=lambda: copy.deepcopy(made),
        batch_size=6,
        seed=0,
        optimizer="sgd(lr=0.02)",
    )
    expected = plain_loop(job, together=2)
    found = load_file(tmp_path / "run/model.safetensors")
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found[name].to(value.dtype), value, rtol=1e-4, atol=1e-5, msg=name)
