"""Which commands there are, and what their help says.

Theory. This module and :mod:`~reshard.cli.options` are all that ``reshard --help`` needs, so they
import nothing that reads, plans or draws; :mod:`reshard.cli.commands` is imported when a command
runs. Help is drawn by rich on a terminal and is plain text elsewhere. A command returns its exit
code.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from reshard import __version__
from reshard.cli import failure, options
from reshard.cli.screen import wants_rich

if TYPE_CHECKING:
    from reshard.cli.commands import Source

app = typer.Typer(
    name="reshard",
    epilog="Exit codes: 0 done; 1 a comparison found differences, or doctor something to mend; "
    "2 bad usage or bad input.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if wants_rich(sys.stdout) else None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"reshard {__version__}")
        raise typer.Exit(failure.DONE)


@app.callback(invoke_without_command=True)
def reshard(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Move the state of a training run from the topology it was saved under to any other."""
    del version
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _source(
    ckpt: str,
    also: list[str] | None,
    layout: str | None,
    model_key: str | None,
    optimizer_key: str | None,
    frozen: list[str] | None,
) -> Source:
    """What a command was told about the checkpoint that it reads."""
    from reshard.cli import commands
    from reshard.cli.reading import ReadingFlags

    reading = ReadingFlags(model_key, optimizer_key, tuple(frozen or ()))
    return commands.Source(ckpt, tuple(also or ()), layout, reading)


@app.command(short_help="Show what a checkpoint holds, and what is wrong with it.")
def inspect(
    ckpt: options.Ckpt,
    *,
    tensors: options.Tensors = None,
    names: options.Names = None,
    html: options.Html = None,
    also: options.Also = None,
    layout: options.Layout = None,
    model_key: options.ModelKey = None,
    optimizer_key: options.OptimizerKey = None,
    frozen: options.Frozen = None,
    json: options.Json = False,
) -> int:
    """Show what a checkpoint holds: files, topology, tensors, states, problems.

    Reads headers and metadata, never tensor bytes: doctor also compares the copies of a value.
    """
    from reshard.cli import commands

    source = _source(ckpt, also, layout, model_key, optimizer_key, frozen)
    return commands.inspect(source, tensors=tensors, names=tuple(names or ()), html=html, json=json)


@app.command(short_help="Find everything that is wrong with a folder, each with the fix.")
def doctor(
    ckpt: options.Ckpt,
    *,
    also: options.Also = None,
    layout: options.Layout = None,
    model_key: options.ModelKey = None,
    optimizer_key: options.OptimizerKey = None,
    frozen: options.Frozen = None,
    json: options.Json = False,
) -> int:
    """Find everything that is wrong with a checkpoint folder, each with the fix.

    Makes the checks of a conversion: headers, metadata, and the bytes of tensors that several
    ranks hold. Exit code 0 when there is nothing to mend, 1 when there is, 2 when CKPT is no
    checkpoint.
    """
    from reshard.cli import commands

    return commands.doctor(_source(ckpt, also, layout, model_key, optimizer_key, frozen), json=json)


@app.command(name="map", short_help="Show where every element of a parameter lives.")
def map_(
    ckpt: options.Ckpt,
    name: options.Name,
    *,
    state: options.State = None,
    files: options.Files = False,
    svg: options.Svg = None,
    png: options.Png = None,
    html: options.Html = None,
    also: options.Also = None,
    layout: options.Layout = None,
    model_key: options.ModelKey = None,
    optimizer_key: options.OptimizerKey = None,
    frozen: options.Frozen = None,
    json: options.Json = False,
) -> int:
    """Show where every element of one parameter lives, as text and as a picture."""
    from reshard.cli import commands
    from reshard.cli.pictures.drawing import MapPictures

    source = _source(ckpt, also, layout, model_key, optimizer_key, frozen)
    pictures = MapPictures(svg, png, html)
    return commands.map_(source, name, pictures, state=state, files=files, json=json)


