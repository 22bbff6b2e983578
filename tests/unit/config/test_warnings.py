"""What may go wrong though it is allowed is said in one line before anything starts."""

import itertools
import logging

import pytest
from PIL import Image

from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.roles.job import CheckpointConfig


@pytest.mark.parametrize(
    ("strategy", "optimizer", "bound"),
    [
        ("easgd(alpha=1.2)", "sgd(lr=0.5)", "0.8571"),
        ("easgd(mode=synchronous, beta=3.0)", "sgd(lr=0.5)", "0.4615"),
        ("easgd", "sgd(lr=0.5)", ""),
        ("synchronous", "sgd(lr=0.5)", ""),
    ],
)
def test_alpha_out_of_the_stable_range_is_named_with_its_bound(strategy, optimizer, bound, caplog):
    options = {"data": "digits", "model": "mlp", "strategy": strategy, "workers": 3, "optimizer": optimizer}
    with caplog.at_level(logging.WARNING):
        assemble(configure(options), CheckpointConfig(checkpoints=0))
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == bool(bound)
    for text in texts:
        assert f"strategy {strategy}: alpha=" in text
        assert f"is above {bound}" in text
        assert "\n" not in text


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"freeze": "body"}, True),
        ({"freeze": "1"}, True),
        ({"freeze": "norms"}, False),
        ({}, False),
    ],
)
def test_frozen_parts_of_a_fresh_network_are_named(options, warned, caplog):
    with caplog.at_level(logging.WARNING):
        assemble(configure({"data": "digits", "model": "mlp"} | options), CheckpointConfig(checkpoints=0))
    said = [
        text
        for text in caplog.messages
        if "keeps untrained parts of a network at random values: give weights" in text
    ]
    assert len(said) == warned
    assert all(text.startswith(f"freeze {options['freeze']} keeps") and "\n" not in text for text in said)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"augment": "flip; rotation; stretching(fill=reflect)"}, "rotation see"),
        ({"augment": "rotation; lens_distortion"}, "rotation; lens_distortion see"),
        ({"augment": "rotation(fill=reflect)"}, None),
        ({"augment": "rotation(fill=frame)"}, None),  # asked for, as Deep Image has it
        ({"augment": "rotation", "scale": 16}, None),
        ({"augment": "flip"}, None),
    ],
)
def test_warps_that_leave_frames_are_named_with_the_scale_that_mends_it(options, named, tmp_path, caplog):
    for number, name in itertools.product(range(5), ("ant", "bee")):
        (tmp_path / "train" / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 16), (number, 0, 0)).save(tmp_path / "train" / name / f"{number}.png")
    given = {"data": str(tmp_path), "model": "mlp", "image_size": 14, "batch_size": 2}
    with caplog.at_level(logging.WARNING):
        assemble(configure(given | options), CheckpointConfig(checkpoints=0))
    said = [text for text in caplog.messages if "leave gray corners" in text]
    assert len(said) == (named is not None)
    assert all(text.startswith(f"{named} the center square") and "--scale 16 " in text for text in said)
