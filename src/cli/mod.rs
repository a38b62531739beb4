//! The command line: arguments in, calls of the library, text or JSON out. Exit code 0 on success, 1 on failure, 2 on wrong
//! usage. No arithmetic of models here.

mod bandwidth;
mod diagnose;
mod hub;
mod inspect;
mod model;
mod output;
mod pull;
mod quantize;
mod synth;

use std::process::ExitCode;

use NVFP4::base::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(
    name = "nvfp4",
    version,
    about = "Run, quantize and measure language models with weights in NVFP4"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Fetch a model from the Hugging Face hub into the usual cache
    Pull(pull::Args),
    /// Convert a model to NVFP4 on disk
    Quantize(quantize::Args),
    /// List what a model file holds
    Inspect(inspect::Args),
    /// Write a model of a known shape with random weights, for benchmarks
    Synth(synth::Args),
    /// Tell what this machine and build can do
    Diagnose(diagnose::Args),
}

/// Parses the arguments and runs the subcommand.
pub(crate) fn main() -> ExitCode {
    // Wrong usage prints to standard error and exits with 2; --help and --version exit with 0.
    let cli = Cli::parse();
    match dispatch(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nvfp4: {error}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(command: Command) -> Result<()> {
    match command {
        Command::Pull(args) => pull::run(&args),
        Command::Quantize(args) => quantize::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Diagnose(args) => diagnose::run(&args),
    }
}
