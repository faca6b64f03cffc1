//! Runs every fuzz target over its kept inputs, without a fuzzer, so that bugs which the fuzzer has found cannot come
//! back unnoticed. `scripts/fuzz.sh` finds new inputs.

use pagetide::fuzzing::TARGETS;
use pagetide::text::grammar::sandbox;
use std::fs;
use std::path::Path;

fn corpus() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus")
}

#[test]
fn every_kept_input_is_taken_or_refused() {
    sandbox::use_program(env!("CARGO_BIN_EXE_pagetide"));
    for (name, run) in TARGETS {
        let folder = corpus().join(name);
        let mut files: Vec<_> = fs::read_dir(&folder).expect(name).map(|entry| entry.expect("a file").path()).collect();
        files.sort();
        assert!(!files.is_empty(), "{name} has no inputs to start from");
        for file in files {
            let data = fs::read(&file).expect("a file");
            // If the test fails or hangs, its output ends with the file at fault.
            println!("{}", file.display());
            run(&data);
        }
        run(b"");
    }
}

#[test]
fn every_folder_and_every_program_has_its_target() {
    let names: Vec<&str> = TARGETS.iter().map(|(name, _)| *name).collect();
    for entry in fs::read_dir(corpus()).expect("the corpus") {
        let name = entry.expect("a folder").file_name();
        assert!(names.contains(&name.to_str().unwrap()), "{name:?} belongs to no target");
    }
    for name in names {
        let program = corpus().join("../fuzz_targets").join(name).with_extension("rs");
        assert!(program.is_file(), "{} is missing", program.display());
    }
}
