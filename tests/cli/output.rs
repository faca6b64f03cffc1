//! Standard output and standard error that accept nothing: a pipe without a reader, a full disk, none at all. And too
//! few open files.

use crate::live::wait_until;
use crate::{Server, pagetide, text};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, PipeReader, PipeWriter, Read, Write, pipe};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(300);
/// Maximum length of a request id in the log.
const ID_BYTES: usize = 256;
/// More requests than the queue of the log can hold.
const NUM_REQUESTS: usize = 16_000;
const CLIENTS: usize = 4;

fn full() -> Stdio {
    full_file().into()
}

fn full_file() -> File {
    OpenOptions::new().write(true).open("/dev/full").expect("there is one")
}

/// A pipe with room for few lines.
fn small_pipe() -> (PipeReader, PipeWriter) {
    let (reader, writer) = pipe().expect("a pipe");
    // SAFETY: the pipe is open, and the call changes its size alone.
    assert!(unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETPIPE_SZ, 4096) } >= 4096);
    (reader, writer)
}

/// Sends requests that are logged, one after the other on one connection; all are answered.
fn ask_often(addr: &str, num: usize) {
    let mut connection = TcpStream::connect(addr).expect("the server listens");
    connection.set_read_timeout(Some(LONG)).expect("a time-out can be set");
    let id = "i".repeat(ID_BYTES);
    let request = format!("GET /health HTTP/1.1\r\nhost: x\r\nx-request-id: {id}\r\n\r\n");
    let mut answers = Vec::new();
    for place in 1..=num {
        connection.write_all(request.as_bytes()).expect("the server reads");
        let end = b"{\"status\":\"ok\"}";
        while !answers.ends_with(end) {
            let mut part = [0; 4096];
            let length = connection.read(&mut part).unwrap_or_else(|error| panic!("answer {place}: {error}"));
            assert!(length > 0, "answer {place}: the connection has ended");
            answers.extend_from_slice(&part[..length]);
        }
        answers.clear();
    }
}

fn dropped(server: &Server) -> u64 {
    let page = server.answer("GET", "/metrics", "");
    let line = page.lines().find_map(|line| line.strip_prefix("pagetide_log_dropped_lines_total "));
    line.unwrap_or_else(|| panic!("it is a metric: {page}")).parse().unwrap()
}

#[test]
fn an_unread_log_blocks_neither_the_server_nor_its_shutdown() {
    let (reader, writer) = small_pipe();
    let args = ["--set", "log.level=info,pagetide::access=debug"];
    let server = Server::start_telling(&args, writer.into());
    let ask = |num: usize| {
        std::thread::scope(|scope| {
            for _ in 0..CLIENTS {
                scope.spawn(|| ask_often(&server.addr, num / CLIENTS));
            }
        });
    };
    // Far more than the pipe holds, and then more than the queue holds.
    ask(NUM_REQUESTS / 8);
    assert!(server.answer("GET", "/ready", "").starts_with("HTTP/1.1 200"));
    assert_eq!(dropped(&server), 0, "there is room for some thousand lines");
    ask(NUM_REQUESTS);
    let num_dropped = dropped(&server);
    assert!(num_dropped > 0);
    // When the pipe is read again, the log reports how many lines are missing.
    let mut log = BufReader::new(reader);
    let mut lines = 0;
    loop {
        let mut line = String::new();
        log.read_line(&mut line).expect("the log goes on");
        assert!(line.ends_with('\n'), "the log has ended");
        if line.contains("log lines were dropped") {
            break;
        }
        lines += usize::from(line.contains("answered"));
    }
    assert!(lines > NUM_REQUESTS / 8, "{lines} lines of {NUM_REQUESTS}");
    // The pipe is no longer read.
    ask(NUM_REQUESTS / 8);
    server.signal(libc::SIGTERM);
    assert_eq!(server.wait().code(), Some(0));
    drop(log);
}

