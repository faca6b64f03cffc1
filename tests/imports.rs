//! Which folder of the source may import which, read from the sources themselves.

use std::path::{Path, PathBuf};

/// Folders or files of `src`, and what none of their files may name outside of its tests.
const FORBIDDEN: &[(&str, &[&str])] = &[
    ("api", &["actix", "crate::actors", "crate::http", "crate::cli", "crate::offline"]),
    ("api.rs", &["actix", "crate::actors", "crate::cli", "crate::offline"]),
    ("actors", &["actix_web", "crate::http", "crate::cli"]),
    ("offline.rs", &["actix", "crate::http", "crate::cli"]),
    ("cli/generate.rs", &["crate::http"]),
    ("engine", &["actix", "crate::api", "crate::actors", "crate::http", "crate::text"]),
];

fn sources(path: &Path, found: &mut Vec<PathBuf>) {
    if path.is_file() {
        found.push(path.to_owned());
        return;
    }
    for entry in std::fs::read_dir(path).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() || path.extension().is_some_and(|extension| extension == "rs") {
            sources(&path, found);
        }
    }
}

/// The code of a file: no comments, and nothing from its tests on.
fn code(text: &str) -> String {
    let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

#[test]
fn imports_point_down() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut wrong = Vec::new();
    for (place, forbidden) in FORBIDDEN {
        let mut files = Vec::new();
        sources(&root.join(place), &mut files);
        assert!(!files.is_empty(), "src/{place} has no sources");
        for file in files.iter().filter(|file| !file.components().any(|part| part.as_os_str() == "tests")) {
            let code = code(&std::fs::read_to_string(file).unwrap());
            let named = forbidden.iter().filter(|name| code.contains(**name));
            wrong.extend(named.map(|name| format!("{} names {name}", file.strip_prefix(&root).unwrap().display())));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
