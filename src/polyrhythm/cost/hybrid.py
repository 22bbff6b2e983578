"""Values that a worker receives when fully connected layers are cut by their neurons over K workers.

Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014, arXiv 1404.5997: all of K b
examples pass every slice, b of each worker, with A features each; the same in all of the paper's three schemes.

    examples, and their gradients          (K-1) b A  each
    layer of n neurons but the last        K b (n - n_s)  of outputs, (K-1) K b n_s  of their partial gradients
    last layer of n neurons                b (n - n_s)  of logits, (K-1) b n_s  of their gradients

n_s are the neurons of the worker. Data parallel, the M weights of these layers cost 2 M (K-1)/K.
"""

from __future__ import annotations

from collections.abc import Sequence


def examples(workers: int, batch: int, features: int) -> int:
    """Return the number of values received as examples; their gradients are as many again.

    Args:
        workers: K.
        batch: b, of one worker.
        features: A.
    """
    return (workers - 1) * batch * features


def received(workers: int, batch: int, features: int, widths: Sequence[int]) -> int:
    """Return the number of values that worker 0 receives in a step for layers that are cut.

    Args:
        workers: K.
        batch: b, of one worker.
        features: A.
        widths: neurons of each layer.
    """
    return 2 * examples(workers, batch, features) + between_layers(workers, batch, widths, 0)


def data_parallel(workers: int, features: int, widths: Sequence[int]) -> float:
    """Return the number of values that a worker receives in a step if these layers' M weights are all-reduced.

    Args:
        workers: K.
        features: A.
        widths: neurons of each layer.
    """
    weights = sum(rows * columns for rows, columns in zip([features, *widths], widths, strict=False))
    return 2 * weights * (workers - 1) / workers


def between_layers(workers: int, batch: int, widths: Sequence[int], worker: int) -> int:
    """Return the number of values received between the layers and as logits, forward and backward.

    Args:
        workers: K.
        batch: b, of one worker.
        widths: neurons of each layer.
        worker: the receiver; slices differ by a neuron if they are not even.
    """
    own = [width * (worker + 1) // workers - width * worker // workers for width in widths]
    hidden = sum(
        workers * batch * (width - mine) + (workers - 1) * workers * batch * mine
        for width, mine in zip(widths[:-1], own[:-1], strict=True)
    )
    return hidden + batch * (widths[-1] - own[-1]) + (workers - 1) * batch * own[-1]
