//! Which crate uses which: the manifests, and the table in docs/architecture.md, which says what they allow.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use toml_edit::DocumentMut;

type Uses = BTreeMap<String, BTreeSet<String>>;

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The dependencies in the manifest of each crate in `src`.
fn manifests() -> Uses {
    let folders = fs::read_dir(root("src")).unwrap().map(|entry| entry.unwrap().path());
    let crates = folders.filter(|folder| folder.join("Cargo.toml").is_file()).map(|folder| {
        let manifest: DocumentMut = fs::read_to_string(folder.join("Cargo.toml")).unwrap().parse().unwrap();
        let names = manifest["dependencies"].as_table().unwrap().iter().map(|(name, _)| name.to_owned());
        (folder.file_name().unwrap().to_str().unwrap().to_owned(), names.collect())
    });
    crates.collect()
}

/// The table of the page.
fn documented() -> Uses {
    let page = fs::read_to_string(root("docs/architecture.md")).unwrap();
    let (_, source) = page.split_once("\n## Source\n").unwrap();
    let mut uses = Uses::new();
    for row in source.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").collect();
        let may_use = match cells[2] {
            all if all.contains("all of the above") => uses.keys().cloned().collect(),
            some => {
                some.split('`').skip(1).step_by(2).filter(|name| uses.contains_key(*name)).map(str::to_owned).collect()
            }
        };
        uses.insert(cells[0].replace(['`', ' '], ""), may_use);
    }
    uses
}

#[test]
fn crates_use_what_the_page_allows() {
    let of_ours = |names: BTreeSet<String>| -> BTreeSet<String> {
        names.iter().filter_map(|name| name.strip_prefix("pagetide-")).map(str::to_owned).collect()
    };
    let manifests: Uses = manifests().into_iter().map(|(name, uses)| (name, of_ours(uses))).collect();
    assert_eq!(manifests, documented());
}

#[test]
fn only_actors_and_transport_know_actix() {
    for (name, uses) in manifests() {
        let knows = uses.iter().any(|other| other.starts_with("actix"));
        assert_eq!(knows, ["actors", "http", "bench", "cli"].contains(&name.as_str()), "{name}");
    }
}

/// These are for programs without a server.
#[test]
fn the_library_and_generate_know_no_server() {
    for (file, forbidden) in [("src/actors/offline.rs", "actix"), ("src/cli/generate.rs", "pagetide_http")] {
        assert!(!fs::read_to_string(root(file)).unwrap().contains(forbidden), "{file} names {forbidden}");
    }
}
