"""Compressed pushes and pulls of shards that are on two servers, which both know what workers hold."""

from __future__ import annotations

from polyrhythm.strategies.parameter_server.replication.replicated_server import ReplicatedPushPull
from polyrhythm.strategies.parameter_server.serving.compressed import CompressedPushPull


class CompressedReplicatedPushPull(CompressedPushPull, ReplicatedPushPull):
    """As `CompressedPushPull`; a request that is repeated after a loss is answered with whole parameters."""
