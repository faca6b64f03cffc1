//! Prints the result of a benchmark and writes its files.

use super::command_line::command_line;
use super::common::CommonArgs;
use super::html;
use super::levels::{LoadLevel, Summary};
use super::result::{APPROXIMATE, BenchSetup, Measured, ResultFile, write_file, write_json};
use pagetide_base::error::StartError;
use pagetide_terminal::output;
use std::process::ExitCode;

/// Prints the result and writes the files of `--json` and `--html`. The exit status is 1 if a request failed.
pub fn finish(args: &CommonArgs, measured: &Measured, setup: &BenchSetup) -> Result<ExitCode, StartError> {
    let Measured { levels, phases, roofline } = measured;
    let mut text = match &levels[..] {
        [level] => level.all.to_string(),
        levels => Summary(levels).to_string(),
    };
    if let [LoadLevel { rounds, .. }] = &levels[..]
        && rounds.len() > 1
    {
        let speeds: Vec<String> = rounds.iter().map(|round| format!("{:.1}", round.out_tok_per_s)).collect();
        text += &format!("\noutput tok/s of each round: {}\n", speeds.join(", "));
    }
    if !setup.is_exact {
        text += &format!("\napproximate: {APPROXIMATE}\n");
    }
    if let Some(phases) = phases {
        text += &format!("\n{phases}");
    }
    if let Some(roofline) = roofline {
        text += &format!("\n{roofline}");
    }
    output::print(text)?;
    let file = ResultFile::new(&args.workload, measured, setup, command_line(std::env::args()));
    if let Some(path) = &args.json {
        write_json(path, &serde_json::to_value(&file).expect("what is measured can be written"))?;
    }
    if let Some(path) = &args.html {
        write_file("--html", path, &html::report(&file))?;
    }
    let failed = levels.iter().any(|level| level.all.failed > 0);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
