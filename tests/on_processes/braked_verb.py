"""`polyrhythm` with a brake on its networks, for torchrun to start.

braked_verb.py FOLDER AT VERB …   (FOLDER and AT as in `Brake`)
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    from on_processes.brake import Brake
    from polyrhythm.cli.main import main

    Brake(Path(sys.argv[1]), int(sys.argv[2])).on_every_model()
    main(sys.argv[3:])
