"""`python -m polyrhythm` is `polyrhythm`."""

from polyrhythm.cli.main import main

if __name__ == "__main__":
    main()
