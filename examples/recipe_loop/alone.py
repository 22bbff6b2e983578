"""A loop in the manner of timm's training script: a network by name, mixup, accumulation, an optimizer of timm's."""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from polyrhythm.models.create import define_missing_operators

operators = define_missing_operators()  # a torchvision for CUDA beside a torch without it

from timm import create_model  # noqa: E402
from timm.data import Mixup  # noqa: E402
from timm.loss import SoftTargetCrossEntropy  # noqa: E402
from timm.optim import create_optimizer_v2  # noqa: E402
from timm.scheduler import CosineLRScheduler  # noqa: E402
from timm.utils import AverageMeter, accuracy  # noqa: E402


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return digits of 32 x 32 pixels, for training and for testing."""
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    images, labels = nn.functional.interpolate(images, scale_factor=4), torch.tensor(digits)
    tested = torch.arange(len(images)) % 6 == 0
    return TensorDataset(images[~tested], labels[~tested]), TensorDataset(images[tested], labels[tested])


def train_one_epoch(epoch, model, loader, optimizer, criterion, scheduler, mixup, options):
    """Train, and return the mean loss."""
    model.train()
    losses = AverageMeter()
    updates = epoch * len(loader)
    for index, (image, target) in enumerate(loader):
        needs_update = (index + 1) % options.accumulate == 0 or index + 1 == len(loader)
        image, target = mixup(image[: len(image) // 2 * 2], target[: len(target) // 2 * 2])
        loss = criterion(model(image), target) / options.accumulate
        loss.backward()
        losses.update(loss.item() * options.accumulate, len(image))
        if needs_update:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step_update(num_updates=updates + index)
    scheduler.step(epoch + 1)
    return losses.avg


@torch.inference_mode()
def validate(model, loader):
    """Return the accuracy in percent."""
    model.eval()
    top1 = AverageMeter()
    for image, target in loader:
        top1.update(accuracy(model(image), target)[0].item(), len(image))
    return top1.avg


def arguments():
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mobilenetv3_small_050")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--out", default="", help="file for the network's weights")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main(options):
    """Train on digits, and save the network."""
    torch.manual_seed(options.seed)
    training, testing = load_data()
    loader = DataLoader(training, options.batch_size, shuffle=True, drop_last=True)
    model = create_model(options.model, num_classes=10, in_chans=1)
    optimizer = create_optimizer_v2(model, opt="lamb", lr=options.lr, weight_decay=0.02)
    scheduler = CosineLRScheduler(optimizer, options.epochs, warmup_t=1, warmup_lr_init=1e-4)
    criterion, mixup = SoftTargetCrossEntropy(), Mixup(mixup_alpha=0.1, num_classes=10, label_smoothing=0.05)
    for epoch in range(options.epochs):
        loss = train_one_epoch(epoch, model, loader, optimizer, criterion, scheduler, mixup, options)
        top1 = validate(model, DataLoader(testing, 100))
        print(f"epoch {epoch}  loss {loss:.3f}  accuracy {top1:.1f} %")
    if options.out:
        torch.save(model.state_dict(), options.out)


if __name__ == "__main__":
    options = arguments()
    main(options)
