//! Shell completions and manual pages.

use super::{output, text};
use std::process::Command;

#[test]
fn bash_completes_commands_and_flags() {
    let folder = tempfile::tempdir().expect("a folder");
    let script = folder.path().join("pagetide");
    let printed = output(&["completions", "bash"]);
    assert!(printed.status.success());
    std::fs::write(&script, printed.stdout).expect("it can be written");
    let complete = |line: &[&str]| {
        let words = line.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" ");
        let ask = format!(
            "source '{}'; COMP_WORDS=({words}); COMP_CWORD={}; _pagetide pagetide '{}' '{}'; echo \"${{COMPREPLY[@]}}\"",
            script.display(),
            line.len() - 1,
            line[line.len() - 1],
            line[line.len() - 2],
        );
        let answer = Command::new("bash").args(["--norc", "-c", &ask]).output().expect("bash runs");
        text(&answer.stdout)
    };
    assert_eq!(complete(&["pagetide", "doc"]).trim(), "doctor");
    assert_eq!(complete(&["pagetide", "serve", "--swap-sp"]).trim(), "--swap-space-gib");
    assert_eq!(complete(&["pagetide", "serve", "--preemption-mode", "re"]).trim(), "recompute");
    for shell in ["zsh", "fish", "elvish", "powershell"] {
        assert!(text(&output(&["completions", shell]).stdout).contains("preemption-mode"), "{shell}");
    }
}

#[test]
fn every_command_has_a_manual_page() {
    let page = text(&output(&["man"]).stdout);
    assert!(page.contains(".TH pagetide 1") && page.contains("SUBCOMMANDS"), "{page}");
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("man1");
    assert!(output(&["man", "--out", out.to_str().expect("UTF-8")]).status.success());
    for command in ["pagetide", "pagetide-serve", "pagetide-bench-memory", "pagetide-config-show"] {
        let page = std::fs::read_to_string(out.join(format!("{command}.1"))).unwrap_or_else(|_| panic!("{command}"));
        assert!(page.contains(".SH SYNOPSIS"), "{command}");
    }
    let file = folder.path().join("file");
    std::fs::write(&file, "").expect("it can be written");
    let refused = output(&["man", "--out", file.to_str().expect("UTF-8")]);
    assert!(!refused.status.success() && text(&refused.stderr).contains("--out"), "{}", text(&refused.stderr));
}
