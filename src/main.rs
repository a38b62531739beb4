//! The `nvfp4` command: a thin shell over the library, one file per subcommand.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
