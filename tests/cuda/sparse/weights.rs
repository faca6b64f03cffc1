//! Weights beyond 4 GiB for kernels that are launched alone, because a matrix of such a size would have to be packed
//! first, or so many rows for so many experts computed: rows of a quantised table, matrices of many experts, and the
//! last columns of a large matrix, whose other columns the emulation leaves out.

use super::{device_with_room, put, sparse_device, sparse_options};
use crate::emulation::EmulatedOptions;
use crate::support::*;
use pagetide::backend::DType;
use pagetide::backend::cuda::device::{Copy, Device, DeviceBuffer, DevicePtr, Grid, ModuleSource, Stream};
use pagetide::backend::cuda::experts::HOPPER_PRODUCT_SHARED_BYTES;
use pagetide::backend::cuda::{WeightTiles, few_rows, quantized};
use pagetide::backend::quant::QuantFormat;
use std::rc::Rc;

/// Rows and columns of a weight tile. Matrices here have one tile, or rows of one.
const TILE_N: usize = 16;
const TILE_K: usize = 64;

const TILES: WeightTiles = WeightTiles::of(QuantFormat::Q8_0);

/// A kernel's parameters.
#[derive(Default)]
struct Params(Vec<u8>);

impl Params {
    fn addresses(mut self, addresses: &[DevicePtr]) -> Self {
        self.0.extend(addresses.iter().flat_map(|address| address.0.to_le_bytes()));
        self
    }

    fn words(mut self, words: &[u32]) -> Self {
        self.0.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        self
    }
}

/// Codes and scales of a tile. The scales are float16 below 2.
fn tile_bytes(seed: u64) -> Vec<u8> {
    let random = &mut Random(seed);
    (0..TILES.tile_bytes()).map(|_| random.bits() as u8 & 0x3f).collect()
}

fn words(device: &Rc<dyn Device>, words: &[u32]) -> DeviceBuffer {
    upload_bytes(device, &words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>())
}

fn launch(
    device: &Rc<dyn Device>,
    source: ModuleSource,
    kernel: &str,
    (threads, shared_bytes): (u32, usize),
    params: Params,
) {
    launch_grid(device, source, kernel, ([1, 1, 1], threads, shared_bytes), params);
}

fn launch_grid(
    device: &Rc<dyn Device>,
    source: ModuleSource,
    kernel: &str,
    (blocks, threads, shared_bytes): ([u32; 3], u32, usize),
    params: Params,
) {
    let module = device.load_modules(&[source]).unwrap()[0];
    let kernel = device.kernel(module, kernel, shared_bytes as u32).unwrap();
    let grid = Grid { blocks, threads, shared_bytes: shared_bytes as u32 };
    // SAFETY: the parameters are those of the kernel, and the callers keep the memory until the device is done.
    unsafe { device.launch(kernel, grid, &params.0) }.unwrap();
}

fn quantized_source() -> ModuleSource {
    quantized::source(TILES, DType::BF16)
}

/// The row of a token whose tile has `tiles_before` tiles before it.
fn looked_up(device: &Rc<dyn Device>, tiles_before: usize) -> Vec<f32> {
    let (token, rows) = (tiles_before * TILE_N + 5, (tiles_before + 1) * TILE_N);
    let table = DeviceBuffer::new(device, (tiles_before + 1) * TILES.tile_bytes()).unwrap();
    put(device, table.ptr() + tiles_before * TILES.tile_bytes(), &tile_bytes(1));
    look_up(device, quantized_source(), "quantized_lookup", (table.ptr(), token, rows), |params| params)
}

/// The row of a token in E4M3, with scales for rows, or for blocks of 128 x 128 weights.
fn looked_up_in_fp8(device: &Rc<dyn Device>, rows_before: usize, is_in_blocks: bool) -> Vec<f32> {
    let table = DeviceBuffer::new(device, (rows_before + 1) * TILE_K).unwrap();
    put(device, table.ptr() + rows_before * TILE_K, &tile_bytes(1)[..TILE_K]);
    // A row of blocks has one, and is filled up to four.
    let (scale, blocks_of_row) = if is_in_blocks { (rows_before / 128 * 4, 4) } else { (rows_before, 0) };
    let scales = DeviceBuffer::new(device, (scale + 1) * size_of::<f32>()).unwrap();
    put(device, scales.ptr() + scale * size_of::<f32>(), &0.5_f32.to_le_bytes());
    let source = ModuleSource { file: "fp8.cu", defines: vec![("DTYPE", "bf16".into())] };
    let table = (table.ptr(), rows_before, rows_before + 1);
    look_up(device, source, "fp8_lookup", table, |params| params.addresses(&[scales.ptr()]).words(&[blocks_of_row, 0]))
}

