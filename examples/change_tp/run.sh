#!/bin/sh
# ZeRO-1 on tp 2 x dp 2 becomes ZeRO-2 on tp 4 x dp 1; then what became of one weight.
set -eu
source=$(dirname "$0")/../llama_tp2dp2_zero1
out=${OUT:-out}/change_tp
weight=model.layers.0.mlp.down_proj.weight

reshard convert "$source" "$out/step3" --to deepspeed --stage 2 --dp 1 --tp 4 --kv-heads 2 \
    --verify --overwrite

# Its 14 columns are cut 7 + 7 before, 4 + 4 + 3 + 3 afterwards. (Attention stays as it is: with two
# key/value heads on four ranks, two ranks hold one each, and two hold nothing.)
reshard map "$source" "$weight"
reshard map "$out" "$weight"
