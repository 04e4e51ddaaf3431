//! The `weir` command line: one module per command, everything they share beside them.
//!
//! Every command returns an [`failure::Outcome`]; the one line of an error is printed here and
//! nowhere else. Data goes to standard output, everything else to standard error.

pub mod asking;
pub mod commands;
pub mod failure;
pub mod mount_helper;
pub mod open;
pub mod place;
pub mod progress;
pub mod show;
pub mod signals;
pub mod size;
pub mod streams;

use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};

use failure::{FSCK_USAGE, Failure, USAGE};

/// A crash-safe file system that a program links into itself, or mounts.
#[derive(Debug, Parser)]
#[command(
    name = "weir",
    version,
    max_term_width = 100,
    after_help = "Exit codes: 0 done, 1 failed, 2 wrong usage; `weir fsck` has its own.\n\n\
        Examples:\n  \
        weir mount --create --size 8G disk.weir /mnt\n  \
        weir umount /mnt\n  \
        weir fsck disk.weir\n  \
        weir cp -r ~/src disk.weir:/src"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make a new volume in a file or on a block device
    Create(commands::create::CreateArgs),
    /// Mount a volume
    Mount(commands::mount::MountArgs),
    /// Unmount a volume, and wait until it is closed
    #[command(alias = "unmount")]
    Umount(commands::umount::UmountArgs),
    /// Make what was written through a mount durable
    Sync(commands::sync::SyncArgs),
    /// Order what was done on a mount before what will be done, without waiting
    Barrier(commands::barrier::BarrierArgs),
    /// Check everything on a volume
    Fsck(commands::fsck::FsckArgs),
    /// Show what a volume is and how full
    Info(commands::info::InfoArgs),
    /// Show structures on the disk
    Dump(commands::dump::DumpArgs),
    /// List a directory of an unmounted volume
    Ls(commands::ls::LsArgs),
    /// Print files of an unmounted volume
    Cat(commands::cat::CatArgs),
    /// Show the statistics of a mount, or the attributes of a file of an unmounted volume
    Stat(commands::stat::StatArgs),
    /// Remove files of an unmounted volume
    Rm(commands::rm::RmArgs),
    /// Make directories on an unmounted volume
    Mkdir(commands::mkdir::MkdirArgs),
    /// Copy into and out of an unmounted volume
    Cp(commands::cp::CpArgs),
    /// Measure file systems side by side
    Lab(Box<weir_lab::LabArgs>),
    /// Crash a simulated volume in every way, and see whether it survives
    Sim(weir_sim::cli::RunArguments),
}

fn run(command: Command) -> Result<ExitCode, Failure> {
    let done = |outcome: failure::Outcome| outcome.map(|()| ExitCode::SUCCESS);
    match command {
        Command::Create(args) => done(commands::create::run(&args)),
        Command::Mount(args) => commands::mount::run(&args),
        Command::Umount(args) => done(commands::umount::run(&args)),
        Command::Sync(args) => done(commands::sync::run(&args)),
        Command::Barrier(args) => done(commands::barrier::run(&args)),
        Command::Fsck(args) => commands::fsck::run(&args),
        Command::Info(args) => done(commands::info::run(&args)),
        Command::Dump(args) => done(commands::dump::run(&args)),
        Command::Ls(args) => done(commands::ls::run(&args)),
        Command::Cat(args) => done(commands::cat::run(&args)),
        Command::Stat(args) => done(commands::stat::run(&args)),
        Command::Rm(args) => done(commands::rm::run(&args)),
        Command::Mkdir(args) => done(commands::mkdir::run(&args)),
        Command::Cp(args) => done(commands::cp::run(&args)),
        Command::Lab(args) => Ok(weir_lab::main(*args)),
        Command::Sim(run) => Ok(weir_sim::cli::main(&weir_sim::cli::Arguments { run })),
    }
}

/// The command, and its own commands, that the arguments begin with: ` lab check`.
fn named_command(arguments: impl Iterator<Item = String>) -> String {
    let mut command = <Cli as clap::CommandFactory>::command();
    let mut named = String::new();
    for argument in arguments {
        let Some(found) = command.find_subcommand(&argument) else { break };
        named = format!("{named} {}", found.get_name());
        command = found.clone();
    }
    named
}

/// One line for a command line that could not be understood.
fn usage_failure(error: &clap::Error) -> Failure {
    let text = error.to_string();
    let first = text.split("\n\n").next().unwrap_or(&text).trim_start_matches("error: ");
    let first = first.lines().map(str::trim).collect::<Vec<_>>().join(" ");
    let arguments = std::env::args_os().skip(1);
    let command = named_command(arguments.map(|argument| argument.to_string_lossy().into_owned()));
    let code = if command == " fsck" { FSCK_USAGE } else { USAGE };
    Failure::bare(format!("{first}: see weir{command} --help")).with_code(code)
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    if mount_helper::is_meant(std::env::args_os().next().as_deref()) {
        return mount_helper::main();
    }
    if asking::is_meant(std::env::args_os().next().as_deref()) {
        return asking::main(std::env::args_os().nth(1));
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::DisplayHelp
                    | ErrorKind::DisplayVersion
                    | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
            ) =>
        {
            // Help asked for goes to standard output, help for want of a command to standard error.
            let code = if error.use_stderr() { USAGE } else { 0 };
            if let Err(failure) = open::check_output()
                && !error.use_stderr()
            {
                return report(&failure);
            }
            return match error.print() {
                Ok(()) => ExitCode::from(code),
                Err(error) => report(&open::unprinted(&error)),
            };
        }
        Err(error) => return report(&usage_failure(&error)),
    };
    run(cli.command).unwrap_or_else(|failure| report(&failure))
}

fn report(failure: &Failure) -> ExitCode {
    let text = failure.to_string();
    if !text.is_empty() {
        failure::say(text);
    }
    ExitCode::from(failure.code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_has_examples_in_its_help() {
        for command in Cli::command().get_subcommands() {
            let help = command.clone().render_long_help().to_string();
            assert!(help.contains("Example"), "{} has no example", command.get_name());
        }
    }
}
