import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

from polyrhythm.data.dataset import Dataset, Split, TensorSplit, TorchSplit, from_objects
from polyrhythm.data.record import DataRecord
from polyrhythm.errors import RequestError


def pair(n=6, classes=3, size=4, **kwargs):
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, 2, size, size, generator=generator, **kwargs), torch.arange(n) % classes


class Items(TorchDataset):
    def __init__(self, n=6, **attributes):
        self.pairs = list(zip(*pair(n), strict=True))
        self.reads = 0
        vars(self).update(attributes)

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        self.reads += 1
        image, label = self.pairs[index]
        return image, int(label)


def test_bytes_become_normalized_numbers():
    images = torch.tensor([0, 100, 255, 7], dtype=torch.uint8).view(4, 1, 1, 1)
    split = TensorSplit(images, torch.arange(4), mean=100, std=50)
    chosen = split.images(torch.tensor([2, 0, 2]))
    assert chosen.dtype == torch.float32
    assert chosen.flatten().tolist() == [pytest.approx(3.1), -2, pytest.approx(3.1)]
    assert images.flatten().tolist() == [0, 100, 255, 7]


def test_batches_of_floats_share_no_memory_with_the_data():
    images, labels = pair()
    before = images.clone()
    TensorSplit(images, labels).images(torch.tensor([1, 2])).zero_()
    assert torch.equal(images, before)


@pytest.mark.parametrize("make", [lambda: TensorSplit(*pair()), lambda: TorchSplit(Items())])
def test_both_splits_give_the_same(make):
    images, labels = pair()
    split = make()
    assert isinstance(split, Split)
    assert len(split) == 6
    assert torch.equal(split.images(torch.tensor([5, 0])), images[[5, 0]])
    assert torch.equal(split.labels, labels)
    assert split.images(torch.tensor([], dtype=torch.int64)).shape == (0, 2, 4, 4)


def test_labels_come_from_targets_without_reading_every_item():
    items = Items(targets=[2, 2, 1, 0, 1, 0])
    assert TorchSplit(items).labels.tolist() == [2, 2, 1, 0, 1, 0]
    assert items.reads == 1
    transformed = Items(targets=[2, 2, 1, 0, 1, 0], target_transform=str)
    assert TorchSplit(transformed).labels.tolist() == [0, 1, 2, 0, 1, 2]


def test_images_of_different_shapes_are_refused():
    items = Items()
    items.pairs[3] = (torch.zeros(2, 9, 4), 0)
    with pytest.raises(RequestError, match=r"image 3 of the data is \(2, 9, 4\) and the first \(2, 4, 4\)"):
        TorchSplit(items).images(torch.tensor([0, 3]))


@pytest.mark.parametrize(
    "data",
    [
        (pair(), pair(4)),
        [TensorDataset(*pair()), TensorDataset(*pair(4))],
        (Items(), Items(4)),
        (TensorSplit(*pair()), Items(4)),
        (tuple(part.numpy() for part in pair()), tuple(part.numpy() for part in pair(4))),
    ],
    ids=["tensors", "tensor data sets", "data sets", "mixed", "arrays"],
)
def test_every_form_of_own_data_becomes_the_same(data):
    dataset = from_objects(data)
    assert dataset.classes == ("0", "1", "2")
    assert dataset.image_shape == (2, 4, 4)
    assert (len(dataset.train), len(dataset.test)) == (6, 4)
    assert torch.equal(dataset.train.images(torch.arange(6)), pair()[0])
    assert dataset.test.labels.tolist() == [0, 1, 2, 0]


def test_a_dataset_passes_through():
    dataset = Dataset("mine", TensorSplit(*pair()), TensorSplit(*pair()), ("a", "b", "c"), (2, 4, 4), 1)
    assert from_objects(dataset) is dataset
    assert dataset.skipped == ()


def test_class_names_are_taken_over():
    assert from_objects((Items(classes=["cat", "dog", "owl"]), Items(4))).classes == ("cat", "dog", "owl")


def test_attributes_named_as_those_of_a_split_do_not_make_one():
    dataset = from_objects((Items(images=["a.jpg"], labels=["cat"]), Items(4)))
    assert dataset.train.labels.tolist() == [0, 1, 2, 0, 1, 2]


