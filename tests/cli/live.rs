//! Settings that change while the server runs.

use crate::{Server, text};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufReader, Read};
use std::net::TcpStream;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

const ADMIN: &str = "the-admin";
/// Three streams of 600 tokens want 115 blocks.
const SCARCE: [&str; 2] = ["--num-device-blocks", "60"];
const TOKENS: u32 = 600;

pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..3000 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("not in time: {what}");
}

fn write(file: &Path, api_key: &str, more: &str) {
    let config = format!("[server]\napi_keys = [\"{api_key}\"]\nadmin_key = \"{ADMIN}\"\n{more}");
    std::fs::write(file, config).unwrap();
}

impl Server {
    fn is_good(&self, key: &str) -> bool {
        self.answer_to(key, "GET", "/v1/models", "").starts_with("HTTP/1.1 200")
    }

    /// The answer to a request with the admin key.
    fn admin(&self, method: &str, body: &Value) -> Value {
        let answer = self.answer_to(ADMIN, method, "/admin/config", &body.to_string());
        let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        // Chunked or not: the object is one line.
        let object = body.lines().find(|line| line.starts_with('{'));
        serde_json::from_str(object.unwrap_or_else(|| panic!("{answer}"))).unwrap()
    }

    fn swap_pool(&self) -> Value {
        self.admin("GET", &json!({}))["swap_pool"].take()
    }
}

/// The text of a stream, which must end by its length.
fn rest_of(mut stream: BufReader<TcpStream>) -> String {
    let mut rest = String::new();
    stream.read_to_string(&mut rest).expect("the stream ends well");
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("data: [DONE]"), "{rest}");
    let events = rest.lines().filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok());
    events.filter_map(|event| Some(event["choices"][0]["text"].as_str()?.to_owned())).collect()
}

