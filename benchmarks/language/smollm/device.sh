#!/usr/bin/env bash
# A piece of the study on an accelerator, of at most four minutes; the next call goes on.
#
#     bash benchmarks/language/smollm/device.sh DIR
#
# All that is read and written lies in DIR: e2e/ with the data, weights.* with the file of
# the weights in parts (made by `split -n 2`), and results, which are lines of JSON.
set -euo pipefail
folder=$1
began=$SECONDS
left() { echo $((235 - (SECONDS - began))); }

timeout "$(left)" python -m benchmarks.language.smollm.cost --run \
    --tokens 16384 --output "$folder/cost.jsonl"
for way in lora full; do
    if (($(left) < 60)); then exit; fi
    timeout "$(left)" python -m benchmarks.language.smollm --data-dir "$folder" \
        --weights "$folder"/weights.* --way "$way" --epsilon 8 none 3 --epochs 5 \
        --minutes "$(($(left) / 60))" --output "$folder/e2e.jsonl" \
        --cache-dir "$folder/cache"
done
