import math
import os

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from polyrhythm.errors import RequestError, RunError
from polyrhythm.models.weights import check_finite, load_weights, read_metadata, save_weights


class Executed(Exception):
    """Raised if a pickle was executed."""


def execute():
    raise Executed


class Malicious:
    def __reduce__(self):
        return execute, ()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight


def _network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))


def _flatten(model):
    """Makes the parameters views of one vector, as training does."""
    parameters = list(model.parameters())
    flat = nn.utils.parameters_to_vector(parameters).detach().clone()
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.view_as(parameter)
    return flat


def _assert_same(model, other):
    expected = other.state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def _refused(model, path):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RequestError) as caught:
        load_weights(model, path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_saved_is_loaded(tmp_path):
    saved, loaded = _network(0), _network(1)
    saved[1].running_mean.fill_(0.5)

    save_weights(saved, tmp_path / "w.safetensors", {"model": "mlp", "note": "é"})
    load_weights(loaded, tmp_path / "w.safetensors")

    _assert_same(loaded, saved)
    assert read_metadata(tmp_path / "w.safetensors") == {"model": "mlp", "note": "é"}
    assert os.listdir(tmp_path) == ["w.safetensors"]


def test_views_of_one_vector_are_saved_and_stay_views(tmp_path):
    saved, loaded = _network(0), _network(1)
    _flatten(saved)
    flat = _flatten(loaded)

    save_weights(saved, tmp_path / "w", {})
    load_weights(loaded, tmp_path / "w")

    _assert_same(loaded, saved)
    assert torch.equal(flat, nn.utils.parameters_to_vector(saved.parameters()))
    size = 4 * sum(tensor.numel() for tensor in saved.state_dict().values())
    assert (tmp_path / "w").stat().st_size < size + 2000  # each view alone, not the vector for each


@pytest.mark.parametrize("save", [lambda model, path: save_weights(model, path, {}), save_model])
def test_tied_tensors_may_be_written_twice_or_once(tmp_path, save):
    saved, loaded = Tied(), Tied()
    save(saved, tmp_path / "w")
    load_weights(loaded, tmp_path / "w")
    _assert_same(loaded, saved)
    assert loaded.first.weight is loaded.second.weight


def test_an_older_file_is_replaced_and_a_failure_leaves_it(tmp_path, monkeypatch):
    path = tmp_path / "w"
    save_weights(_network(0), path, {"age": "old"})
    save_weights(_network(1), path, {"age": "new"})
    assert read_metadata(path) == {"age": "new"}

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="No space left on device"):
        save_weights(_network(2), path, {"age": "never"})
    assert read_metadata(path) == {"age": "new"}
    assert os.listdir(tmp_path) == ["w"]


