//! Compares `include/nvfp4.h` with cbindgen's output for `src/abi` under the settings of `include/cbindgen.toml`, or regenerates it, given
//! `--bless`. cbindgen keeps the comments of functions but not those of files, so the chapters' headings are inserted here.

use std::error::Error;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

/// cbindgen follows the `mod` lines of `src/abi/mod.rs`, so their order is that of the header's chapters.
fn generate(root: &Path) -> Result<String, Box<dyn Error>> {
    let mut header = Vec::new();
    cbindgen::Builder::new()
        .with_config(cbindgen::Config::from_file(
            root.join("include/cbindgen.toml"),
        )?)
        .with_src(root.join("src/abi/mod.rs"))
        .generate()?
        .write(&mut header);
    let header = String::from_utf8(header)?;
    chapters(&root.join("src/abi"), tidy(&header))
}

/// Comments of one line in one line, and types by their typedef alone.
fn tidy(header: &str) -> String {
    let lines: Vec<&str> = header.lines().collect();
    let mut out = String::new();
    let mut i = 0;
    while i < lines.len() {
        let indent = lines[i].len() - lines[i].trim_start().len();
        match lines[i..] {
            [first, only, last, ..] if first.trim() == "/**" && last.trim() == "*/" => {
                let text = only.trim_start().trim_start_matches('*');
                out.push_str(&format!("{:indent$}/**{text} */", ""));
                i += 3;
            }
            [line, ..] if !line.starts_with("typedef struct") => {
                // Rust has no `volatile` for memory that another thread or a signal handler may change.
                let line = line.replace(
                    "const int32_t *cancel_flag",
                    "const volatile int32_t *cancel_flag",
                );
                out.push_str(&line.replace("struct NVFP4_", "NVFP4_"));
                i += 1;
            }
            _ => {
                out.push_str(lines[i]);
                i += 1;
            }
        }
        out.push('\n');
    }
    out
}

/// Puts the opening comment of each file of `src/abi` before the first function that the file exports.
fn chapters(abi: &Path, mut header: String) -> Result<String, Box<dyn Error>> {
    let modules = fs::read_to_string(abi.join("mod.rs"))?;
    for name in modules
        .lines()
        .filter_map(|l| l.strip_prefix("pub mod ")?.strip_suffix(';'))
    {
        let source = fs::read_to_string(abi.join(format!("{name}.rs")))?;
        // pthread_cancel() unwinds a function in which it takes effect, and another would end the process then: see `guard.rs`.
        if source.contains("extern \"C\" fn NVFP4_") {
            let what = format!("a function of src/abi/{name}.rs is not extern \"C-unwind\"");
            return Err(what.into());
        }
        let function = source
            .split("extern \"C-unwind\" fn ")
            .skip(1)
            .find(|rest| rest.starts_with("NVFP4_"))
            .and_then(|rest| rest.split('(').next())
            .ok_or_else(|| format!("src/abi/{name}.rs exports no function"))?;
        let call = format!("{function}(");
        let declaration = header
            .match_indices(&call)
            .map(|(at, _)| at)
            .find(|&at| !in_comment(&header[..at]))
            .ok_or_else(|| format!("{function} is not in the header"))?;
        let before = header[..declaration]
            .rfind("\n\n")
            .ok_or_else(|| format!("{function} has no empty line before it"))?;
        let mut heading = format!("\n\n/**\n * @defgroup {name} ");
        for (i, line) in source
            .lines()
            .map_while(|l| l.strip_prefix("//!"))
            .enumerate()
        {
            if i > 0 {
                heading.push_str("\n *");
            }
            heading.push_str(if i > 0 {
                line
            } else {
                line.trim().trim_end_matches('.')
            });
        }
        heading.push_str("\n */");
        header.insert_str(before, &heading);
    }
    Ok(header)
}

/// Whether the last line of `text` is inside a comment.
fn in_comment(text: &str) -> bool {
    let line = text.rsplit('\n').next().unwrap_or_default();
    line.trim_start().starts_with(['*', '/'])
}

fn first_difference(a: &str, b: &str) -> usize {
    let same = a.lines().zip(b.lines()).take_while(|(a, b)| a == b);
    same.count()
}

fn run() -> Result<bool, Box<dyn Error>> {
    // The root of this run: checkouts that share a target folder share the executable.
    let root = Path::new(&std::env::var("CARGO_MANIFEST_DIR")?).join("../..");
    let path = root.join("include/nvfp4.h");
    let generated = generate(&root)?;
    if std::env::args().nth(1).as_deref() == Some("--bless") {
        fs::write(&path, &generated)?;
        println!("include/nvfp4.h: {} lines", generated.lines().count());
        return Ok(true);
    }
    let committed = fs::read_to_string(&path)?;
    if committed == generated {
        println!("include/nvfp4.h matches src/abi");
        return Ok(true);
    }
    let line = first_difference(&committed, &generated);
    println!(
        "include/nvfp4.h differs from src/abi at line {}; tests/header/run.sh --bless writes it anew",
        line + 1
    );
    println!(
        "  committed: {}",
        committed.lines().nth(line).unwrap_or("(end)")
    );
    println!(
        "  generated: {}",
        generated.lines().nth(line).unwrap_or("(end)")
    );
    Ok(false)
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            println!("the header could not be compared: {error}");
            ExitCode::FAILURE
        }
    }
}
