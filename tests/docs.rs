//! The pages that list settings and metrics, and `config/pagetide.toml`, agree with the code. To write them anew:
//! `UPDATE_DOCS=1 cargo test --test docs`.

use pagetide::config::settings::{SECTIONS, SETTINGS, reference_file};
use pagetide::config::value::Value;
use pagetide::metrics::METRICS;
use std::fmt::Write;
use std::path::{Path, PathBuf};

fn in_repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Compares `expected` with the file, or with what stands between the page's markers.
fn check(path: &str, markers: Option<(&str, &str)>, expected: &str) {
    let file = in_repository(path);
    let text = std::fs::read_to_string(&file).unwrap_or_default();
    let (start, end) = match markers {
        Some((begin, end)) => {
            let start = text.find(begin).unwrap_or_else(|| panic!("{path} has no {begin}")) + begin.len() + 1;
            (start, start + text[start..].find(end).unwrap_or_else(|| panic!("{path} has no {end}")))
        }
        None => (0, text.len()),
    };
    if &text[start..end] == expected {
        return;
    }
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&file, format!("{}{expected}{}", &text[..start], &text[end..])).unwrap();
        return;
    }
    panic!("{path} is out of date: run UPDATE_DOCS=1 cargo test --test docs\nexpected:\n{expected}");
}

#[test]
fn the_configuration_file_holds_every_setting() {
    check("config/pagetide.toml", None, &reference_file());
}

#[test]
fn the_configuration_page_lists_every_setting() {
    let mut page = String::new();
    for (section, about) in SECTIONS {
        writeln!(page, "\n### `[{section}]`\n\n{about}.\n").unwrap();
        writeln!(page, "| key | default | values | what it is | when to change it |\n|---|---|---|---|---|").unwrap();
        for setting in SETTINGS.iter().filter(|setting| setting.section() == *section) {
            let flag = setting.flag.map_or(String::new(), |(flag, _)| format!("<br>`--{flag}`"));
            let unit = if setting.unit.is_empty() { String::new() } else { format!(" {}", setting.unit) };
            let unit = if matches!(setting.default(), Value::Int(_) | Value::Float(_)) { unit } else { String::new() };
            writeln!(
                page,
                "| `{}`{flag} | `{}`{unit} | {} | {} | {} |",
                setting.name(),
                setting.default(),
                setting.kind.expected(),
                setting.doc,
                setting.when_to_change,
            )
            .unwrap();
        }
    }
    check("docs/configuration.md", Some(("<!-- settings -->", "<!-- end of settings -->")), &page);
}

#[test]
fn the_metrics_page_lists_every_metric() {
    let mut page = String::from("\n| metric | type | unit | labels | meaning |\n|---|---|---|---|---|\n");
    for metric in METRICS {
        let labels: Vec<String> = metric.labels.iter().map(|(name, values)| format!("`{name}`: {values}")).collect();
        writeln!(
            page,
            "| `{}` | {} | {} | {} | {} |",
            metric.name,
            metric.kind.name(),
            metric.unit,
            labels.join("; "),
            metric.help
        )
        .unwrap();
    }
    page.push('\n');
    check("docs/metrics.md", Some(("<!-- metrics -->", "<!-- end of metrics -->")), &page);
}

/// `scripts/compare-with-vllm.py` looks for differences that are not in the file.
#[test]
fn the_api_page_lists_every_difference_from_vllm() {
    let file = std::fs::read_to_string(in_repository("scripts/vllm_comparison/differences.toml")).unwrap();
    let file: toml_edit::DocumentMut = file.parse().unwrap();
    let mut page = String::from("\n| where | what Pagetide does, and why |\n|---|---|\n");
    for difference in file["difference"].as_array_of_tables().unwrap() {
        let text = |key: &str| difference.get(key).and_then(|value| value.as_str()).unwrap_or_else(|| panic!("{key}"));
        writeln!(page, "| {} | {} |", text("name"), text("reason")).unwrap();
    }
    page.push('\n');
    check("docs/api.md", Some(("<!-- vllm -->", "<!-- end of vllm -->")), &page);
}
