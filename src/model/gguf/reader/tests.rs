use super::super::test_files::GgufWriter;
use super::*;

fn error(bytes: &[u8]) -> String {
    GgufFile::read(bytes).expect_err("must be refused").to_string()
}

/// Replaces the bytes at `at`.
fn patched(mut file: Vec<u8>, at: usize, bytes: &[u8]) -> Vec<u8> {
    file[at..at + bytes.len()].copy_from_slice(bytes);
    file
}

/// Where `needle` begins.
fn find(file: &[u8], needle: &[u8]) -> usize {
    file.windows(needle.len()).position(|window| window == needle).expect("it is in the file")
}

/// Where the numbers of tensors and of values stand.
const NUM_TENSORS: usize = 8;
const NUM_VALUES: usize = 16;
const AFTER_HEAD: usize = 24;

#[test]
fn reads_every_kind_of_value() {
    let file = GgufWriter::new()
        .value("u8", 0, &[255])
        .value("i8", 1, &[255])
        .value("u16", 2, &u16::MAX.to_le_bytes())
        .value("i16", 3, &i16::MIN.to_le_bytes())
        .value("u32", 4, &u32::MAX.to_le_bytes())
        .value("i32", 5, &i32::MIN.to_le_bytes())
        .value("f32", 6, &1.5_f32.to_le_bytes())
        .value("yes", 7, &[1])
        .value("no", 7, &[0])
        .text("text", "größer")
        .value("u64", 10, &u64::MAX.to_le_bytes())
        .value("i64", 11, &i64::MIN.to_le_bytes())
        .value("f64", 12, &(-0.25_f64).to_le_bytes())
        .texts("texts", &["a", "", "ü"])
        .list("bytes", 0, 2, &[1, 2])
        .list("shorts", 3, 2, &[0xff, 0xff, 2, 0])
        .integers("integers", &[-1, 7])
        .floats("floats", &[0.5, -2.0])
        .list("flags", 7, 2, &[0, 1])
        .list("longs", 10, 1, &u64::MAX.to_le_bytes())
        .list("doubles", 12, 1, &3.0_f64.to_le_bytes())
        .texts("none", &[""; 0])
        .finish();
    let metadata = GgufFile::read(&file).unwrap().metadata;
    let value = |key: &str| metadata.get(key).unwrap();
    assert_eq!(value("u8"), GgufValue::Integer(255));
    assert_eq!(value("i8"), GgufValue::Integer(-1));
    assert_eq!(value("u16"), GgufValue::Integer(u16::MAX.into()));
    assert_eq!(value("i16"), GgufValue::Integer(i16::MIN.into()));
    assert_eq!(value("u32"), GgufValue::Integer(u32::MAX.into()));
    assert_eq!(value("i32"), GgufValue::Integer(i32::MIN.into()));
    assert_eq!(value("f32"), GgufValue::Float(1.5));
    assert_eq!(value("yes"), GgufValue::Bool(true));
    assert_eq!(value("no"), GgufValue::Bool(false));
    assert_eq!(value("text"), GgufValue::Text("größer"));
    assert_eq!(value("u64"), GgufValue::Integer(u64::MAX.into()));
    assert_eq!(value("i64"), GgufValue::Integer(i64::MIN.into()));
    assert_eq!(value("f64"), GgufValue::Float(-0.25));
    assert_eq!(metadata.texts("texts").unwrap().unwrap(), ["a", "", "ü"]);
    assert_eq!(metadata.integers("bytes").unwrap().unwrap(), [1, 2]);
    assert_eq!(metadata.integers("shorts").unwrap().unwrap(), [-1, 2]);
    assert_eq!(metadata.integers("integers").unwrap().unwrap(), [-1, 7]);
    assert_eq!(metadata.floats("floats").unwrap().unwrap(), [0.5, -2.0]);
    assert_eq!(metadata.floats("integers").unwrap().unwrap(), [-1.0, 7.0], "integers are numbers too");
    assert_eq!(metadata.floats("doubles").unwrap().unwrap(), [3.0]);
    let flags: Vec<_> = value("flags").as_list().unwrap().values().map(|value| value.as_bool().unwrap()).collect();
    assert_eq!(flags, [false, true]);
    assert!(value("none").as_list().unwrap().is_empty());
    assert_eq!(value("texts").as_list().unwrap().len(), 3);

    assert_eq!(metadata.text("text").unwrap(), Some("größer"));
    assert_eq!(metadata.integer("u64").unwrap(), Some(u64::MAX));
    assert_eq!(metadata.float("f32").unwrap(), Some(1.5));
    assert_eq!(metadata.float("u8").unwrap(), Some(255.0));
    assert_eq!(metadata.flag("yes").unwrap(), Some(true));
    assert_eq!(metadata.text("missing").unwrap(), None);
}

