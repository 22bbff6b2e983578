"""Hivemind's Optimizer with the settings of its quickstart: local updates, parameters averaged every 10,000 images.

python hivemind_loop.py FOLDER            one peer
python hivemind_loop.py FOLDER --first    the peer by which the others find each other; it does not train
"""

import sys
import time
from pathlib import Path

import hivemind
import job
import torch
from torch import nn

TARGET = 10_000
ADDRESS = "/ip4/127.0.0.1/tcp/0"


def main() -> None:
    """Run one peer."""
    folder = sys.argv[1]
    address = Path(f"{folder}-address")
    if "--first" in sys.argv:
        dht = hivemind.DHT(host_maddrs=[ADDRESS], start=True)
        Path(f"{address}.new").write_text(str(dht.get_visible_maddrs()[0]))
        Path(f"{address}.new").rename(address)
        while True:
            time.sleep(1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    while not address.exists():
        time.sleep(0.1)
    dht = hivemind.DHT(host_maddrs=[ADDRESS], initial_peers=[address.read_text()], start=True)
    images, labels = job.dataset()
    model = job.Paced(folder)
    diary = job.Diary(folder)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="dead_worker",
        batch_size_per_step=job.BATCH,
        target_batch_size=TARGET,
        optimizer=torch.optim.SGD(model.parameters(), job.RATE),
        use_local_updates=True,
        matchmaking_time=3.0,
        averaging_timeout=10.0,
        verbose=True,
    )
    draw = torch.Generator().manual_seed(job.rank())
    while optimizer.local_epoch < job.EPOCHS * job.IMAGES // TARGET:
        batch = torch.randint(job.IMAGES, (job.BATCH,), generator=draw)
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        diary.write(1, images[batch])
    optimizer.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
