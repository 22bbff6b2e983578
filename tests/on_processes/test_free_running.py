"""Strategies whose workers run free, over real processes: every gradient counts, and the run learns."""

import pytest
import torch

from conformance.jobs import blobs, make_job, result_of, saved_vector, strategy
from polyrhythm.launch.children import run_local

STEPS = 40


@pytest.mark.parametrize("spec", ["easgd(tau=2, servers=2)", "gaia", "hogwild"])
def test_real_processes_count_every_gradient_and_learn(spec, tmp_path):
    job = make_job(spec, 3, dataset=blobs(train=240), folder=tmp_path, checkpoints=0)
    events = []
    run_local(job, events.append, threads=1)
    result = result_of(events)
    built = strategy(spec)
    counted = sum(result["staleness"]["histogram"].values())
    traits = built.traits(3)
    tellers = traits.shards or (1 if traits.servers else 3)  # without servers every worker tells its own
    assert counted == STEPS * traits.gradients * tellers
    assert result["steps"] == STEPS
    assert result["test_top1"] > 0.6  # three classes: a third by chance
    assert torch.isfinite(saved_vector(tmp_path)).all()
    assert (result["bytes_sent_per_step"] == 0) == (spec == "hogwild")
