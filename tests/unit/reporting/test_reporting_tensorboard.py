import struct

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from polyrhythm.reporting.loggers import TensorBoardWriter


def scalars(folder):
    (path,) = folder.iterdir()
    found = []
    for record in EventFileLoader(str(path)).Load():
        for value in record.summary.value:
            number = value.tensor.float_val[0]  # the loader turns simple values into tensors
            found.append((value.tag, record.step, record.wall_time, number))
    return found


def as_float32(number):
    return struct.unpack("f", struct.pack("f", number))[0]


def test_scalars_read_back_over_images_seen_and_at_the_time_of_the_run(tmp_path, story, ended):
    writer = TensorBoardWriter(tmp_path / "tensorboard", clock=lambda: 1000.0)
    for event in [*story, ended]:
        writer.on_event(event)
    writer.close()
    found = scalars(tmp_path / "tensorboard")
    assert ("loss/worker_0", 400, 1002.0, 1.0) in found
    assert ("loss/worker_1", 600, 1004.0, 2.5) in found
    assert ("images_per_s/worker_0", 920, 1006.0, 80.0) in found
    assert ("waiting_share/worker_1", 1040, 1008.0, 0.75) in found
    assert ("learning_rate/worker_1", 1040, 1008.0, as_float32(0.05)) in found
    # Eight gradients, all one version old, since the last report of server 0.
    assert ("staleness/server_0", 1040, 1008.0, 1.0) in found
    assert ("test_top1", 1040, 1009.0, 0.90625) in found
    assert ("test_top5", 1040, 1009.0, 0.984375) in found
    assert ("test_loss", 600, 1004.5, 0.75) in found
    assert len(found) == 4 * 4 + 3 + 2 * 3


def test_what_is_written_can_be_read_while_the_run_goes_on(tmp_path, story):
    writer = TensorBoardWriter(tmp_path)
    for event in story[:2]:
        writer.on_event(event)
    assert {tag for tag, *_ in scalars(tmp_path)} == {
        "loss/worker_0",
        "learning_rate/worker_0",
        "images_per_s/worker_0",
        "waiting_share/worker_0",
    }
    writer.close()
    writer.close()
