#!/bin/sh
# Convert, prove, and see that a proof can fail.
set -eu
source=$(dirname "$0")/../llama_tp2dp2_zero1
out=${OUT:-out}/verify_in_ci

reshard doctor "$source"
reshard convert "$source" "$out/step3_universal" --overwrite --quiet
reshard verify "$source" "$out/step3_universal" --json > "$out/verify.json"
echo "proven: $out/verify.json"

# One number of one moment, changed: not by 2 (unreadable), but by 1 (different).
python - "$out/step3_universal/zero/lm_head.weight/exp_avg.pt" << 'END'
import sys

import reshard

path = sys.argv[1]
number = reshard.read(path.rsplit("/zero/", 1)[0], "lm_head.weight", state="exp_avg")["lm_head.weight"][0, 0]
content = open(path, "rb").read()
with open(path, "wb") as file:
    file.write(content.replace(number.tobytes(), (number * 2).tobytes(), 1))
END
code=0
reshard verify "$source" "$out/step3_universal" || code=$?
echo "exit code $code"
test "$code" = 1
