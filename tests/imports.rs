//! The order of the house: which crate uses which, by the manifests and by the table in docs/architecture.md; and one
//! name for one type.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use toml_edit::{DocumentMut, Item, Table};

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

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        match path.extension() {
            None if path.is_dir() && !path.ends_with("tests") => sources(&path, found),
            Some(extension) if extension == "rs" && !path.ends_with("tests.rs") => found.push(path),
            _ => {}
        }
    }
}

/// The name of the type that a line declares.
fn declared_type(line: &str) -> Option<&str> {
    let mut words = line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty());
    let is_declared = !line.starts_with(' ')
        && words
            .find(|word| !["pub", "super", "crate", "unsafe"].contains(word))
            .is_some_and(|keyword| ["struct", "enum", "union", "trait", "type"].contains(&keyword));
    is_declared.then(|| words.next()).flatten()
}

#[test]
fn type_names_are_unique() {
    let mut files = Vec::new();
    sources(&root("src"), &mut files);
    let mut places: BTreeMap<String, Vec<&Path>> = BTreeMap::new();
    let texts: Vec<String> = files.iter().map(|file| fs::read_to_string(file).unwrap()).collect();
    for (file, text) in files.iter().zip(&texts) {
        let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
        for name in code.lines().filter_map(declared_type) {
            places.entry(name.to_owned()).or_default().push(file);
        }
    }
    assert!(places.len() > 1000, "only {} types were found", places.len());
    places.retain(|_, files| files.len() > 1);
    assert!(places.is_empty(), "one name for several types: {places:#?}");
}

/// The fuzzer is a workspace of its own. With the same profile it takes the libraries that other builds have compiled,
/// and never Pagetide's crates, which it instruments.
#[test]
fn the_fuzzer_compiles_only_pagetide_anew() {
    let read = |path| -> DocumentMut { fs::read_to_string(root(path)).unwrap().parse().unwrap() };
    let (ours, fuzzers) = (read("Cargo.toml"), read("fuzz/Cargo.toml"));
    let lock = fs::read_to_string(root("fuzz/Cargo.lock")).unwrap();
    fn profile(manifest: &DocumentMut) -> &Table {
        manifest["profile"]["dev"].as_table().unwrap()
    }
    let text = |item: &Item| item.to_string().trim().to_owned();
    let own = |manifest: &DocumentMut| -> BTreeMap<String, String> {
        let entries = profile(manifest).iter().filter(|(key, _)| *key != "package");
        entries.map(|(key, value)| (key.to_owned(), text(value))).collect()
    };
    assert_eq!(own(&fuzzers), own(&ours));

    // Each crate's settings, as in the manifests.
    let crates = |manifest: &DocumentMut| -> BTreeMap<String, BTreeMap<String, String>> {
        let packages = profile(manifest)["package"].as_table_like().unwrap().iter().map(|(name, settings)| {
            let settings = settings.as_table_like().unwrap().iter();
            (name.to_owned(), settings.map(|(key, value)| (key.to_owned(), text(value))).collect())
        });
        packages.filter(|(name, _)| name == "*" || lock.contains(&format!("name = \"{name}\"\n"))).collect()
    };
    let (ours, fuzzers) = (crates(&ours), crates(&fuzzers));
    let is_own = |name: &str| name == "pagetide" || name.starts_with("pagetide-");
    let libraries = |crates: &BTreeMap<String, BTreeMap<String, String>>| -> BTreeMap<_, _> {
        crates.clone().into_iter().filter(|(name, _)| !is_own(name)).collect()
    };
    assert_eq!(libraries(&fuzzers), libraries(&ours));
    for name in lock.lines().filter_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"')) {
        let is_distinct = fuzzers.get(name).is_some_and(|settings| settings.contains_key("codegen-units"));
        assert_eq!(is_distinct, is_own(name) && name != "pagetide-fuzz", "{name}");
    }
}
