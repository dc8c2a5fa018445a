"""The files that lie beside a model and that a set of weights is not served without.

Theory. transformers keeps the configuration and the tokenizer in files beside the weights, and
trainers save them beside their checkpoints. They are carried byte for byte: under the same name,
unread but for one question, whether the loader ties the embeddings. They are looked for in the
folder of the checkpoint, then in the folder around it (a trainer's), then where the user says; the
first one of a name counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from reshard.errors import CheckpointError
from reshard.formats.target import OutputFile

CONFIG = "config.json"

NAMES = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Names of files that are carried."""

LARGEST = 256 * 10**6
"""Bytes that such a file may have; the largest tokenizers have some 30 MB."""


def companions(folder: str, beside: Iterable[str]) -> dict[str, Path]:
    """Find the files to carry, by name.

    Parameters
    ----------
    folder
        The folder of the checkpoint.
    beside
        Further folders to look in.
    """
    places = [Path(folder), Path(folder).parent, *map(Path, beside)]
    found = {}
    for name in NAMES:
        for place in places:
            if (place / name).is_file():
                found[name] = place / name
                break
    return found


def link_notes(files: Mapping[str, Path]) -> Iterator[str]:
    """Tell which files to carry are links that lead out of their folder.

    That is usual in a cache, so it is no fault; but what is copied then lies elsewhere.
    """
    leading = {
        name: path.resolve() for name, path in files.items() if path.is_symlink() and _leaves(path)
    }
    if leading:
        listed = ", ".join(f"{name} ({place})" for name, place in leading.items())
        yield f"copied from outside of the folder, where a link leads: {listed}"


def _leaves(path: Path) -> bool:
    return not path.resolve().is_relative_to(path.parent.resolve())


def carried(files: Mapping[str, Path]) -> list[OutputFile]:
    """The files as parts of the output.

    Raises
    ------
    CheckpointError
        A file is too large to be what its name says, or cannot be read.
    """
    return [_carried(name, path) for name, path in files.items()]


def _carried(name: str, path: Path) -> OutputFile:
    nbytes = path.stat().st_size
    if nbytes > LARGEST:
        raise CheckpointError(
            "a file beside the checkpoint is too large to be carried along",
            file=path,
            expected=f"at most {LARGEST} bytes",
            found=nbytes,
        )
    data = path.read_bytes()
    return OutputFile(name, len(data), ((0, data),) if data else ())


def ties_embeddings(files: Mapping[str, Path]) -> bool:
    """Whether the configuration says that the loader ties the output to the input embeddings."""
    path = files.get(CONFIG)
    if path is None or path.stat().st_size > LARGEST:
        return False
    try:
        config = json.loads(path.read_text("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            "the configuration beside the checkpoint is no sound JSON",
            file=path,
            found=str(error),
            next_step="mend it, or move it away",
        ) from error
    return isinstance(config, Mapping) and config.get("tie_word_embeddings") is True