/// Launches a lookup of one row. `add` adds the parameters behind `LookupParams`.
fn look_up(
    device: &Rc<dyn Device>,
    source: ModuleSource,
    kernel: &str,
    (table, token, rows): (DevicePtr, usize, usize),
    add: impl FnOnce(Params) -> Params,
) -> Vec<f32> {
    // `BatchHeader`: one row, whose token and its source are behind the header.
    let mut batch = vec![1, 0, 16, 17];
    batch.resize(16, 0);
    batch.extend([token as u32, u32::MAX]);
    let (batch, out) = (words(device, &batch), DeviceBuffer::new(device, TILE_K * 4).unwrap());
    let addresses = [batch.ptr(), DevicePtr::NULL, table, out.ptr(), DevicePtr::NULL];
    let params = Params::default().addresses(&addresses);
    let params = params.words(&[TILE_K as u32, rows as u32, 1_f32.to_bits(), 0, 0, 0]);
    launch(device, source, kernel, (256, 0), add(params));
    download(device, &out, DType::F32)
}

/// The product of a row with the matrix of an expert, of which there are `bytes`.
fn product_of(
    device: &Rc<dyn Device>,
    expert: usize,
    bytes: &[u8],
    source: ModuleSource,
    kernel: &str,
    launched: (u32, usize),
) -> Vec<f32> {
    let weights = DeviceBuffer::new(device, (expert + 1) * bytes.len()).unwrap();
    put(device, weights.ptr() + expert * bytes.len(), bytes);
    let x = upload(device, &Random(3).floats(TILE_K, DType::BF16), DType::BF16);
    let out = DeviceBuffer::new(device, TILE_N * 2).unwrap();
    let (choices, num_tiles, tiles) = (words(device, &[0]), words(device, &[1]), words(device, &[expert as u32, 0, 1]));
    // `Piece`, and the rest of `ProductParams`.
    let params = Params::default().addresses(&[DevicePtr::NULL]).words(&[0, 1, expert as u32 + 1, 1]);
    let addresses = [DevicePtr::NULL, choices.ptr(), num_tiles.ptr(), tiles.ptr(), x.ptr(), weights.ptr(), out.ptr()];
    let params = params.addresses(&addresses).words(&[TILE_N as u32, TILE_K as u32, 0, 0]);
    launch(device, source, kernel, launched, params);
    download(device, &out, DType::BF16)
}

fn quantised_product_of(device: &Rc<dyn Device>, expert: usize) -> Vec<f32> {
    let launched = (128, quantized::tiled_shared_bytes(TILES));
    product_of(device, expert, &tile_bytes(2), quantized_source(), "quantized_expert_product", launched)
}

fn product_on_warp_groups_of(device: &Rc<dyn Device>, expert: usize) -> Vec<f32> {
    let source = ModuleSource { file: "experts_hopper.cu", defines: vec![("DTYPE", "bf16".into())] };
    let matrix = DType::BF16.encode(&Random(2).floats(TILE_N * TILE_K, DType::BF16));
    product_of(device, expert, &matrix, source, "expert_product_hopper", (384, HOPPER_PRODUCT_SHARED_BYTES))
}

/// The last columns of the product of a row with a large matrix: those of the last thread block, which is one in the x
/// or in the y dimension of a grid.
struct LastColumns {
    source: ModuleSource,
    kernel: &'static str,
    /// Of a block.
    threads: u32,
    shared_bytes: usize,
    /// Weight tiles below each other that a block multiplies with.
    tiles: usize,
    k: usize,
    in_y: bool,
    /// The bytes of all tiles of a block.
    weights: fn(&Self) -> Vec<u8>,
    /// The kernel's parameters: from the addresses of x, the matrix and the result, and the number of columns.
    params: fn(&Self, DevicePtr, DevicePtr, DevicePtr, u32) -> Params,
}

impl LastColumns {
    /// With so many blocks before the last. Without a GPU, only the last one runs.
    fn compute(&self, options: &EmulatedOptions, before: usize) -> Vec<f32> {
        let (weights, columns) = ((self.weights)(self), (before + 1) * self.tiles * TILE_N);
        let last = |at: u32, of: u32| if self.in_y { [of, at, of] } else { [at, of, of] };
        let only_block = Some(last(before as u32, 0));
        let device =
            if on_gpu() { device(0) } else { sparse_device(EmulatedOptions { only_block, ..options.clone() }) };
        let matrix = DeviceBuffer::new(&device, (before + 1) * weights.len()).unwrap();
        put(&device, matrix.ptr() + before * weights.len(), &weights);
        let x = upload(&device, &Random(3).floats(self.k, DType::BF16), DType::BF16);
        let out = DeviceBuffer::new(&device, columns * 2).unwrap();
        let params = (self.params)(self, x.ptr(), matrix.ptr(), out.ptr(), columns as u32);
        let grid = (last(before as u32 + 1, 1), self.threads, self.shared_bytes);
        launch_grid(&device, self.source.clone(), self.kernel, grid, params);
        let last_bytes = self.tiles * TILE_N * 2;
        let results = DeviceBuffer::new(&device, last_bytes).unwrap();
        let copy = Copy { to: results.ptr(), from: out.ptr() + before * last_bytes, bytes: last_bytes };
        // SAFETY: both ranges are there, and the download waits for the device.
        unsafe { device.copy(Stream::Compute, copy) }.unwrap();
        download(&device, &results, DType::BF16)
    }