#[test]
fn a_value_of_another_type_is_an_error_that_names_the_key() {
    let file = GgufWriter::new()
        .text("text", "1")
        .value("negative", 5, &(-1_i32).to_le_bytes())
        .list("longs", 10, 1, &u64::MAX.to_le_bytes())
        .texts("texts", &["1"])
        .finish();
    let metadata = GgufFile::read(&file).unwrap().metadata;
    let problem = |error: GgufError| error.to_string();
    assert_eq!(problem(metadata.integer("text").unwrap_err()), "text: not an integer from 0");
    assert_eq!(problem(metadata.integer("negative").unwrap_err()), "negative: not an integer from 0");
    assert_eq!(problem(metadata.float("text").unwrap_err()), "text: not a number");
    assert_eq!(problem(metadata.flag("negative").unwrap_err()), "negative: not a boolean");
    assert_eq!(problem(metadata.text("texts").unwrap_err()), "texts: not a string");
    assert_eq!(problem(metadata.texts("longs").unwrap_err()), "longs: not a list of strings");
    assert_eq!(problem(metadata.texts("text").unwrap_err()), "text: not a list of strings");
    assert_eq!(problem(metadata.integers("longs").unwrap_err()), "longs: not a list of integers");
    assert_eq!(problem(metadata.floats("texts").unwrap_err()), "texts: not a list of numbers");
}

#[test]
fn finds_the_data_of_tensors() {
    for alignment in [None, Some(8), Some(64), Some(1 << 16)] {
        let writer = GgufWriter::new();
        let writer = if let Some(alignment) = alignment { writer.align(alignment) } else { writer };
        let file = writer.tensor("a", &[2, 3], 0, &[1; 24]).tensor("b.weight", &[5], 1, &[2; 10]).finish();
        let read = GgufFile::read(&file).unwrap();
        let [a, b] = read.tensors.as_slice() else { panic!("two tensors") };
        assert_eq!((a.name, a.shape.as_slice(), a.kind), ("a", [2, 3].as_slice(), 0));
        assert_eq!((b.name, b.shape.as_slice(), b.kind), ("b.weight", [5].as_slice(), 1));
        assert_eq!(a.start % alignment.unwrap_or(32) as usize, 0);
        assert_eq!(file[data_range(a, 24, file.len()).unwrap()], [1; 24]);
        assert_eq!(file[data_range(b, 10, file.len()).unwrap()], [2; 10]);
        let error = data_range(b, 11, file.len()).unwrap_err().to_string();
        assert!(error.contains("b.weight") && error.contains("truncated"), "{error}");
        assert!(data_range(b, usize::MAX, file.len()).is_err());
    }
}

#[test]
fn a_file_that_ends_early_is_refused() {
    let file = GgufWriter::new()
        .text("general.architecture", "llama")
        .texts("texts", &["a", "bc"])
        .integers("integers", &[1, 2, 3])
        .tensor("a", &[2, 4], 0, &[1; 32])
        .tensor("b", &[4], 0, &[1; 16])
        .finish();
    assert!(GgufFile::read(&file).is_ok());
    for len in 0..file.len() {
        let Ok(read) = GgufFile::read(&file[..len]) else { continue };
        let sizes = [32, 16];
        let complete = read.tensors.iter().zip(sizes).all(|(tensor, size)| data_range(tensor, size, len).is_ok());
        assert!(!complete, "{len} of {} bytes", file.len());
    }
}

#[test]
fn other_files_and_versions_are_refused() {
    let file = GgufWriter::new().finish();
    assert!(GgufFile::read(&patched(file.clone(), 4, &2_u32.to_le_bytes())).is_ok(), "version 2");
    assert_eq!(error(&patched(file.clone(), 0, b"GGML")), "not a GGUF file: it does not begin with GGUF");
    for version in [0, 1, 4] {
        let error = error(&patched(file.clone(), 4, &u32::to_le_bytes(version)));
        assert_eq!(error, format!("GGUF version {version}: versions 2 and 3 are supported"));
    }
    assert!(error(&patched(file, 4, &3_u32.to_be_bytes())).ends_with("it is big-endian"));
}

