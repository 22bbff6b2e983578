"""Reject words that are not plain technical English, and parameter lines that are not noun phrases.

Pages, docstrings, comments and messages are searched.

python scripts/check_words.py

CONTRIBUTING.md has the terms to use instead.
"""

from __future__ import annotations

import ast
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

SECTIONS = ("Args", "Attributes")
LEFTOVER = re.compile(
    r"^(?:that|which|whose|whom?|what|where|when|while|as|it|its|they|them|their|in which|of (?:it|them|which)|"
    r"(?:to|by|with|from|at|on|under|after|before|for) (?:which|whom|it|them)|to \w+|in it|among those|is|are|was|were|"
    r"has|have|had|holds|lets|gets|gives|goes|hears|knows|learns|does|stands)\b(?! *[`:(=]).*",
    re.IGNORECASE,
)
"""The rest of a sentence that a parameter's name does not begin."""


def leftovers(path: Path) -> list[str]:
    """Return the lines of parameters and attributes in a module that are no noun phrases."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            sections = re.split(r"^(\w+):$", ast.get_docstring(node) or "", flags=re.MULTILINE)
            for title, lines in zip(sections[1::2], sections[2::2], strict=True):
                described = (
                    re.findall(r"^ {4}(\*{0,2}\w+): (.*)", lines, re.MULTILINE) if title in SECTIONS else []
                )
                found += [f"{name}: {text}" for name, text in described if LEFTOVER.match(text)]
    return found


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
            if problems := WORDS.findall(prose(file)) + (leftovers(file) if file.suffix == ".py" else []):
                print(f"{file.relative_to(ROOT)}: {', '.join(problems)}")
                failed = True
    sys.exit("words or parameter lines to replace: see CONTRIBUTING.md" if failed else 0)


if __name__ == "__main__":
    main()