    /// Whether they are the same in a matrix of more than 2³² elements of two bytes.
    fn are_right(&self, options: &EmulatedOptions) -> bool {
        let expected = self.compute(options, 1);
        assert!(expected.iter().all(|x| x.is_finite()) && expected.iter().any(|x| x.abs() > 0.1), "{}", self.kernel);
        let before = (1 << 33) / (self.weights)(self).len() + 2;
        bits(&self.compute(options, before)) == bits(&expected)
    }

    fn few_rows() -> Self {
        Self {
            source: ModuleSource { file: "few_rows.cu", defines: vec![("DTYPE", "bf16".into())] },
            kernel: "few_rows_product",
            threads: 256,
            shared_bytes: few_rows::shared_bytes(1),
            tiles: 1,
            k: TILE_K,
            in_y: false,
            weights: |of| DType::BF16.encode(&Random(2).floats(TILE_N * of.k, DType::BF16)),
            // `FewRowsInput`, and the rest of `FewRowsParams`.
            params: |of, x, matrix, out, columns| {
                let input = Params::default().addresses(&[matrix, x, DevicePtr::NULL, DevicePtr::NULL]);
                let input = input.words(&[1, columns, of.k as u32, 1e-6_f32.to_bits()]);
                input.addresses(&[DevicePtr::NULL, DevicePtr::NULL, out]).words(&[0, 0])
            },
        }
    }

    fn quantized_few_rows() -> Self {
        Self::quantized("quantized_product_few", (128, quantized::few_shared_bytes(TILES)), 1, TILE_K)
    }

    /// Eight tiles a block, and 16 beside each other: a grid has at most 65,535 blocks in y.
    fn quantized_many_rows() -> Self {
        Self::quantized("quantized_product", (128, quantized::tiled_shared_bytes(TILES)), 8, 16 * TILE_K)
    }

    /// For a matrix of weight tiles.
    fn quantized(kernel: &'static str, (threads, shared_bytes): (u32, usize), tiles: usize, k: usize) -> Self {
        Self {
            source: quantized_source(),
            kernel,
            threads,
            shared_bytes,
            tiles,
            k,
            in_y: tiles > 1,
            weights: |of| (0..of.tiles * of.k / TILE_K).flat_map(|i| tile_bytes(i as u64)).collect(),
            // `QuantizedParams`.
            params: |of, x, matrix, out, columns| {
                let addresses = [x, matrix, DevicePtr::NULL, DevicePtr::NULL, out];
                Params::default().addresses(&addresses).words(&[1, columns, of.k as u32, 0, columns, 0])
            },
        }
    }
}

#[test]
fn last_columns_of_a_matrix_beyond_8_gib() {
    if device_with_room(12 << 30).is_none() {
        return;
    }
    for columns in [LastColumns::few_rows(), LastColumns::quantized_few_rows(), LastColumns::quantized_many_rows()] {
        assert!(columns.are_right(&sparse_options()), "{}", columns.kernel);
    }
}

#[test]
fn products_with_short_offsets_are_noticed() {
    if !on_emulation() {
        return;
    }
    for (columns, file, from, to) in [
        (
            LastColumns::few_rows(),
            "include/few_rows.cuh",
            "(uint64_t(matrix) * p.columns + row)",
            "(matrix * p.columns + row)",
        ),
        (LastColumns::quantized_few_rows(), "quantized.cu", "uint64_t(k_tiles) * TILE_BYTES", "k_tiles * TILE_BYTES"),
        (
            LastColumns::quantized_many_rows(),
            "include/quantized.cuh",
            "const uint64_t k_tiles = tiles_of(k)",
            "const uint32_t k_tiles = tiles_of(k)",
        ),
    ] {
        let folder = broken_copy(file, from, to);
        let options = EmulatedOptions { kernels: folder.path().into(), ..sparse_options() };
        assert!(!columns.are_right(&options), "nobody notices {to:?} in {file}");
    }
}

/// Compares what is computed of the second of many pieces of weights, and of one beyond 4 GiB.
fn check(device: &Rc<dyn Device>, what: &str, piece_bytes: usize, run: fn(&Rc<dyn Device>, usize) -> Vec<f32>) {
    let expected = run(device, 1);
    assert!(expected.iter().all(|x| x.is_finite()) && expected.iter().any(|x| x.abs() > 0.1), "{what}");
    assert_eq!(bits(&run(device, (1 << 32) / piece_bytes + 2)), bits(&expected), "{what}");
}

#[test]
fn weights_beyond_4_gib() {
    let Some(device) = device_with_room(5 << 30) else { return };
    check(&device, "lookup", TILES.tile_bytes(), looked_up);
    check(&device, "FP8 lookup", TILE_K, |device, row| looked_up_in_fp8(device, row, false));
    check(&device, "FP8 lookup in blocks", TILE_K, |device, row| looked_up_in_fp8(device, row, true));
    check(&device, "quantised product", TILES.tile_bytes(), quantised_product_of);
    if device.info().compute_capability == (9, 0) {
        check(&device, "product on warp groups", TILE_N * TILE_K * 2, product_on_warp_groups_of);
    }
}
