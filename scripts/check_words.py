"""List words that are not plain technical English in pages, docstrings, comments and messages; fail if there are any.

python scripts/check_words.py

CONTRIBUTING.md has the terms to use instead.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLACES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "examples/README.md",
    "docs",
    "benchmarks",
    "src",
)
WORDS = re.compile(
    r"\b(?:who(?:se|m|ever)?|(?:no|some|every)body|told|tells?|sa(?:ys?|id)|go(?:es)? on|went on|going on|comes?|came|"
    r"(?:is|are) left|so many|of which|under way|besides?|anew|meanwhile|likewise|successors?|heirs?|pictures?|"
    r"rehears\w+|(?:in|out of) step|free-running|at (?:its|their) own pace|held back|seldom|mend(?:s|ed)?|"
    r"st(?:ands?|anding) still)\b",
    re.IGNORECASE,
)


NAME = re.compile(r"""\w*["'][\w./-]*["']""")
"""A string that is a key or the name of a file."""
SEED = re.compile(r"""\b(generator_for|seed_for|sample_keys)\(\s*f?("|').*?\2""")
"""A purpose in a seed (see `data.seeding`), which cannot be reworded without other random numbers."""
CODE = re.compile(r"`[^`\n]*`|\{[^{}\n]*\}|^ *\*{0,2}\w+(?:, \w+)*(?=: )", re.MULTILINE)
"""Code in a string: between backticks or braces, and the name of a parameter."""


def prose(path: Path) -> str:
    """Return the sentences of a page, or the comments, docstrings and messages of a module."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return re.sub(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", " ", text, flags=re.DOTALL)
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    tokens = tokenize.generate_tokens(io.StringIO(SEED.sub(r"\1(''", text)).readline)
    strings = [token.string for token in tokens if token.type in kinds and not NAME.fullmatch(token.string)]
    return "\n".join(CODE.sub(" ", string) for string in strings)


def main() -> None:
    """Print the words of each file."""
    failed = False
    for place in PLACES:
        inside = (ROOT / place).rglob("*.py" if place == "src" else "*.md")
        for file in [ROOT / place] if place.endswith(".md") else sorted(inside):
            if words := WORDS.findall(prose(file)):
                print(f"{file.relative_to(ROOT)}: {', '.join(words)}")
                failed = True
    sys.exit("words to replace: see CONTRIBUTING.md" if failed else 0)


if __name__ == "__main__":
    main()
