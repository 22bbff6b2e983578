"""Proofs that both sides know a secret, without ever sending it: HMAC-SHA256 over fresh numbers of both.

After Krawczyk, Bellare, Canetti, "HMAC: Keyed-Hashing for Message Authentication", RFC 2104, 1997.

    proof = HMAC-SHA256(key, purpose | length of part | part | …)
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

NONCE_BYTES = 32
PROOF_BYTES = 32
_LENGTH_BYTES = 8


def nonce() -> bytes:
    """Draw a number that has never been used, `NONCE_BYTES` bytes."""
    return secrets.token_bytes(NONCE_BYTES)


def prove(key: bytes, purpose: str, *parts: bytes) -> bytes:
    """Return `PROOF_BYTES` bytes that prove knowledge of the key.

    Args:
        key: the secret.
        purpose: purpose of the proof; a proof for one purpose is none for another.
        parts: facts that it covers. Their lengths are covered as well, so no two lists give the same bytes.
    """
    made = hmac.new(key, purpose.encode() + b"\0", hashlib.sha256)
    for part in parts:
        made.update(len(part).to_bytes(_LENGTH_BYTES, "big"))
        made.update(part)
    return made.digest()


def proves(proof: bytes, key: bytes, purpose: str, *parts: bytes) -> bool:
    """Return whether a proof is right, in a time that does not depend on where it is wrong."""
    return hmac.compare_digest(proof, prove(key, purpose, *parts))
