//! The floors of `src/`: reads every path that names another part of the crate and refuses the ones that go up or sideways.
//! Also what else a room may not do: `format/` is safe and touches no system, `abi/` alone defines C functions, the command
//! sees only the public Rust API, and one file reads the environment.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// Module and floor, as in the design. A module may import those on lower floors only.
const FLOORS: &[(&str, u32)] = &[
    ("abi", 7),
    ("cli", 7),
    ("session", 6),
    ("train", 6),
    ("model", 5),
    ("ops", 4),
    ("cpu", 3),
    ("cuda", 3),
    ("checkpoint", 3),
    ("text", 3),
    ("tensor", 2),
    ("format", 1),
    ("base", 0),
];

/// Names that `base` puts at the crate root: macros are exported there.
const MACROS: &[&str] = &["bail", "err"];

/// Files outside `abi` that define a C function, because they hand a callback to another library and export nothing: DLPack
/// calls a tensor's deleter, and libc the handlers of a fork, what a thread does, and in a test a signal handler.
const CALLBACKS: &[&str] = &[
    "tensor/dlpack.rs",
    "base/file.rs",
    "base/fork.rs",
    "base/threads.rs",
];

fn floor(module: &str) -> Option<u32> {
    FLOORS
        .iter()
        .find(|(name, _)| *name == module)
        .map(|(_, floor)| *floor)
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Word(String),
    Text(String),
    /// `::` is one mark, every other mark is one character.
    Mark(&'static str),
}

struct Located {
    token: Token,
    line: usize,
}

/// Words, string literals and the marks that matter, without comments. No more of Rust than paths need.
fn tokens(source: &str) -> Vec<Located> {
    const MARKS: &[&str] = &["::", "{", "}", "(", ")", "[", "]", ",", ";", "*", "#", "$"];
    let bytes = source.as_bytes();
    let mut out = Vec::new();
    let (mut at, mut line) = (0, 1);
    while at < bytes.len() {
        let rest = &source[at..];
        let start = at;
        let mut token = None;
        if rest.starts_with("//") {
            at += rest.find('\n').unwrap_or(rest.len());
        } else if rest.starts_with("/*") {
            at += block_comment(rest);
        } else if let Some(hashes) = raw_string(rest) {
            let open = rest.find('"').expect("a raw string has a quote") + 1;
            let close = format!("\"{}", "#".repeat(hashes));
            let length = rest[open..].find(&close).unwrap_or(rest.len() - open);
            token = Some(Token::Text(rest[open..open + length].to_owned()));
            at += (open + length + close.len()).min(rest.len());
        } else if rest.starts_with('"') {
            let length = string(rest);
            token = Some(Token::Text(rest[1..length.max(2) - 1].to_owned()));
            at += length;
        } else if rest.starts_with('\'') {
            at += character_or_lifetime(rest);
        } else if rest.starts_with(|c: char| c.is_alphanumeric() || c == '_') {
            let length = rest
                .find(|c: char| !c.is_alphanumeric() && c != '_')
                .unwrap_or(rest.len());
            token = Some(Token::Word(rest[..length].to_owned()));
            at += length;
        } else if let Some(mark) = MARKS.iter().find(|m| rest.starts_with(**m)) {
            token = Some(Token::Mark(mark));
            at += mark.len();
        } else {
            at += rest.chars().next().map_or(1, char::len_utf8);
        }
        if let Some(token) = token {
            out.push(Located { token, line });
        }
        line += source[start..at].matches('\n').count();
    }
    out
}

fn block_comment(rest: &str) -> usize {
    let (mut at, mut depth) = (0, 0);
    while at < rest.len() {
        if rest[at..].starts_with("/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if rest[at..].starts_with("*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return at;
            }
        } else {
            at += rest[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    rest.len()
}

/// The number of `#` of a raw string that starts here.
fn raw_string(rest: &str) -> Option<usize> {
    let after = ["r", "br", "cr"]
        .iter()
        .find_map(|prefix| rest.strip_prefix(prefix))?;
    let hashes = after.len() - after.trim_start_matches('#').len();
    after[hashes..].starts_with('"').then_some(hashes)
}

fn string(rest: &str) -> usize {
    let mut escaped = false;
    for (i, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return i + 1,
            _ => {}
        }
    }
    rest.len()
}

fn character_or_lifetime(rest: &str) -> usize {
    let mut chars = rest.char_indices().skip(1);
    match chars.next() {
        // An escape: the closing quote is the first one after the escaped character.
        Some((_, '\\')) => rest[3..].find('\'').map_or(rest.len(), |i| i + 4),
        Some(_) => match chars.next() {
            Some((i, '\'')) => i + 1,
            _ => 1,
        },
        None => 1,
    }
}

/// A source file by its place under `src/`.
struct File<'a> {
    path: &'a str,
    tokens: Vec<Located>,
}

impl<'a> File<'a> {
    fn new(path: &'a str, source: &str) -> Self {
        File {
            path,
            tokens: tokens(source),
        }
    }

    /// The path of the file's module: `["cpu", "avx2"]`; empty for `lib.rs` and `main.rs`.
    fn module(&self) -> Vec<String> {
        let parts: Vec<&str> = self.path.trim_end_matches(".rs").split('/').collect();
        parts
            .into_iter()
            .filter(|p| !["mod", "lib", "main"].contains(p))
            .map(str::to_owned)
            .collect()
    }

    fn is_command(&self) -> bool {
        self.path == "main.rs" || self.path == "cli.rs" || self.path.starts_with("cli/")
    }

    fn word(&self, at: usize) -> Option<&str> {
        match &self.tokens.get(at)?.token {
            Token::Word(w) => Some(w),
            _ => None,
        }
    }

    fn is_mark(&self, at: usize, mark: &str) -> bool {
        matches!(self.tokens.get(at), Some(Located { token: Token::Mark(m), .. }) if *m == mark)
    }

    fn is_path(&self, at: usize, words: &[&str]) -> bool {
        words.iter().enumerate().all(|(i, word)| {
            self.word(at + 2 * i) == Some(word) && (i == 0 || self.is_mark(at + 2 * i - 1, "::"))
        })
    }

    /// The first names of what follows `::` at `at`: one, or each branch of a `{}` tree.
    fn heads(&self, at: usize) -> Vec<String> {
        if let Some(word) = self.word(at) {
            return vec![word.to_owned()];
        }
        if self.is_mark(at, "*") {
            return vec!["*".to_owned()];
        }
        let mut heads = Vec::new();
        if self.is_mark(at, "{") {
            let (mut depth, mut fresh, mut i) = (1, true, at + 1);
            while depth > 0 && i < self.tokens.len() {
                match &self.tokens[i].token {
                    Token::Mark("{") => depth += 1,
                    Token::Mark("}") => depth -= 1,
                    Token::Mark(",") if depth == 1 => fresh = true,
                    Token::Mark("*") if fresh => heads.push("*".to_owned()),
                    Token::Word(w) if fresh => {
                        heads.push(w.clone());
                        fresh = false;
                    }
                    _ => {}
                }
                i += 1;
            }
        }
        heads
    }

    /// Line and name of everything this file names at the root of its crate, and of the library by its crate name.
    fn roots(&self) -> Vec<(usize, Root)> {
        let mut found = Vec::new();
        let mut module = self.module();
        // Inline modules, with the brace depth outside them.
        let (mut depth, mut inline) = (0usize, Vec::new());
        let mut i = 0;
        while i < self.tokens.len() {
            let line = self.tokens[i].line;
            match &self.tokens[i].token {
                Token::Mark("{") => depth += 1,
                Token::Mark("}") => {
                    depth = depth.saturating_sub(1);
                    if inline.last() == Some(&depth) {
                        inline.pop();
                        module.pop();
                    }
                }
                Token::Word(w) if w == "mod" && self.is_mark(i + 2, "{") => {
                    if let Some(name) = self.word(i + 1) {
                        module.push(name.to_owned());
                        inline.push(depth);
                    }
                }
                Token::Word(w) if (w == "crate" || w == "NVFP4") && self.is_mark(i + 1, "::") => {
                    let library = w == "NVFP4";
                    for name in self.heads(i + 2) {
                        found.push((line, Root { library, name }));
                    }
                }
                Token::Word(w) if w == "super" => {
                    let mut climbed = module.clone();
                    while self.word(i) == Some("super") && self.is_mark(i + 1, "::") {
                        climbed.pop();
                        i += 2;
                    }
                    if climbed.is_empty() && i > 0 && self.is_mark(i - 1, "::") {
                        for name in self.heads(i) {
                            found.push((
                                line,
                                Root {
                                    library: false,
                                    name,
                                },
                            ));
                        }
                    }
                    // The token after the climb is looked at again: it may be a brace.
                    if self.word(i) != Some("super") {
                        continue;
                    }
                }
                _ => {}
            }
            i += 1;
        }
        found
    }

    fn complaints(&self) -> Vec<String> {
        let mut out = Vec::new();
        let mut complain =
            |line: usize, what: String| out.push(format!("{}:{line}: {what}", self.path));
        let module = self.module();
        let room = module.first().map_or("", String::as_str);

        if !room.is_empty() && floor(room).is_none() {
            complain(
                1,
                format!("'{room}' has no floor; give it one in tests/layers.rs and in the design"),
            );
        }
        for (line, root) in self.roots() {
            let name = root.name.as_str();
            if self.is_command() {
                if !root.library && name != "cli" {
                    complain(
                        line,
                        format!("crate::{name}: the command uses the library as NVFP4:: only"),
                    );
                }
                continue;
            }
            if root.library {
                complain(
                    line,
                    format!("NVFP4::{name}: the library names itself crate::"),
                );
                continue;
            }
            let name = if MACROS.contains(&name) { "base" } else { name };
            // The root itself only lists the modules.
            if room.is_empty() || name == room {
                continue;
            }
            match (floor(room), floor(name)) {
                (_, None) => complain(line, format!("crate::{name}: not a module with a floor")),
                (Some(own), Some(other)) if other >= own => complain(
                    line,
                    format!(
                        "{room} (floor {own}) imports {name} (floor {other}); imports go down only"
                    ),
                ),
                _ => {}
            }
        }
        for i in 0..self.tokens.len() {
            let line = self.tokens[i].line;
            let c_text = matches!(
                self.tokens.get(i + 1),
                Some(Located {
                    token: Token::Text(_),
                    ..
                })
            );
            // A function pointer type has no name after `fn`.
            if self.word(i) == Some("extern")
                && c_text
                && self.word(i + 2) == Some("fn")
                && self.word(i + 3).is_some()
                && room != "abi"
                && !CALLBACKS.contains(&self.path)
            {
                complain(line, "a C function is defined outside abi".to_owned());
            }
            if ["no_mangle", "export_name"].contains(&self.word(i).unwrap_or("")) && room != "abi" {
                complain(line, "a symbol is exported outside abi".to_owned());
            }
            let reads_environment =
                self.is_path(i, &["env", "var"]) || self.is_path(i, &["env", "var_os"]);
            if reads_environment && self.path != "base/env.rs" {
                complain(
                    line,
                    "the environment is read outside base/env.rs".to_owned(),
                );
            }
            if room == "format" {
                if self.word(i) == Some("unsafe") {
                    complain(line, "format is safe Rust".to_owned());
                }
                for system in [
                    "env", "fs", "io", "net", "process", "sync", "thread", "time",
                ] {
                    if self.is_path(i, &["std", system]) {
                        complain(line, format!("std::{system}: format is pure functions"));
                    }
                }
            }
        }
        out
    }
}

struct Root {
    /// Named by the library's crate name rather than by `crate` or `super`.
    library: bool,
    name: String,
}

fn sources(folder: &Path, out: &mut Vec<PathBuf>) {
    let mut entries: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            sources(&path, out);
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(path);
        }
    }
}

