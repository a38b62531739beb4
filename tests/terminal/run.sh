#!/usr/bin/env bash
# `nvfp4 chat` at a terminal, which tmux is: bash tests/terminal/run.sh, with nvfp4 in $NVFP4_BUILD (target/release if unset). Without
# tmux, and where it cannot be installed, all of it is SKIPPED, or fails if NVFP4_REQUIRE names tmux. The last line is "N passed, N
# failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/common/checks.sh

build=$(cd "${NVFP4_BUILD:-target/release}" && pwd) || exit 1

command -v tmux >/dev/null || install_packages tmux >/dev/null
if ! command -v tmux >/dev/null; then
    skip "a chat at a terminal" "there is no tmux, and it could not be installed" tmux
    finish
fi

unset TMUX NO_COLOR
export LC_ALL=C.UTF-8 CUDA_VISIBLE_DEVICES='' XDG_STATE_HOME=$work/state
readonly answer='Blue .*light' prompt='^>$'

# Each terminal has a server of its own, as one that ends takes a while to go.
tmux() { command tmux -u -S "$(cat "$work/socket")" -f /dev/null "$@"; }
stop() { [ ! -e "$work/socket" ] || tmux kill-server 2>/dev/null; }
trap 'stop; rm -rf "$work"' EXIT

# start COMMAND...: in a new terminal, which then shows the exit code.
start() {
    stop
    mktemp -u "$work/tmux.XXXXXX" >"$work/socket"
    tmux new-session -d -s chat -x 110 -y 50 "trap : INT; $*; echo ended with \$?, \$(stty -a | grep -oE -- '-?icanon'); exec sleep 600"
}

# Starts a chat with the model that thinks, and waits until it asks.
chat() { start "$build/nvfp4" chat --model "$work/thinker" "$@" && last_line "$prompt"; }

# screen [OPTION]: the content of the terminal.
screen() { tmux capture-pane -p -t chat "$@"; }

# wait_for COMMAND...: retries until it succeeds, and otherwise shows the terminal.
wait_for() {
    local waited=0
    until "$@"; do
        [ $((waited += 1)) -le 300 ] || { echo "no: $*"; screen; return 1; }
        sleep 0.1
    done
}

has() { screen | grep -qE -- "$1"; }
counts() { [ "$(screen | grep -cE -- "$1")" -eq "$2" ]; }
ends_in() { screen | grep . | tail -1 | grep -qE -- "$1"; }
last_line() { wait_for ends_in "$1"; }
keys() { tmux send-keys -t chat "$@"; }
type() { tmux send-keys -t chat -l -- "$1"; }

# say TEXT: types it, and waits until the chat asks again.
say() { type "$1" && last_line "$1" && keys Enter && last_line "$prompt"; }

# A command's output on a line of its own, which may be cut where the terminal ends.
messages() { say /messages && screen -J | grep -F '[{"role":' | tail -1 >"$work/messages"; }

greeting() {
    chat && has "^model: $work/thinker, on cpu" && has "^sampling: temperature 0.6, .* as the model recommends$"
}

dimmed() {
    chat && say Hi && has "$answer" && has '^Let me see' && screen -e | grep -qF $'\e[2mLet me see' &&
        ! screen -e | grep -qF $'\e[2mBlue'
}

undimmed() {
    export NO_COLOR=1
    chat && say Hi && has '^<thinking>$' && has '^</thinking>$' && ! screen -e | grep -qF $'\e[2m'
}

last_line_again() {
    chat && say 'What is blue?' && keys Up && last_line '^> What is blue\?$' && keys Enter && last_line "$prompt" &&
        counts "$answer" 2 && counts '^> What is blue\?$' 2
}

history_kept() {
    local file=$XDG_STATE_HOME/nvfp4/history
    chat && say 'Remember me' && keys C-d && last_line 'ended with 0' && [ "$(stat -c %a "$file")" = 600 ] &&
        grep -qx 'Remember me' "$file" && chat && keys Up && last_line '^> Remember me$'
}

no_history() {
    export XDG_STATE_HOME=/dev/null/none
    chat && say Hi && has "$answer" && keys Up && last_line '^> Hi$'
}

completion() {
    chat && type /re && keys Tab && wait_for has '/reset .*/retry' && last_line '^> /re$' && type t && keys Tab &&
        last_line '^> /retry$' && keys C-u && type "/load $work/thi" && keys Tab && last_line "^> /load $work/thinker/"
}

