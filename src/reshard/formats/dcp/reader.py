"""The reader of DCP folders: FSDP2, tensor parallel, torchtitan, or whatever else saved one.

Theory. The index (``.metadata``) says which entries there are and from which keys; `tree` sorts
them into model, optimizer and rest; `chunks` turns the chunks of each tensor into a map. A weight
is the state ``fp32`` of its name, in its own dtype, whatever training kept it in; an optimizer
state is the state of its own name. A state with one element where the parameter has a shape
(``step``) is a scalar.

DCP does not say which names are tied, frozen or buffers. Equal tensors at one place are tied (see
`sharing`; reshard writes ties so). A tensor that no group trains is a buffer when it is not
floating point; else it may be either, and is called a buffer, which is said (`--frozen` states
otherwise).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from reshard.errors import CheckpointError, UnsupportedError, UsageError, count_text
from reshard.formats.checkpoint import (
    Checkpoint,
    Extra,
    Problem,
    Role,
    Scalar,
    SourceFile,
    StoredTensor,
    TensorKey,
    Topology,
)
from reshard.formats.dcp.carried import KEY, Carried, parse_carried
from reshard.formats.dcp.chunks import ChunkMaps, DataFiles
from reshard.formats.dcp.groups import Group, read_groups
from reshard.formats.dcp.index import METADATA, Index, TensorEntry
from reshard.formats.dcp.metadata import read_index
from reshard.formats.dcp.options import DcpReading
from reshard.formats.dcp.sharing import find_aliases, require_own_places
from reshard.formats.dcp.tree import (
    Optimizer,
    StateEntry,
    find_model,
    find_optimizer,
    other_entries,
    read_flattened,
    read_nested,
    refuse_numbered,
)
from reshard.formats.folders import TagFolder
from reshard.formats.model_keys import CARRIED
from reshard.formats.parsing import Cursor
from reshard.formats.stamps import source_file
from reshard.formats.states import require_even, states_by_name, uneven_states
from reshard.formats.torch_archive import read_scalar, short_repr

FP32 = "fp32"
_LISTED = 3
_MOST_STEPS = 1 << 63


def open_dcp(folder: TagFolder, reading: DcpReading | None = None) -> Checkpoint:
    """Open a DCP folder: the index, the headers of its archives, and small objects.

    Parameters
    ----------
    folder
        The folder with ``.metadata``.
    reading
        What the user states about it.

    Raises
    ------
    ReshardError
        The folder is not a whole and sound checkpoint, or does not say what is what.
    """
    if folder.also:
        raise UsageError(
            "a DCP folder is one folder",
            file=folder.path,
            next_step="convert one folder at a time; data files of other nodes of the same save "
            "belong beside its .metadata, and replace no file of the same name",
        )
    _require_index(folder)
    index = read_index(folder.path / METADATA)
    with DataFiles(folder.path, index) as files:
        return _Reading(folder, index, files, reading or DcpReading()).checkpoint()


def _require_index(folder: TagFolder) -> None:
    """Refuse a folder that has no index of all ranks, saying what it has instead."""
    names = folder.listing()
    if METADATA in names:
        return
    unfinished = next((name for name in names if name.endswith(f"{METADATA}.tmp")), None)
    if unfinished is not None:
        raise CheckpointError(
            "the save did not finish: its index still has its temporary name",
            file=folder.path / unfinished,
            next_step="take another checkpoint",
        )
    raise UnsupportedError(
        "the ranks saved an index each, and none says what the whole is",
        file=folder.path / next(name for name in names if name.endswith(METADATA)),
        next_step="load it in torch and save it with collectives (use_collectives=True)",
    )


@dataclass(slots=True)
class _Sorted:
    """The entries by what they are."""

    model: Mapping[str, str]
    optimizer: Optimizer | None = None
    groups: Sequence[Group] = ()
    trained: frozenset[str] = frozenset()
    tensors: dict[TensorKey, StoredTensor] = field(default_factory=dict)
    scalars: dict[TensorKey, Scalar] = field(default_factory=dict)


class _Reading:
    """One folder while it is being read."""

    def __init__(
        self, folder: TagFolder, index: Index, files: DataFiles, reading: DcpReading
    ) -> None:
        self.folder = folder
        self.index = index
        self.files = files
        self.maps = ChunkMaps(files)
        self.stated = reading
        self.sources = tuple(self._source_files())

    def checkpoint(self) -> Checkpoint:
        carried = self._carried()
        found = self._sorted()
        self._require_frozen(found)
        aliases = self._aliases(found)
        roles = {name: self._role(name, found, carried) for name in found.model}
        for name, entry in found.model.items():
            if name not in aliases:
                found.tensors[name, FP32] = self._tensor(name, FP32, entry, roles[name])
        for state in () if found.optimizer is None else found.optimizer.states:
            self._add_state(found, state)
        held = states_by_name((*found.tensors, *found.scalars))
        require_even(held, [list(map(str, group.names)) for group in found.groups], self.index.file)
        return Checkpoint(
            format="dcp",
            path=str(self.folder.path),
            topology=Topology(),
            tensors=found.tensors,
            scalars=found.scalars,
            aliases=aliases,
            extras=self._extras(found, carried),
            versions={"dcp": self.index.version} if self.index.version else {},
            files=self.sources,
            problems=tuple(self._problems(found, carried, aliases)),
        )

    # ------------------------------------------------------------------------ sorting

    def _sorted(self) -> _Sorted:
        keys = self.stated.keys
        marked = find_optimizer(self.index, keys)
        if marked is None:
            return _Sorted(find_model(self.index, keys, None, frozenset()))
        read = read_flattened if marked.flattened else read_nested
        optimizer = read(self.index, marked)
        groups = read_groups(optimizer, self._value)
        refuse_numbered(self.index, (name for group in groups for name in group.names))
        trained = frozenset(str(name) for group in groups for name in group.names)
        for state in optimizer.states:
            if state.name not in trained:
                raise CheckpointError(
                    "a state is of a parameter that is in no group",
                    file=self.index.file,
                    parameter=state.name,
                    state=state.state,
                )
        model = find_model(self.index, keys, optimizer, trained)
        return _Sorted(model, optimizer, groups, trained)

    def _require_frozen(self, found: _Sorted) -> None:
        """Refuse a pattern for frozen parameters that matches nothing: it is a mistake."""
        for pattern in self.stated.frozen:
            if not any(fnmatchcase(name, pattern) for name in found.model):
                raise UsageError(
                    "--frozen matches no parameter",
                    file=self.index.file,
                    found=pattern,
                    next_step="reshard inspect --tensors '*' lists the names",
                )

    def _aliases(self, found: _Sorted) -> dict[str, str]:
        """Tied names, after which no two other entries may lie at one place."""
        aliases = find_aliases(self.index, found.model, found.trained)
        tied = {found.model[alias]: found.model[owner] for alias, owner in aliases.items()}
        require_own_places(self.index, tied, frozenset(self._values_of(found)))
        return aliases

    def _values_of(self, found: _Sorted) -> Iterator[str]:
        """Entries of the optimizer that are settings or numbers."""
        if found.optimizer is None:
            return
        yield from found.optimizer.settings.values()
        for state in found.optimizer.states:
            tensor = self.index.tensors.get(state.entry)
            if tensor is not None and self._is_number(found, state, tensor):
                yield state.entry

    def _is_number(self, found: _Sorted, state: StateEntry, tensor: TensorEntry) -> bool:
        """Whether a state has one element where the parameter has a shape, or counts."""
        parameter = self.index.tensors[found.model[state.name]]
        return tensor.shape == () and (parameter.shape != () or _counts(state.state))

    def _role(self, name: str, found: _Sorted, carried: Carried) -> Role:
        if name in found.trained:
            return Role.PARAMETER
        if name in carried.roles:
            return carried.roles[name]
        if found.optimizer is None:
            return Role.PARAMETER
        stated = any(fnmatchcase(name, pattern) for pattern in self.stated.frozen)
        return Role.FROZEN if stated else Role.BUFFER

    # ------------------------------------------------------------------------ entries

    def _tensor(self, name: str, state: str, entry: str, role: Role) -> StoredTensor:
        tensor = self.index.tensors[entry]
        found, regions = self.maps.locate(entry, tensor)
        chunks = count_text(len(regions), "chunk")
        return StoredTensor(name, state, tensor.dtype, found, regions, role, f"dcp, {chunks}")

    def _add_state(self, found: _Sorted, state: StateEntry) -> None:
        key = (state.name, state.state)
        tensor = self.index.tensors.get(state.entry)
        if tensor is None:
            value = self._value(state.entry)
            if not isinstance(value.value, (int, float)):
                raise value.unexpected("a number")
            scalar = Scalar(value.value, None, state.entry)
            found.scalars[key] = _require_count(scalar, key, value.file)
            return
        parameter = self.index.tensors[found.model[state.name]]
        if self._is_number(found, state, tensor):
            found.scalars[key] = self._scalar(key, state.entry, tensor)
        elif tensor.shape == parameter.shape:
            found.tensors[key] = self._tensor(*key, state.entry, Role.PARAMETER)
        else:
            raise CheckpointError(
                "a state has another shape than its parameter",
                file=self.index.file,
                parameter=state.name,
                state=state.state,
                expected=parameter.shape,
                found=tensor.shape,
                next_step="leave it out with --states",
            )

    def _scalar(self, key: TensorKey, entry: str, tensor: TensorEntry) -> Scalar:
        self.maps.locate(entry, tensor)
        record, archive = self.maps.record(entry, tensor, tensor.chunks[0])
        scalar = Scalar(read_scalar(archive, record), tensor.dtype, entry)
        return _require_count(scalar, key, archive.path)

    def _value(self, entry: str) -> Cursor:
        """The value of an object; of a tensor, its record."""
        offsets = None
        if entry in self.index.tensors:
            offsets = tuple(0 for _ in self.index.tensors[entry].shape)
        archive = self.files.archive(entry, offsets)
        return Cursor(archive.root, archive.path, entry)

    # ------------------------------------------------------------------------ the rest

    def _carried(self) -> Carried:
        if KEY not in self.index.objects:
            return Carried()
        value = self._value(KEY)
        return parse_carried(value.value, value.file)

    def _extras(self, found: _Sorted, carried: Carried) -> dict[str, Extra]:
        file = self.index.file
        extras = {key: Extra(value, file) for key, value in carried.extras.items()}
        extras["model_files"] = Extra([model_file(found.scalars, carried.extras)], file)
        if found.optimizer is None:
            return extras
        names = [[str(name) for name in group.names] for group in found.groups]
        settings = [_stated(group, carried) for group in found.groups]
        return {
            **extras,
            "param_groups": Extra(settings, file),
            "groups": Extra(names, file),
        }

    def _source_files(self) -> Iterator[SourceFile]:
        names = dict.fromkeys(place.file for place in self.index.places.values())
        for name in (METADATA, *names):
            path = self.folder.path / name
            if path.is_file():
                kind = "index" if name == METADATA else "chunks"
                yield source_file(path, kind)

    def _problems(
        self, found: _Sorted, carried: Carried, aliases: Mapping[str, str]
    ) -> Iterator[Problem]:
        rest = [
            entry
            for entry in other_entries(self.index, found.model, found.optimizer)
            if entry != KEY
        ]
        if rest:
            yield Problem(
                f"entries of neither the model nor the optimizer are not carried: {_listing(rest)}",
                self.index.file,
            )
        yield from uneven_states(states_by_name(found.tensors), found.trained, self.index.file)
        yield from self._unclear_roles(found, {*carried.roles, *aliases})

    def _unclear_roles(self, found: _Sorted, clear: set[str]) -> Iterator[Problem]:
        unclear = [
            name
            for name, entry in found.model.items()
            if found.optimizer is not None
            and name not in found.trained
            and name not in clear
            and self.index.tensors[entry].dtype.is_floating
            and not any(fnmatchcase(name, pattern) for pattern in self.stated.frozen)
        ]
        if unclear:
            yield Problem(
                "tensors in no group may be buffers or frozen parameters, and are taken as "
                f"buffers: {_listing(unclear)}",
                self.index.file,
                next_step="name frozen parameters with --frozen GLOB, and tied ones with --exclude",
            )


def _stated(group: Group, carried: Carried) -> dict[str, object]:
    """The settings of a group, without those that reshard supplied when it wrote them."""
    supplied = {key for name in group.names for key in carried.supplied.get(str(name), ())}
    return {key: value for key, value in group.settings.items() if key not in supplied}


def model_file(
    scalars: Mapping[TensorKey, Scalar], extras: Mapping[str, object]
) -> dict[str, object]:
    """The counters and whatever else DeepSpeed's model-state files have beside the model.

    DeepSpeed does not load one without counters. Where the source has none, the steps of the
    optimizer are counted, when all its parameters agree, and no samples.
    """
    steps = {scalar.value for (_, state), scalar in scalars.items() if _counts(state)}
    step = int(steps.pop()) if len(steps) == 1 else 0
    client = extras.get("client_state")
    return {
        "global_steps": step,
        "skipped_steps": 0,
        "global_samples": 0,
        **{key: value for key, value in extras.items() if key in CARRIED},
        **({str(key): value for key, value in client.items()} if isinstance(client, dict) else {}),
    }


def _counts(state: str) -> bool:
    """Whether a state is a number even for a parameter that is a number itself."""
    return state == "step"


def _require_count(scalar: Scalar, key: TensorKey, file: str) -> Scalar:
    """Refuse a count of steps that is none; other numbers may be whatever they are."""
    name, state = key
    value = scalar.value
    whole = isinstance(value, int) or value.is_integer()
    counted = whole and not isinstance(value, bool) and 0 <= value < _MOST_STEPS
    if _counts(state) and not counted:
        raise CheckpointError(
            "a step is no count",
            file=file,
            parameter=name,
            state=state,
            expected="a whole number from 0 to 2**63 - 1",
            found=short_repr(value),
            next_step="the file was changed or is damaged; take another checkpoint",
        )
    return scalar


def _listing(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(short_repr(name)[1:-1] for name in names[:_LISTED]) + more
