"""Cost of a parameter server: bytes, the time of a step, and the staleness of gradients.

Campos et al., "Distributed training strategies for a computer vision deep learning algorithm on a distributed GPU
cluster", ICCS 2017, section 6.

N workers, S servers with an equal share of M bytes each, a NIC for every rank. A push and its answer move M each way.
"""

from __future__ import annotations

from polyrhythm.cost.machine import Machine, Payload


def worker_bytes(payload: Payload) -> int:
    """Bytes that a worker and its servers send each other for one step: `2M`."""
    return 2 * payload.nbytes


def server_bytes(workers: int, servers: int, payload: Payload) -> float:
    """Bytes that a server sends and receives while every worker takes a step: `2 N M / S`."""
    return workers * worker_bytes(payload) / servers


def exchange_s(machine: Machine, workers: int, servers: int, payload: Payload) -> float:
    """Seconds of one way, push or answer, when all workers do it at once: `α + β max(M, N M / S)`."""
    share = payload.nbytes / servers
    return machine.latency_s + max(workers, servers) * machine.port_s(share)


def synchronous_step_s(
    machine: Machine, workers: int, servers: int, payload: Payload, compute_s: float
) -> float:
    """Seconds of a step in which all workers push when the slowest has computed, and all are answered at once.

    Args:
        machine: the links.
        workers: N.
        servers: S, with equal shards.
        payload: the parameters.
        compute_s: compute time of the slowest worker in seconds.
    """
    return compute_s + 2 * exchange_s(machine, workers, servers, payload)


def asynchronous_step_s(
    machine: Machine, workers: int, servers: int, payload: Payload, compute_s: float
) -> float:
    """Lower bound of the seconds between two steps of a worker, if all are equal.

    It is that of a single worker until the servers' NICs are saturated: then they pass `S / (β M)` steps a second,
    each way.
    """
    alone_s = compute_s + 2 * exchange_s(machine, 1, servers, payload)
    return max(alone_s, workers * machine.port_s(payload.nbytes / servers))


def staleness(updaters: int) -> int:
    """Updates of others between a read and its gradient, if all are equal and take turns: `N - 1`."""
    return updaters - 1


def mean_staleness(updaters: int, steps: int) -> float:
    """Mean staleness over a run of equal updaters with `steps` each; their first gradients meet 0, 1, … updates."""
    return (updaters - 1) * (1 - 1 / (2 * steps))
