//! Shell completions and manual pages, made from the command line.

use clap::{Args, Command, ValueHint};
use clap_complete::Shell;
use pagetide_base::error::StartError;
use pagetide_terminal::output;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Args)]
pub struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

#[derive(Args)]
pub struct ManArgs {
    /// Write a page for every command (pagetide.1, pagetide-serve.1, ...) into this folder instead of printing one
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    out: Option<PathBuf>,
}

pub fn completions(args: &CompletionsArgs, mut program: Command) -> Result<ExitCode, StartError> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut program, "pagetide", &mut script);
    output::print(&script)
}

pub fn man(args: &ManArgs, program: Command) -> Result<ExitCode, StartError> {
    match &args.out {
        Some(folder) => {
            let cannot = |error: std::io::Error| {
                StartError::new(format!("--out {}: {error}: expected a writable folder", folder.display()))
            };
            std::fs::create_dir_all(folder).map_err(cannot)?;
            clap_mangen::generate_to(program, Path::new(folder)).map_err(cannot)?;
            Ok(ExitCode::SUCCESS)
        }
        None => {
            let mut page = Vec::new();
            let written = clap_mangen::Man::new(program).render(&mut page);
            written.map_err(|error| StartError::new(format!("cannot write the manual page: {error}")))?;
            output::print(&page)
        }
    }
}
