"""Writes the settings into docs/api.md, from their declarations: `python docs/make_api.py`."""

import re
from pathlib import Path

from ferryman.options import describe

PAGE = Path(__file__).with_name("api.md")
BEGIN, END = "<!-- settings: written by docs/make_api.py -->\n", "<!-- end of settings -->\n"


def settings() -> str:
    """The settings of an engine as a Markdown list."""
    entries = re.findall(r"^(\w+) \((.*)\):\n((?: +.*\n?)+)", describe(indent=0), re.MULTILINE)
    return "".join(f"- **`{name}`** (`{kind}`): {' '.join(text.split())}\n" for name, kind, text in entries)


def renewed(page: str) -> str:
    """The page with the current settings."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{settings()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
