#!/bin/bash
# The first minutes of this project on a GPU, in one command:
#   bash tests/gpu/first.sh             on a machine with one GPU; at most 9 minutes; $OUT/results.json
#   bash tests/gpu/first.sh --cpu       the same logic with tiny models, on any machine
#   bash tests/gpu/first.sh --wheels    download into .whl what a GPU machine without network lacks:
#                                       wheels for Python 3.12, next to its own torch
# Other options are those of first.py: --limit SECONDS, --only STAGE ...
set -eu
cd "$(dirname "$0")/../.."

if [[ ${1:-} == --wheels ]]; then
    names=(torchtitan torchdata datasets dill multiprocess tyro docstring_parser isal pydantic
        pydantic_core annotated-types typing-inspection zstandard xxhash huggingface_hub)
    platforms=()
    for version in 2_28 2_27 2_17 2014 1; do
        [[ $version == 2_* ]] && name=manylinux_$version || name=manylinux$version
        platforms+=(--platform "${name}_x86_64")
    done
    python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 \
        --implementation cp "${platforms[@]}" -d .whl -c constraints.txt \
        "${names[@]}" 'fla-core>=0.6,<0.7'
    exit
fi

begin=$SECONDS
export OUT=${OUT:-$PWD/outputs/first_gpu}
mkdir -p "$OUT"
if compgen -G '.whl/*.whl' >/dev/null; then
    site=$(mktemp -d)
    python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" .whl/*.whl
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

# what clocks and power were, before and after
clocks=(nvidia-smi "--query-gpu=name,driver_version,clocks.sm,power.draw,temperature.gpu" --format=csv)
"${clocks[@]}" >"$OUT/nvidia-smi.txt" 2>&1 || true
status=0
python3 -m tests.gpu.first --limit $((540 - (SECONDS - begin))) "$@" || status=$?
"${clocks[@]}" >>"$OUT/nvidia-smi.txt" 2>&1 || true
exit "$status"
