#!/usr/bin/env bash
# A drafter from nothing but prompts in a quarter of an hour of one large GPU, on a machine without a network.
#
#   here   train/gpu_quarter_hour.sh pack PROMPTS DIR     target and prompts into DIR/part-0, DIR/part-1, ... (40 MiB each)
#   there  train/gpu_quarter_hour.sh stage DIR/part-N     once for each part, as far as they cannot all come at once
#   there  train/gpu_quarter_hour.sh run [OPTIONS]        again, if it was cut off: it goes on where it stopped
#   here   train/gpu_quarter_hour.sh join RESULT DIR      the drafter, from the bundle.* in RESULT
#
# `there` needs python3 with PyTorch and this repository's files, nothing built or installed; OPTIONS are those of
# `python3 -m paceline.train.quarter_hour --help`. Results go to $OUT (default: result), state to $WORK.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
WORK=${WORK:-$HOME/paceline-quarter-hour}
OUT=${OUT:-result}
export PYTHONUNBUFFERED=1

usage() { sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }

case "${1:-}" in
  pack)
    [ $# -ge 3 ] || usage
    exec "$PYTHON" -m paceline.train.pack_run --prompts "$2" --out "$3" "${@:4}" ;;
  stage)
    [ $# -ge 2 ] || usage
    mkdir -p "$WORK/parts"
    cp -r "${@:2}" "$WORK/parts/"
    ls "$WORK/parts" ;;
  run)
    shift
    exec "$PYTHON" -m paceline.train.quarter_hour --inputs "$WORK"/parts/part-* --work "$WORK" --out "$OUT" "$@" ;;
  join)
    [ $# -eq 3 ] || usage
    exec "$PYTHON" -c 'import sys; from pathlib import Path; from paceline.train.package import join_bundle
join_bundle([Path(sys.argv[1])], Path(sys.argv[2]))' "$2" "$3" ;;
  *) usage ;;
esac
