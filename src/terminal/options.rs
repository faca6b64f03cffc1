//! The command-line flags of settings, made from the table of settings: `--port 9000`, `--set server.port=9000`.

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use pagetide_base::error::StartError;
use pagetide_config::layers::{Resolved, Sources, read_file, resolve};
use pagetide_config::settings::{SETTINGS, Setting};
use pagetide_config::value::SettingKind;
use std::ffi::OsStr;
use std::path::PathBuf;

/// The settings on the command line.
#[derive(Clone, Debug, Default)]
pub struct ConfigOptions {
    /// `--config`
    pub file: Option<PathBuf>,
    /// Flag as given, key and value, in the order of the command line.
    pub values: Vec<(String, String, String)>,
}

impl ConfigOptions {
    /// With the model that the command line names without a flag.
    pub fn with_model(mut self, model: Option<String>) -> Self {
        self.values.extend(model.map(|model| ("MODEL".into(), "model.path".into(), model)));
        self
    }

    /// Combines the flags with the environment, the file and the defaults.
    pub fn resolve(&self) -> Result<Resolved, StartError> {
        let file = self.file.as_deref().map(read_file).transpose()?;
        // A value that is not Unicode is never valid, but its name is still worth reporting.
        let env = std::env::vars_os().filter_map(|(name, value)| {
            let name = name.into_string().ok()?;
            Some((name, value.to_string_lossy().into_owned()))
        });
        Ok(resolve(&Sources { file, env: env.collect(), flags: self.values.clone() })?)
    }
}

const CONFIG: &str = "config-file";
const SET: &str = "set";

impl Args for ConfigOptions {
    fn augment_args(command: Command) -> Command {
        let file = Arg::new(CONFIG)
            .long("config")
            .value_name("FILE")
            .value_parser(clap::value_parser!(PathBuf))
            .help("Read settings from this TOML file")
            .help_heading("Any setting");
        let set = Arg::new(SET)
            .long("set")
            .value_name("SECTION.KEY=VALUE")
            .action(ArgAction::Append)
            .help("Set any setting; can be repeated")
            .help_heading("Any setting");
        let flags = SETTINGS.iter().filter_map(|setting| Some(flag(setting, setting.flag?)));
        command.args(flags).arg(file).arg(set)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

fn flag(setting: &'static Setting, (name, value_name): (&'static str, &'static str)) -> Arg {
    let default = setting.default().to_string();
    let help = match default.as_str() {
        "[]" => format!("{} (can be repeated)", setting.doc.trim_end_matches('.')),
        default => format!("{} [default: {}]", setting.doc.trim_end_matches('.'), default.trim_matches('"')),
    };
    Arg::new(setting.key)
        .long(name)
        .value_name(value_name)
        .action(ArgAction::Append)
        .allow_hyphen_values(true)
        .value_parser(Known(match setting.kind {
            SettingKind::Choice(words) => words,
            SettingKind::Bool => &["true", "false"],
            _ => &[],
        }))
        .hide_possible_values(true) // the value's placeholder lists them
        .help(help)
        .help_heading(setting.section_about())
}

/// The words that a setting accepts, for shell completion. Any text is accepted here, because the configuration reports
/// all mistakes together.
#[derive(Clone)]
struct Known(&'static [&'static str]);

impl TypedValueParser for Known {
    type Value = String;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<String, clap::Error> {
        StringValueParser::new().parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let words = (!self.0.is_empty()).then(|| self.0.iter().map(PossibleValue::new))?;
        Some(Box::new(words))
    }
}

impl FromArgMatches for ConfigOptions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut options = Self::default();
        options.update_from_arg_matches(matches)?;
        Ok(options)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.file = matches.get_one::<PathBuf>(CONFIG).cloned();
        let mut values: Vec<(usize, String, String, String)> = Vec::new();
        for setting in SETTINGS {
            let Some((name, _)) = setting.flag else { continue };
            let given = matches.get_many::<String>(setting.key).into_iter().flatten();
            for (index, value) in matches.indices_of(setting.key).into_iter().flatten().zip(given) {
                values.push((index, format!("--{name}"), setting.key.into(), value.clone()));
            }
        }
        let given = matches.get_many::<String>(SET).into_iter().flatten();
        for (index, text) in matches.indices_of(SET).into_iter().flatten().zip(given) {
            let Some((key, value)) = text.split_once('=') else {
                let message = format!("--set {text}: expected SECTION.KEY=VALUE\n");
                return Err(clap::Error::raw(clap::error::ErrorKind::ValueValidation, message));
            };
            let key = key.trim();
            values.push((index, format!("--set {key}"), key.into(), value.into()));
        }
        values.sort_by_key(|(index, ..)| *index);
        self.values = values.into_iter().map(|(_, flag, key, value)| (flag, key, value)).collect();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<ConfigOptions, clap::Error> {
        let command = ConfigOptions::augment_args(Command::new("test").no_binary_name(true));
        ConfigOptions::from_arg_matches(&command.try_get_matches_from(line.split_whitespace())?)
    }

    #[test]
    fn the_last_on_the_line_wins() {
        let port = |line| {
            let flags = parse(line).unwrap().values;
            resolve(&Sources { flags, ..Default::default() }).unwrap().config.server.port
        };
        assert_eq!(port("--port 1 --set server.port=2"), 2);
        assert_eq!(port("--set server.port=2 --port 1"), 1);
        assert_eq!(port("--port 3 --port 4"), 4);
    }

    #[test]
    fn set_needs_a_key_and_a_value() {
        assert!(parse("--set server.port").unwrap_err().to_string().contains("expected SECTION.KEY=VALUE"));
        let values = parse("--set model.path=/a=b").unwrap().values;
        assert_eq!(values, [("--set model.path".into(), "model.path".into(), "/a=b".into())]);
    }

    #[test]
    fn a_negative_value_reaches_the_range_check() {
        let flags = parse("--swap-space-gib -1").unwrap().values;
        let problems = resolve(&Sources { flags, ..Default::default() }).unwrap_err();
        assert_eq!(
            problems.to_string(),
            "--swap-space-gib: swap.space_gib: -1 is out of range: a number from 0 to 65536, or \"auto\""
        );
    }
}
