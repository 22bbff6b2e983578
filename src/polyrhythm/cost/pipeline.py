"""Idle time, activations and bytes of pipelines with even stages: K ranks, M microbatches.

    schedule                   idle of each rank     live activations of rank k
    gpipe                      (K-1)(f+b)            M
    one_forward_one_backward   (K-1)(f+b)            min(M, K-k)
    interleaved, v chunks      (K-1)(f+b)/v          min(vM, (v-1)K + 2(K-1-k) + 1) chunks
    zero_bubble                (K-1)(f+B-W), W <= B  min(M, K-k) until B, min(M, K) until W

f, b: seconds of a rank's forward and backward pass of one microbatch; B + W = b where it is split. Of unequal stages,
GPipe takes sum(f+b) + (M-1)(max f + max b) without transfers.
"""

from __future__ import annotations

from collections.abc import Sequence


def idle_s(ranks: int, forward_s: float, backward_s: float, chunks: int = 1) -> float:
    """Return for how long each rank is idle in a batch.

    Args:
        ranks: K.
        forward_s: f, of all chunks of a rank.
        backward_s: b; of zero_bubble B - W.
        chunks: v; 1 where ranks have one stage each.
    """
    return (ranks - 1) * (forward_s + backward_s) / chunks


def bubble(ranks: int, microbatches: int, chunks: int = 1) -> float:
    """Return the idle share of a batch's time: (K-1) / (v M + K - 1)."""
    return (ranks - 1) / (chunks * microbatches + ranks - 1)


def gpipe_s(stages: Sequence[tuple[float, float]], microbatches: int) -> float:
    """Return the seconds of a batch with GPipe, from the forward and backward seconds of each stage."""
    whole = sum(forward + backward for forward, backward in stages)
    slowest = max(forward for forward, _ in stages) + max(backward for _, backward in stages)
    return whole + (microbatches - 1) * slowest


def sent_bytes(images: int, output_bytes: Sequence[int]) -> int:
    """Return the bytes that all ranks send in a step: activations, and as many of their gradients.

    Args:
        images: images of the pipeline in a step.
        output_bytes: bytes of one image, over each cut.
    """
    return 2 * images * sum(output_bytes)
