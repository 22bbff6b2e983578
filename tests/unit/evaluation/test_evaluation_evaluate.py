import numpy as np
import pytest
import torch
from sklearn.metrics import (
    accuracy_score,
    confusion_matrix,
    log_loss,
    precision_score,
    recall_score,
    top_k_accuracy_score,
)
from torch import Tensor, nn

from polyrhythm.data.dataset import TensorSplit
from polyrhythm.errors import RequestError
from polyrhythm.evaluation.evaluate import (
    PartialEvaluation,
    batches_for,
    disjoint,
    evaluate,
    evaluate_part,
    evaluate_scores,
)


def _split(images, classes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.randn(images, 1, 3, 4, generator=generator)
    return TensorSplit(pictures, torch.randint(classes, (images,), generator=generator))


def _model(classes):
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, classes))


@pytest.mark.parametrize("batch_size", [1, 7, 103, 500])
def test_it_agrees_with_scikit_learn(batch_size):
    split, model, names = _split(103, 8), _model(8), [f"class {index}" for index in range(8)]
    with torch.no_grad():
        probabilities = model.double()(split.images(torch.arange(103)).double()).softmax(1).numpy()
    labels, taken_for = split.labels.numpy(), probabilities.argmax(1)
    model.float()

    found = evaluate(model, split, classes=names, batch_size=batch_size)

    assert found.images == 103
    assert found.loss == pytest.approx(log_loss(labels, probabilities), rel=1e-6)
    assert found.top1 == pytest.approx(accuracy_score(labels, taken_for), abs=1e-12)
    assert found.top5 == pytest.approx(top_k_accuracy_score(labels, probabilities, k=5), abs=1e-12)
    assert np.array_equal(found.confusion.numpy(), confusion_matrix(labels, taken_for))
    assert [result.name for result in found.per_class] == names
    assert [result.images for result in found.per_class] == np.bincount(labels, minlength=8).tolist()
    recall, precision = (score(labels, taken_for, average=None) for score in (recall_score, precision_score))
    assert [result.recall for result in found.per_class] == pytest.approx(recall.tolist(), abs=1e-12)
    assert [result.precision for result in found.per_class] == pytest.approx(precision.tolist(), abs=1e-12)


def test_with_fewer_than_five_classes_top5_counts_all():
    assert evaluate(_model(3), _split(20, 3), classes="abc").top5 == 1.0


def test_a_class_without_images_and_one_never_taken_score_zero():
    constant = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    nn.init.zeros_(constant[1].weight)
    constant[1].bias.data = torch.tensor([0.0, 0.0, 1.0])
    split = TensorSplit(torch.zeros(4, 1, 3, 4), torch.tensor([0, 0, 0, 0]))

    found = evaluate(constant, split, classes=("a", "b", "c"))

    assert [(r.images, r.recall, r.precision) for r in found.per_class] == [(4, 0, 0), (0, 0, 0), (0, 0, 0)]
    assert found.confusion.tolist() == [[0, 0, 4], [0, 0, 0], [0, 0, 0]]
    assert found.loss == pytest.approx(np.log(2 + np.e))


def test_the_model_is_tested_in_evaluation_mode_and_given_back_as_it_was():
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12), nn.Dropout(0.9), nn.Linear(12, 3))
    model[1].eval()  # frozen by its owner
    model[0].register_forward_hook(
        lambda module, *_: modes.append((module.training, torch.is_grad_enabled()))
    )
    modes: list[tuple[bool, bool]] = []

    split = _split(20, 3)
    found = evaluate(model, split, classes="abc", batch_size=10)

    assert modes == [(False, False)] * 2
    assert [module.training for module in model.modules()] == [True, True, False, True, True]
    assert found.loss == evaluate(model, split, classes="abc", batch_size=10).loss


def test_the_mode_comes_back_after_a_failure_too():
    model = nn.Sequential(nn.Flatten(), nn.Linear(5, 3))
    with pytest.raises(RuntimeError, match="shapes"):
        evaluate(model, _split(20, 3), classes="abc")
    assert model.training