def test_double_precision_becomes_single():
    dataset = from_objects((pair(dtype=torch.float64), pair(dtype=torch.float64)))
    assert dataset.train.images(torch.tensor([0])).dtype == torch.float32


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (7, "data is a int: give a \\(train, test\\) pair"),
        ((pair(), 7), "a part of data is a int"),
        ((pair(), (torch.zeros(3, 2), torch.arange(3))), r"images are \(3, 2\) torch.float32"),
        ((pair(), (torch.zeros(3, 2, 4, 4, dtype=torch.uint8), torch.arange(3))), "uint8.*normalized"),
        ((pair(), (torch.zeros(3, 2, 4, 4), torch.arange(4))), r"3 images have labels \(4,\)"),
        ((pair(), (torch.zeros(3, 2, 4, 4), torch.rand(3))), "labels are .* one integer an image"),
        ((pair(), (torch.zeros(2, 2, 4, 4), torch.tensor([0, -1]))), "label -1 is negative"),
        ((pair(), (np.array([object()]), [1])), "must be tensors or arrays"),
        ((pair(), pair(size=5)), r"train images are \(2, 4, 4\) and test images \(2, 5, 5\)"),
        ((pair(), pair(classes=4)), "test has label 3, train none above 2"),
        ((pair(classes=1), pair(classes=1)), "one class only"),
        ((pair(), pair(0)), "a part of data is empty"),
        ((Items(), Items(0)), "a part of data is empty"),
        ((Items(), ["picture"]), "an item of data gives a str"),
        ((Items(), [("picture", 1)] * 3), "an item of data gives a str"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(data, message):
    with pytest.raises(RequestError, match=message) as caught:
        from_objects(data)
    assert "\n" not in str(caught.value)


def test_black_and_white_of_own_data_are_its_extremes():
    images = torch.linspace(-2, 3, 24).view(6, 1, 2, 2)
    pair_of_both = (images, torch.tensor([0, 1, 0, 1, 0, 1]))
    dataset = from_objects((pair_of_both, pair_of_both))
    assert (dataset.black, dataset.white) == ((-2.0,), (3.0,))


class Labelled:
    """Items with given labels."""

    def __init__(self, labels, image=None):
        self.labels = labels
        self.image = torch.rand(1, 2, 2) if image is None else image

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.image, self.labels[index]


@pytest.mark.parametrize(
    ("labels", "complaint"),
    [
        ([0, 1, torch.tensor([0, 1, 0])], "item 2 of the data has a label of shape (3,), such as one-hot"),
        ([0, 1, np.array([1.0, 0.0])], "item 2 of the data has a label of shape (2,), such as one-hot"),
        ([0, "cat"], "item 1 of the data has the label 'cat' (str): give the number of its class"),
        ([0, "1"], "item 1 of the data has the label '1' (str): give the number of its class"),
        ([0, 1, None], "item 2 of the data has the label None (NoneType): give the number of its class"),
        ([0, 0.5], "item 1 of the data has the label 0.5 (float): give the number of its class"),
        ([0, float("nan")], "item 1 of the data has the label nan (float): give the number of its class"),
        ([0, [0, 1]], "item 1 of the data has the label [0, 1] (list): give the number of its class"),
    ],
)
@pytest.mark.parametrize("as_targets", [False, True])
def test_labels_that_are_no_class_are_refused_with_their_item(labels, complaint, as_targets):
    items = Labelled(labels)
    if as_targets:
        items.targets = labels
    with pytest.raises(RequestError) as refusal:
        from_objects((items, Labelled([0, 1])))
    assert complaint in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_labels_of_any_kind_of_whole_number_are_classes():
    labels = [0, np.int64(1), torch.tensor(2), 3.0, torch.tensor([1]), np.float32(2.0)]
    assert from_objects((Labelled(labels), Labelled([0, 1]))).train.labels.tolist() == [0, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
def test_items_that_are_no_floats_are_refused(dtype):
    with pytest.raises(RequestError, match=f"image 0 of the data is {dtype}: give float tensors"):
        from_objects((Labelled([0, 1], torch.zeros(1, 2, 2, dtype=dtype)), Labelled([0, 1])))


def test_an_item_that_is_no_float_among_others_is_refused():
    class Mixed(Labelled):
        def __getitem__(self, index):
            image = self.image if index == 0 else torch.zeros(1, 2, 2, dtype=torch.uint8)
            return image, self.labels[index]

    with pytest.raises(RequestError, match=r"image 1 of the data is torch\.uint8"):
        from_objects((Mixed([0, 1]), Labelled([0, 1])))


def test_a_worker_is_sent_the_listing_of_the_data_without_their_names():
    split = TensorSplit(*pair())
    names = tuple(f"a/{number}.png" for number in range(6))
    data = Dataset("d", split, split, ("0", "1", "2"), (2, 4, 4), 1, names=(names, names), held_out=True)
    sent = pickle.loads(pickle.dumps(data))
    assert sent.names is None
    assert sent.listing_sha256 == data.listing_sha256
    assert DataRecord.of(sent).to_json() == DataRecord.of(data).to_json()
    renamed = Dataset("d", split, split, ("0", "1", "2"), (2, 4, 4), 1, names=(names, names[::-1]))
    assert renamed.listing_sha256 != data.listing_sha256
