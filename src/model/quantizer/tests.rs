use super::*;
use pagetide_backend::DType;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

const ROWS: usize = 3;
const COLS: usize = 64;
const NAMES: [&str; 3] = ["embed", "up", "down"];

/// Some weights in float32, others for each name.
fn stored(name: &str) -> Vec<u8> {
    let seed = name.len() as f32;
    (0..ROWS * COLS).flat_map(|i| ((i as f32 * 0.37 + seed).sin() * 0.1).to_le_bytes()).collect()
}

fn plan_in(folder: &Path) -> QuantizePlan {
    let place = KeptPlace { path: folder.join("deep/er/model-q4_0.weights"), key: "a hash".into() };
    QuantizePlan { to: Quantization::Q4_0, place: Some(place) }
}

/// All matrices as one load gets them, and how many of them were read from the checkpoint.
fn load(plan: &QuantizePlan) -> (Vec<Vec<u8>>, usize) {
    let kept = plan.place.as_ref().and_then(KeptPlace::read);
    let mut quantizing = Quantizing::new(plan, kept.as_ref());
    let mut num_read = 0;
    let blocks = NAMES.map(|name| {
        let source = || {
            num_read += 1;
            Cow::Owned(stored(name))
        };
        quantizing.blocks(name, QuantFormat::Q4_0, [ROWS, COLS], DType::F32.into(), source).unwrap().into_owned()
    });
    quantizing.finish();
    (blocks.into(), num_read)
}

fn file_of(plan: &QuantizePlan) -> &Path {
    &plan.place.as_ref().unwrap().path
}

/// A folder with a whole file.
fn kept() -> (TempDir, QuantizePlan, Vec<Vec<u8>>) {
    let folder = tempfile::tempdir().unwrap();
    let plan = plan_in(folder.path());
    let (blocks, num_read) = load(&plan);
    assert_eq!(num_read, NAMES.len());
    (folder, plan, blocks)
}

#[test]
fn the_second_load_reads_no_element_of_the_checkpoint() {
    let (_folder, plan, blocks) = kept();
    assert_eq!(blocks[0].len(), ROWS * COLS / 32 * 18);
    assert_eq!(load(&plan), (blocks, 0));
    assert_eq!(fs::read_dir(file_of(&plan).parent().unwrap()).unwrap().count(), 1, "nothing is left beside it");
}

#[test]
fn a_damaged_file_is_made_again() {
    let (_folder, plan, blocks) = kept();
    let (path, whole) = (file_of(&plan), fs::read(file_of(&plan)).unwrap());
    let flipped = (0..whole.len()).map(|at| {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x40;
        bytes
    });
    let cut = [0, 1, 16, 40, 60, whole.len() / 2, whole.len() - 1].map(|len| whole[..len].to_vec());
    let mut lying = whole.clone();
    // The length of the table.
    let at = lying.len() - 40;
    lying[at..at + 8].fill(0xff);
    for (index, damaged) in flipped.step_by(7).chain(cut).chain([lying, [&whole[..], b" "].concat()]).enumerate() {
        fs::write(path, damaged).unwrap();
        assert_eq!(load(&plan), (blocks.clone(), NAMES.len()), "{index}");
        assert!(fs::read(path).unwrap() == whole, "{index}");
    }
}

#[test]
fn a_file_of_other_weights_is_not_used() {
    let (_folder, mut plan, blocks) = kept();
    plan.place.as_mut().unwrap().key = "another hash".into();
    assert_eq!(load(&plan), (blocks.clone(), NAMES.len()));
    assert_eq!(load(&plan), (blocks, 0));
    let kept = plan.place.as_ref().unwrap().read().unwrap();
    assert!(kept.get("up", QuantFormat::Q4_0, [ROWS, COLS]).is_some());
    assert!(kept.get("up", QuantFormat::Q4_1, [ROWS, COLS]).is_none());
    assert!(kept.get("up", QuantFormat::Q4_0, [COLS, ROWS]).is_none());
    assert_eq!(kept.total_bytes(), (NAMES.len() * ROWS * COLS / 32 * 18) as u64);
}

#[test]
fn a_folder_that_cannot_be_written_stops_nothing() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("deep"), "a file").unwrap();
    let plan = plan_in(folder.path());
    let (blocks, num_read) = load(&plan);
    assert_eq!((blocks.len(), num_read), (NAMES.len(), NAMES.len()));
    assert_eq!(load(&plan), (blocks.clone(), NAMES.len()));
    assert_eq!(load(&QuantizePlan { place: None, ..plan }), (blocks, NAMES.len()));
}

/// A directory in the place of the file.
#[test]
fn a_file_that_cannot_be_renamed_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let plan = plan_in(folder.path());
    fs::create_dir_all(file_of(&plan).join("full")).unwrap();
    assert_eq!(load(&plan).1, NAMES.len());
    assert_eq!(fs::read_dir(file_of(&plan).parent().unwrap()).unwrap().count(), 1);
}

