"""A loop over Accelerate on Fashion-MNIST, alone or with a strategy of Polyrhythm.

python benchmarks/adapters/accelerate_loop.py --out DIR
polyrhythm run --workers 2 benchmarks/adapters/accelerate_loop.py --out DIR --strategy synchronous
"""

from __future__ import annotations

import torch
from fashion import EPOCHS, Network, arguments, keep, pictures
from torch import nn, optim
from torch.utils.data import DataLoader


def main() -> None:
    options = arguments(__doc__)
    if options.strategy:
        from polyrhythm.adapters.accelerate import PolyrhythmAccelerator

        accelerator = PolyrhythmAccelerator(options.strategy)
    else:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
    training, testing = pictures()
    network = Network(options.killed)
    optimizer = optim.Adam(network.parameters(), lr=1e-3)
    loader = DataLoader(
        training, options.batch_size, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    model, optimizer, loader, tests = accelerator.prepare(
        network, optimizer, loader, DataLoader(testing, 100)
    )
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    for _ in range(EPOCHS):
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            found = [accelerator.gather_for_metrics(model(x).argmax(1) == y) for x, y in tests]
        accelerator.print(f"top-1 {float(torch.cat(found).double().mean()):.4f}")
    accelerator.end_training()
    network.eval()
    x, y = testing.tensors
    keep(options.out, network, float((network(x).argmax(1) == y).double().mean()))


if __name__ == "__main__":
    main()