#[test]
fn a_standard_error_that_takes_nothing_stops_nothing() {
    let server = Server::start_telling(&["--set", "log.level=info,pagetide::access=debug"], full());
    ask_often(&server.addr, 100);
    wait_until("what could not be written is counted", || dropped(&server) >= 100);
    server.signal(libc::SIGTERM);
    assert_eq!(server.wait().code(), Some(0));

    // None at all.
    let mut closed = Command::new("sh");
    let program = pagetide(&["serve", "--port", "0", "--num-device-blocks", "64"]);
    closed.args(["-c", "exec \"$0\" \"$@\" 2>&-"]).arg(program.get_program()).args(program.get_args());
    let process = closed.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("there is a shell");
    let mut server = Server { process, addr: String::new() };
    server.wait_until_it_listens();
    ask_often(&server.addr, 100);
    server.signal(libc::SIGTERM);
    assert_eq!(server.wait().code(), Some(0));
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[test]
fn a_full_standard_output_is_reported_and_the_server_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let port = free_port();
    let process = pagetide(&["serve", "--port", &port.to_string(), "--num-device-blocks", "64"])
        .stdout(full())
        .stderr(File::create(&log).unwrap())
        .spawn()
        .expect("the binary runs");
    let server = Server { process, addr: format!("127.0.0.1:{port}") };
    let read = || std::fs::read_to_string(&log).unwrap();
    wait_until("it says so", || read().contains("cannot write to standard output"));
    wait_until("it listens", || TcpStream::connect(&server.addr).is_ok());
    ask_often(&server.addr, 10);
    server.signal(libc::SIGTERM);
    assert_eq!(server.wait().code(), Some(0));
    assert!(!read().contains("panicked"), "{}", read());
}

#[test]
fn a_full_disk_is_reported_and_a_closed_pipe_is_no_failure() {
    let folder = tempfile::tempdir().unwrap();
    let requests = folder.path().join("requests.jsonl");
    let line = "{\"custom_id\": \"a\", \"method\": \"POST\", \"url\": \"/v1/completions\", \
                \"body\": {\"prompt\": \"x\", \"max_tokens\": 1}}\n";
    std::fs::write(&requests, line).unwrap();
    let server = Server::start(&[]);
    let port = server.addr.rsplit(':').next().unwrap().to_owned();
    let generate = ["generate", "--input", requests.to_str().unwrap(), "--output", "-", "--num-device-blocks", "64"];
    let bench = ["bench", "throughput", "--fixed", "4:4", "--num", "2", "--num-device-blocks", "64"];
    let commands: [&[&str]; 8] = [
        &["config", "show"],
        &["config", "show", "--reference"],
        &["doctor", "--device", "cpu"],
        &["completions", "bash"],
        &["man"],
        &["health", "--port", &port],
        &generate,
        &bench,
    ];
    for command in commands {
        let run = pagetide(command).stdout(full()).output().expect("the binary runs");
        let stderr = text(&run.stderr);
        assert_eq!(run.status.code(), Some(1), "{command:?}: {stderr}");
        assert!(stderr.contains("No space left on device") && !stderr.contains("panicked"), "{command:?}: {stderr}");
        // There is no room for the error message either.
        let run = pagetide(command).stdout(full()).stderr(full()).status().expect("the binary runs");
        assert_eq!(run.code(), Some(1), "{command:?}");
        if command[0] != "generate" {
            let (reader, writer) = pipe().unwrap();
            drop(reader);
            let run = pagetide(command).stdout(writer).output().expect("the binary runs");
            assert_eq!(run.status.code(), Some(0), "{command:?}: {}", text(&run.stderr));
        }
    }
}

/// Runs the program in a shell that allows so many open files. Returns the exit status and standard error, if the
/// program ends by itself.
fn with_open_files(num: u32, command: &[&str]) -> (Option<i32>, String) {
    let program = pagetide(command);
    let run = Command::new("sh")
        .args(["-c", "ulimit -n \"$1\" && shift && exec \"$0\" \"$@\""])
        .arg(program.get_program())
        .arg(num.to_string())
        .args(program.get_args())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .output()
        .expect("there is a shell");
    (run.status.code(), text(&run.stderr))
}

#[test]
fn too_few_open_files_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let requests = folder.path().join("requests.jsonl");
    std::fs::write(&requests, "").unwrap();
    let generate = ["generate", "--input", requests.to_str().unwrap(), "--output", "-"];
    let serve = ["serve", "--port", "0", "--num-device-blocks", "64"];
    for command in [&serve[..], &generate] {
        for num in [6, 8, 10, 12, 14, 16, 20, 24] {
            let (code, stderr) = with_open_files(num, command);
            assert_eq!(code, Some(1), "{num}: {command:?}: {stderr}");
            assert!(stderr.contains("open files") && !stderr.contains("panicked"), "{num}: {command:?}: {stderr}");
        }
    }
}
