//! Compares `include/nvfp4.h` with what cbindgen makes of `src/abi` under the settings of `include/cbindgen.toml`, or, given
//! `--bless`, writes it anew.

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
    Ok(String::from_utf8(header)?)
}

fn first_difference(a: &str, b: &str) -> usize {
    let same = a.lines().zip(b.lines()).take_while(|(a, b)| a == b);
    same.count()
}

fn run() -> Result<bool, Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
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
