"""Agreement: what one rank says or refuses, all hear, and raise alike.

Theory. A rank that raises alone leaves the others waiting for it. So whatever may be refused on one
rank is done in a step that ends with every rank telling how it went: either all have what all said,
or all raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reshard.errors import ReshardError, TransferError
from reshard.live.plain import dumped, loaded
from reshard.live.transport import Transport


def together(transport: Transport, say: Callable[[], object]) -> list[Any]:
    """Return what every rank says, by rank.

    Parameters
    ----------
    transport
        The group.
    say
        Makes a plain value; what it raises is told to all ranks.

    Raises
    ------
    TransferError
        The same on all ranks, when one or more refused.
    """
    refusal: Exception | None = None
    try:
        said = dumped({"refusal": None, "said": say()}, "what a rank says")
    except Exception as error:  # noqa: BLE001 - whatever it is, the others must hear of it
        refusal = error
        said = dumped({"refusal": _text(error)}, "a refusal")
    told: list[Any] = [loaded(one) for one in transport.gather(said)]
    refused = {rank: one["refusal"] for rank, one in enumerate(told) if one["refusal"] is not None}
    if refused:
        raise _refused(refused, transport.size) from refusal
    return [one["said"] for one in told]


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, ReshardError) else f"{type(error).__name__}: {error}"


def _refused(texts: dict[int, str], size: int) -> TransferError:
    distinct = list(dict.fromkeys(texts.values()))
    return TransferError(
        f"the transfer was refused ({distinct[0]})",
        rank="all" if len(texts) == size else ", ".join(map(str, texts)),
        found=f"{len(distinct) - 1} other refusals" if len(distinct) > 1 else None,
        next_step="mend that, then move again",
    )