def test_training_goes_on_after_a_test_of_a_network_that_caches():
    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(12, 3)
            self.scale = None

        def forward(self, images):
            if self.scale is None:
                self.scale = torch.full((3,), 2.0)
            return self.linear(images.flatten(1)) * self.scale

    model, split = Caching(), _split(20, 3)
    evaluate(model, split, classes="abc")
    model(split.images(torch.arange(20))).sum().backward()
    torch.testing.assert_close(model.linear.bias.grad, torch.full((3,), 40.0))


def test_a_model_for_other_classes_is_refused():
    with pytest.raises(RequestError, match="has 4 classes, but the data have 3"):
        evaluate(_model(4), _split(20, 3), classes="abc")


def test_no_images_are_refused():
    with pytest.raises(RequestError, match="no images"):
        evaluate(_model(3), _split(0, 3), classes="abc")


def test_mistakes_are_listed_by_their_number_and_accuracy_has_an_interval() -> None:
    labels = torch.tensor([0] * 10 + [1] * 10 + [2] * 10)
    said = labels.clone()
    said[:3], said[10], said[20:22] = 2, 0, 1
    scores = torch.nn.functional.one_hot(said, 3).float()
    found = evaluate_scores(lambda indices: scores[indices], labels, classes=("a", "b", "c"))
    assert found.confused() == [
        {"class": "a", "taken_for": "c", "images": 3},
        {"class": "c", "taken_for": "b", "images": 2},
        {"class": "b", "taken_for": "a", "images": 1},
    ]
    assert found.confused(most=1) == found.confused()[:1]
    # p is a bound where it lies z standard errors, as they are at p, from what was found
    for p in found.top1_interval:
        assert abs(found.top1 - p) == pytest.approx(1.959964 * (p * (1 - p) / 30) ** 0.5, abs=1e-9)
    assert found.top1_interval[0] < 24 / 30 < found.top1_interval[1]


@pytest.mark.parametrize("parts_of", [(1,), (1, 1), (1, 1, 1), (1,) * 7, (80, 80, 16), (1, 99)])
@pytest.mark.parametrize("images", [1, 499, 500, 1501, 2600])
def test_parts_of_a_test_come_to_the_same_bits(images: int, parts_of: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, split, names = nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), _split(images, 4), "abcd"
    whole = evaluate(model, split, classes=names)
    batches = [batches_for(images, place, parts_of) for place in range(len(parts_of))]
    assert [batch for part in batches for batch in part] == list(range(-(-images // 500)))
    parts = [
        PartialEvaluation.from_tensors(evaluate_part(model, split, part, classes=names).tensors())
        for part in batches
    ]
    for kept in (parts, parts[1:], parts[:-1], []):  # what nobody has done is done here
        found = evaluate(model, split, classes=names, tested=kept)
        assert found == whole
        assert torch.equal(found.confusion, whole.confusion)


def test_parts_of_a_test_follow_those_of_the_workers() -> None:
    assert [len(batches_for(10_000, place, (3, 1))) for place in range(2)] == [15, 5]
    assert [len(batches_for(10_000, place, (5, 5, 5, 1))) for place in range(4)] == [6, 6, 6, 2]
    assert [len(batches_for(10_000, place, (1, 0, 1))) for place in range(3)] == [10, 0, 10]


def test_who_is_given_all_parts_computes_nothing() -> None:
    class Counted(nn.Module):
        images = 0

        def forward(self, images: Tensor) -> Tensor:
            self.images += len(images)
            return images.flatten(1)[:, :4]

    model, split = Counted(), _split(1200, 4)
    parts = [
        evaluate_part(model, split, batches_for(1200, place, (1, 1)), classes="abcd") for place in (0, 1)
    ]
    assert model.images == 1200
    evaluate(model, split, classes="abcd", tested=parts)
    assert model.images == 1200
    overlapping = evaluate_part(model, split, range(1, 3), classes="abcd")
    assert disjoint([*parts, overlapping]) == parts
