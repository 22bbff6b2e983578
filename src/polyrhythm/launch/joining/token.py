"""The run token: what somebody must know to join a run."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from polyrhythm.claim import UNCLAIMED, Unclaimed
from polyrhythm.communication.secret import prove
from polyrhythm.errors import RequestError

TOKEN_VARIABLE = "POLYRHYTHM_TOKEN"
"""In the environment: the token itself."""

TOKEN_FILE = "join-token"
"""In the run folder: the token of a run that was told none, readable by its owner alone."""

LEAST_CHARACTERS = 16
_DRAWN_BYTES = 32
_PRIVATE = 0o600


def read_token(file: str | Path | None) -> str | None:
    """Reads the token that the user has given, from a file, else from the environment.

    Args:
        file: whose text it is, without surrounding blanks; None looks at `POLYRHYTHM_TOKEN`.

    Returns:
        The token, or None where neither is given.

    Raises:
        RequestError: the file cannot be read, or the token is too short to be safe.
    """
    where = f"the environment's {TOKEN_VARIABLE}" if file is None else str(file)
    if file is None:
        text = os.environ.get(TOKEN_VARIABLE)
        if text is None:
            return None
    else:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except OSError as error:
            raise RequestError(f"cannot read the token file {file}: {error.strerror}") from None
        except ValueError:
            raise RequestError(f"cannot read the token file {file}: it holds no text") from None
    token = text.strip()
    if len(token) < LEAST_CHARACTERS:
        raise RequestError(
            f"the token of {where} has {len(token)} characters: make one of {LEAST_CHARACTERS} or more, with "
            "`openssl rand -hex 32` for example"
        )
    return token


def draw_token(folder: Path, claim: Unclaimed = UNCLAIMED) -> tuple[str, Path]:
    """Draws a token and leaves it in the run folder, readable by the user alone; gives it and the file.

    Args:
        folder: of the run.
        claim: to it.

    Raises:
        Superseded: the folder is another's.
    """
    token, path = secrets.token_hex(_DRAWN_BYTES), folder / TOKEN_FILE
    draft = claim.draft(path)
    draft.unlink(missing_ok=True)  # one of an earlier session may be open to others
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE), "w", encoding="utf-8") as file:
        file.write(f"{token}\n")
    claim.publish(path)
    return token, path


def door_key(token: str) -> bytes:
    """Gives the key that guards the door."""
    return prove(token.encode(), "polyrhythm door")


def link_key(token: str) -> bytes:
    """Gives the key that guards links between ranks; who hears a proof of one learns nothing about the other."""
    return prove(token.encode(), "polyrhythm links")
