"""Structures: torch files loaded, changed in one place or in all files alike, and saved again."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.attack.room import NothingToDoError, Room, replace


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands: a holder, its key in it, and the way there."""

    holder: Any
    key: Any
    path: tuple[str, ...]

    @property
    def value(self) -> Any:
        """What stands there."""
        if isinstance(self.holder, dict | list):
            return self.holder[self.key]
        return getattr(self.holder, self.key)

    def put(self, value: Any) -> None:
        """Put another value there."""
        if isinstance(self.holder, dict | list):
            self.holder[self.key] = value
        else:
            object.__setattr__(self.holder, self.key, value)

    def remove(self) -> None:
        """Take it out."""
        if isinstance(self.holder, dict | list):
            del self.holder[self.key]
        else:
            object.__delattr__(self.holder, self.key)

    def __str__(self) -> str:
        return "/".join(self.path)


def load(path: Path) -> Any:
    """Load a file of an honest folder."""
    content = path.read_bytes()
    if path.name == ".metadata":
        return pickle.loads(content)  # noqa: S301 - written by torch on this machine
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)


def save(path: Path, content: Any) -> None:
    """Replace a file as torch would have written it under its name."""
    if path.name == ".metadata":
        replace(path, pickle.dumps(content))
        return
    path.unlink(missing_ok=True)
    torch.save(content, path)  # under a path, for torch names the archive after it


def places(node: Any, path: tuple[str, ...] = (), depth: int = 0) -> Iterator[Place]:
    """Yield every place below a value."""
    if depth > 12:
        return
    if isinstance(node, dict):
        found = [Place(node, key, (*path, str(key))) for key in node]
    elif isinstance(node, list):
        found = [Place(node, at, (*path, str(at))) for at in range(len(node))]
    elif isinstance(node, tuple):
        for at, value in enumerate(node):
            yield from places(value, (*path, str(at)), depth + 1)
        return
    elif hasattr(node, "__dict__") and not isinstance(node, type | torch.Tensor):
        found = [Place(node, key, (*path, str(key))) for key in vars(node)]
    else:
        return
    for place in found:
        yield place
        yield from places(place.value, place.path, depth + 1)


def remove_key(room: Room) -> str:
    """Take one entry out of a file."""
    path, root, place = _chosen(room)
    place.remove()
    save(path, root)
    return f"{room.name(path)}: {place} removed"


def rename_key(room: Room) -> str:
    """Give an entry of a dict another name."""
    path, root, place = _chosen(room, lambda p: isinstance(p.holder, dict))
    items = list(place.holder.items())
    new = f"{place.key}x" if isinstance(place.key, str) else 1000
    place.holder.clear()
    place.holder.update((new if key == place.key else key, value) for key, value in items)
    save(path, root)
    return f"{room.name(path)}: {place} renamed to {new!r}"


def exchange(room: Room) -> str:
    """Exchange two entries of one kind."""
    path, root, place = _chosen(room)
    same = [p for p in places(root) if p.holder is not place.holder or p.key != place.key]
    same = [p for p in same if _alike(p.value, place.value) and p.path[:-1] == place.path[:-1]]
    if not same:
        raise NothingToDoError
    other = room.chance.choice(same)
    mine, its = place.value, other.value
    place.put(its)
    other.put(mine)
    save(path, root)
    return f"{room.name(path)}: {place} and {other} exchanged"


def reorder(room: Room) -> str:
    """Put the entries of a dict into another order."""
    path, root, place = _chosen(room, lambda p: isinstance(p.value, dict) and len(p.value) > 1)
    items = list(place.value.items())
    room.chance.shuffle(items)
    place.value.clear()
    place.value.update(items)
    save(path, root)
    return f"{room.name(path)}: {place} in another order"


def change_value(room: Room) -> str:
    """Change one value of one file."""
    path, root, place = _chosen(room, lambda p: _is_leaf(p.value))
    old = place.value
    place.put(_other(room, old))
    save(path, root)
    return f"{room.name(path)}: {place}: {_told(old)} -> {_told(place.value)}"


