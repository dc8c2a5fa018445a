"""``python -m scripts.attack --count N --seed S``: make the folders, convert them, count."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from operator import attrgetter
from pathlib import Path

from scripts.attack.campaign import Campaign, Verdict

OUTCOMES = ("exact", "refused", "undecidable", "wrong", "traceback", "slow", "large")
COLUMNS: dict[str, Callable[[Verdict], str]] = {
    "family": attrgetter("family"),
    "kind": attrgetter("kind"),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.attack", description=__doc__)
    parser.add_argument("--count", type=int, default=3000, help="how many folders")
    parser.add_argument("--seed", type=int, default=1, help="the same folders again")
    parser.add_argument("--start", type=int, default=0, help="the first number")
    parser.add_argument("--only", type=int, nargs="*", help="these numbers, and say what came out")
    parser.add_argument("--keep", type=Path, help="where the folders of --only are kept")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--cache", type=Path, help="where honest folders lie ready")
    parser.add_argument("--record", type=Path, help="a file for every verdict, a JSON line each")
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="attack_"))
    cache = options.cache or home / "cache"
    numbers = options.only or range(options.start, options.start + options.count)
    try:
        campaign = Campaign(options.seed, cache, home)
        verdicts = in_parallel(campaign, numbers, options.servers, options.record, options.keep)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    if options.only:
        for verdict in verdicts:
            print(json.dumps(verdict.document(), indent=1))
    print(table(verdicts))


def in_parallel(
    campaign: Campaign,
    numbers: Iterable[int],
    servers: int,
    record: Path | None = None,
    keep: Path | None = None,
) -> list[Verdict]:
    """Judge all numbers with so many servers."""
    left, verdicts, lock = iter(numbers), list[Verdict](), threading.Lock()

    def work(which: int) -> None:
        with campaign.server(which) as server:
            while True:
                with lock:
                    number = next(left, None)
                if number is None:
                    return
                verdict = campaign.judge(number, server, which, keep)
                with lock:
                    verdicts.append(verdict)
                    if record is not None:
                        with record.open("a") as file:
                            file.write(json.dumps(verdict.document()) + "\n")

    threads = [threading.Thread(target=work, args=(which,)) for which in range(servers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(verdicts, key=lambda verdict: verdict.number)


def table(verdicts: Iterable[Verdict]) -> str:
    """Write the counts, by family and by kind."""
    rows = [*verdicts]
    lines = []
    for title, key in COLUMNS.items():
        groups = sorted({key(verdict) for verdict in rows})
        lines.append(f"| {title} | folders | " + " | ".join(OUTCOMES) + " |")
        lines.append("|---" * (len(OUTCOMES) + 2) + "|")
        for group in [*groups, "all"]:
            mine = [v for v in rows if group in (key(v), "all")]
            found = Counter(verdict.outcome for verdict in mine)
            counts = " | ".join(str(found[outcome]) for outcome in OUTCOMES)
            lines.append(f"| {group} | {len(mine)} | {counts} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
