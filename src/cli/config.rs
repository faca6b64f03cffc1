//! `pagetide config`

use clap::Subcommand;
use pagetide_base::error::StartError;
use pagetide_config::layers::{Problems, Sources, read_file, resolve};
use pagetide_config::reference::reference_file;
use pagetide_terminal::options::ConfigOptions;
use pagetide_terminal::output;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Subcommand)]
pub enum ConfigCommand {
    /// Print the effective configuration and where each value comes from
    Show {
        /// Print what 'pagetide config defaults' prints
        #[arg(long)]
        reference: bool,
        #[command(flatten)]
        options: ConfigOptions,
    },
    /// Print a configuration file with all settings, their descriptions and their defaults
    Defaults,
    /// Report every mistake in a configuration file
    Check {
        /// The TOML file
        file: PathBuf,
    },
}

pub fn run(command: &ConfigCommand) -> Result<ExitCode, StartError> {
    match command {
        ConfigCommand::Defaults | ConfigCommand::Show { reference: true, .. } => output::print(reference_file()),
        ConfigCommand::Show { options, .. } => output::print(options.resolve()?.show()),
        ConfigCommand::Check { file } => check(file),
    }
}

/// Checks the file alone, without environment variables: those of the server may differ from those here.
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
