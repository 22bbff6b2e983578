"""A training loop of your own, distributed by the lines marked with `#`.

    python examples/own_loop.py                                     one worker
    polyrhythm run --workers 2 examples/own_loop.py --strategy "parameter_server(servers=2)"
    torchrun --nproc-per-node 3 examples/own_loop.py --strategy parameter_server

Without them it is an ordinary PyTorch loop over scikit-learn's digits.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm  # 1


def main() -> None:
    """Trains, and prints the accuracy on images that were not trained on."""
    parser = argparse.ArgumentParser(description="Train a small network on scikit-learn's digits.")
    parser.add_argument("--strategy", default="synchronous", help='such as "parameter_server(servers=2)"')
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()

    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    held_out = torch.arange(len(images)) % 6 == 0
    loader = DataLoader(TensorDataset(images[~held_out], labels[~held_out]), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()

    with polyrhythm.join(options.strategy) as group:  # 2
        model, optimizer = group.distribute(model, optimizer)  # 3
        shard = group.shard(loader)  # 4
        # Or range(…), which lets nobody take a lost worker's place.
        for epoch in group.epochs(options.epochs):
            total = 0.0
            for x, y in shard:
                loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                total += loss.item()
            mean = group.average(total / len(shard))
            if group.leads:
                print(f"epoch {epoch + 1:2}  loss {mean:.3f}")

    if group.leads:
        with torch.no_grad():
            right = model(images[held_out]).argmax(1) == labels[held_out]
        print(f"{group.workers} workers: accuracy {right.double().mean():.3f}")


if __name__ == "__main__":
    main()
