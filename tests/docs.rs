//! Checks that `config/pagetide.toml` and the pages that list settings, metrics and the API agree with the code.
//! `UPDATE_DOCS=1 cargo test --test docs` writes them again.

use pagetide::api::body::refused::{Off, RefusedField, RefusedTable};
use pagetide::api::fields::unsupported::UnsupportedFields;
use pagetide::config::layers::{Sources, resolve};
use pagetide::config::live::is_live;
use pagetide::config::reference::{common_file, reference_file};
use pagetide::config::settings::{SECTIONS, SETTINGS};
use pagetide::config::value::Value;
use pagetide::config::{Config, Dialect, Surface};
use pagetide::http::openapi;
use pagetide::http::routes::paths_of;
use pagetide::metrics::llama_cpp::LLAMA_CPP_METRICS;
use pagetide::metrics::vllm::VLLM_METRICS;
use pagetide::metrics::{METRICS, MetricKind};
use serde_json::Value as Json;
use std::collections::HashSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

fn in_repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Compares `expected` with the file, or with the part between the page's markers.
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

fn config_of(file: String) -> Config {
    resolve(&Sources { file: Some(("pagetide.toml".into(), file)), ..Sources::default() }).unwrap().config
}

#[test]
fn the_configuration_file_holds_the_common_settings_at_their_defaults() {
    check("config/pagetide.toml", None, &common_file());
    let shipped = std::fs::read_to_string(in_repository("config/pagetide.toml")).unwrap();
    assert_eq!(config_of(shipped), Config::default());
}

#[test]
fn the_complete_configuration_file_is_the_defaults() {
    let file = reference_file();
    assert!(SETTINGS.iter().all(|setting| file.contains(&format!("\n{} = ", setting.name()))));
    assert_eq!(config_of(file), Config::default());
}

