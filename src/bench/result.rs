//! What a benchmark has to say, printed and in files.

use super::levels::LoadLevel;
use super::report::{BenchReport, PhaseReport};
use super::roofline::RooflineReport;
use super::workload::WorkloadArgs;
use pagetide_base::error::StartError;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;

/// The target of a benchmark, and whether its requests were exact.
pub struct BenchSetup {
    pub subject: Value,
    /// Whether requests are exactly those of the workload, or as near as the server allows.
    pub is_exact: bool,
}

pub struct Measured {
    pub levels: Vec<LoadLevel>,
    pub phases: Option<PhaseReport>,
    pub roofline: Option<RooflineReport>,
}

/// A file of `--json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ResultFile {
    pub command: String,
    pub version: String,
    pub date: String,
    pub subject: Value,
    pub workload: Value,
    /// `exact`, or `approximate` if prompts were words and the model decided the ends of outputs.
    pub work: String,
    /// Of the only level and all its rounds; of several there is none.
    pub sending: Value,
    pub result: Option<BenchReport>,
    pub levels: Vec<LoadLevel>,
    pub phases: Value,
    pub roofline: Value,
}

/// What approximate means.
pub const APPROXIMATE: &str = "The requests used only OpenAI's API: prompts are words, so they have about as many \
                                tokens as the workload, and outputs end when the model ends them, at the latest \
                               at the workload's length. Tokens are those that the server counts, or pieces of \
                               text if it does not count them.";

impl ResultFile {
    pub fn new(workload: &WorkloadArgs, measured: &Measured, setup: &BenchSetup, command: String) -> Self {
        let now = time::OffsetDateTime::now_utc();
        let levels = &measured.levels;
        let only = (levels.len() == 1).then(|| &levels[0]);
        let value = |value: Result<Value, _>| value.expect("what is measured can be written");
        Self {
            command,
            version: env!("CARGO_PKG_VERSION").into(),
            date: now.format(&time::format_description::well_known::Rfc3339).expect("the year has four digits"),
            subject: setup.subject.clone(),
            workload: value(serde_json::to_value(workload)),
            work: if setup.is_exact { "exact" } else { "approximate" }.into(),
            sending: only.map_or(Value::Null, |level| level.sending.clone()),
            result: only.map(|level| level.all.clone()),
            levels: levels.clone(),
            phases: value(serde_json::to_value(measured.phases)),
            roofline: value(serde_json::to_value(&measured.roofline)),
        }
    }

    pub fn read(path: &Path) -> Result<Self, StartError> {
        let wrong = |what: String| StartError::new(format!("{}: {what}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
        let what = "not a result of bench serve, throughput or latency, written by --json";
        serde_json::from_str(&text).map_err(|error| wrong(format!("{what}: {error}")))
    }

    /// What was measured, in a few words.
    pub fn subject_line(&self) -> String {
        let text = |key: &str| self.subject[key].as_str().map(str::to_owned);
        [text("model"), text("device"), text("url")].into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

/// Writes the file of `--json`.
pub fn write_json(path: &Path, result: &Value) -> Result<(), StartError> {
    let text = serde_json::to_string_pretty(result).expect("a Value can be written") + "\n";
    write_file("--json", path, &text)
}

pub fn write_file(flag: &str, path: &Path, text: &str) -> Result<(), StartError> {
    std::fs::write(path, text).map_err(|error| StartError::new(format!("{flag} {}: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::super::command_line::command_line;
    use super::super::report::RequestOutcome;
    use super::super::{BenchCommand, levels::LevelInProgress, tests::parse};
    use super::*;
    use serde_json::json;
    use std::time::Duration;

    #[test]
    fn the_json_says_what_was_run_and_keeps_no_key() {
        let Ok(BenchCommand::Throughput { common }) = parse("throughput --fixed 8:2 --num 3") else { panic!() };
        let line = "pagetide bench serve --api-key k1 --api-key=k2 --set server.api_keys=k3 --port 1";
        let command = command_line(line.split(' ').map(str::to_owned));
        let mut level = LevelInProgress::new(json!({"batch": 1}));
        level.add_round(
            vec![RequestOutcome { output_tokens: 2, ..RequestOutcome::default() }],
            Duration::from_secs(1),
            Vec::new(),
        );
        let measured = Measured { levels: vec![level.done()], phases: None, roofline: None };
        let setup = BenchSetup { subject: json!({"model": "m"}), is_exact: true };
        let file = ResultFile::new(&common.workload, &measured, &setup, command);
        let result = serde_json::to_value(&file).unwrap();
        assert_eq!(
            result["command"],
            "pagetide bench serve --api-key (secret) --api-key=(secret) --set server.api_keys=(secret) --port 1"
        );
        for (given, shown) in [
            (
                "--set server.admin_key=S --set=server.admin_key=S",
                "--set server.admin_key=(secret) --set=server.admin_key=(secret)",
            ),
            ("--set=server.api_keys=a=b --set x.y=z", "--set=server.api_keys=(secret) --set x.y=z"),
            ("--url https://user:pa@ss@host:1/v1?a=b@c", "--url https://(secret)@host:1/v1?a=b@c"),
            ("--url=http://user@host --url http://host/a@b", "--url=http://(secret)@host --url http://host/a@b"),
        ] {
            assert_eq!(command_line(given.split(' ').map(str::to_owned)), shown);
        }
        assert_eq!(result["workload"]["fixed"], json!([8, 2]));
        assert_eq!((&result["result"]["out_tok_per_s"], &result["subject"]["model"]), (&json!(2.0), &json!("m")));
        assert_eq!(result["sending"]["batch"], 1);
        let date = result["date"].as_str().unwrap();
        assert!(date.starts_with("20") && date.ends_with('Z'), "{date}");
        assert_eq!((&result["version"], &result["work"]), (&json!(env!("CARGO_PKG_VERSION")), &json!("exact")));
        // The file can be read again.
        let path = tempfile::NamedTempFile::new().unwrap();
        write_json(path.path(), &result).unwrap();
        assert_eq!(serde_json::to_value(ResultFile::read(path.path()).unwrap()).unwrap(), result);
        std::fs::write(path.path(), "{}").unwrap();
        assert!(ResultFile::read(path.path()).unwrap_err().to_string().contains("not a result of bench"));
    }
}
