//! The command line: parses arguments, calls the library, prints text or JSON. Exit codes are 0 on success, 1 on failure and 2 on wrong
//! usage; `train` has its own if a signal stopped it, and `guard` those of its command. No model arithmetic here.

mod bandwidth;
mod bench;
mod chart;
mod chat;
mod compare;
mod context;
mod diagnose;
mod embed;
mod grammar;
mod guard;
mod hub;
mod inspect;
mod model;
mod models;
mod output;
mod pages;
mod perplexity;
mod plan;
mod prompting;
mod pull;
mod quantize;
mod recipe;
mod rm;
mod run;
mod sampling;
mod synth;
mod train;
mod view;
mod warnings;
mod windows;

use std::io::Write;
use std::process::ExitCode;

use NVFP4::base::{Result, leftover};
use clap::{CommandFactory, Parser, Subcommand};

#[derive(Parser)]
#[command(
    name = "nvfp4",
    version,
    about = "Run, train, quantize and measure language models with weights in NVFP4"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Answer one prompt
    Run(run::Args),
    /// Hold a conversation
    Chat(chat::Args),
    /// Fetch a model from the Hugging Face hub into the usual cache
    Pull(pull::Args),
    /// List the fetched models: sizes, formats, and what fits this machine
    Models(models::Args),
    /// Remove a fetched model
    Rm(rm::Args),
    /// Teach a model what stands in files, with weights and optimizer in 4 bits
    #[command(allow_negative_numbers = true)]
    Train(Box<train::Args>),
    /// Convert a model to NVFP4 on disk
    Quantize(quantize::Args),
    /// List what a model file holds
    Inspect(inspect::Args),
    /// Write a model of a known shape with random weights, for benchmarks
    Synth(synth::Args),
    /// Measure the prefill and decode speed of a model
    Bench(bench::Args),
    /// Measure the perplexity of a model on a text, and its divergence from a reference model
    Perplexity(perplexity::Args),
    /// Say where a model differs from a reference of the same shape: by position, by block, and at which tokens
    Compare(compare::Args),
    /// Embed texts, and say how near they are to each other
    Embed(embed::Args),
    /// Say what this machine and build support
    Diagnose(diagnose::Args),
    /// Run a command, and kill it when GPU memory passes a limit
    Guard(guard::Args),
    /// Write manual pages and shell completions into a folder, for packages
    #[command(hide = true)]
    Pages(pages::Args),
}

/// Parses the arguments and runs the subcommand.
pub(crate) fn main() -> ExitCode {
    // Wrong usage prints to standard error and exits with 2; --help and --version exit with 0.
    let cli = Cli::parse();
    warnings::show();
    // Before any other thread starts, so that all of them leave signals to the thread that cleans up.
    match leftover::remove_on_signals().and_then(|()| dispatch(cli.command)) {
        Ok(code) => code,
        Err(error) => {
            // Standard error may have gone, as with a terminal.
            let _ = writeln!(std::io::stderr(), "nvfp4: {error}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(command: Command) -> Result<ExitCode> {
    let done = match command {
        Command::Run(args) => run::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Pull(args) => pull::run(&args),
        Command::Models(args) => models::run(&args),
        Command::Rm(args) => rm::run(&args),
        Command::Train(args) => return train::run(&args),
        Command::Quantize(args) => quantize::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Perplexity(args) => perplexity::run(&args),
        Command::Compare(args) => compare::run(&args),
        Command::Embed(args) => embed::run(&args),
        Command::Diagnose(args) => diagnose::run(&args),
        Command::Guard(args) => return guard::run(&args),
        Command::Pages(args) => pages::run(&args, &Cli::command()),
    };
    done.map(|()| ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_fit_together() {
        Cli::command().debug_assert();
    }
}