/// Numbers that claim more than the file holds. A reader that believed them would run out of memory.
#[test]
fn huge_numbers_are_refused() {
    let file = || GgufWriter::new().texts("texts", &["abc"]).integers("integers", &[1]).tensor("t", &[4], 0, &[0; 16]);
    for huge in [u64::MAX, u64::MAX / 4, 1 << 40, 100] {
        let huge_at = |at: usize| error(&patched(file().finish(), at, &huge.to_le_bytes()));
        assert!(huge_at(NUM_TENSORS).contains(&format!("{huge} tensors: the rest of the file has room for")));
        assert!(huge_at(NUM_VALUES).contains(&format!("{huge} metadata values: the rest of the file has room for")));
        // A list is its type, its length and its values.
        let list = find(&file().finish(), b"texts") + 5 + 4 + 4;
        assert!(huge_at(list).starts_with(&format!("texts: {huge} values of a list: ")));
        if huge > 100 {
            assert!(huge_at(list + 8).starts_with("texts: a string is longer than the rest of the file"));
            assert!(huge_at(AFTER_HEAD).starts_with("key 0 of the metadata: a string is longer"));
            // A tensor is its name, the number of its dimensions, their sizes, its type and its offset.
            let size = find(&file().finish(), b"\x01\0\0\0\0\0\0\0t") + 9 + 4;
            let offset = huge_at(size + 8 + 4);
            assert!(offset.starts_with("tensor t: its data begin "), "{offset}");
        }
    }
    let long = "k".repeat(MAX_NAME_BYTES + 1);
    assert!(
        error(&GgufWriter::new().text(&long, "x").finish()).contains("longer than the rest of the file, or than a")
    );
    assert!(GgufFile::read(&GgufWriter::new().text(&long[1..], "x").finish()).is_ok());
}

#[test]
fn broken_metadata_are_refused() {
    let twice = GgufWriter::new().integer("key", 1).integer("key", 2).finish();
    assert_eq!(error(&twice), "key: twice in the metadata");
    assert_eq!(
        error(&GgufWriter::new().value("key", 13, &[0; 8]).finish()),
        "key: 13 is not a type of values (0 to 12)"
    );
    let unknown = GgufWriter::new().list("key", u32::MAX, 0, &[]).finish();
    assert_eq!(error(&unknown), format!("key: {} is not a type of values (0 to 12)", u32::MAX));
    assert_eq!(error(&GgufWriter::new().list("key", 9, 1, &[0; 12]).finish()), "key: a list of lists");
    let text = GgufWriter::new().text("key", "abc").finish();
    assert_eq!(error(&patched(text.clone(), find(&text, b"abc"), b"a\xff")), "key: a string is not UTF-8");
    assert!(error(&patched(text.clone(), find(&text, b"key"), b"\xff")).starts_with("key 0 of the metadata: "));

    for alignment in [0, 1, 4, 24, 1 << 17] {
        let error = error(&GgufWriter::new().integer("general.alignment", alignment).finish());
        assert_eq!(error, format!("general.alignment: {alignment} is not a power of two from 8 to 65536"));
    }
    let text = GgufWriter::new().text("general.alignment", "32").finish();
    assert_eq!(error(&text), "general.alignment: not an integer from 0");
}

#[test]
fn broken_tensors_are_refused() {
    let tensor = |shape: &[usize]| GgufWriter::new().tensor("t", shape, 0, &[0; 64]).finish();
    assert!(GgufFile::read(&tensor(&[1, 2, 3, 4])).is_ok());
    assert_eq!(error(&tensor(&[])), "tensor t: 0 dimensions: 1 to 4 are supported");
    assert_eq!(error(&tensor(&[1; 5])), "tensor t: 5 dimensions: 1 to 4 are supported");
    for shape in [&[2, 0][..], &[usize::MAX, 2], &[1 << 40, 1 << 40], &[usize::MAX / 8 + 1]] {
        let error = error(&tensor(shape));
        assert!(error.ends_with("is empty, or too large for this machine"), "{error}");
    }
    let twice = GgufWriter::new().tensor("a", &[1], 0, &[0; 4]).tensor("a", &[1], 0, &[0; 4]).finish();
    assert_eq!(error(&twice), "tensor a: twice in the file");
    let file = tensor(&[16]);
    let offset = find(&file, b"\x01\0\0\0\0\0\0\0t") + 9 + 4 + 8 + 4;
    let misplaced = error(&patched(file.clone(), offset, &4_u64.to_le_bytes()));
    assert_eq!(misplaced, "tensor t: its data begin at 4, which is no multiple of 32");
    let behind = error(&patched(file, offset, &4096_u64.to_le_bytes()));
    assert!(behind.ends_with("begin behind the end of the file: it is truncated"), "{behind}");
}
