//! `nvfp4 pages`: manual pages and shell completions of every subcommand, generated from its arguments. Hidden from `--help`: packaging
//! calls it.

use std::fs;
use std::path::{Path, PathBuf};

use NVFP4::base::{Error, Result};
use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;

/// Name of the command in file names.
const NAME: &str = "nvfp4";

#[derive(clap::Args)]
pub(super) struct Args {
    /// A folder laid out as /usr/share: man/man1, and the folders in which bash, fish and zsh look for completions
    folder: PathBuf,
}

pub(super) fn run(args: &Args, command: &Command) -> Result<()> {
    let mut command = shown(command);
    for (shell, path) in [
        (Shell::Bash, "bash-completion/completions/nvfp4"),
        (Shell::Fish, "fish/vendor_completions.d/nvfp4.fish"),
        (Shell::Zsh, "zsh/site-functions/_nvfp4"),
    ] {
        let mut text = Vec::new();
        clap_complete::generate(shell, &mut command, NAME, &mut text);
        write(&args.folder.join(path), &text)?;
    }
    // Prefixes the subcommands' usages with the command's name.
    command.build();
    let manuals = args.folder.join("man/man1");
    page(&command, NAME, &manuals)?;
    for subcommand in command.get_subcommands().filter(|s| s.get_name() != "help") {
        page(
            subcommand,
            &format!("{NAME}-{}", subcommand.get_name()),
            &manuals,
        )?;
    }
    Ok(())
}

/// The command without hidden parts, which completions would offer.
fn shown(command: &Command) -> Command {
    let subcommands = command.get_subcommands().filter(|s| !s.is_hide_set());
    Command::new(NAME)
        .version(env!("CARGO_PKG_VERSION"))
        .about(command.get_about().cloned().unwrap_or_default())
        .args(command.get_arguments())
        .subcommand_required(true)
        .subcommands(subcommands.cloned())
}

/// Writes the manual page of a command under its name.
fn page(command: &Command, name: &str, folder: &Path) -> Result<()> {
    let version = concat!("nvfp4 ", env!("CARGO_PKG_VERSION"));
    let man = Man::new(command.clone()).title(name).source(version);
    let mut text = Vec::new();
    man.render(&mut text).expect("memory takes any text");
    write(&folder.join(format!("{name}.1")), &text)
}

fn write(path: &Path, text: &[u8]) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(path, text))
        .map_err(|e| Error::io(format!("writing {}", path.display()), e))
}
