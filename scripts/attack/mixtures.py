"""Files: gone, exchanged, copied over one another, of other runs and steps, links, odd names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from scripts.attack.room import Mutation, NothingToDoError, Room, replace


def delete(room: Room) -> str:
    """Delete some files."""
    files = room.files()
    gone = room.chance.sample(files, min(len(files) - 1, room.chance.choice((1, 1, 1, 2, 3))))
    for path in gone:
        path.unlink()
    return f"deleted {_names(room, gone)}"


def exchange(room: Room) -> str:
    """Exchange the names of two files."""
    one, other = _two(room)
    mine, its = one.read_bytes(), other.read_bytes()
    if mine == its:
        raise NothingToDoError
    replace(one, its)
    replace(other, mine)
    return f"exchanged {room.name(one)} and {room.name(other)}"


def copy_over(room: Room) -> str:
    """Copy one file over another, or under a name that does not exist."""
    one, other = _two(room)
    if one.read_bytes() == other.read_bytes():
        raise NothingToDoError
    replace(other, one.read_bytes())
    return f"copied {room.name(one)} over {room.name(other)}"


def _two(room: Room) -> tuple[Path, Path]:
    one = room.any_file()
    kin = [path for path in room.files() if path != one and _kind(path) == _kind(one)]
    if not kin:
        kin = [path for path in room.files() if path != one]
    if not kin:
        raise NothingToDoError
    return one, room.chance.choice(kin)


def _kind(path: Path) -> str:
    return "".join(c for c in path.name if not c.isdigit())


def mixed(other: str, choose: Callable[[Room, list[Path]], list[Path]]) -> Mutation:
    """Return the mutation that takes some files from another run or step."""

    def mutate(room: Room) -> str:
        if other not in room.others:
            raise NothingToDoError
        differing = [
            path
            for path in room.files()
            if room.in_other(other, path).is_file()
            and room.in_other(other, path).read_bytes() != path.read_bytes()
        ]
        if len(differing) < 2:
            raise NothingToDoError
        taken = choose(room, differing)
        if len(taken) == len(differing):
            raise NothingToDoError
        for path in taken:
            replace(path, room.in_other(other, path).read_bytes())
        return f"of the other {other}: {_names(room, taken)}"

    return mutate


def one_file(room: Room, files: list[Path]) -> list[Path]:
    """Take one file."""
    return [room.chance.choice(files)]


def some_files(room: Room, files: list[Path]) -> list[Path]:
    """Take any number of files."""
    return room.chance.sample(files, room.chance.randrange(1, len(files)))


def one_kind(room: Room, files: list[Path]) -> list[Path]:
    """Take all files of one kind: all optimizer files, all layer files, …."""
    kind = _kind(room.chance.choice(files))
    return [path for path in files if _kind(path) == kind]


def added(room: Room) -> str:
    """Add a file: another rank's, another layer's, or one with an odd name."""
    path = room.any_file()
    digits = [at for at, c in enumerate(path.name) if c.isdigit()]
    odd = ["\x1b[31mred", "a\nb.pt", "..pt", " ", "日本.pt", "zero_pp_rank_-1_mp_rank_00_x.pt"]
    name = room.chance.choice(odd) + path.suffix
    if digits and room.chance.random() < 0.7:
        at = room.chance.choice(digits)
        name = path.name[:at] + str((int(path.name[at]) + 1) % 10) + path.name[at + 1 :]
    new = path.with_name(name)
    if new.exists():
        raise NothingToDoError
    shutil.copy(path, new)
    return f"added {name!r}, a copy of {room.name(path)}"


def renamed(room: Room) -> str:
    """Give a file an odd name."""
    path = room.any_file()
    name = room.chance.choice((path.name.upper(), path.name + ".bak", "x" + path.name, "ä.pt"))
    if path.with_name(name).exists():
        raise NothingToDoError
    path.rename(path.with_name(name))
    return f"{room.name(path)} renamed to {name}"


def linked(room: Room) -> str:
    """Put a link, a folder or a pipe where a file was."""
    path = room.any_file()
    kept = path.read_bytes()
    path.unlink()
    way = room.chance.randrange(7)
    if way == 0:
        path.symlink_to("/dev/zero")
        return f"{room.name(path)} is a link to /dev/zero"
    if way == 1:
        path.symlink_to(path.name)
        return f"{room.name(path)} is a link to itself"
    if way == 2:
        os.mkfifo(path)
        return f"{room.name(path)} is a pipe"
    if way == 3:
        path.mkdir()
        return f"{room.name(path)} is a folder"
    if way == 4:
        path.symlink_to("/etc/passwd")
        return f"{room.name(path)} is a link to /etc/passwd"
    if way == 5:
        with path.open("wb") as file:
            file.truncate(3 << 30)
        return f"{room.name(path)} is 3 GB of nothing"
    aside = path.with_name("aside")
    aside.write_bytes(kept)
    path.symlink_to(aside.name)
    return f"{room.name(path)} is a link to its content"


def _names(room: Room, files: list[Path]) -> str:
    names = [room.name(path) for path in files]
    return ", ".join(sorted(names))
