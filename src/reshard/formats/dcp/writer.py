"""The writer of DCP folders: what stock ``dcp.load`` reads, under any mesh.

Theory. The tree of a training loop is built from names and states: the model is ``{NAME: fp32}``,
the optimizer has every other state, and the hyperparameters of each group. Each tensor is an entry
cut along dim 0, each number and object an entry of its own; the index says where each lies, and
from which keys it came. Tied names are two entries at one place. Nothing depends on the mesh that
will load it: DCP reads the parts of chunks that each rank needs.

What torch's optimizers demand and DeepSpeed does not keep is supplied and said: ``step`` becomes a
0-dimensional float32 tensor, and an Adam of DeepSpeed gets the settings of ``torch.optim.AdamW``
that it has no word for. `dcp.load` refuses a checkpoint that lacks a key of the loader's own tree.

Source: ``torch/distributed/checkpoint/{filesystem,default_planner,state_dict}.py``, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator

from reshard.errors import CheckpointError, count_text
from reshard.formats.checkpoint import Checkpoint, Role, StoredTensor
from reshard.formats.dcp.carried import KEY, carried_object
from reshard.formats.dcp.index import METADATA, Chunk, Path, Place, TensorEntry
from reshard.formats.dcp.layout import Cutter, Packing, chunk_fill
from reshard.formats.dcp.metadata_writing import metadata_pickle
from reshard.formats.dcp.options import DcpOptions, Tree
from reshard.formats.dcp.settings import Settings, carried_of, settings_of, state_value
from reshard.formats.dcp.tree import PARAM_GROUPS, PARAMS, STATE
from reshard.formats.dtypes import DType
from reshard.formats.target import OutputFile, Target
from reshard.formats.torch_archive import NewTensor, TensorRecord

FP32 = "fp32"


def lay_out_dcp(checkpoint: Checkpoint, *, options: DcpOptions) -> Target:
    """Lay out a DCP folder.

    Parameters
    ----------
    checkpoint
        What to write.
    options
        What was chosen.

    Raises
    ------
    CheckpointError
        Two entries would have one name, a name is no text, or a state has no place.
    """
    settings = settings_of(checkpoint, options.adam)
    out = _Output(checkpoint, options, settings)
    out.add_all()
    index = metadata_pickle(out.tensors, out.paths, out.places)
    files = [
        OutputFile(METADATA, len(index), ((0, index),)),
        *out.packing.files(),
    ]
    return Target("dcp", tuple(files), None, tuple(out.notes()))


class _Output:
    """One folder while it is being laid out."""

    def __init__(self, checkpoint: Checkpoint, options: DcpOptions, settings: Settings) -> None:
        self.checkpoint = checkpoint
        self.options = options
        self.settings = settings
        self._left_out: tuple[str, ...] = ()
        self.packing = Packing(options.max_shard_bytes)
        self.cutter = Cutter(options.chunk_bytes)
        self.tensors: dict[str, TensorEntry] = {}
        self.paths: dict[str, Path] = {}
        self.places: dict[tuple[str, tuple[int, ...] | None], Place] = {}

    def add_all(self) -> None:
        carried, self._left_out = carried_of(self.checkpoint, self.settings)
        self._add_object((KEY,), carried_object(carried))
        for path, value in self._optimizer_objects():
            self._add_object(path, value)
        for key, scalar in self.checkpoint.scalars.items():
            self._add_object(self._state_path(*key), state_value(*key, scalar))
        for tensor in self.checkpoint.tensors.values():
            self._add_tensor(tensor)
        for alias, owner in self.checkpoint.aliases.items():
            self._add_alias(alias, owner)

    # ------------------------------------------------------------------------ entries

    def _add_tensor(self, tensor: StoredTensor) -> None:
        dtype = self._dtype(tensor)
        entry = self._named(self._path(tensor))
        target, chunks = self.cutter.cut(tensor.shape, dtype.itemsize)
        self.tensors[entry] = TensorEntry(dtype, tensor.shape, chunks)
        for rank, chunk in enumerate(chunks):
            fill = chunk_fill(tensor, dtype, target, rank)
            place = self.packing.add_chunk(dtype, chunk.sizes, fill)
            self.places[entry, chunk.offsets] = place

    def _add_object(self, path: Path, value: object) -> None:
        entry = self._named(path)
        place = self.packing.add_object(value)
        offsets = None
        if isinstance(value, (NewTensor, TensorRecord)):
            shape = tuple(value.shape)
            whole = Chunk((0,) * len(shape), shape)
            offsets = whole.offsets
            self.tensors[entry] = TensorEntry(value.dtype, shape, (whole,))
        self.places[entry, offsets] = place

    def _add_alias(self, alias: str, owner: str) -> None:
        owned = ".".join(map(str, self._model_path(owner)))
        if owned not in self.tensors:
            return
        entry = self._named(self._model_path(alias))
        tensor = self.tensors[entry] = self.tensors[owned]
        for chunk in tensor.chunks:
            self.places[entry, chunk.offsets] = self.places[owned, chunk.offsets]

    def _named(self, path: Path) -> str:
        entry = ".".join(map(str, path))
        if any("\ud800" <= character <= "\udfff" for character in entry):
            raise CheckpointError(
                "a name cannot stand in a DCP folder",
                parameter=repr(entry),
                found="a lone surrogate, which is no text",
                next_step="leave it out with --exclude",
            )
        if entry in self.paths:
            raise CheckpointError(
                "two entries would have one name",
                parameter=entry,
                next_step="leave one of them out with --exclude",
            )
        self.paths[entry] = path
        return entry

    def _dtype(self, tensor: StoredTensor) -> DType:
        chosen = self.options.dtype
        is_weight = tensor.state == FP32 and tensor.role is not Role.BUFFER
        return chosen if chosen and is_weight and tensor.dtype.is_floating else tensor.dtype

    # ------------------------------------------------------------------------ paths

    def _path(self, tensor: StoredTensor) -> Path:
        if tensor.state == FP32:
            return self._model_path(tensor.name)
        return self._state_path(*tensor.key)

    def _model_path(self, name: str) -> Path:
        key = self.options.tree.model
        return (key, name) if key else (name,)

    def _state_path(self, name: str, state: str) -> Path:
        tree = self.options.tree
        if tree.flattened:
            return (*_place(tree), f"{STATE}.{name}.{state}")
        return (*_place(tree), STATE, name, state)

    def _optimizer_objects(self) -> Iterator[tuple[Path, object]]:
        tree = self.options.tree
        for number, group in enumerate(self.settings.groups):
            if not tree.flattened:
                place = (*_place(tree), PARAM_GROUPS, number)
                yield (*place, PARAMS), list(group.names)
                yield from (((*place, key), value) for key, value in group.settings.items())
                continue
            for name in group.names:
                for key, value in group.settings.items():
                    yield (*_place(tree), f"{PARAM_GROUPS}.{name}.{key}"), value

    # ------------------------------------------------------------------------ notes

    def notes(self) -> Iterator[str]:
        yield from (*self.settings.notes, *self._left_out)
        frozen = {t.name for t in self.checkpoint.tensors.values() if t.role is Role.FROZEN}
        if frozen:
            yield (
                f"the model has {count_text(len(frozen), 'frozen parameter')}, and DCP does not "
                "say what is frozen"
            )


def _place(tree: Tree) -> Path:
    return (tree.optimizer,) if tree.optimizer else ()
