# Seconds and processor seconds of the parts of a test run. Sourced by tests/run.sh and .ci/run.
# shellcheck shell=bash

# timed FILE COMMAND...: runs it in a shell of its own, and writes into FILE the seconds that it took and the processor seconds of all that it
# started, with a tab between them.
timed() (
    # In microseconds, because differences of $SECONDS can be 1 for instant parts.
    file=$1 start=${EPOCHREALTIME/[.,]/}
    shift
    "$@"
    code=$?
    times >"$file.times"
    # Its second line is that of children: minutes and seconds of user time, and of the system's.
    awk -v wall=$((${EPOCHREALTIME/[.,]/} - start)) 'NR == 2 { gsub(/[ms]/, " "); printf "%.0f\t%.0f\n", wall / 1000000, 60 * $1 + $2 + 60 * $3 + $4 }' "$file.times" >"$file"
    exit "$code"
)
