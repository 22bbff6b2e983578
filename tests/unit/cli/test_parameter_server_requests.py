"""Compositions of the parameter server that cannot be: one line, exit status 2, and nothing written."""

from __future__ import annotations

from collections.abc import Callable

import pytest

TINY = ("--data", "digits", "--model", "mlp", "--epochs", "1", "--workers", "3")
WRONG = {
    "ssp(s=-1)": "s should be greater than or equal to 0 (given -1)",
    "backup_workers(spare=3)": "spare is 3, but only 3 push: ask for 2 at most, or for more workers",
    "softsync(n=9)": "n is 9, but only 3 push: ask for 3 at most",
    "dc_asgd(variant=b)": "variant should be 'c' or 'a' (given 'b')",
    "dc_asgd(lambda0=-1)": "lambda0 should be greater than or equal to 0 (given -1)",
    "parameter_server(consistency=synchronous, aggregator=krum)": "krum needs at least 5 gradients an update, and "
    "there are 3: ask for 5 synchronous workers, or for a smaller f",
    "parameter_server(aggregator=bulyan)": "asynchronous makes an update of every single one: use "
    "consistency=synchronous",
    "parameter_server(merge=delay_compensate)": "unknown merge rule 'delay_compensate': did you mean "
    "delay_compensated?",
    "parameter_server(consistency=ssp)": "unknown consistency 'ssp'",
}


@pytest.mark.parametrize("spec", WRONG)
def test_it_is_refused_with_the_mend(spec: str, refused: Callable[..., str]) -> None:
    assert WRONG[spec] in refused("train", *TINY, "--strategy", spec)


def test_an_unknown_attack_is_refused(refused: Callable[..., str]) -> None:
    fault = "byzantine(rank=1, attack=sign_flop)"
    complaint = refused(
        "simulate", *TINY, "--cluster", "office", "--strategy", "parameter_server", "--faults", fault
    )
    assert "unknown attack 'sign_flop': did you mean sign_flip?" in complaint


@pytest.mark.parametrize("optimizer", ["lars", "lamb"])
def test_an_optimizer_of_whole_layers_is_refused_where_a_shard_cuts_one(
    optimizer: str, refused: Callable[..., str]
) -> None:
    complaint = refused("train", *TINY, "--strategy", "parameter_server(servers=2)", "--optimizer", optimizer)
    assert (
        "looks at whole layers, and a server's shard cuts one: use one server, or a strategy with"
        in complaint
    )