def test_whoever_may_read_other_files_may_read_weights(tmp_path):
    (tmp_path / "other").touch()
    save_weights(_network(), tmp_path / "w", {})
    assert (tmp_path / "w").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_folder_that_is_none_is_said(tmp_path):
    (tmp_path / "file").touch()
    for folder in ("missing", "file"):
        with pytest.raises(RunError, match=f"cannot write the weights {tmp_path / folder}"):
            save_weights(_network(), tmp_path / folder / "w", {})


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": state, "optimizer": {"lr": 0.1}},
        lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
        lambda state: {"model": {f"module._orig_mod.{name}": tensor for name, tensor in state.items()}},
    ],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_torchs_own_files_are_read(tmp_path, wrap, zipped):
    saved, loaded = _network(0), _network(1)
    torch.save(wrap(saved.state_dict()), tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    load_weights(loaded, tmp_path / "w.pt")
    _assert_same(loaded, saved)
    assert read_metadata(tmp_path / "w.pt") == {}


def test_a_run_folder_stands_for_its_weights(tmp_path):
    saved, loaded = _network(0), _network(1)
    save_weights(saved, tmp_path / "model.safetensors", {"model": "lenet5"})
    load_weights(loaded, tmp_path)
    _assert_same(loaded, saved)
    assert read_metadata(tmp_path) == {"model": "lenet5"}


@pytest.mark.parametrize("inside", ["bare", "beside weights"])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_is_refused_and_not_executed(tmp_path, inside, zipped):
    model = _network()
    content = Malicious() if inside == "bare" else {"state_dict": model.state_dict(), "extra": Malicious()}
    torch.save(content, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(Executed):  # it is dangerous indeed
        torch.load(tmp_path / "w.pt", weights_only=False)

    message = _refused(model, tmp_path / "w.pt")

    assert "execute" in message
    assert "nothing was executed" in message


@pytest.mark.parametrize("kept", [0, 4, 9, 60, -1])
@pytest.mark.parametrize("safe", [True, False])
def test_a_truncated_file_is_refused(tmp_path, kept, safe):
    path = tmp_path / "w"
    save_file(_network().state_dict(), path) if safe else torch.save(_network().state_dict(), path)
    path.write_bytes(path.read_bytes()[:kept])
    assert "damaged" in _refused(_network(), path)


@pytest.mark.parametrize(
    "content", [b"no weights at all", b"\x89PNG\r\n\x1a\n" + b"\0" * 50, b"\x80\x02}q\x00."]
)
def test_another_kind_of_file_is_refused(tmp_path, content):
    (tmp_path / "w").write_bytes(content)
    assert "weights" in _refused(_network(), tmp_path / "w")


def test_what_holds_no_state_dict_is_refused(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "w")
    assert "holds no weights" in _refused(_network(), tmp_path / "w")


def test_a_missing_file_is_refused(tmp_path):
    assert "there are no weights at" in _refused(_network(), tmp_path / "w")
    assert "model.safetensors" in _refused(_network(), tmp_path)
    with pytest.raises(RequestError, match="there are no weights at"):
        read_metadata(tmp_path / "w")


def test_other_shapes_are_named_with_both(tmp_path):
    state = _network().state_dict()
    state["3.weight"] = torch.zeros(5, 16)
    state["1.num_batches_tracked"] = torch.zeros(2, dtype=torch.int64)
    save_file(state, tmp_path / "w")

    message = _refused(_network(), tmp_path / "w")

    assert "3.weight is 5×16 where the model has 3×16" in message
    assert "1.num_batches_tracked is 2 where the model has a single number" in message


def test_missing_and_unexpected_tensors_are_named_and_counted(tmp_path):
    state = {name: tensor for name, tensor in _network().state_dict().items() if not name.startswith("1.")}
    state["head.weight"] = torch.zeros(2)
    save_file(state, tmp_path / "w")

    message = _refused(_network(), tmp_path / "w")

    assert "5 of the model's tensors are not there (1.weight, 1.bias, 1.running_mean, and 2 more)" in message
    assert "1 of its tensors are not the model's (head.weight)" in message


def test_damaged_metadata_is_refused(tmp_path):
    path = tmp_path / "w"
    save_weights(_network(), path, {"model": "mlp"})
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RequestError, match="damaged"):
        read_metadata(path)


def test_texts_of_no_utf_8_are_kept_beside_the_weights(tmp_path):
    path = tmp_path / "model.safetensors"
    save_weights(_network(), path, {"classes": "caf\udce9\ntea"})
    assert read_metadata(path)["classes"] == "caf\\udce9\ntea"


def test_a_flipped_byte_is_found(tmp_path):
    path = tmp_path / "model.safetensors"
    save_weights(nn.Linear(7, 3), path, {"model": "linear"})
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(RequestError, match="was changed after it was written"):
        load_weights(nn.Linear(7, 3), path)


def test_values_that_are_no_numbers_are_named(tmp_path):
    model = nn.Linear(7, 3)
    check_finite(model, tmp_path)
    model.bias.data[1] = math.nan
    with pytest.raises(RequestError, match=r"infinite or not a number \(in bias\)"):
        check_finite(model, tmp_path)