pasted() {
    chat && tmux set-buffer $'first line\nsecond line' && tmux paste-buffer -p -t chat && last_line 'second line$' &&
        ! has "$answer" && keys Enter && last_line "$prompt" && counts "$answer" 1 && messages &&
        grep -qF '"content":"first line\nsecond line"' "$work/messages" &&
        keys Up && keys Up && last_line 'second line$'
}

marked() {
    chat && type '"""' && keys Enter && last_line '^\.\.\.' && type '/one' && keys Enter && wait_for has '^\.\.\. /one$' &&
        type '  two' && keys Enter && wait_for has '^\.\.\.   two$' && type '"""' && keys Enter && wait_for has "$answer" &&
        last_line "$prompt" && messages && grep -qF '"content":"/one\n  two"' "$work/messages"
}

unknown_command() {
    chat && say /rset && has '^nvfp4: there is no command /rset; the commands are /edit, ' && say Hi && has "$answer"
}

end_of_input() { chat && keys C-d && last_line 'ended with 0'; }

interrupted_prompt() {
    chat && type 'never sent' && last_line 'sent$' && keys C-c && last_line "$prompt" && keys C-c &&
        wait_for has 'Ctrl-C again' && last_line "$prompt" && say Hi && has "$answer" && keys C-c &&
        wait_for counts 'Ctrl-C again' 2 && last_line "$prompt" && keys C-c && last_line 'ended with 0'
}

result_of_a_call() {
    echo '[{"type": "function", "function": {"name": "weather"}}]' >"$work/tools.json"
    chat --tools "$work/tools.json" && type 'Paris?' && keys Enter && last_line '^result of weather\(\{"city":"Paris"\}\)>$' &&
        has '^weather\(\{"city":"Paris"\}\)$' && type rain && keys Enter && wait_for has 'It rains in Paris' && last_line "$prompt"
}

# endless: a chat with a model that never stops, in the midst of its answer.
endless() {
    start "$build/nvfp4" chat --model "$work/endless" --context 1000000 && last_line "$prompt" && type Go && keys Enter &&
        wait_for has '(abc){20}'
}

interrupted_answer() {
    endless && keys C-c && last_line "$prompt" && say /stats && has 'tokens out at' && type Go && keys Enter &&
        wait_for has '(abc){20}' && keys C-c && last_line "$prompt" && keys C-d && last_line 'ended with 0'
}

interrupted_twice() {
    endless && keys C-c && last_line "$prompt" && kill -INT "$(child)" && wait_for has 'ended with 130'
}

terminated() { chat && type half && last_line 'half$' && kill -TERM "$(child)" && last_line 'ended with 143, icanon'; }

# The program that runs in the terminal.
child() { pgrep -P "$(tmux display-message -p -t chat '#{pane_pid}')"; }

answers_alone() {
    start "$build/nvfp4 chat --model $work/thinker | tee $work/answers >/dev/null" && last_line "$prompt" && say Hi && keys C-d &&
        last_line 'ended with 0' && [ "$(cat "$work/answers")" = 'Blue 漢字 light 🦀.' ] && has '^Let me see'
}

python3 tests/common/thinker.py "$work/thinker" && python3 tests/dotnet/reciter.py tests/golden/model/qwen3_tied/tokenizer.json \
    "$work/endless" abc --forever || exit 1

check "what is loaded and how tokens are chosen is said" greeting
check "reasoning is dimmed" dimmed
check "without colours, reasoning stands between marks" undimmed
check "the last line comes back by the up arrow" last_line_again
check "the history outlives the program, for its user alone" history_kept
check "a history that cannot be kept ends nothing" no_history
check "commands and files are completed" completion
check "lines that are pasted are one message" pasted
check "lines between marks are one message" marked
check "an unknown command is named, and the others are listed" unknown_command
check "Ctrl-D ends the program" end_of_input
check "Ctrl-C drops a line, and twice ends the program" interrupted_prompt
check "the result of a call is asked for" result_of_a_call
check "Ctrl-C stops an answer, and the conversation goes on" interrupted_answer
check "a second interrupt ends the program with 130" interrupted_twice
check "a signal that ends the program leaves the terminal as it was" terminated
check "a pipe gets the answers alone" answers_alone
finish
