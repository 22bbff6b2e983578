"""A loop in the manner of torchvision's reference for classification: warm-up, scaler, clipping, averaged weights."""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return digits of 8 x 8 pixels, for training and for testing."""
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(digits)
    tested = torch.arange(len(images)) % 6 == 0
    return TensorDataset(images[~tested], labels[~tested]), TensorDataset(images[tested], labels[tested])


def train_one_epoch(model, criterion, optimizer, loader, scheduler, average, scaler, options):
    """Train, and return the mean loss."""
    model.train()
    losses = []
    for step, (image, target) in enumerate(loader):
        with torch.autocast("cpu", enabled=options.amp, dtype=torch.bfloat16):
            loss = criterion(model(image), target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        if step % options.ema_steps == 0:
            average.update_parameters(model)
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.inference_mode()
def evaluate(model, loader):
    """Return the accuracy."""
    model.eval()
    return sum((model(image).argmax(1) == target).sum().item() for image, target in loader) / len(
        loader.dataset
    )


def arguments():
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--clip-grad-norm", type=float, default=1.0)
    parser.add_argument("--ema-steps", type=int, default=4)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--out", default="", help="file for the network's weights")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main(options):
    """Train on digits, and save the network."""
    torch.manual_seed(options.seed)
    training, testing = load_data()
    loader = DataLoader(training, options.batch_size, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    biases = [each for each in model.parameters() if each.ndim == 1]
    weights = [each for each in model.parameters() if each.ndim > 1]
    groups = [{"params": weights, "weight_decay": 1e-4}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=options.lr, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=options.amp)
    steps = len(loader)
    warm_up, main_part = LinearLR(optimizer, 0.01, total_iters=steps), CosineAnnealingLR(optimizer, 3 * steps)
    scheduler = SequentialLR(optimizer, [warm_up, main_part], [steps])
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for epoch in range(options.epochs):
        loss = train_one_epoch(model, criterion, optimizer, loader, scheduler, average, scaler, options)
        accuracy = evaluate(model, DataLoader(testing, 100))
        averaged = evaluate(average, DataLoader(testing, 100))
        print(f"epoch {epoch}  loss {loss:.3f}  accuracy {accuracy:.3f}  averaged {averaged:.3f}")
    if options.out:
        torch.save(model.state_dict(), options.out)


if __name__ == "__main__":
    options = arguments()
    main(options)
