//! The floors of `src/`: reads every path that names another part of the crate, and refuses paths up or sideways, and circles of files
//! within a room.
//! Also enforces further rules: `format/` is safe and touches no system, `abi/` alone defines C functions, the command sees only the public
//! Rust API, and one file reads the environment.

#[path = "layers/circles.rs"]
mod circles;
#[path = "layers/source.rs"]
mod source;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use circles::{Crate, in_circles, shortest, show, show_edge};
use source::{Source, from_root};

/// Module and floor, as in the design. A module may import those on lower floors only.
const FLOORS: &[(&str, u32)] = &[
    ("abi", 8),
    ("cli", 8),
    ("session", 7),
    ("train", 7),
    ("engine", 6),
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

/// Files outside `abi` that define a C function, because they pass a callback to another library and export nothing: DLPack calls a
/// tensor's deleter, and libc the handlers of a fork, the body of a thread, and in a test a signal handler.
const CALLBACKS: &[&str] = &[
    "tensor/dlpack.rs",
    "base/file.rs",
    "base/fork.rs",
    "base/threads.rs",
];

/// Rooms that stand under the room around them, and name nothing else of it.
const FOUNDATIONS: &[&str] = &["cuda/driver"];

fn floor(module: &str) -> Option<u32> {
    FLOORS
        .iter()
        .find(|(name, _)| *name == module)
        .map(|(_, floor)| *floor)
}

struct Root {
    /// Named by the library's crate name rather than by `crate` or `super`.
    library: bool,
    name: String,
}

/// Line and name of everything that a source names at the root of its crate, and of the library by its crate name.
fn roots(source: &Source) -> Vec<(usize, Root)> {
    let mut found = Vec::new();
    for named in &source.named {
        let path = from_root(&named.module, &named.segments);
        if let Some(name) = path.and_then(|path| path.first().cloned()) {
            let library = named.segments[0] == "NVFP4";
            found.push((named.line, Root { library, name }));
        }
    }
    found
}

fn is_command(source: &Source) -> bool {
    source.path == "main.rs" || source.path == "cli.rs" || source.path.starts_with("cli/")
}

/// Whether `path` names `words` one after another somewhere.
fn names(path: &[String], words: &[&str]) -> bool {
    path.windows(words.len()).any(|window| window == words)
}

fn complaints(source: &Source) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    let mut complain = |line: usize, what: String| {
        let said = format!("{}:{line}: {what}", source.path);
        if !out.contains(&said) {
            out.push(said);
        }
    };
    let module = source.module();
    let room = module.first().map_or("", String::as_str);

    if !room.is_empty() && floor(room).is_none() {
        complain(
            1,
            format!("'{room}' has no floor; give it one in tests/layers.rs and in the design"),
        );
    }
    for (line, root) in roots(source) {
        let name = root.name.as_str();
        if is_command(source) {
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
    for named in &source.named {
        let path = &named.segments;
        let reads_environment = names(path, &["env", "var"]) || names(path, &["env", "var_os"]);
        if reads_environment && source.path != "base/env.rs" {
            complain(
                named.line,
                "the environment is read outside base/env.rs".to_owned(),
            );
        }
        for system in [
            "env", "fs", "io", "net", "process", "sync", "thread", "time",
        ] {
            if room == "format" && names(path, &["std", system]) {
                complain(
                    named.line,
                    format!("std::{system}: format is pure functions"),
                );
            }
        }
    }
    let words = &source.words;
    let word = |at: usize| words.get(at).map_or("", |w| w.text.as_str());
    for (i, here) in words.iter().enumerate() {
        // A function pointer type has no name after `fn`.
        if here.text == "extern"
            && word(i + 1).ends_with('"')
            && word(i + 2) == "fn"
            && word(i + 3) != "("
            && room != "abi"
            && !CALLBACKS.contains(&source.path.as_str())
        {
            complain(here.line, "a C function is defined outside abi".to_owned());
        }
        if ["no_mangle", "export_name"].contains(&word(i)) && room != "abi" {
            complain(here.line, "a symbol is exported outside abi".to_owned());
        }
        if room == "format" && here.text == "unsafe" {
            complain(here.line, "format is safe Rust".to_owned());
        }
    }
    out
}

/// Reports circles of files within the rooms of `sources`, and imports of foundations from the room around them.
fn circle_complaints(sources: &[Source]) -> String {
    let all = Crate::new(sources);
    let mut report = String::new();
    for room in all.rooms() {
        let edges = all.edges(&room);
        if let Some(circle) = shortest(&edges) {
            writeln!(
                report,
                "  {room}: {} files import each other in circles; the shortest:\n{}",
                in_circles(&edges).len(),
                show(&edges, &circle).trim_end()
            )
            .unwrap();
        }
    }
    for foundation in FOUNDATIONS {
        let around = foundation.rsplit_once('/').map_or("", |(room, _)| room);
        let edges = all.edges(around);
        for (from, to) in edges.keys().filter(|(from, _)| from == foundation) {
            writeln!(
                report,
                "  {foundation} knows nothing of what stands on it: {}",
                show_edge(&edges, from, to)
            )
            .unwrap();
        }
    }
    report
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

fn read_all() -> Vec<Source> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&src, &mut files);
    assert!(files.len() > 10, "only {} sources found", files.len());
    files
        .iter()
        .map(|path| {
            let name = path.strip_prefix(&src).unwrap().to_str().unwrap();
            Source::new(name, &fs::read_to_string(path).unwrap())
        })
        .collect()
}

#[test]
fn imports_go_down_only() {
    let mut report = String::new();
    for source in read_all() {
        for complaint in complaints(&source) {
            writeln!(report, "  src/{complaint}").unwrap();
        }
    }
    assert!(report.is_empty(), "the floors are crossed:\n{report}");
}

#[test]
fn no_circle_inside_a_room() {
    let report = circle_complaints(&read_all());
    assert!(report.is_empty(), "files import each other:\n{report}");
}

/// The reader's complaints about one source, without the place.
fn said(path: &str, source: &str) -> Vec<String> {
    complaints(&Source::new(path, source))
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
            "session (floor 7) imports train",
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

/// The report on the imports inside the rooms of `sources`.
fn circles(sources: &[(&str, &str)]) -> String {
    let sources: Vec<Source> = sources.iter().map(|(p, s)| Source::new(p, s)).collect();
    circle_complaints(&sources)
}

/// A room whose files refer to each other only downwards: the root re-exports and declares, a room in it is one node, a test may use
/// anything, and a macro's branches are read.
const STRAIGHT: &[(&str, &str)] = &[
    ("lib.rs", "mod ops; mod tensor;"),
    (
        "ops/mod.rs",
        "mod deep; mod norm; mod rope; pub use norm::{Norm, norm}; pub(crate) use rope::*; use crate::tensor::Tensor;",
    ),
    (
        "ops/norm.rs",
        "use crate::tensor::Tensor; use super::rope; fn f() { rope::g() } struct Norm;",
    ),
    (
        "ops/rope.rs",
        "pub struct Rope; fn g() { let norm = 1; h(norm) } #[cfg(test)] mod tests { use super::super::Norm; use super::*; }",
    ),
    ("ops/deep/mod.rs", "mod a; mod b; pub use a::A;"),
    (
        "ops/deep/a.rs",
        "use super::b::B; pub struct A(crate::ops::Norm);",
    ),
    (
        "ops/deep/b.rs",
        "use super::super::norm as other; pub struct B;",
    ),
    ("tensor/mod.rs", "mod tensor; pub use self::tensor::Tensor;"),
    ("tensor/tensor.rs", "pub struct Tensor;"),
];

#[test]
fn files_that_import_downwards_form_no_circle() {
    assert_eq!(circles(STRAIGHT), "");
}

#[test]
fn circles_are_found_and_shown() {
    let with = |path: &str, source: &'static str| {
        let mut sources = STRAIGHT.to_vec();
        let place = sources.iter_mut().find(|(p, _)| *p == path).unwrap();
        place.1 = source;
        sources
    };
    for (path, source, lines) in [
        // By its module.
        (
            "ops/rope.rs",
            "// A line.\nuse super::norm::Norm;",
            &[
                "  ops: 2 files",
                "ops/norm.rs -> ops/rope.rs: src/ops/norm.rs:1: ",
                "ops/rope.rs -> ops/norm.rs: src/ops/rope.rs:2: super::norm::Norm",
            ][..],
        ),
        // Through a re-export of the room, in a tree, renamed.
        (
            "ops/rope.rs",
            "use crate::{ops::{\nNorm as Other}};",
            &["src/ops/rope.rs:2: crate::ops::Norm"],
        ),
        // Through a glob of the room.
        (
            "ops/rope.rs",
            "use super::*; struct Rope(Norm);",
            &["src/ops/rope.rs:1: Norm"],
        ),
        // By a path alone, by a call, and in a macro.
        (
            "ops/rope.rs",
            "fn g(n: super::Norm) {}",
            &["src/ops/rope.rs:1: super::Norm"],
        ),
        (
            "ops/rope.rs",
            "use super::*; fn g() { norm(1) }",
            &["src/ops/rope.rs:1: norm"],
        ),
        (
            "ops/rope.rs",
            "fn g() { vec![super::norm::norm(1)] }",
            &["src/ops/rope.rs:1: super::norm::norm"],
        ),
        // Three files, one of which is a room.
        (
            "ops/rope.rs",
            "use super::deep::A;",
            &[
                "  ops: 3 files",
                "ops/deep -> ops/norm.rs: src/ops/deep/a.rs:1: crate::ops::Norm",
                "ops/rope.rs -> ops/deep: src/ops/rope.rs:1: super::deep::A",
            ],
        ),
        // Inside the inner room.
        (
            "ops/deep/b.rs",
            "use super::A; pub struct B;",
            &[
                "  ops/deep: 2 files",
                "ops/deep/b.rs -> ops/deep/a.rs: src/ops/deep/b.rs:1: super::A",
            ],
        ),
        // With the root itself, once it defines something.
        (
            "tensor/mod.rs",
            "mod tensor; pub fn empty() -> tensor::Tensor { tensor::empty() }",
            &[],
        ),
    ] {
        let report = circles(&with(path, source));
        assert_eq!(report.is_empty(), lines.is_empty(), "{source}: {report}");
        for line in lines {
            assert!(report.contains(line), "{source}: no '{line}' in\n{report}");
        }
    }
    let mut sources = with(
        "tensor/mod.rs",
        "mod tensor; pub fn rank() -> tensor::Tensor {}",
    );
    sources.retain(|(path, _)| *path != "tensor/tensor.rs");
    sources.push(("tensor/tensor.rs", "fn f() { super::rank() }"));
    let report = circles(&sources);
    assert!(
        report.contains("tensor/mod.rs -> tensor/tensor.rs"),
        "{report}"
    );
}

#[test]
fn the_driver_imports_no_launcher() {
    let sources = [
        ("lib.rs", "mod cuda;"),
        (
            "cuda/mod.rs",
            "mod driver; mod linear; pub use linear::Matrix;",
        ),
        ("cuda/driver/mod.rs", "mod gpu;"),
        ("cuda/driver/gpu.rs", "use crate::cuda::Matrix;"),
        ("cuda/linear.rs", "pub struct Matrix;"),
    ];
    let report = circles(&sources);
    assert!(
        report.contains("cuda/driver knows nothing of what stands on it: cuda/driver -> cuda/linear.rs: src/cuda/driver/gpu.rs:1"),
        "{report}"
    );
}
