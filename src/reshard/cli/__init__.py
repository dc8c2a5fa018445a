"""The command line: parse, call :mod:`reshard.api`, render.

Theory. The command line holds no logic of its own. :mod:`~reshard.cli.app` says which commands and
options there are, :mod:`~reshard.cli.commands` calls one verb of the API for each, the ``render_*``
modules turn what it returned into blocks (:mod:`~reshard.cli.blocks`) or JSON
(:mod:`~reshard.cli.documents`), and :mod:`~reshard.cli.failure` turns what it raised into one line.
Results go to standard output, progress and errors to standard error.
"""

from reshard.cli.entry import main

__all__ = ["main"]
