//! Recordings of a server under memory pressure, replayed by the program.

use crate::{Server, output, text};
use serde_json::{Value, json};
use std::io::Read;
use std::path::Path;

const ADMIN: &str = "the-admin";
const TOKENS: u32 = 400;

/// A server in which three streams need twice the available blocks.
fn pressed(dir: &Path, more: &[&str]) -> Server {
    let dir = format!("recorder.dir={}", dir.display());
    let key = format!("server.admin_key={ADMIN}");
    let base = ["--num-device-blocks", "40", "--set", &dir, "--set", &key, "--set", "scheduler.admission=prompt"];
    Server::start(&[&base[..], more].concat())
}

impl Server {
    /// The streams run together and share no block, so that a preempted one does not find its blocks in another.
    fn run_streams(&self, count: usize) {
        let begin = |number: usize| self.begin_stream_on(&format!("{number} times"), "none", TOKENS);
        let streams: Vec<_> = (0..count).map(begin).collect();
        for mut stream in streams {
            let mut rest = String::new();
            stream.read_to_string(&mut rest).expect("the stream ends well");
            assert!(rest.contains("data: [DONE]"), "{rest}");
        }
    }

    fn record(&self) -> Value {
        let answer = self.answer_to(ADMIN, "POST", "/admin/recording", "");
        let object = answer.lines().find(|line| line.starts_with('{'));
        serde_json::from_str(object.unwrap_or_else(|| panic!("{answer}"))).unwrap()
    }
}

#[test]
fn a_recording_of_a_server_replays_and_says_why_a_request_waited() {
    for (overlap, mode) in [("off", "swap"), ("on", "auto"), ("off", "recompute")] {
        let folder = tempfile::tempdir().unwrap();
        let overlap = format!("scheduler.overlap={overlap}");
        let server = pressed(folder.path(), &["--preemption-mode", mode, "--set", &overlap, "--max-num-seqs", "3"]);
        // A fourth request with a grammar waits.
        let ruled = json!({"prompt": "Once", "max_tokens": 20, "guided_regex": "[0-9]{8}", "temperature": 0});
        std::thread::scope(|scope| {
            let streams = scope.spawn(|| server.run_streams(3));
            let ruled = server.answer("POST", "/v1/completions", &ruled.to_string());
            assert!(ruled.starts_with("HTTP/1.1 200"), "{ruled}");
            streams.join().unwrap();
        });
        let taken = server.record();
        assert_eq!((&taken["requests"], &taken["ends_early"]), (&json!(4), &Value::Null), "{taken}");
        let file = taken["file"].as_str().unwrap();
        assert_eq!(Path::new(file).parent(), Some(folder.path()));

        let checked = output(&["replay", file, "--check"]);
        let said = text(&checked.stdout);
        assert_eq!(checked.status.code(), Some(0), "{said}{}", text(&checked.stderr));
        let all = format!("replayed: all {} steps were decided in the same way", taken["steps"]);
        assert!(said.contains(&all) && said.contains("without text"), "{said}");

        let [svg, trace] = ["a.svg", "a.json"].map(|name| folder.path().join(name).to_str().unwrap().to_owned());
        let stories: Vec<String> = (0..5)
            .filter_map(|number| {
                let told = output(&["replay", file, "--why", &format!("r{number}"), "--svg", &svg, "--trace", &trace]);
                (told.status.code() == Some(0)).then(|| text(&told.stdout))
            })
            .collect();
        assert_eq!(stories.len(), 4, "each request has a story");
        let preempted: Vec<&String> = stories.iter().filter(|story| story.contains("  is preempted for ")).collect();
        assert!(!preempted.is_empty(), "{stories:?}");
        assert!(stories.iter().any(|story| story.contains(" s for device blocks: ")), "{stories:?}");
        for story in preempted {
            assert!(story.contains("waits ") && story.contains("goes on"), "{story}");
            assert_eq!(mode == "auto", story.contains("the arbiter: "), "{story}");
        }
        let svg = std::fs::read_to_string(svg).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>") && svg.contains("is preempted for r"));
        let trace: Value = serde_json::from_str(&std::fs::read_to_string(trace).unwrap()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let count = |name: &str| events.iter().filter(|event| event["name"] == name).count();
        assert!(count("step") > 300 && count("preempted") > 0 && count("decoding") >= 4, "{}", events.len());
    }
}

#[test]
fn an_unreadable_recording_and_an_unknown_request_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let server = pressed(folder.path(), &[]);
    server.run_streams(1);
    let taken = server.record();
    let file = taken["file"].as_str().unwrap();
    let unknown = output(&["replay", file, "--why", "r999"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(text(&unknown.stderr).contains("there is no such request in the recording"));
    let whole = std::fs::read(file).unwrap();
    let part = folder.path().join("part.recording");
    std::fs::write(&part, &whole[..whole.len() / 2]).unwrap();
    for (file, says) in [
        (part.to_str().unwrap(), "it is cut off"),
        (concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"), "it is not a recording of Pagetide"),
        ("/nowhere/at.all", "No such file"),
    ] {
        let refused = output(&["replay", file, "--check"]);
        assert_eq!(refused.status.code(), Some(1));
        assert!(text(&refused.stderr).contains(says), "{}", text(&refused.stderr));
    }
    // Nothing is recorded, so there is nothing to write.
    let silent = pressed(folder.path(), &["--set", "recorder.minutes=0"]);
    let answer = silent.answer_to(ADMIN, "POST", "/admin/recording", "");
    assert!(answer.starts_with("HTTP/1.1 409") && answer.contains("not_recording"), "{answer}");
}