#[test]
fn the_configuration_page_lists_every_setting() {
    let mut page = String::new();
    for (section, about) in SECTIONS {
        writeln!(page, "\n### `[{section}]`\n\n{about}.\n").unwrap();
        writeln!(
            page,
            "| key | default | values | description | when to change it | live |\n|---|---|---|---|---|---|"
        )
        .unwrap();
        for setting in SETTINGS.iter().filter(|setting| setting.section() == *section) {
            let flag = setting.flag.map_or(String::new(), |(flag, _)| format!("<br>`--{flag}`"));
            let unit = if setting.unit.is_empty() { String::new() } else { format!(" {}", setting.unit) };
            let unit = if matches!(setting.default(), Value::Int(_) | Value::Float(_)) { unit } else { String::new() };
            writeln!(
                page,
                "| {}{flag} | `{}`{unit} | {} | {} | {} | {} |",
                // The common settings are bold.
                if setting.is_common { format!("**`{}`**", setting.name()) } else { format!("`{}`", setting.name()) },
                setting.default(),
                setting.kind.expected(),
                setting.doc,
                setting.when_to_change,
                if is_live(setting.key) { "yes" } else { "no" },
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

    // In the same test, because only one test may write the page at a time.
    let mut page = String::from("\n| metric | type | labels | meaning |\n|---|---|---|---|\n");
    for metric in VLLM_METRICS {
        // Labels of all metrics are explained in the text.
        let common = |name: &str| ["model_name", "engine"].contains(&name);
        let labels = metric.labels.iter().filter(|(name, _)| !common(name));
        let labels: Vec<String> = labels.map(|(name, values)| format!("`{name}`: {values}")).collect();
        writeln!(page, "| `{}` | {} | {} | {} |", metric.name, metric.kind.name(), labels.join("; "), metric.help)
            .unwrap();
    }
    page.push('\n');
    check("docs/metrics.md", Some(("<!-- vllm -->", "<!-- end of vllm -->")), &page);

    let mut page = String::from("\n| metric | type | meaning |\n|---|---|---|\n");
    for metric in &LLAMA_CPP_METRICS {
        writeln!(page, "| `{}` | {} | {} |", metric.name, metric.kind.name(), metric.help).unwrap();
    }
    page.push('\n');
    check("docs/metrics.md", Some(("<!-- llama.cpp -->", "<!-- end of llama.cpp -->")), &page);
}

/// A dashboard with a wrong metric name shows nothing and reports no error.
#[test]
fn dashboards_and_alerts_use_metrics_that_there_are() {
    let series: Vec<String> = METRICS
        .iter()
        .flat_map(|metric| match metric.kind {
            MetricKind::Histogram => ["_bucket", "_sum", "_count"].map(|end| format!("{}{end}", metric.name)).to_vec(),
            MetricKind::Counter | MetricKind::Gauge => vec![metric.name.to_owned()],
        })
        .collect();
    let mut used = 0;
    for path in ["grafana/pagetide.json", "prometheus/rules/recording.yml", "prometheus/rules/alerts.yml"] {
        let text = std::fs::read_to_string(in_repository("dashboards").join(path)).unwrap();
        let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
        for word in text.split(|c| !is_of_name(c)).filter(|word| word.starts_with("pagetide_")) {
            assert!(series.iter().any(|known| known == word), "{path}: {word} is no metric");
            used += 1;
        }
    }
    assert!(used > 60, "only {used} names were found");
}

/// `scripts/compare-with-vllm.py` reports differences that are not in the file.
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

#[test]
fn the_api_page_lists_every_endpoint_and_parameter() {
    let document = openapi::document(paths_of(Surface::ALL), "/", Dialect::OpenAi, |access| access);
    let mut page = String::from("\n| endpoint | what it does | key |\n|---|---|---|\n");
    let (mut parameters, mut bodies) = (Vec::new(), HashSet::new());
    for (path, item) in document["paths"].as_object().expect("paths") {
        for (verb, operation) in item.as_object().expect("operations") {
            let key = match operation["security"].as_array().expect("a list").first() {
                None => "no",
                Some(scheme) if scheme.get("admin_key").is_some() => "admin",
                Some(scheme) if scheme.get("metrics_key").is_some() => "metrics",
                Some(_) => "yes",
            };
            let summary = operation["summary"].as_str().expect("a summary");
            writeln!(page, "| `{} {path}` | {summary} | {key} |", verb.to_uppercase()).unwrap();
            if let Some(schema) = operation.pointer("/requestBody/content/application~1json/schema") {
                let forms = schema["anyOf"].as_array().map_or(std::slice::from_ref(schema), Vec::as_slice);
                // A body that several paths take is listed with the first.
                for form in forms.iter().filter(|form| bodies.insert(form["$ref"].to_string())) {
                    parameter_rows(path, "", form, &document, &mut parameters);
                }
            }
        }
    }
    page.push_str("\n| parameter | of | type | default | meaning |\n|---|---|---|---|---|\n");
    for Parameter { name, paths, columns } in &parameters {
        let paths: Vec<String> = paths.iter().map(|path| format!("`{path}`")).collect();
        writeln!(page, "| `{name}` | {} | {columns} |", paths.join("<br>")).unwrap();
    }
    let (hints, refused): (Vec<&RefusedField>, Vec<&RefusedField>) =
        UnsupportedFields::FIELDS.iter().partition(|field| matches!(field.off, Off::Any));
    let names = |fields: Vec<&RefusedField>| {
        fields.iter().map(|field| format!("`{}`", field.name)).collect::<Vec<_>>().join(", ")
    };
    writeln!(page, "\nRefused where they ask for something, at paths that do not read them: {}.\n", names(refused))
        .unwrap();
    writeln!(page, "Hints of other servers, which change no answer and have no effect: {}.\n", names(hints)).unwrap();
    check("docs/api.md", Some(("<!-- endpoints -->", "<!-- end of endpoints -->")), &page);
}

/// A row of the table of parameters. Equal parameters of several paths share a row.
struct Parameter {
    name: String,
    paths: Vec<String>,
    columns: String,
}

fn parameter_rows(path: &str, prefix: &str, schema: &Json, document: &Json, rows: &mut Vec<Parameter>) {
    let schema = resolved(schema, document);
    let is_required = |name: &str| schema["required"].as_array().is_some_and(|names| names.iter().any(|n| n == name));
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let about = field["description"].as_str().or(resolved(field, document)["description"].as_str());
        let default = match field.get("default") {
            Some(default) => format!("`{default}`"),
            None if is_required(name) => "required".into(),
            None => String::new(),
        };
        let columns = format!("{} | {default} | {}", type_of(field, document), about.unwrap_or_default());
        let name = format!("{prefix}{name}");
        match rows.iter_mut().find(|row| row.name == name && row.columns == columns) {
            Some(row) if row.paths.last().is_some_and(|last| last == path) => {}
            Some(row) => row.paths.push(path.into()),
            None => rows.push(Parameter { name: name.clone(), paths: vec![path.into()], columns }),
        }
        nested_rows(path, &name, field, document, rows);
    }
}

/// The fields of an object, of the items of an array, or of one of several forms.
fn nested_rows(path: &str, name: &str, field: &Json, document: &Json, rows: &mut Vec<Parameter>) {
    let field = resolved(field, document);
    // Deeper schemas are those of clients.
    if name.matches('.').count() > 3 {
        return;
    }
    if field.get("properties").is_some() {
        parameter_rows(path, &format!("{name}."), field, document, rows);
    }
    if let Some(items) = field.get("items") {
        nested_rows(path, &format!("{name}[]"), items, document, rows);
    }
    for form in ["oneOf", "anyOf", "allOf"].into_iter().filter_map(|key| field[key].as_array()).flatten() {
        nested_rows(path, name, form, document, rows);
    }
}

fn resolved<'a>(schema: &'a Json, document: &'a Json) -> &'a Json {
    match schema.get("$ref").and_then(Json::as_str) {
        Some(name) => document.pointer(name.trim_start_matches('#')).expect("what is referred to is there"),
        None => schema,
    }
}

/// The type and range of a schema in words, without null, which every field allows.
fn type_of(schema: &Json, document: &Json) -> String {
    let schema = resolved(schema, document);
    if let Some(words) = schema["enum"].as_array() {
        return words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ");
    }
    let mut forms: Vec<String> = ["oneOf", "anyOf"]
        .into_iter()
        .filter_map(|key| schema[key].as_array())
        .flatten()
        .filter(|form| form["type"] != "null")
        .map(|form| type_of(form, document))
        .collect();
    forms.dedup();
    if !forms.is_empty() {
        return forms.join(", or ");
    }
    let types: Vec<&str> = match &schema["type"] {
        Json::Array(names) => names.iter().filter_map(Json::as_str).filter(|name| *name != "null").collect(),
        name => name.as_str().into_iter().collect(),
    };
    let number = |key: &str| schema.get(key).filter(|bound| !bound.is_null()).map(Json::to_string);
    let between = |low: Option<String>, high: Option<String>| match (low, high) {
        (Some(low), Some(high)) => format!("{low} to {high}"),
        (Some(low), None) => format!("at least {low}"),
        (None, Some(high)) => format!("at most {high}"),
        (None, None) => String::new(),
    };
    match types[..] {
        [] => "any".into(),
        ["boolean"] => "boolean".into(),
        ["array"] => {
            let items = type_of(&schema["items"], document);
            match between(number("minItems"), number("maxItems")) {
                range if range.is_empty() => format!("array of {items}"),
                range => format!("array of {range} × {items}"),
            }
        }
        ["object"] => match schema.get("additionalProperties").filter(|values| values.is_object()) {
            Some(values) => format!("object of {}", type_of(values, document)),
            None => "object".into(),
        },
        ref types => {
            let low = number("minimum").or(number("exclusiveMinimum").map(|low| format!("above {low}")));
            let range = if low.is_some() || number("maximum").is_some() {
                between(low, number("maximum")).replace("at least above", "above")
            } else {
                between(number("minLength"), number("maxLength").map(|length| format!("{length} characters")))
            };
            let name = types.join(" or ");
            if range.is_empty() { name } else { format!("{name}, {range}") }
        }
    }
}
