"""The arguments and options of the commands, each told once.

Theory. A type alias is the whole of an option: its Python type, its name, its help, and the panel
of the help it stands in. Commands that share an option share the alias, so the same word means
the same thing everywhere. Defaults that are budgets are not repeated here: the API owns them.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from reshard.cli import completion

_SOURCE = "Source"
_WHAT = "What to carry"
_SAFETY = "Safety"
_BUDGETS = "Budgets"
_OUTPUT = "Output"
_FILES = "Files to write"
_TOPOLOGY = "Topology to write for (--to deepspeed)"
_WEIGHTS = "Weights to serve (--to safetensors)"


class TiedWeights(str, Enum):
    """What becomes of names that are the same parameter as another."""

    DROP = "drop"
    KEEP = "keep"


class Replicas(str, Enum):
    """What to do where ranks that should hold the same bytes differ."""

    REFUSE = "refuse"
    FIRST = "first"
    MEAN = "mean"


Ckpt = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="The folder that holds 'latest', a tag folder, or a file inside one.",
        show_default=False,
    ),
]
Out = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="The folder to write, for example CKPT/step3_universal. It must not exist yet. "
        "The pointer file (latest_universal, or latest) is written beside it.",
        show_default=False,
    ),
]
AnnotatedOut = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="The folder to write, for example annotated/step3. It must not exist yet.",
        show_default=False,
    ),
]
Other = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="The checkpoint to compare CKPT with, of any format.",
        show_default=False,
    ),
]
Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="The name of a parameter.",
        show_default=False,
        autocompletion=completion.parameter_names,
    ),
]

Also = Annotated[
    list[str] | None,
    typer.Option(
        "--also",
        metavar="DIR",
        help="Another folder that holds ranks of CKPT, as node-local saves leave them, or files to "
        "carry along (config.json, tokenizer; safetensors). Repeatable.",
        rich_help_panel=_SOURCE,
    ),
]
Layout = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="FILE",
        help="Rules that say how parameters are cut, for a checkpoint that does not say it itself.",
        rich_help_panel=_SOURCE,
    ),
]

ModelKey = Annotated[
    str | None,
    typer.Option(
        "--model-key",
        metavar="KEY",
        help="Where the model is in the tree of a DCP folder, keys joined by dots; '' is the root.",
        rich_help_panel=_SOURCE,
    ),
]
OptimizerKey = Annotated[
    str | None,
    typer.Option(
        "--optimizer-key",
        metavar="KEY",
        help="Where the optimizer is in the tree of a DCP folder.",
        rich_help_panel=_SOURCE,
    ),
]
Frozen = Annotated[
    list[str] | None,
    typer.Option(
        "--frozen",
        metavar="GLOB",
        help="Tensors of a DCP folder that are frozen parameters and not buffers. Repeatable.",
        rich_help_panel=_SOURCE,
    ),
]
Tensors = Annotated[
    str | None,
    typer.Option(
        "--tensors",
        metavar="GLOB",
        help="List every state of the parameters whose names match.",
        rich_help_panel=_OUTPUT,
    ),
]
State = Annotated[
    str | None,
    typer.Option(
        "--state",
        metavar="STATE",
        autocompletion=completion.states,
        help="Which state: fp32, exp_avg, ... By default fp32.",
        rich_help_panel=_WHAT,
    ),
]
Files = Annotated[
    bool,
    typer.Option("--files", help="Go down to byte ranges of files.", rich_help_panel=_OUTPUT),
]

Svg = Annotated[
    str | None,
    typer.Option("--svg", metavar="FILE", help="Draw it as SVG.", rich_help_panel=_OUTPUT),
]
Png = Annotated[
    str | None,
    typer.Option(
        "--png", metavar="FILE", help="Draw it as PNG (needs Pillow).", rich_help_panel=_OUTPUT
    ),
]
Html = Annotated[
    str | None,
    typer.Option(
        "--html",
        metavar="FILE",
        help="Write a page about it: one file that needs nothing else.",
        rich_help_panel=_OUTPUT,
    ),
]

PlanHtml = Annotated[
    str | None,
    typer.Option(
        "--html",
        metavar="FILE",
        help="With --dry-run: write a page about the plan, one file that needs nothing else.",
        rich_help_panel=_OUTPUT,
    ),
]

To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="FORMAT",
        autocompletion=completion.formats,
        help="The format to write: universal, deepspeed, safetensors or dcp.",
        rich_help_panel=_WHAT,
    ),
]
Stage = Annotated[
    int | None,
    typer.Option(
        "--stage", metavar="{0,1,2,3}", help="ZeRO stage.", rich_help_panel=_TOPOLOGY, min=0, max=3
    ),
]
Dp = Annotated[
    int | None,
    typer.Option(
        "--dp", metavar="N", help="Data-parallel degree.", rich_help_panel=_TOPOLOGY, min=1
    ),
]
Tp = Annotated[
    int | None,
    typer.Option(
        "--tp",
        metavar="N",
        help="Tensor-parallel degree.  1 by default.",
        rich_help_panel=_TOPOLOGY,
        min=1,
    ),
]
Pp = Annotated[
    int | None,
    typer.Option(
        "--pp",
        metavar="N",
        help="Pipeline-parallel degree.  1 by default.",
        rich_help_panel=_TOPOLOGY,
        min=1,
    ),
]
Ep = Annotated[
    int | None,
    typer.Option(
        "--ep",
        metavar="N",
        help="Expert-parallel degree.  1 by default.",
        rich_help_panel=_TOPOLOGY,
        min=1,
    ),
]
KvHeads = Annotated[
    int | None,
    typer.Option(
        "--kv-heads",
        metavar="N",
        help="Key/value heads of the model, where cuts follow them and the source leaves it open.",
        rich_help_panel=_TOPOLOGY,
        min=1,
    ),
]
VocabMultiple = Annotated[
    int | None,
    typer.Option(
        "--vocab-multiple",
        metavar="N",
        help="What a padded vocabulary is a multiple of on each tensor rank (Megatron).",
        rich_help_panel=_TOPOLOGY,
        min=1,
    ),
]
StageStarts = Annotated[
    str | None,
    typer.Option(
        "--stage-starts",
        metavar="LAYER,...",
        help="The first layer of every pipeline stage, from 0 on. By default the source's stages.",
        rich_help_panel=_TOPOLOGY,
    ),
]
Tied = Annotated[
    list[str] | None,
    typer.Option(
        "--tied",
        metavar="KEY=LAYER,...",
        help="The pipeline layers that use a tied module, where the files leave it open. "
        "Repeatable.",
        rich_help_panel=_TOPOLOGY,
    ),
]
SubGroupSize = Annotated[
    int | None,
    typer.Option(
        "--sub-group-size",
        metavar="N",
        help="zero_optimization.sub_group_size of the run to come (ZeRO-3). As in the source by "
        "default.",
        rich_help_panel=_TOPOLOGY,
        min=1,
    ),
]
Dtype = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        metavar="[GLOB=]DTYPE",
        help="Element type of the model's weights: bf16, fp16, fp32, for safetensors also "
        "fp64, fp8_e4m3 and fp8_e5m2. As the model was trained by default. For safetensors "
        "GLOB=DTYPE is for the names that match. Repeatable; the last that matches counts.",
        rich_help_panel=_WHAT,
    ),
]
MaxShardSize = Annotated[
    str | None,
    typer.Option(
        "--max-shard-size",
        metavar="SIZE",
        help="Largest data file, like 5GB, which is the default for weights (DCP: 1GiB).",
        rich_help_panel=_FILES,
    ),
]
TiedNames = Annotated[
    TiedWeights | None,
    typer.Option(
        "--tied-weights",
        help="Drop tied names, or write them twice. By default they are dropped where a "
        "config.json beside CKPT says tie_word_embeddings.",
        rich_help_panel=_WEIGHTS,
        show_default=False,
    ),
]
Rename = Annotated[
    list[str] | None,
    typer.Option(
        "--rename",
        metavar="OLD=NEW",
        help="Replace the first match of the regular expression OLD in every name by NEW. "
        "Repeatable, in order.",
        rich_help_panel=_WEIGHTS,
    ),
]
RenameTable = Annotated[
    str | None,
    typer.Option(
        "--rename-table",
        metavar="FILE",
        help='A JSON file {"OLD": "NEW", ...} of whole names.',
        rich_help_panel=_WEIGHTS,
    ),
]


class NamedStates(str, Enum):
    """What is carried under other names."""

    ALL = "all"
    WEIGHTS = "weights"


Names = Annotated[
    list[str] | None,
    typer.Option(
        "--names",
        metavar="FILE",
        help="Rules that join, split and rename parameters, moments included: a TOML file, or "
        "preset:llama, preset:transformers-megatron, ... Repeatable, in order.",
        rich_help_panel=_WHAT,
    ),
]
NamesStates = Annotated[
    NamedStates,
    typer.Option(
        "--names-states",
        help="With --names: all states, or the weights alone.",
        rich_help_panel=_WHAT,
    ),
]
DcpTree = Annotated[
    str | None,
    typer.Option(
        "--dcp-tree",
        metavar="NAME",
        help="Where a DCP folder keeps things: get_state_dict (under model and optim, the "
        "default) or torchtitan (model at the root, flattened optimizer).",
        rich_help_panel=_FILES,
    ),
]
Adam = Annotated[
    str | None,
    typer.Option(
        "--adam",
        metavar="{adamw,adam}",
        help="Which of torch's two Adams the optimizer is, where the source does not say it (DCP).",
        rich_help_panel=_FILES,
    ),
]
DropIn = Annotated[
    bool,
    typer.Option(
        "--drop-in",
        help="Write the whole trainer's folder that CKPT lies in: the checkpoint, and the "
        "trainer's own files beside it.",
        rich_help_panel=_TOPOLOGY,
    ),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        metavar="GLOB",
        help="Only the parameters whose names match. Repeatable.",
        rich_help_panel=_WHAT,
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude",
        metavar="GLOB",
        help="All but the parameters whose names match. Repeatable.",
        rich_help_panel=_WHAT,
    ),
]
States = Annotated[
    list[str] | None,
    typer.Option(
        "--states",
        metavar="STATE,...",
        help="Only these states (fp32: the weights alone, as by default for safetensors). "
        "Repeatable.",
        rich_help_panel=_WHAT,
    ),
]
Trainable = Annotated[
    bool,
    typer.Option(
        "--trainable",
        help="Only the parameters that are trained: no frozen ones, no buffers.",
        rich_help_panel=_WHAT,
    ),
]

ReplicaPolicy = Annotated[
    Replicas,
    typer.Option(
        "--replicas",
        help="Where ranks that should hold the same bytes differ: refuse, take the first rank's, "
        "or take the mean. What differed is reported.",
        rich_help_panel=_SAFETY,
    ),
]
AcceptedReplicas = Annotated[
    Replicas,
    typer.Option(
        "--replicas",
        help="The policy that OUT was converted with: copies inside CKPT that differ are then no "
        "difference, where OUT holds the first of them, or their mean.",
        rich_help_panel=_SAFETY,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Say what would be read, written and needed, and write nothing.",
        rich_help_panel=_SAFETY,
    ),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Finish a run that was stopped.", rich_help_panel=_SAFETY),
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace OUT if it exists.", rich_help_panel=_SAFETY),
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Read OUT again afterwards and compare all of it with CKPT.",
        rich_help_panel=_SAFETY,
    ),
]
NoFsync = Annotated[
    bool,
    typer.Option(
        "--no-fsync",
        help="Do not wait until the disk has it all: faster, and lost if the machine dies now.",
        rich_help_panel=_SAFETY,
    ),
]

Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        metavar="N",
        help="Copies under way at a time. It changes speed only. By default one a CPU.",
        rich_help_panel=_BUDGETS,
    ),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        "--max-memory",
        metavar="SIZE",
        help="Hard cap on the buffers of all workers together, like 512MB or 2GiB.",
        rich_help_panel=_BUDGETS,
    ),
]

Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document, for machines.", rich_help_panel=_OUTPUT),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Show no progress.", rich_help_panel=_OUTPUT)
]