#[test]
fn of_two_loads_at_once_one_keeps_the_weights() {
    let folder = tempfile::tempdir().unwrap();
    let plan = plan_in(folder.path());
    // What a killed process has left.
    let unfinished = file_of(&plan).with_extension("tmp");
    fs::create_dir_all(unfinished.parent().unwrap()).unwrap();
    fs::write(&unfinished, "half a file").unwrap();

    let mut first = Quantizing::new(&plan, None);
    let source = || Cow::Owned(stored("embed"));
    let shape = [ROWS, COLS];
    first.blocks("embed", QuantFormat::Q4_0, shape, DType::F32.into(), source).unwrap();
    let (blocks, num_read) = load(&plan);
    assert_eq!(num_read, NAMES.len(), "the other one goes on");
    assert!(!file_of(&plan).exists(), "and keeps nothing");
    for name in &NAMES[1..] {
        let source = || Cow::Owned(stored(name));
        first.blocks(name, QuantFormat::Q4_0, shape, DType::F32.into(), source).unwrap();
    }
    first.finish();
    assert_eq!(load(&plan), (blocks, 0));

    // A load that fails leaves nothing.
    fs::remove_file(file_of(&plan)).unwrap();
    let mut failing = Quantizing::new(&plan, None);
    failing.blocks("embed", QuantFormat::Q4_0, shape, DType::F32.into(), source).unwrap();
    assert!(unfinished.exists());
    drop(failing);
    assert!(!unfinished.exists() && !file_of(&plan).exists());
}

#[test]
fn weights_that_no_scale_can_hold_are_refused() {
    for (wrong, is_refused) in
        [(f32::NAN, true), (f32::INFINITY, true), (-65536.0, true), (65504.0, false), (1e-45, false), (-0.0, false)]
    {
        for to in Quantization::ALL.iter().filter(|to| **to != Quantization::None) {
            let plan = QuantizePlan { to: *to, place: None };
            let (rows, cols) = (600, 256);
            let format = plan.format(MatrixUse::Layer, cols).unwrap();
            let mut weights = vec![0.5_f32; rows * cols];
            // In the part of the last thread.
            weights[rows * cols - 7] = wrong;
            let bytes: Vec<u8> = weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
            let mut quantizing = Quantizing::new(&plan, None);
            let source = || Cow::Owned(bytes);
            let found = quantizing.blocks("layers.1.up", format, [rows, cols], DType::F32.into(), source);
            assert_eq!(found.is_err(), is_refused, "{wrong} in {format}");
            if let Err(error) = found {
                let says = ["model.quantization = ", to.name(), "layers.1.up", "NaN", "65504"];
                assert!(says.iter().all(|part| error.to_string().contains(part)), "{error}");
            }
        }
    }
}

/// Threads share the rows, so their number must not change the result.
#[test]
fn rows_are_quantised_by_themselves() {
    let (rows, cols) = (MIN_PARALLEL_WEIGHTS / 256 + 5, 256);
    let weights: Vec<f32> = (0..rows * cols).map(|i| (i as f32 * 0.11).cos()).collect();
    let bytes: Vec<u8> = weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
    let source = HostTensor { format: DType::F32.into(), rows, cols, bytes: &bytes };
    for format in [QuantFormat::Q8_0, QuantFormat::Q4_K] {
        let whole = quantized(&source, format).unwrap();
        let by_row: Vec<u8> =
            (0..rows).flat_map(|row| quantized(&source.row_range(row..row + 1), format).unwrap()).collect();
        assert!(whole == by_row, "{format}");
    }
}

#[test]
fn the_recipe_is_that_of_llama_quantize() {
    use MatrixUse::{Head, Layer, Plain};
    use QuantFormat::{Q4_0, Q4_K, Q5_0, Q6_K, Q8_0};
    let of = |to, matrix, cols| QuantizePlan { to, place: None }.format(matrix, cols);
    for (to, cols, layer, head) in [
        (Quantization::Q8_0, 512, Some(Q8_0), Some(Q8_0)),
        (Quantization::Q4_0, 512, Some(Q4_0), Some(Q6_K)),
        (Quantization::Q4_0, 96, Some(Q4_0), Some(Q8_0)),
        (Quantization::Q4K, 512, Some(Q4_K), Some(Q6_K)),
        (Quantization::Q4K, 576, Some(Q5_0), Some(Q8_0)),
        (Quantization::Q6K, 512, Some(Q6_K), Some(Q6_K)),
        (Quantization::Q6K, 96, Some(Q8_0), Some(Q8_0)),
        (Quantization::Q4_0, 56, None, None),
        (Quantization::None, 512, None, None),
    ] {
        assert_eq!((of(to, Layer, cols), of(to, Head, cols)), (layer, head), "{to} with rows of {cols}");
        assert_eq!(of(to, Plain, cols), None);
    }
    for to in Quantization::ALL.iter().filter(|to| **to != Quantization::None) {
        for matrix in [Layer, Head] {
            let formats = [256, 32].map(|cols| of(*to, matrix, cols));
            assert!(formats.iter().all(|format| format.is_some_and(|format| format.quantizer().is_some())), "{to}");
        }
    }
}
