//! `pagetide config`

use super::options::ConfigOptions;
use super::output;
use crate::config::layers::{Problems, Sources, read_file, resolve};
use crate::config::settings::reference_file;
use crate::error::StartError;
use clap::Subcommand;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Subcommand)]
pub enum ConfigCommand {
    /// Print the effective configuration, and where each value came from
    Show {
        /// Print a configuration file with every setting explained, at its default
        #[arg(long)]
        reference: bool,
        #[command(flatten)]
        options: ConfigOptions,
    },
    /// Report every problem of a configuration file
    Check {
        /// The TOML file
        file: PathBuf,
    },
}

pub fn run(command: &ConfigCommand) -> Result<ExitCode, StartError> {
    match command {
        ConfigCommand::Show { reference: true, .. } => output::print(reference_file()),
        ConfigCommand::Show { options, .. } => output::print(options.resolve()?.show()),
        ConfigCommand::Check { file } => check(file),
    }
}

/// Checks the file alone: the environment of whoever checks it is not that of the server.
fn check(path: &Path) -> Result<ExitCode, StartError> {
    match resolve(&Sources { file: Some(read_file(path)?), ..Default::default() }) {
        Ok(_) => output::print(format!("{} is right\n", path.display())),
        Err(problems) => {
            let Problems(list) = &problems;
            let count = if list.len() == 1 { "1 problem".into() } else { format!("{} problems", list.len()) };
            output::print(format!("{problems}\n{count} in {}\n", path.display()))?;
            Ok(ExitCode::FAILURE)
        }
    }
}