def change_everywhere(room: Room) -> str:
    """Change a value in the same way in all files that have it at the same place."""
    _, _, place = _chosen(room, lambda p: _is_leaf(p.value))
    seed = room.chance.randrange(1 << 30)
    told, count = "", 0
    for file in _torch_files(room):
        root = load(file)
        for its in places(root):
            if its.path == place.path and type(its.value) is type(place.value):
                room.chance.seed(seed)
                old = its.value
                its.put(_other(room, old))
                told, count = f"{_told(old)} -> {_told(its.value)}", count + 1
                save(file, root)
                break
    return f"{count} files: {place}: {told}"


def change_map(room: Room) -> str:
    """Change something below a stored map of a parameter."""
    path, root, place = _chosen(
        room,
        lambda p: bool({"affine_map", "universal_checkpoint_info", "ds_autoep_layers"} & {*p.path}),
    )
    if isinstance(place.value, dict | list) and len(place.value) > 1:
        items = list(place.value.values() if isinstance(place.value, dict) else place.value)
        turned = items[1:] + items[:1]
        turned = copy.deepcopy(turned)
        if isinstance(place.value, dict):
            place.value.update(zip(list(place.value), turned, strict=True))
        else:
            place.value[:] = turned
        what = "values turned by one"
    else:
        old = place.value
        place.put(_other(room, old))
        what = f"{_told(old)} -> {_told(place.value)}"
    save(path, root)
    return f"{room.name(path)}: {place}: {what}"


def _torch_files(room: Room) -> list[Path]:
    found = room.files(".pt", ".metadata")
    if not found:
        raise NothingToDoError
    return found


def _chosen(room: Room, fits: Any = lambda _: True) -> tuple[Path, Any, Place]:
    files = _torch_files(room)
    room.chance.shuffle(files)
    for path in files:
        root = load(path)
        found = [place for place in places(root) if fits(place)]
        if found:
            by_depth: dict[int, list[Place]] = {}
            for place in found:
                by_depth.setdefault(len(place.path), []).append(place)
            level = room.chance.choice(sorted(by_depth))
            return path, root, room.chance.choice(by_depth[level])
    raise NothingToDoError


def _is_leaf(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | torch.Tensor | tuple | torch.Size) or (
        isinstance(value, list) and not any(isinstance(item, dict) for item in value)
    )


def _alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other) or one is other:
        return False
    return not isinstance(one, torch.Tensor) or one.dtype == other.dtype


def _other(room: Room, old: Any) -> Any:
    chance = room.chance
    if isinstance(old, torch.Tensor):
        return _other_tensor(room, old)
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return chance.choice((old + 1, old - 1, 0, -old - 1, 2 * old + 1, 10**9, 10**5000))
    if isinstance(old, float):
        return chance.choice((old + 1, old * 2, 0.0, -old, float("nan"), float("inf")))
    if isinstance(old, str):
        return chance.choice((old + "x", "", old[::-1], "(a+)+$", "\x1b[2J" + old))
    if isinstance(old, tuple):
        return type(old)(chance.choice((old[::-1], old[:-1], old + old[:1])))
    if isinstance(old, list):
        return chance.choice((old[::-1], old[:-1], old + old[:1], []))
    return None


def _other_tensor(room: Room, old: torch.Tensor) -> torch.Tensor:
    chance = room.chance
    ways = [
        lambda: old.clone().flatten()[: old.numel() // 2],
        lambda: old.clone().double() if old.is_floating_point() else old.clone().float(),
        lambda: torch.zeros_like(old),
        lambda: old.clone().reshape(-1),
        lambda: old.clone().flatten().roll(1).reshape(old.shape),
        lambda: torch.cat([old.flatten(), old.flatten()[:1]]),
        lambda: old.clone() + 1,
        lambda: (
            old.clone().t().contiguous()
            if old.dim() == 2
            else old.clone().flip(0)
            if old.dim()
            else old.clone() * 2
        ),
    ]
    return chance.choice(ways)()


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, int) and value.bit_length() > 200:
        return "an enormous number"
    return f"{value!r:.60}"