#[test]
fn imports_go_down_only() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&src, &mut files);
    assert!(files.len() > 10, "only {} sources found", files.len());
    let mut report = String::new();
    for path in &files {
        let name = path.strip_prefix(&src).unwrap().to_str().unwrap();
        let source = fs::read_to_string(path).unwrap();
        for complaint in File::new(name, &source).complaints() {
            writeln!(report, "  src/{complaint}").unwrap();
        }
    }
    assert!(report.is_empty(), "the floors are crossed:\n{report}");
}

/// What the reader says about one source, without the place.
fn said(path: &str, source: &str) -> Vec<String> {
    File::new(path, source)
        .complaints()
        .into_iter()
        .map(|c| c.split_once(": ").unwrap().1.to_owned())
        .collect()
}

#[test]
fn the_reader_accepts_what_is_allowed() {
    for (path, source) in [
        (
            "model/mod.rs",
            "use crate::{base::Result, ops::{norm, rope}}; use super::text::Tokenizer;",
        ),
        (
            "cpu/avx2/gemv.rs",
            "use super::super::table; use crate::format::e2m1; use super::*;",
        ),
        (
            "cpu/scalar.rs",
            "// use crate::ops;\n/* crate::ops /* nested */ crate::ops */ fn f() -> &'static str { \"crate::ops\" }",
        ),
        (
            "cpu/scalar.rs",
            "const A: &str = r#\"a \" crate::ops\"#; const C: char = '\\''; const D: char = '\"'; fn f<'a>(x: &'a u8) {}",
        ),
        (
            "checkpoint/dat.rs",
            "mod tests { use super::*; mod deeper { use super::super::read; } } use super::write;",
        ),
        (
            "base/error.rs",
            "macro_rules! e { () => { $crate::base::Error } } pub use crate::{bail, err};",
        ),
        ("format/nf4.rs", "use crate::bail;"),
        (
            "cpu/load.rs",
            "type F = unsafe extern \"C\" fn(i32) -> i32;",
        ),
        (
            "abi/tensor.rs",
            "#[unsafe(no_mangle)] pub extern \"C\" fn NVFP4_x() {} use crate::session::Session;",
        ),
        (
            "cli/run.rs",
            "use NVFP4::session::Session; use crate::cli::options;",
        ),
        (
            "main.rs",
            "mod cli; use NVFP4::base; fn main() { crate::cli::main() }",
        ),
        ("lib.rs", "pub mod base; pub use crate::session::Session;"),
    ] {
        assert_eq!(said(path, source), [""; 0], "{path}: {source}");
    }
}

