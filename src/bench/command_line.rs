//! The command line as results show it, without secrets.

use pagetide_config::settings::SETTINGS;

/// The command as it was given, without keys and passwords.
pub fn command_line(args: impl Iterator<Item = String>) -> String {
    let mut secret_follows = false;
    let shown = args.map(|arg| {
        if std::mem::replace(&mut secret_follows, arg == "--api-key") {
            return "(secret)".into();
        }
        let (set, assigned) = match arg.strip_prefix("--set=") {
            Some(assigned) => ("--set=", assigned),
            None => ("", arg.as_str()),
        };
        match assigned.split_once('=') {
            Some((key, _)) if key == "--api-key" || is_secret(key) => format!("{set}{key}=(secret)"),
            _ => without_password(&arg),
        }
    });
    shown.collect::<Vec<_>>().join(" ")
}

/// Whether a setting, or a part of one, is secret.
fn is_secret(key: &str) -> bool {
    let key = key.trim();
    SETTINGS.iter().filter(|setting| setting.is_secret()).any(|setting| key.starts_with(setting.key))
}

/// `text` with user name and password of a URL hidden, wherever the URL is in it.
pub fn without_password(text: &str) -> String {
    let Some((scheme, rest)) = text.split_once("://") else { return text.to_owned() };
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    match rest[..end].rfind('@') {
        Some(at) => format!("{scheme}://(secret){}", &rest[at..]),
        None => text.to_owned(),
    }
}
