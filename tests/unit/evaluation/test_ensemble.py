"""Networks that vote."""

from __future__ import annotations

import pytest
import torch

from polyrhythm.evaluation.ensemble import average, greedy_selection, log_probabilities


def _members(members: int, images: int = 40, classes: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(members, images, classes, generator=generator).softmax(2)


def test_the_mean_is_of_probabilities_and_sums_to_one() -> None:
    first, second = torch.tensor([[4.0, 0.0]]).softmax(1), torch.tensor([[-1.0, 0.0]]).softmax(1)
    found = average([first, second])
    expected = (torch.tensor([4.0, -1.0]).sigmoid().mean()).item()
    assert found[0, 0].item() == pytest.approx(expected)
    assert found[0, 0].item() != pytest.approx(torch.tensor(1.5).sigmoid().item(), abs=1e-3)  # mean of logits
    torch.testing.assert_close(average(list(_members(4))).sum(1), torch.ones(40))


def test_identical_members_change_nothing() -> None:
    one = _members(1)[0]
    torch.testing.assert_close(average([one, one, one]), one)
    indices = torch.tensor([3, 0])
    together = log_probabilities([lambda i: one[i], lambda i: one[i]])(indices)
    torch.testing.assert_close(together, one[indices].log())


def test_greedy_selection_is_what_brute_force_finds_at_every_step() -> None:
    members, labels = _members(4), torch.randint(5, (40,), generator=torch.Generator().manual_seed(2))
    chosen = greedy_selection(members, labels)

    def right(numbers: list[int]) -> tuple[float, float]:
        mean = members[numbers].mean(0)
        likely = mean.gather(1, labels[:, None]).log().double().mean().item()
        return (mean.argmax(1) == labels).double().mean().item(), likely

    so_far: list[int] = []
    for number in chosen:
        scores = [right([*so_far, other]) for other in range(4)]
        assert scores[number] >= max(scores)
        so_far.append(number)
        assert len(so_far) == 1 or right(so_far) > right(so_far[:-1])
    assert all(right([*so_far, other]) <= right(so_far) for other in range(4))
    assert right(chosen) >= max(right([number]) for number in range(4))


def test_a_member_that_only_harms_is_left_out() -> None:
    labels = torch.tensor([0, 1, 2, 0])
    good = torch.nn.functional.one_hot(labels, 3).double() * 0.8 + 0.2 / 3
    assert greedy_selection(torch.stack([good.flip(1), good]), labels) == [1]