#[test]
fn the_reader_refuses_what_is_not() {
    for (path, source, complaint) in [
        (
            "cpu/scalar.rs",
            "use crate::ops::norm;",
            "cpu (floor 3) imports ops (floor 4)",
        ),
        (
            "cpu/scalar.rs",
            "fn f() { let x = crate::model::load(); }",
            "cpu (floor 3) imports model",
        ),
        (
            "cpu/scalar.rs",
            "use crate::text;",
            "cpu (floor 3) imports text (floor 3)",
        ),
        (
            "session/mod.rs",
            "use crate::{base::{Error, Result}, train::Trainer};",
            "session (floor 6) imports train",
        ),
        (
            "checkpoint/mod.rs",
            "use super::text::Tokenizer;",
            "checkpoint (floor 3) imports text",
        ),
        (
            "checkpoint/gguf/read.rs",
            "use super::super::super::cpu;",
            "checkpoint (floor 3) imports cpu",
        ),
        (
            "checkpoint/dat.rs",
            "mod tests { fn f() { super::super::super::ops::f() } }",
            "checkpoint (floor 3) imports ops",
        ),
        (
            "base/mod.rs",
            "pub use super::{format::nf4};",
            "base (floor 0) imports format",
        ),
        ("ops/mod.rs", "use super::*;", "crate::*"),
        (
            "ops/mod.rs",
            "use crate::gemm::x;",
            "crate::gemm: not a module",
        ),
        ("gemm/mod.rs", "", "'gemm' has no floor"),
        ("ops/mod.rs", "use NVFP4::base;", "NVFP4::base"),
        (
            "cli/run.rs",
            "use crate::session::Session;",
            "crate::session: the command",
        ),
        (
            "ops/mod.rs",
            "pub unsafe extern \"C\" fn f() {}",
            "a C function is defined outside abi",
        ),
        (
            "ops/mod.rs",
            "#[unsafe(no_mangle)] fn f() {}",
            "a symbol is exported outside abi",
        ),
        (
            "format/mod.rs",
            "fn f() { unsafe { g() } }",
            "format is safe Rust",
        ),
        ("format/mod.rs", "use std::fs::File;", "std::fs"),
        (
            "text/mod.rs",
            "fn f() { std::env::var(\"X\"); }",
            "the environment is read",
        ),
    ] {
        let said = said(path, source);
        assert!(
            said.len() == 1 && said[0].starts_with(complaint),
            "{path}: {source}: {said:?}"
        );
    }
}
