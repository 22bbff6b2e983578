"""Compressed pushes and answers of shards that are on two servers, which both know what workers hold.

A request that is repeated after a loss is answered with whole parameters.
"""

from __future__ import annotations

from polyrhythm.strategies.parameter_server.replication.replicated_link import (
    ReplicatedFreeLink,
    ReplicatedPushPull,
)
from polyrhythm.strategies.parameter_server.serving.compressed import CompressedFreeLink, CompressedPushPull


class CompressedReplicatedPushPull(CompressedPushPull, ReplicatedPushPull):
    """As `CompressedPushPull`, of replicated shards."""


class CompressedReplicatedFreeLink(CompressedFreeLink, ReplicatedFreeLink):
    """As `CompressedFreeLink`, of replicated shards."""