@app.command(short_help="Convert a checkpoint, bit for bit.")
def convert(
    ckpt: options.Ckpt,
    out: options.Out,
    *,
    to: options.To = "universal",
    stage: options.Stage = None,
    dp: options.Dp = None,
    tp: options.Tp = None,
    pp: options.Pp = None,
    ep: options.Ep = None,
    kv_heads: options.KvHeads = None,
    vocab_multiple: options.VocabMultiple = None,
    stage_starts: options.StageStarts = None,
    tied: options.Tied = None,
    sub_group_size: options.SubGroupSize = None,
    dtype: options.Dtype = None,
    drop_in: options.DropIn = False,
    max_shard_size: options.MaxShardSize = None,
    tied_weights: options.TiedNames = None,
    rename: options.Rename = None,
    rename_table: options.RenameTable = None,
    names: options.Names = None,
    names_states: options.NamesStates = options.NamedStates.ALL,
    dcp_tree: options.DcpTree = None,
    adam: options.Adam = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    states: options.States = None,
    trainable: options.Trainable = False,
    replicas: options.ReplicaPolicy = options.Replicas.REFUSE,
    dry_run: options.DryRun = False,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    verify: options.Verify = False,
    no_fsync: options.NoFsync = False,
    workers: options.Workers = None,
    max_memory: options.MaxMemory = None,
    also: options.Also = None,
    layout: options.Layout = None,
    html: options.PlanHtml = None,
    model_key: options.ModelKey = None,
    optimizer_key: options.OptimizerKey = None,
    frozen: options.Frozen = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Convert a checkpoint: every state of every parameter, bit for bit.

    OUT appears under its name when it is complete, and not before.
    """
    from reshard.cli import commands
    from reshard.cli.writing import WritingFlags

    return commands.convert(
        _source(ckpt, also, layout, model_key, optimizer_key, frozen),
        out,
        commands.Conversion(
            to=to,
            selection=commands.Selection(
                tuple(include or ()),
                tuple(exclude or ()),
                tuple(states or ()),
                trainable,
                tuple(rename or ()),
                rename_table,
                tuple(names or ()),
                names_states.value,
            ),
            replicas=replicas.value,
            dry_run=dry_run,
            resume=resume,
            overwrite=overwrite,
            verify=verify,
            fsync=not no_fsync,
            workers=workers,
            max_memory=max_memory,
            writing=WritingFlags(
                stage=stage,
                dp=dp,
                tp=tp,
                pp=pp,
                ep=ep,
                kv_heads=kv_heads,
                vocab_multiple=vocab_multiple,
                stage_starts=stage_starts,
                tied=tuple(tied or ()),
                sub_group_size=sub_group_size,
                dtype=tuple(dtype or ()),
                drop_in=drop_in,
                max_shard_size=max_shard_size,
                tied_weights=tied_weights.value if tied_weights else None,
                dcp_tree=dcp_tree,
                adam=adam,
            ),
        ),
        html=html,
        json=json,
        quiet=quiet,
    )


@app.command(short_help="Prove that two checkpoints hold the same tensors.")
def verify(
    ckpt: options.Ckpt,
    out: options.Other,
    *,
    include: options.Include = None,
    exclude: options.Exclude = None,
    states: options.States = None,
    trainable: options.Trainable = False,
    rename: options.Rename = None,
    rename_table: options.RenameTable = None,
    names: options.Names = None,
    names_states: options.NamesStates = options.NamedStates.ALL,
    replicas: options.AcceptedReplicas = options.Replicas.REFUSE,
    also: options.Also = None,
    layout: options.Layout = None,
    model_key: options.ModelKey = None,
    optimizer_key: options.OptimizerKey = None,
    frozen: options.Frozen = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Prove that two checkpoints hold the same tensors, for every state and scalar.

    Formats and topologies may differ. When the tensors do, exit code 1 and the first differences.
    Weights for serving (safetensors) are compared in their element type, and what such a folder
    cannot hold is listed, not counted.
    """
    from reshard.cli import commands

    source = _source(ckpt, also, layout, model_key, optimizer_key, frozen)
    selection = commands.Selection(
        tuple(include or ()),
        tuple(exclude or ()),
        tuple(states or ()),
        trainable,
        tuple(rename or ()),
        rename_table,
        tuple(names or ()),
        names_states.value,
    )
    return commands.verify(source, out, selection, replicas=replicas.value, json=json, quiet=quiet)


@app.command(short_help="Add affine maps to a tensor-parallel checkpoint.")
def annotate(
    ckpt: options.Ckpt,
    out: options.AnnotatedOut,
    *,
    dry_run: options.DryRun = False,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    no_fsync: options.NoFsync = False,
    workers: options.Workers = None,
    max_memory: options.MaxMemory = None,
    also: options.Also = None,
    layout: options.Layout = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Write the same checkpoint with an affine_map for every tensor-parallel parameter.

    The pointer file 'latest' is written beside OUT, unless there is one that names another folder.
    """
    from reshard.cli import commands

    source = commands.Source(ckpt, tuple(also or ()), layout)
    how = commands.Run(
        dry_run=dry_run,
        resume=resume,
        overwrite=overwrite,
        fsync=not no_fsync,
        workers=workers,
        max_memory=max_memory,
    )
    return commands.annotate(source, out, how, json=json, quiet=quiet)
