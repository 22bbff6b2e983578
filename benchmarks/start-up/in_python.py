"""`polyrhythm.train` in a script: the folder of the run, and the words of `polyrhythm train`."""

import sys

import polyrhythm

if __name__ == "__main__":
    folder, _, *words = sys.argv[1:]
    options = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    numbers = {name: int(value) for name, value in options.items() if value.isdecimal()}
    polyrhythm.train(out=folder, **(options | numbers))
