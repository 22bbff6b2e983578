"""Count words that are not plain technical English in pages, docstrings, comments and messages; fail above the limits.

python scripts/check_words.py          compare with LIMITS
python scripts/check_words.py --show   print the words of each file as well

CONTRIBUTING.md has the terms to use instead.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLACES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md", "docs", "benchmarks", "src")
LIMITS = {"src": 160}
"""Words that are still there; lower them with every rewrite. All other places have none."""
WORDS = re.compile(
    r"\b(?:who(?:se|m|ever)?|(?:no|some|every)body|told|tells?|sa(?:ys?|id)|go(?:es)? on|went on|going on|comes?|came|"
    r"(?:is|are) left|so many|of which|under way|besides?|anew|meanwhile|likewise|successors?|heirs?|pictures?|"
    r"rehears\w+|(?:in|out of) step|free-running|at (?:its|their) own pace|held back|seldom|mend(?:s|ed)?|"
    r"st(?:ands?|anding) still)\b",
    re.IGNORECASE,
)


NAME = re.compile(r"""\w*["'][\w./-]*["']""")
"""A string that is a key or the name of a file."""
CODE = re.compile(r"`[^`\n]*`|\{[^{}\n]*\}|^ *\*{0,2}\w+(?:, \w+)*(?=: )", re.MULTILINE)
"""Code in a string: between backticks or braces, and the name of a parameter."""


def prose(path: Path) -> str:
    """Return the sentences of a page, or the comments, docstrings and messages of a module."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return re.sub(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", " ", text, flags=re.DOTALL)
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    strings = [token.string for token in tokens if token.type in kinds and not NAME.fullmatch(token.string)]
    return "\n".join(CODE.sub(" ", string) for string in strings)


def main() -> None:
    """Compare what is there with the limits."""
    found: Counter[str] = Counter()
    for place in PLACES:
        inside = (ROOT / place).rglob("*.py" if place == "src" else "*.md")
        for file in [ROOT / place] if place.endswith(".md") else sorted(inside):
            words = WORDS.findall(prose(file))
            found[place] += len(words)
            if words and "--show" in sys.argv:
                print(f"{len(words):4}  {file.relative_to(ROOT)}: {', '.join(words)}")
    above = [
        f"{place} has {n} (limit {LIMITS.get(place, 0)})"
        for place, n in found.items()
        if n > LIMITS.get(place, 0)
    ]
    sys.exit(
        f"words to replace: {'; '.join(above)}; scripts/check_words.py --show lists them" if above else 0
    )


if __name__ == "__main__":
    main()
