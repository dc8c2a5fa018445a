#!/bin/sh
# The newcomer's minute: a new environment, a real checkpoint converted, and the proof that it is
# the same. Needs python3 (3.10 or newer) and a package registry; neither torch nor DeepSpeed.
#
#   sh scripts/demo.sh [PYTHON]
set -eu

python=${1:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
example=examples/llama_tp2dp2_zero1
parameter=model.layers.0.self_attn.o_proj.weight

cd "$root"
say() { printf '\n\033[1m# %s\033[0m\n' "$1"; }
run() {
    printf '\033[2m$ reshard %s\033[0m\n' "$*"
    .demo/env/bin/reshard "$@"
}

say "A new environment with reshard in it"
rm -rf .demo
"$python" -m venv .demo/env
.demo/env/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt .
.demo/env/bin/python -m pip list --disable-pip-version-check 2>/dev/null
out=.demo/out

say "A real checkpoint: a Llama that DeepSpeed trained in bf16, ZeRO-1, 2 tensor-parallel x 2 data-parallel ranks"
run inspect "$example"

say "Where one parameter lives: its columns on two tensor-parallel ranks, those on two data-parallel ranks"
run map "$example" "$parameter" --state exp_avg --files

say "Everything it holds as a universal checkpoint, which any topology can load"
run convert "$example" "$out/step3_universal"

say "The proof: every state of every parameter, bit for bit, and every scalar"
run verify "$example" "$out/step3_universal"

say "What was written"
run inspect "$out/step3_universal"
printf '\n%s\n' "The result is in $out. DeepSpeed resumes from it under any topology with
  \"checkpoint\": {\"load_universal\": true}   in its configuration, and
  engine.load_checkpoint(\"$out\", tag=\"step3_universal\")"
