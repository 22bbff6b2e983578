"""A script in the manner of CIFAR speed records: half-precision layers beside float norms, a loader of its own."""

from __future__ import annotations

import argparse
import copy

import torch
from sklearn.datasets import load_digits
from torch import nn

import polyrhythm


class Batches:
    """Shuffles and shifts all pictures at once at the beginning of each epoch."""

    def __init__(self, images, labels, size, train):
        self.images, self.labels, self.size, self.train, self.epoch = images, labels, size, train, 0

    def __len__(self):
        return len(self.images) // self.size if self.train else -(-len(self.images) // self.size)

    def __iter__(self):
        images, order = self.images, torch.arange(len(self.images))
        if self.train:
            generator = torch.Generator().manual_seed(self.epoch)
            padded = nn.functional.pad(images, (1, 1, 1, 1), mode="reflect")
            down, right = torch.randint(0, 3, (2,), generator=generator).tolist()
            images = padded[:, :, down : down + 8, right : right + 8]
            order = torch.randperm(len(images), generator=generator)
            self.epoch += 1
        for part in order.split(self.size)[: len(self)]:
            yield images[part], self.labels[part]


class Block(nn.Module):
    """Two convolutions in half precision, each before a float norm without scale."""

    def __init__(self, width_in, width):
        super().__init__()
        self.first = nn.Conv2d(width_in, width, 3, padding="same", bias=False)
        self.second = nn.Conv2d(width, width, 3, padding="same", bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
        for norm in self.norms:
            norm.weight.requires_grad = False

    def forward(self, x):
        """Halve the picture."""
        x = nn.functional.max_pool2d(self.first(x), 2)
        x = nn.functional.gelu(self.norms[0](x.float()).to(x.dtype))
        return nn.functional.gelu(self.norms[1](self.second(x).float()).to(x.dtype))


def make_net():
    """Return a network whose norms are float32, and whose other layers are bfloat16."""
    net = nn.Sequential(
        Block(1, 16), Block(16, 32), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 10, bias=False)
    )
    net.to(memory_format=torch.channels_last).bfloat16()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    return net


class Lookahead:
    """Pulls the weights to a slow copy of them now and then."""

    def __init__(self, net):
        self.slow = copy.deepcopy(net.state_dict())

    def update(self, net, decay):
        """Move the copy, and the network to it."""
        with torch.no_grad():
            for name, value in net.state_dict().items():
                if value.is_floating_point():
                    self.slow[name].lerp_(value, 1 - decay)
                    value.copy_(self.slow[name])


def accuracy(net, batches):
    """Return the accuracy, over each picture and its shifts to both sides."""
    net.eval()
    with torch.no_grad():
        logits = ((sum(net(x.roll(by, 3).bfloat16()) for by in (-1, 0, 1)), y) for x, y in batches)
        return torch.cat([found.argmax(1) == y for found, y in logits]).float().mean().item()


def arguments():
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="synchronous")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--out", default="", help="file for the network's weights")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main(options):
    """Train on digits, and save the network."""
    torch.manual_seed(options.seed)
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(digits)
    tested = torch.arange(len(images)) % 6 == 0
    loader = group.shard(Batches(images[~tested], labels[~tested], options.batch_size, train=True))
    net = make_net()
    norms = [each for name, each in net.named_parameters() if "norm" in name and each.requires_grad]
    others = [each for name, each in net.named_parameters() if "norm" not in name]
    groups = [
        {"params": norms, "lr": 1.0, "weight_decay": 1e-4},
        {"params": others, "lr": 0.1, "weight_decay": 1e-3},
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.85, nesterov=True)
    net, optimizer = group.distribute(nn.SyncBatchNorm.convert_sync_batchnorm(net), optimizer)
    steps = options.epochs * len(loader)
    triangle = torch.cat(
        [torch.linspace(0.2, 1, steps // 4), torch.linspace(1, 0.05, steps - steps // 4 + 1)]
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: triangle[min(step, steps)].item())
    lookahead, step = Lookahead(net), 0
    for epoch in range(options.epochs):
        net.train()
        for image, target in loader:
            logits = net(image.bfloat16())
            loss = nn.functional.cross_entropy(logits.float(), target, label_smoothing=0.1)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step % 5 == 0:
                lookahead.update(net, decay=0.8 * step / steps)
        found = accuracy(net, Batches(images[tested], labels[tested], 100, train=False))
        group.print(f"epoch {epoch}  accuracy {found:.3f}")
    if options.out and group.leads:
        torch.save(net.state_dict(), options.out)


if __name__ == "__main__":
    options = arguments()
    with polyrhythm.join(options.strategy) as group:
        main(options)
