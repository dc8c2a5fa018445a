"""Say plainly when this Python is too old; an old one must be able to run this file."""

import sys

if sys.version_info < (3, 10):  # noqa: UP036  # the whole point
    sys.exit(
        "error: reshard needs Python 3.10 or newer, found "
        + sys.version.split()[0]
        + "; next: make PYTHON=python3.11 ..."
    )
