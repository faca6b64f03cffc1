//! `pagetide bench compare`: two results beside each other.

use super::comparison::Comparison;
use super::html;
use super::result::{ResultFile, write_file};
use clap::Args;
use pagetide_base::error::StartError;
use pagetide_terminal::output;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Args)]
pub struct CompareArgs {
    /// The baseline
    #[arg(value_name = "A.json")]
    base: PathBuf,
    /// The result to compare with the baseline
    #[arg(value_name = "B.json")]
    other: PathBuf,
    /// Also write the comparison as one HTML file with charts
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

pub fn run(args: &CompareArgs) -> Result<ExitCode, StartError> {
    let (base, other) = (ResultFile::read(&args.base)?, ResultFile::read(&args.other)?);
    let comparison = Comparison::new(&base, &other);
    output::print(comparison.to_string())?;
    if let Some(path) = &args.html {
        write_file("--html", path, &html::comparison(&comparison, &base, &other))?;
    }
    Ok(ExitCode::SUCCESS)
}
