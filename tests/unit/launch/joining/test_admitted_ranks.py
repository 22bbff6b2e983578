"""What ranks that torchrun has started must agree on before others may join them."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
from polyrhythm.errors import RequestError
from polyrhythm.launch.joining.connections import Address, link_key
from polyrhythm.launch.joining.join_server import Admission

TOKEN = "the token of this test"
HERE = Address("127.0.0.1", 0)


@pytest.fixture
def ranks() -> list[Rendezvous]:
    store: Any = dist.HashStore()
    return [Rendezvous(store, rank, 2, "10.1.2.3") for rank in range(2)]


def admission(token: str | None, address: Address = HERE) -> Admission:
    return Admission(address, lambda: token)


def test_links_have_the_key_of_the_token_and_guests_reach_all(ranks: list[Rendezvous]) -> None:
    found = [admission(TOKEN).of(rank) for rank in ranks]
    assert [each.key for each in found] == [link_key(TOKEN)] * 2
    assert [each.address for each in found] == ["127.0.0.1"] * 2  # that of the interface where the door is


def test_a_rank_with_another_token_says_so_and_the_store_does_not_tell_which(ranks: list[Rendezvous]) -> None:
    admission(TOKEN).of(ranks[0])
    told = bytes(ranks[0].store.get("run token"))
    assert TOKEN.encode() not in told
    assert link_key(TOKEN).hex().encode() not in told
    with pytest.raises(
        RequestError, match=r"^rank 1 has another run token than rank 0: give all hosts the same"
    ):
        admission(TOKEN + "!").of(ranks[1])


def test_a_rank_without_a_token_says_how_to_give_one(ranks: list[Rendezvous]) -> None:
    with pytest.raises(
        RequestError, match=r"^rank 1 has no run token.* --token-file, or set POLYRHYTHM_TOKEN"
    ):
        admission(None).of(ranks[1])


def test_a_door_on_loopback_is_refused_where_the_run_has_several_hosts(
    ranks: list[Rendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(RequestError, match=r"--listen 127\.0\.0\.1:0 is reached from this host alone"):
        admission(TOKEN).of(ranks[0])
