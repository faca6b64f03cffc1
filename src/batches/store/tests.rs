use super::*;
use crate::batch::ResultKind;
use crate::journal::{CANCELLED, JournalLine, result_id};
use std::io::{BufRead, BufReader, Read};

const LIMITS: StoreLimits =
    StoreLimits { max_file_bytes: 100, max_folder_bytes: 1000, max_files: 3, max_batches: 2, keep_s: 50 };
const NUM_LINES: u64 = 5;

fn open(folder: &Path, num_steps: usize) -> io::Result<BatchStore> {
    let disk = Disk::new();
    disk.steps_left.store(num_steps, Ordering::Relaxed);
    BatchStore::open_on(disk, folder, LIMITS, 10)
}

fn upload(store: &BatchStore, owner: &str, id: &str, text: &str) -> Result<FileRecord, StoreError> {
    let mut upload = store.begin_upload(owner)?;
    upload.write(text.as_bytes())?;
    store.finish_upload(upload, (id.into(), owner, "in.jsonl".into()), None, 10)
}

fn new_batch(id: &str, api: BatchApi, input: InputSource) -> NewBatch {
    NewBatch {
        id: id.into(),
        owner: "a".into(),
        api,
        endpoint: "/v1/completions".into(),
        input,
        metadata: None,
        output_expires_after_s: None,
        window_s: 1000,
    }
}

fn input() -> String {
    (1..=NUM_LINES).map(|line| format!("{line}\n")).collect()
}

fn result(batch: &str, line: u64, kind: ResultKind) -> JournalLine {
    let code = if kind == ResultKind::Cancelled { CANCELLED } else { "bad" };
    let error = if kind == ResultKind::Succeeded { "null".into() } else { format!("{{\"code\":\"{code}\"}}") };
    let json = format!("{{\"id\":\"{}\",\"error\":{error}}}", result_id(batch, line));
    JournalLine { line, kind, json: json.into_bytes() }
}

/// Line 3 fails, the others are answered.
fn kind(line: u64) -> ResultKind {
    if line == 3 { ResultKind::Failed } else { ResultKind::Succeeded }
}

/// Goes on with the batch from wherever it is. Returns the lines that were answered now.
fn go_on(store: &BatchStore, ids: &mut impl FnMut() -> String) -> Result<Vec<u64>, StoreError> {
    if store.batches("a", BatchApi::OpenAi).is_empty() {
        if store.files("a", 10).is_empty() {
            upload(store, "a", "file-in", &input())?;
        }
        store.create_batch(new_batch("batch_1", BatchApi::OpenAi, InputSource::File("file-in".into())), 10)?;
        // Its requests do not depend on the file.
        store.delete_file("a", "file-in", 10)?;
    }
    let mut answered = Vec::new();
    for batch in store.unended() {
        if batch.state == BatchState::Validating {
            let total = BufReader::new(store.input(&batch.id)?).lines().count() as u64;
            store.validated(&batch.id, total, Vec::new(), true, 11)?;
        }
        let mut journal = store.journal(&batch.id)?;
        for line in 1..=NUM_LINES {
            if !journal.has(line) {
                journal.keep(&[result(&batch.id, line, kind(line))])?;
                answered.push(line);
            }
        }
        store.finish(&batch.id, BatchOutcome::Completed, journal.counts(), &mut *ids, 12)?;
    }
    Ok(answered)
}

