"""What no reader could have told: the kinds, one by one, each with the reason.

Theory. A change is undecidable when an honest save could have made the very same files. Whether it
could follows from what was done and from what differs in the output: a value that stands once in a
folder, under a checksum that holds, is what was saved as far as anybody can tell. A value that
stands twice, or that a manifest has a digest of, is not excused.
"""

from __future__ import annotations

import re

SAVED_AGAIN = {
    "pickle, checksum renewed",
    "safetensors header",
    "key removed",
    "key renamed",
    "entries exchanged",
    "entries in another order",
    "value changed",
    "value changed in all files",
    "stored map changed",
    "JSON document",
}
"""The file was written again, with checksums that hold."""

FREE = re.compile(
    r"(model_states|optimizer_state)\.pt:(/optimizer_state_dict|/param_groups/\d+)*"
    r"(|/(ds_config|ds_version|iteration|lr_scheduler|data_sampler|random_ltd|client_state)(/.*)?"
    r"|/(buffer_names|frozen_param_shapes)(/.+)?|/(skipped_steps|global_samples|micro_steps|dp_world_size)x?|/\w+x"
    r"|(/param_groups/\d+)?(/(betas(/\d)?|lr|eps|weight_decay|maximize|momentum|amsgrad|foreach"
    r"|capturable|differentiable|fused|decoupled_weight_decay|dampening|nesterov|params\w*"
    r"|bias_correction|initial_lr)\w*)?)$"
)
"""What stands once, and is a setting or a counter of the user's own."""

STATE = re.compile(r"zero/.+/(?!step)(?P<state>\w+)\.pt:")
STEP = re.compile(r"zero/.+/step\.pt:")
WHOLE = re.compile(r"\.safetensors$")
BY_NAME = "nothing but names, counters and settings ties"
"""What a report says of files that nothing else ties to one save."""


def excuse(kind: str, did: str, differs: tuple[str, ...], said: str, family: str) -> str:
    """Return why nothing in the folder tells of the change, or nothing."""
    bare = "bare" in family or family == "safetensors"
    if kind.startswith(("bit in", "bytes of")):
        if family == "safetensors":
            return "safetensors has no checksums, and no manifest lies beside it"
        whole = not any(name.endswith((": gone", ": new")) for name in differs)
        if "(tensor at" in did and whole:
            manifest = family in ("universal", "DCP, written", "safetensors, manifest")
            return "" if manifest else "tensor bytes, whose CRC-32 is not read"
        return ""
    if kind in SAVED_AGAIN:
        return _saved_again(kind, differs, family)
    if bare and " of another " in kind:
        return "a folder of files that state neither a run nor a step"
    if BY_NAME in said and " of another " in kind:
        return "files that nothing ties to one save, and the report says which"
    return ""


def _saved_again(kind: str, differs: tuple[str, ...], family: str) -> str:
    if family in ("universal", "DCP, written", "safetensors, manifest"):
        return ""
    if any(name.endswith((": gone", ": new")) for name in differs):
        return ""
    settings = [name for name in differs if FREE.search(name)]
    once = [name for name in differs if (found := STATE.search(name)) and _is_once(found, family)]
    steps = [name for name in differs if STEP.search(name)] if "all files" in kind else []
    weights = [name for name in differs if WHOLE.search(name)] if family == "safetensors" else []
    if len({*settings, *once, *steps, *weights}) == len(differs):
        return "saved again with checksums that hold; what changed stands nowhere else"
    return ""


def _is_once(found: re.Match[str], family: str) -> bool:
    """Whether a state has no second copy: moments, all of ZeRO-3 and of files with one value."""
    alone = ("ZeRO-0", "ZeRO-3", "AutoEP, ZeRO-3", "universal, bare", "DCP", "SGD")
    return found["state"] != "fp32" or family.startswith(alone) or "/frozen/" in found[0]
