from __future__ import annotations

import random
import socket
import threading

import pytest

from polyrhythm.communication.transports.tcp.incoming_links import FrameReader


@pytest.mark.parametrize("seed", range(5))
def test_pieces_come_out_as_they_went_in_however_the_stream_is_cut(seed: int) -> None:
    draw = random.Random(seed)
    pieces = [draw.randbytes(draw.choice([0, 1, 64, 1000, 65_536, 200_000])) for _ in range(60)]
    near, far = socket.socketpair()

    def send() -> None:
        whole = memoryview(b"".join(pieces))
        while whole:
            length = draw.choice([1, 100, 64_000, 300_000])
            near.sendall(whole[:length])
            whole = whole[length:]
        near.close()

    sender = threading.Thread(target=send)
    sender.start()
    reader = FrameReader(far)
    for piece in pieces:
        if len(piece) <= 64:
            assert reader.take(len(piece)) == piece
        else:
            found = bytearray(len(piece))
            reader.fill(memoryview(found))
            assert found == piece
    with pytest.raises(ConnectionError, match="has gone"):
        reader.take(1)
    sender.join()
    far.close()