fn text(store: &BatchStore, id: &str) -> String {
    let mut text = String::new();
    store.content("a", id, 12).unwrap().1.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn a_batch_ends_with_each_result_once_wherever_the_machine_stops() {
    let mut num_crashes = 0;
    for num_steps in 0.. {
        let folder = tempfile::tempdir().unwrap();
        let mut next = 0;
        let mut ids = || {
            next += 1;
            format!("file-out{next}")
        };
        let mut answered = Vec::new();
        let crashed = match open(folder.path(), num_steps) {
            Ok(store) => {
                let mut journal_of = |store: &BatchStore| go_on(store, &mut ids).map(|lines| answered.extend(lines));
                journal_of(&store).is_err()
            }
            Err(_) => true,
        };
        num_crashes += usize::from(crashed);
        // The machine may stop while it recovers, too.
        for num_steps in 0..3 {
            drop(open(folder.path(), num_steps));
        }
        let store = open(folder.path(), usize::MAX).unwrap();
        go_on(&store, &mut ids).unwrap();
        let batch = store.batch("a", BatchApi::OpenAi, "batch_1").unwrap();
        assert_eq!(batch.state, BatchState::Ended(BatchOutcome::Completed), "{num_steps}");
        let expected = BatchCounts { total: 5, succeeded: 4, failed: 1, ..BatchCounts::default() };
        assert_eq!(batch.counts, expected, "{num_steps}");
        let output = text(&store, batch.output_file_id.as_deref().unwrap());
        let mut lines: Vec<&str> = output.lines().collect();
        lines.sort_unstable();
        let ids = [1, 2, 4, 5].map(|line| format!("{{\"id\":\"{}\",\"error\":null}}", result_id("batch_1", line)));
        assert_eq!(lines, ids, "{num_steps}");
        assert_eq!(text(&store, batch.error_file_id.as_deref().unwrap()).lines().count(), 1);
        // Nothing else is left, and what is there is counted.
        let names = |name| names_in(&folder.path().join(name)).unwrap();
        let is_left =
            names("files").len() - 2 * usize::from(store.files("a", 10).iter().any(|file| file.id == "file-in"));
        assert_eq!((is_left, names("batches").len(), names("uploads").len()), (4, 1, 0), "{num_steps}");
        let bytes: u64 = store.files("a", 10).iter().map(|file| file.bytes).sum();
        assert_eq!(store.used.load(Ordering::Relaxed), bytes, "{num_steps}");
        if !crashed {
            break;
        }
    }
    assert!(num_crashes > 20, "{num_crashes}");
}

#[test]
fn what_was_answered_before_a_crash_is_not_answered_again() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path(), usize::MAX).unwrap();
    upload(&store, "a", "file-in", &input()).unwrap();
    store.create_batch(new_batch("batch_1", BatchApi::OpenAi, InputSource::File("file-in".into())), 10).unwrap();
    store.validated("batch_1", NUM_LINES, Vec::new(), true, 10).unwrap();
    let mut journal = store.journal("batch_1").unwrap();
    journal.keep(&[result("batch_1", 4, ResultKind::Succeeded), result("batch_1", 3, ResultKind::Failed)]).unwrap();
    drop((journal, store));
    let store = open(folder.path(), usize::MAX).unwrap();
    assert_eq!(go_on(&store, &mut || "file-out".into()).unwrap(), [1, 2, 5]);
}

#[test]
fn owners_do_not_see_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path(), usize::MAX).unwrap();
    upload(&store, "a", "file-1", "x\n").unwrap();
    let is_hidden = |result: Result<(), StoreError>| matches!(result, Err(StoreError::NotFound));
    assert!(is_hidden(store.file("b", "file-1", 10).map(drop)));
    assert!(is_hidden(store.content("b", "file-1", 10).map(drop)));
    assert!(is_hidden(store.delete_file("b", "file-1", 10)));
    let theirs =
        NewBatch { owner: "b".into(), ..new_batch("batch_1", BatchApi::OpenAi, InputSource::File("file-1".into())) };
    assert!(is_hidden(store.create_batch(theirs, 10).map(drop)));
    store.create_batch(new_batch("batch_2", BatchApi::OpenAi, InputSource::File("file-1".into())), 10).unwrap();
    assert!(is_hidden(store.batch("b", BatchApi::OpenAi, "batch_2").map(drop)));
    assert!(is_hidden(store.batch("a", BatchApi::Anthropic, "batch_2").map(drop)));
    assert!(is_hidden(store.cancel("b", BatchApi::OpenAi, "batch_2", 10).map(drop)));
    assert!(store.files("b", 10).is_empty() && store.batches("b", BatchApi::OpenAi).is_empty());
    // A path is no id.
    assert!(is_hidden(store.file("a", "../lock", 10).map(drop)));
}

