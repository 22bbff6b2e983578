"""The branches of a tree of networks, each computed whole by one of the workers.

    images ─▶ trunk ─▶ (B, A) ─▶ branch 0 ─▶ logits        on worker 0
             every worker ├────▶ branch 1 ─▶ logits        on worker 1
             its own copy └────▶ …

Of R branches and K workers, worker k has the branches R k / K … R (k+1) / K. They see the examples of all
workers; the owner of an example receives all branches' logits, and returns the gradients of its loss with
respect to them. So any loss of several branches works, and the result is a step of the tree with one large
batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from polyrhythm.errors import RequestError
from polyrhythm.evaluation.evaluate import in_evaluation_mode
from polyrhythm.models.architectures.treenet import Tree
from polyrhythm.partition.activations import Activations, neurons
from polyrhythm.partition.cut import Cut, cut
from polyrhythm.training.flat_parameters import FlatParameters


@dataclass(frozen=True)
class Branches:
    """A tree in parts, which share its parameters.

    Attributes:
        trunk: maps images (B, C, H, W) to features (B, A).
        branches: branches, each a map from features (B, A) to logits (B, classes).
        features: A.
        classes: classes of the logits.
        like: empty, with the dtype and device of the features.
    """

    trunk: nn.Module
    branches: tuple[nn.Module, ...]
    features: int
    classes: int
    like: Tensor

    @classmethod
    def of(cls, tree: Tree, image: Tensor) -> Branches:
        """Return the parts of a tree.

        Args:
            tree: unchanged network.
            image: (1, C, H, W), like the images that it will see.

        Raises:
            RequestError: a branch has statistics of its own, which only its worker would know.
        """
        if any(True for _ in tree.branches.buffers()):
            raise RequestError(
                "hybrid shares out branches without batch normalization: give the treenet another base, or take "
                "synchronous"
            )
        with in_evaluation_mode(tree):
            features = tree.trunk(image)
            classes = tree(image).shape[1]
        shape = tuple(features.shape[1:])
        return cls(
            nn.Sequential(tree.trunk, nn.Flatten()),
            tuple(nn.Sequential(nn.Unflatten(1, shape), branch) for branch in tree.branches),
            prod(shape),
            classes,
            features[:0],
        )

    @property
    def trains_trunk(self) -> bool:
        """Whether the trunk has trained parameters."""
        return any(parameter.requires_grad for parameter in self.trunk.parameters())

    def rows(self, flat: FlatParameters) -> list[tuple[int, int, int]]:
        """Return the branches' parameters as (start, stop, branches), each an equal part; none if all are frozen.

        Raises:
            RequestError: the branches are not contiguous, or differ in size.
        """
        views = {id(view.parameter): view for view in flat.views}
        spans = []
        for branch in self.branches:
            found = [views[id(each)] for each in branch.parameters() if id(each) in views]
            spans.append((found[0].start, found[-1].stop) if found else (0, 0))
        start, stop = spans[0][0], spans[-1][1]
        if start == stop:
            return []
        size = (stop - start) // len(spans)
        if spans != [(start + at * size, start + (at + 1) * size) for at in range(len(spans))]:
            raise RequestError(
                "hybrid shares out branches that are alike: freeze the same layers of all of them"
            )
        return [(start, stop, len(spans))]


def parts_of(model: nn.Module, image: Tensor) -> Cut | Branches:
    """Divide a tree into its branches, and any other classifier in front of its fully connected layers.

    Args:
        model: unchanged network.
        image: (1, C, H, W), like the images that it will see.

    Raises:
        RequestError: it can be divided neither way.
    """
    return Branches.of(model, image) if isinstance(model, Tree) else cut(model, image)


class OwnedBranches:
    """One worker's branches.

    Args:
        parts: parts of the tree; gradients are added to this worker's branches only.
        activations: exchange with the others.
    """

    def __init__(self, parts: Branches, activations: Activations) -> None:
        self._parts = parts
        self._activations = activations
        self._places = neurons(len(parts.branches), activations.size)
        self._call: tuple[Tensor, Tensor] | None = None

    @property
    def places(self) -> list[slice]:
        """This worker's branches."""
        return [self._places[self._activations.rank]]

    def forward(self, inputs: Tensor, counts: Sequence[int]) -> Tensor:
        """Return all branches' logits of this worker's own examples.

        Args:
            inputs: (sum of counts, A), the examples of all workers, in rank order.
            counts: number of each worker's examples.

        Returns:
            (counts[rank], branches, classes).
        """
        own = self._parts.branches[self._places[self._activations.rank]]
        leaf = inputs.detach().requires_grad_(self._parts.trains_trunk)
        with torch.enable_grad():
            outputs = (
                torch.stack([branch(leaf) for branch in own], 1)
                if own
                else leaf.new_zeros(len(leaf), 0, self._parts.classes)
            )
        self._call = leaf, outputs
        count = counts[self._activations.rank]
        shapes = [(count, width, self._parts.classes) for width in self._widths]
        return torch.cat(self._activations.swap(outputs.split(list(counts)), shapes), 1)

    def backward(self, gradient: Tensor, counts: Sequence[int]) -> Tensor | None:
        """Add to the gradients of this worker's branches, in place, and return its share of the gradient of the inputs.

        Args:
            gradient: (counts[rank], branches, classes), of the logits that `forward` returned.
            counts: counts given to `forward`.

        Returns:
            (sum of counts, A): the contribution of this worker's branches, to be summed over the workers; None if it is
            not needed.
        """
        assert self._call is not None, "forward must be called first"
        (leaf, outputs), self._call = self._call, None
        width = self._widths[self._activations.rank]
        shapes = [(count, width, self._parts.classes) for count in counts]
        parts = gradient.split(self._widths, 1)
        own = torch.cat(self._activations.swap(parts, shapes), 0)
        if outputs.requires_grad:
            outputs.backward(own)
        if not leaf.requires_grad:
            return None
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad

    @property
    def _widths(self) -> list[int]:
        return [place.stop - place.start for place in self._places]
