"""Writes docs/cli.md: what ``reshard COMMAND --help`` says, for every command.

``python -m scripts.cli_page`` writes the page anew. The tests run it like any other page, so they
tell when it no longer is what the program says.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

from reshard.cli import main

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
COMMANDS = ("inspect", "doctor", "map", "convert", "verify", "annotate")

HEAD = """\
# The command line

Results go to standard output, progress and errors to standard error. Exit codes: 0 done; 1 a
comparison found differences, or `doctor` something to mend; 2 bad usage or bad input; 130
interrupted. Colours and progress are for terminals: they go away in a pipe, with `NO_COLOR`, and
progress with `--quiet`. With `--json` every command prints one document with a `schema`, an error
included. `reshard --install-completion` makes your shell complete commands, options, formats,
states and names of parameters.

Below is what each command says of itself (`python -m scripts.cli_page` writes this page).
"""


def helped(*words: str) -> str:
    """Return what ``reshard WORDS --help`` prints at 100 columns, outside of a terminal."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main([*words, "--help"])
    return out.getvalue().strip("\n")


def page() -> str:
    """Return the text of the page."""
    os.environ["COLUMNS"] = "100"
    sections = [f"\n```console\n$ reshard --help\n{helped()}\n```\n"]
    for name in COMMANDS:
        command = f"reshard {name} --help"
        sections.append(f"\n## {name}\n\n```console\n$ {command}\n{helped(name)}\n```\n")
    return HEAD + "".join(sections)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