#[test]
fn limits_hold_and_what_is_old_makes_room() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path(), usize::MAX).unwrap();
    assert!(matches!(upload(&store, "a", "file-0", &"x".repeat(101)), Err(StoreError::FileTooLarge)));
    assert_eq!(store.used.load(Ordering::Relaxed), 0, "a refused file takes no room");
    for id in ["file-1", "file-2", "file-3"] {
        upload(&store, "a", id, &"x".repeat(100)).unwrap();
    }
    assert!(matches!(upload(&store, "a", "file-4", ""), Err(StoreError::TooManyFiles)));
    let mut full = store.begin_upload("b").unwrap();
    full.write(&[0; 100]).unwrap();
    store.used.store(950, Ordering::Relaxed);
    assert!(matches!(upload(&store, "b", "file-5", &"x".repeat(51)), Err(StoreError::FolderFull)));
    drop(full);
    assert!(matches!(store.file("a", "file-1", 60), Err(StoreError::NotFound)), "it has expired");
    store.sweep(60).unwrap();
    assert!(store.files("a", 10).is_empty());
    assert!(names_in(&folder.path().join("files")).unwrap().is_empty());

    let lines = || InputSource::Lines(b"1\n".to_vec());
    store.create_batch(new_batch("msgbatch_1", BatchApi::Anthropic, lines()), 10).unwrap();
    store.create_batch(new_batch("msgbatch_2", BatchApi::Anthropic, lines()), 10).unwrap();
    let third = || store.create_batch(new_batch("msgbatch_3", BatchApi::Anthropic, lines()), 10);
    assert!(matches!(third(), Err(StoreError::TooManyBatches)));
    store.validated("msgbatch_2", 0, Vec::new(), false, 11).unwrap();
    third().unwrap();
    let ids: Vec<String> = store.batches("a", BatchApi::Anthropic).into_iter().map(|batch| batch.id).collect();
    assert_eq!(ids, ["msgbatch_1", "msgbatch_3"], "the oldest that has ended is gone");
}

#[test]
fn a_cancelled_batch_ends_with_what_it_has() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path(), usize::MAX).unwrap();
    store
        .create_batch(new_batch("msgbatch_1", BatchApi::Anthropic, InputSource::Lines(b"1\n2\n".to_vec())), 10)
        .unwrap();
    store.validated("msgbatch_1", 2, Vec::new(), true, 10).unwrap();
    assert!(matches!(store.results("a", BatchApi::Anthropic, "msgbatch_1"), Err(StoreError::WrongState(_))));
    let mut journal = store.journal("msgbatch_1").unwrap();
    journal.keep(&[result("msgbatch_1", 1, ResultKind::Succeeded)]).unwrap();
    let cancelled = store.cancel("a", BatchApi::Anthropic, "msgbatch_1", 12).unwrap();
    assert_eq!((cancelled.state, cancelled.cancelling_at), (BatchState::Cancelling, Some(12)));
    journal.keep(&[result("msgbatch_1", 2, ResultKind::Cancelled)]).unwrap();
    drop((journal, store));
    let store = open(folder.path(), usize::MAX).unwrap();
    let counts = store.journal("msgbatch_1").unwrap().counts();
    assert_eq!((counts.succeeded, counts.cancelled), (1, 1), "kinds are read again");
    store
        .finish("msgbatch_1", BatchOutcome::Cancelled, counts, || unreachable!("its results become no files"), 13)
        .unwrap();
    assert!(matches!(
        store.cancel("a", BatchApi::Anthropic, "msgbatch_1", 14),
        Err(StoreError::WrongState(BatchState::Ended(BatchOutcome::Cancelled)))
    ));
    assert_eq!(store.results("a", BatchApi::Anthropic, "msgbatch_1").unwrap().len(), 2);
    store.delete_batch("a", BatchApi::Anthropic, "msgbatch_1").unwrap();
    assert!(names_in(&folder.path().join("batches")).unwrap().is_empty());
}

#[test]
fn a_folder_serves_one_server() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path(), usize::MAX).unwrap();
    assert!(open(folder.path(), usize::MAX).err().unwrap().to_string().contains("another server"));
    drop(store);
    assert!(open(folder.path(), usize::MAX).is_ok());
}