#[test]
fn sighup_reads_the_configuration_again_and_no_request_is_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let (file, log) = (folder.path().join("p.toml"), folder.path().join("log"));
    let swaps = "[scheduler]\npreemption_mode = \"swap\"\n[swap]\nspace_gib = 0.02\n";
    write(&file, "old", swaps);
    let args = [&["--config", file.to_str().unwrap()], &SCARCE[..]].concat();
    let server = Server::start_telling(&args, File::create(&log).unwrap().into());
    let told = |what: &str| text(&std::fs::read(&log).unwrap()).contains(what);
    let alone = rest_of(server.begin_stream_of("old", TOKENS));
    let streams: Vec<_> = (0..3).map(|_| server.begin_stream_of("old", TOKENS)).collect();

    // Changes of keys, preemption and swap space apply while requests run; others do not.
    let other = "max_requests = 2\nport = 1\n[scheduler]\npreemption_mode = \"recompute\"\nmax_num_seqs = 4\n\
                 [swap]\nspace_gib = 0\n[cache]\nblock_size = 32\n[log]\nlevel = \"debug\"\n";
    write(&file, "new", other);
    server.signal(libc::SIGHUP);
    wait_until("the new key is good", || server.is_good("new"));
    assert!(!server.is_good("old"));
    let refused = server.answer_to("new", "POST", "/v1/completions", "{\"prompt\": \"x\"}");
    assert!(refused.starts_with("HTTP/1.1 429") && refused.contains("holds 2 requests"), "{refused}");
    for stream in streams {
        assert_eq!(rest_of(stream), alone, "a stream that was there before");
    }
    wait_until("the log says what came of it", || told("the configuration was read again"));
    assert!(told("cache.block_size needs a restart: the KV cache"));
    assert!(told("swap.space_gib was 0.02 and is 0.0 now") && told("answered"), "debug messages are there now");
    assert!(!told("\"old\"") && !told("\"new\""), "keys are secret");
    // The flag on the command line comes before the file, as at the start.
    assert!(!told("server.port needs a restart"));
    let idle = json!({"blocks": 0, "used": 0, "cached": 0, "free": 0, "draining": 0});
    wait_until("all swap blocks are back", || server.swap_pool() == idle);

    // A wrong file changes nothing.
    for wrong in
        ["[server\n", "[swap]\nspace_gib = -1\n", "[scheduler]\npreemption_mode = \"swap\"\n[swap]\nspace_gib = 0\n"]
    {
        std::fs::write(&file, wrong).unwrap();
        let count = || text(&std::fs::read(&log).unwrap()).matches("nothing has changed").count();
        let before = count();
        server.signal(libc::SIGHUP);
        wait_until("the log says what is wrong", || count() > before);
        assert!(server.is_good("new"), "{wrong}");
    }
    // A change through the API lasts until the configuration is read again.
    write(&file, "third", swaps);
    server.admin("POST", &json!({"scheduler.watermark": 0.4}));
    server.signal(libc::SIGHUP);
    wait_until("the third key is good", || server.is_good("third"));
    let config = server.admin("GET", &json!({}));
    let origin = format!("{}:7", file.display());
    assert_eq!(config["live"]["swap.space_gib"]["origin"], origin);
    assert_eq!(config["live"]["scheduler.watermark"]["value"], 0.01);
    assert_eq!(rest_of(server.begin_stream_of("third", TOKENS)), alone);
    server.signal(libc::SIGTERM);
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn the_swap_pool_shrinks_as_its_blocks_drain_and_grows_again() {
    let args = ["--set", "scheduler.preemption_mode=swap", "--set", "server.admin_key=the-admin"];
    let server = Server::start(&[&args, &SCARCE[..]].concat());
    let size = |gib: f64, mode: &str| {
        let body = json!({"swap.space_gib": gib, "scheduler.preemption_mode": mode});
        server.admin("POST", &body)["swap_pool"].take()
    };
    let alone = rest_of(server.begin_stream(TOKENS));
    // Whether a sequence is swapped out at this moment is random.
    let mut drained = false;
    for _ in 0..20 {
        let streams: Vec<_> = (0..3).map(|_| server.begin_stream(TOKENS)).collect();
        wait_until("a sequence is swapped out, or all have ended", || {
            let pool = server.swap_pool();
            pool["used"] != 0 || server.answer("GET", "/metrics", "").contains("pagetide_requests{state=\"running\"} 0")
        });
        let pool = size(0.0, "auto");
        assert_eq!((&pool["blocks"], &pool["cached"], &pool["free"]), (&json!(0), &json!(0), &json!(0)));
        assert_eq!(pool["used"], pool["draining"]);
        drained |= pool["draining"] != 0;
        for stream in streams {
            assert_eq!(rest_of(stream), alone);
        }
        wait_until("all blocks have drained", || server.swap_pool()["used"] == 0);
        assert!(size(0.05, "swap")["blocks"].as_u64().unwrap() > 100);
        if drained {
            break;
        }
    }
    assert!(drained, "nobody was swapped out in twenty tries");
    let page = server.answer("GET", "/metrics", "");
    assert!(page.contains("pagetide_swap_blocks{state=\"draining\"} 0"), "{page}");
    assert!(page.contains("pagetide_config_changes_total{result=\"applied\"}"), "{page}");
    server.signal(libc::SIGTERM);
    assert_eq!(server.wait().code(), Some(0));
}

/// The signals that a process catches, as a mask.
#[cfg(target_os = "linux")]
fn caught_by(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap()
}

#[test]
#[cfg(target_os = "linux")]
fn sighup_before_the_model_is_loaded_waits_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("p.toml");
    write(&file, "old", "");
    let mut server =
        Server { process: Server::spawn(&["--config", file.to_str().unwrap()], Stdio::null()), addr: String::new() };
    wait_until("the signal is caught", || caught_by(server.process.id()) & 1 << (libc::SIGHUP - 1) != 0);
    write(&file, "new", "");
    server.signal(libc::SIGHUP);
    server.wait_until_it_listens();
    wait_until("the new key is good", || server.is_good("new"));
    server.signal(libc::SIGTERM);
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
#[cfg(target_os = "linux")]
fn sighup_of_a_terminal_that_is_closed_ends_the_server() {
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    let (mut ours, mut theirs) = (-1, -1);
    let none = std::ptr::null_mut();
    // SAFETY: the call only writes the two file descriptors.
    assert_eq!(unsafe { libc::openpty(&mut ours, &mut theirs, none, none.cast(), none.cast()) }, 0);
    // SAFETY: both were just opened and have no other owner.
    let (ours, theirs) = unsafe { (OwnedFd::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) };
    // SAFETY: it is open, and only a flag is set: the server must not keep its own terminal open.
    assert_eq!(unsafe { libc::fcntl(ours.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) }, 0);
    let server = Server::start_telling(&[], theirs.into());
    drop(ours);
    server.signal(libc::SIGHUP);
    assert_eq!(server.wait().code(), Some(0));
}
