"""A worker's end of the center, over a network that answers by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import PeerLost
from polyrhythm.strategies.parameter_server.elastic.averaging import CenterLink
from polyrhythm.strategies.role_assignment import RoleAssignment


def test_a_successor_that_one_server_asks_in_and_another_tells_of_the_end_leaves() -> None:
    answers = {3: Message(Kind.JOIN, step=4), 4: Message(Kind.LEAVE)}
    network = SimpleNamespace(
        start_send=lambda to, message: SimpleNamespace(wait=lambda: None),
        receive=lambda source: (source, answers[source]),
    )
    setting: Any = SimpleNamespace(
        network=network,
        roles=RoleAssignment((0, 1), (3, 4)),
        flat=SimpleNamespace(size=6, vector=torch.zeros(6)),
    )
    with pytest.raises(PeerLost, match="joining a run that is ending"):
        CenterLink(setting, setting.flat.vector).pull_whole()
