# release/THIRD-PARTY.txt, which is committed: the texts change only with Cargo.lock, and a test says when they are not those of it.
# shellcheck shell=bash

part_licences() {
    local about unnamed
    about=$(cargo_tool cargo-about "$ABOUT" --no-default-features --features cli,grammar)
    cargo fetch --locked --quiet
    "$about" generate --frozen -c release/about.toml release/about.hbs -o release/THIRD-PARTY.txt
    unnamed=$(unnamed_crates .)
    [ -z "$unnamed" ] || fail "cargo-about left these crates out of release/THIRD-PARTY.txt: $(paste -sd, <<<"$unnamed")"
    say "release/THIRD-PARTY.txt: commit it"
}
