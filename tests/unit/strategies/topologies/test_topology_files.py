"""Graphs from files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polyrhythm.errors import RequestError
from polyrhythm.strategies.topologies.file import File


def graph(folder: Path, text: str, *, directed: bool = False) -> File:
    path = folder / f"{abs(hash((text, directed)))}.txt"
    path.write_text(text)
    return File(path=str(path), directed=directed)


def test_edges_without_weights_are_metropolis(tmp_path: Path) -> None:
    found = graph(tmp_path, "# a path\n0 1\n\n1 2  # and its end\n")
    found.check(3)
    third = 1 / 3
    expected = [[1 - third, third, 0], [third, 1 - 2 * third, third], [0, third, 1 - third]]
    assert torch.equal(found.matrix(3), torch.tensor(expected, dtype=torch.float64))


def test_one_way_edges_without_weights_share_equally(tmp_path: Path) -> None:
    found = graph(tmp_path, "0 1\n0 2\n1 2\n2 0\n", directed=True)
    found.check(3)
    third = 1 / 3
    expected = [[1 - 2 * third, 0, 0.5], [third, 0.5, 0], [third, 0.5, 0.5]]
    torch.testing.assert_close(
        found.matrix(3), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-15
    )
    assert list(found.sources(2, 3)) == [0, 1]


def test_given_weights_are_taken_and_the_rest_is_kept(tmp_path: Path) -> None:
    found = graph(tmp_path, "0 1 0.25\n1 2 0.5\n1 1 0.25\n")
    found.check(3)
    expected = [[0.75, 0.25, 0], [0.25, 0.25, 0.5], [0, 0.5, 0.5]]
    assert torch.equal(found.matrix(3), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(("text", "peers", "complaint"), [
    ("0 1\n2 3\n", 4, r"no path leads from worker 0 to worker 2, so 4 workers would never agree: add an edge"),
    ("0 1\n", 3, r"no path leads from worker 0 to worker 2"),
    ("0 1\n1 5\n", 4, r"has an edge of worker 5, and workers are 0 to 3: ask for 6 workers or take the edge out"),
    ("0 1 0.7\n1 2 0.6\n", 3, r"what leaves worker 1 adds up to 1\.3 of its parameters: its weights must .* at most 1"),
    ("0 1 0.5\n0 0 0.4\n", 2, r"what leaves worker 0 adds up to 0\.9 .*, its own share included: .* add up to 1$"),
    ("0 1 0.5\n1 2\n", 3, r"some edges have a weight and some have none: give all of them one, or none"),
    ("0 1 -0.5\n", 2, r"line 1: weight -0\.5: a weight is above 0"),
    ("0 1\n1\n", 2, r"line 2: '1' is no edge: write two workers and perhaps a weight, as in 0 1 0\.25"),
    ("0 one\n", 2, r"line 1: '0 one' is no edge"),
    ("", 2, r"no path leads from worker 0 to worker 1"),
])  # fmt: skip
def test_files_that_cannot_be(tmp_path: Path, text: str, peers: int, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint) as caught:
        graph(tmp_path, text).check(peers)
    assert "\n" not in str(caught.value)


def test_a_way_there_and_none_back(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no path leads from worker 1 to worker 0"):
        graph(tmp_path, "0 1\n", directed=True).check(2)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match=r"^cannot read the topology .*gone\.txt: No such file or directory$"
    ):
        File(path=str(tmp_path / "gone.txt")).check(2)
