//! The two configuration files that are made from the table of settings: a short one with the common settings, and the
//! complete reference.

use super::live::is_live;
use super::settings::{SECTIONS, SETTINGS, Setting};
use std::fmt::Write;

/// Comments are wrapped at this width.
const WIDTH: usize = 100;

/// `config/pagetide.toml`: the common settings at their defaults, each with one sentence.
pub fn common_file() -> String {
    let intro = "The settings that most users need, each at its default. Change what you need and start with\n\
                 \u{20} pagetide serve --config pagetide.toml\n\
                 All settings: 'pagetide config defaults', or docs/configuration.md. Command-line flags and environment \
                 variables (PAGETIDE_SECTION__NAME) take precedence over this file.";
    file(intro, |setting| setting.is_common, |setting| vec![format!("{}{}", setting.summary(), unit(setting))])
}

/// What `pagetide config defaults` prints: every setting at its default, with its description, range and unit.
pub fn reference_file() -> String {
    let intro = "All settings of Pagetide, each at its default. Keep what you want to change and start with\n\
                 \u{20} pagetide serve --config pagetide.toml\n\
                 Command-line flags and environment variables (PAGETIDE_SECTION__NAME) take precedence over this file.";
    file(
        intro,
        |_| true,
        |setting| {
            let live = if is_live(setting.key) { " Can be changed while the server runs." } else { "" };
            vec![
                setting.doc.to_owned(),
                format!("Value: {}{}.{live}", setting.kind.expected(), unit(setting)),
                format!("When to change it: {}", setting.when_to_change),
            ]
        },
    )
}

/// The setting's unit in brackets, after a space.
fn unit(setting: &Setting) -> String {
    if setting.unit.is_empty() { String::new() } else { format!(" [{}]", setting.unit) }
}

/// A TOML file with the defaults of the settings that `is_in` accepts, each below its comments.
fn file(intro: &str, is_in: impl Fn(&Setting) -> bool, comments: impl Fn(&Setting) -> Vec<String>) -> String {
    let mut out = String::new();
    intro.lines().for_each(|line| comment(&mut out, line));
    for (section, about) in SECTIONS {
        let settings: Vec<&Setting> =
            SETTINGS.iter().filter(|setting| setting.section() == *section && is_in(setting)).collect();
        if settings.is_empty() {
            continue;
        }
        out.push('\n');
        comment(&mut out, about);
        writeln!(out, "[{section}]").expect("writing to a String");
        for (place, setting) in settings.into_iter().enumerate() {
            if place > 0 {
                out.push('\n');
            }
            comments(setting).iter().for_each(|text| comment(&mut out, text));
            writeln!(out, "{} = {}", setting.name(), setting.default()).expect("writing to a String");
        }
    }
    out
}

/// Appends `text` as comment lines of at most [`WIDTH`] characters. Leading spaces stay.
fn comment(out: &mut String, text: &str) {
    let indent = &text[..text.len() - text.trim_start().len()];
    let mut line = format!("# {indent}");
    let mut is_empty = true;
    for word in text.split_whitespace() {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            out.push_str(&line);
            out.push('\n');
            line = format!("# {indent}");
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    out.push_str(&line);
    out.push('\n');
}
