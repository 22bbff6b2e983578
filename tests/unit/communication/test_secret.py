"""Proofs against the definition of HMAC, written out."""

from __future__ import annotations

import hashlib

import pytest

from polyrhythm.communication.secret import NONCE_BYTES, PROOF_BYTES, nonce, prove, proves

KEY = b"k" * 20
BLOCK_BYTES = 64


def hmac_by_hand(key: bytes, text: bytes) -> bytes:
    """RFC 2104: H(K xor opad, H(K xor ipad, text))."""
    padded = (hashlib.sha256(key).digest() if len(key) > BLOCK_BYTES else key).ljust(BLOCK_BYTES, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded) + text).digest()
    return hashlib.sha256(bytes(byte ^ 0x5C for byte in padded) + inner).digest()


@pytest.mark.parametrize("key", [KEY, b"", b"long" * 40])
def test_a_proof_is_the_hmac_of_purpose_and_parts_with_their_lengths(key: bytes) -> None:
    text = b"why\0" + (3).to_bytes(8, "big") + b"one" + (0).to_bytes(8, "big")
    assert prove(key, "why", b"one", b"") == hmac_by_hand(key, text)
    assert len(prove(key, "why")) == PROOF_BYTES


def test_a_proof_holds_for_its_key_purpose_and_parts_alone() -> None:
    proof = prove(KEY, "why", b"ab", b"c")
    assert proves(proof, KEY, "why", b"ab", b"c")
    assert not proves(proof, KEY + b"!", "why", b"ab", b"c")
    assert not proves(proof, KEY, "how", b"ab", b"c")
    assert not proves(proof, KEY, "why", b"a", b"bc")
    assert not proves(proof, KEY, "why", b"abc")
    assert not proves(proof[:-1], KEY, "why", b"ab", b"c")
    for bit in range(8 * PROOF_BYTES):
        changed = bytearray(proof)
        changed[bit // 8] ^= 1 << bit % 8
        assert not proves(bytes(changed), KEY, "why", b"ab", b"c")


def test_no_nonce_comes_twice() -> None:
    drawn = {nonce() for _ in range(1000)}
    assert len(drawn) == 1000
    assert {len(each) for each in drawn} == {NONCE_BYTES}
