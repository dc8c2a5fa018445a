"""Names that a package looks up on first use, safely from several threads.

Theory. A package imports its modules and these import through packages. Two threads that begin such
a ring of imports from different ends wait for each other, which Python breaks up with an error. So
all first uses of public names, whichever package they are asked of, go through one lock; a name
that has been used is an ordinary attribute and comes here no more.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping, MutableMapping

_LOOKUP = threading.RLock()


def looked_up(
    name: str, homes: Mapping[str, str], namespace: MutableMapping[str, object]
) -> object:
    """Return what ``__getattr__`` of a package is to return, and keep it in the namespace.

    Parameters
    ----------
    name
        The name that is asked for.
    homes
        Public name -> the module that defines it, or that it is.
    namespace
        The package's ``globals()``.

    Raises
    ------
    AttributeError
        When the name is not public.

    Examples
    --------
    >>> space = {"__name__": "mine"}
    >>> looked_up("prod", {"prod": "math"}, space)([2, 3])
    6
    >>> sorted(space)
    ['__name__', 'prod']
    """
    home = homes.get(name)
    if home is None:
        raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
    with _LOOKUP:
        module = importlib.import_module(home)
    value: object = module if home.endswith(f".{name}") else getattr(module, name)
    namespace[name] = value
    return value
