#!/usr/bin/env bash
# Runs examples/quickstart.sh as a newcomer would, and looks whether the answer makes sense.
set -euo pipefail
cd "$(dirname "$0")/../.."

answer=$(bash examples/quickstart.sh "What is the capital of France?")
echo "answer: $answer"
case $answer in
*Paris*) echo "quickstart: passed" ;;
*)
    echo "quickstart: the answer does not name Paris" >&2
    exit 1
    ;;
esac
if bash examples/quickstart.sh 2>/dev/null; then
    echo "quickstart: a missing prompt was not refused" >&2
    exit 1
fi
