//! The CUDA driver's side of the program without a GPU: over libraries of the same names that are compiled here
//! (`libcuda.c`, `libnvrtc.c`, `libcublasLt.c`). They do what is enqueued at once, know what is alive, end the process
//! where a handle is wrong, and fail when told to.

mod doctor;
mod fake;
mod serve;

use fake::Fake;
use pagetide::backend::DType;
use pagetide::backend::cuda::device::{
    Copy, Device, DeviceBuffer, DeviceError, DeviceEvent, DevicePtr, Fp8Matmul, Fp8Operands, Fp8Scaling, Grid, Matmul,
    ModuleSource, PinnedBuffer, Stream,
};
use pagetide::backend::cuda::driver::{CopyBatches, DriverOptions, find};
use pagetide::backend::fp8::E4M3_VALUES;
use std::rc::Rc;

const SOURCE: &str = "sampling.cu";

fn source() -> ModuleSource {
    ModuleSource { file: SOURCE, defines: Vec::new() }
}

/// A device buffer that holds `bytes`.
fn upload(device: &Rc<dyn Device>, bytes: &[u8]) -> DeviceBuffer {
    let buffer = DeviceBuffer::new(device, bytes.len()).unwrap();
    let mut pinned = PinnedBuffer::new(device, bytes.len()).unwrap();
    // SAFETY: no copy uses it yet; it lives until the copy is done.
    unsafe {
        pinned.as_mut_slice().copy_from_slice(bytes);
        device.copy(Stream::CopyIn, Copy { to: buffer.ptr(), from: pinned.ptr(), bytes: bytes.len() }).unwrap();
    }
    device.synchronize().unwrap();
    buffer
}

fn download(device: &Rc<dyn Device>, buffer: &DeviceBuffer) -> Vec<u8> {
    let pinned = PinnedBuffer::new(device, buffer.bytes()).unwrap();
    // SAFETY: it lives until the copy is done, and is read after that.
    unsafe {
        device.copy(Stream::CopyOut, Copy { to: pinned.ptr(), from: buffer.ptr(), bytes: buffer.bytes() }).unwrap();
        device.synchronize().unwrap();
        pinned.as_slice().to_vec()
    }
}

#[test]
fn a_device_gives_back_all_that_it_took() {
    let Some(fake) = Fake::lock() else { return };
    let gpu = fake.find(false).unwrap();
    assert_eq!(gpu.info().name, "Fake 0");
    assert_eq!((gpu.info().compute_capability, gpu.info().num_sms), ((9, 0), 132));
    assert_eq!((gpu.info().max_shared_bytes, gpu.info().total_memory), (227 << 10, 1 << 30));
    assert_eq!((gpu.nvrtc.version.as_str(), gpu.cublaslt.version.as_str()), ("13.0", "13.0.2"));
    let open = gpu.opener();
    for _ in 0..2 {
        let device = open().unwrap();
        assert_eq!(device.memory().unwrap(), (600, 1000));
        let module = device.load_modules(&[source()]).unwrap()[0];
        device.kernel(module, "add", 100 << 10).unwrap();
        let buffer = upload(&device, &[7; 1000]);
        // SAFETY: the buffer is ours.
        unsafe { device.fill(Stream::Compute, buffer.ptr() + 10, 9, 5).unwrap() };
        let bytes = download(&device, &buffer);
        assert!(bytes.iter().enumerate().all(|(i, byte)| *byte == if (10..15).contains(&i) { 9 } else { 7 }));
        for stream in Stream::ALL {
            device.record(stream).unwrap();
        }
        device.begin_capture().unwrap();
        device.end_capture().unwrap();
        assert!(fake.alive().iter().sum::<i32>() > 0);
        drop((buffer, device));
        assert_eq!(fake.alive(), [0; 10]);
    }
}

#[test]
fn pinned_memory_has_an_address_for_the_device() {
    let Some(fake) = Fake::lock() else { return };
    let device = fake.find(false).unwrap().open().unwrap();
    let pinned = PinnedBuffer::new(&device, 64).unwrap();
    // SAFETY: nothing is enqueued, and new memory of a process holds zeros.
    assert_ne!(unsafe { pinned.as_slice() }.as_ptr() as u64, pinned.ptr().0, "the fake has two");
    let module = device.load_modules(&[source()]).unwrap()[0];
    let kernel = device.kernel(module, "add", 0).unwrap();
    // SAFETY: the kernel writes to this memory, which is read when it is done.
    let written = unsafe {
        let grid = Grid { blocks: [1, 1, 1], threads: 32, shared_bytes: 0 };
        device.launch(kernel, grid, &add_params(pinned.ptr() + 8, 7)).unwrap();
        device.synchronize().unwrap();
        pinned.as_slice()[8]
    };
    assert_eq!(written, 7);
    fake.fail("cuMemHostGetDevicePointer_v2", 1);
    assert!(PinnedBuffer::new(&device, 64).is_err());
    drop((pinned, device));
    assert_eq!(fake.alive(), [0; 10]);
}

#[test]
fn many_copies_are_one_call_where_the_driver_has_it() {
    let Some(fake) = Fake::lock() else { return };
    let device = fake.find(false).unwrap().open().unwrap();
    let from = upload(&device, &(0..=255).collect::<Vec<u8>>());
    let to = upload(&device, &[0; 256]);
    // Back to front, and one of nothing.
    let copies: Vec<Copy> = [64, 0, 128, 64]
        .iter()
        .enumerate()
        .map(|(i, bytes)| Copy { to: to.ptr() + (3 - i) * 64, from: from.ptr() + i * 64, bytes: *bytes.min(&64) })
        .collect();
    let mut expected = vec![0; 256];
    for (i, target) in [(0, 192), (2, 64), (3, 0)] {
        (0..64).for_each(|j| expected[target + j] = (i * 64 + j) as u8);
    }
    fake.calls();
    // SAFETY: the buffers are ours.
    unsafe { device.copy_batch(Stream::CopyOut, &copies).unwrap() };
    assert_eq!(fake.calls(), ["cuMemcpyBatchAsync_v2"]);
    assert_eq!(download(&device, &to), expected);
    // SAFETY: as above.
    unsafe {
        device.fill(Stream::CopyOut, to.ptr(), 0, 256).unwrap();
        // CUDA_ERROR_NOT_SUPPORTED: one by one, now and from now on.
        fake.fail("cuMemcpyBatchAsync_v2", 801);
        fake.calls();
        device.copy_batch(Stream::CopyOut, &copies).unwrap();
        device.copy_batch(Stream::CopyOut, &copies).unwrap();
    }
    assert_eq!(fake.calls()[1..], ["cuMemcpyAsync"; 6]);
    assert_eq!(download(&device, &to), expected);
}

/// Small copies go in one call if that was measured to be faster at the start, and large ones never.
#[test]
fn how_small_copies_are_made_is_measured_or_chosen() {
    let Some(fake) = Fake::lock() else { return };
    const SMALL: usize = 256 << 10;
    // In a list of 64 copies in each direction: 64 × 0.01 ms or 0.1 ms.
    let cases = [
        (CopyBatches::Auto, 0.01, 0.1, true),
        (CopyBatches::Auto, 0.01, 1.0, false),
        (CopyBatches::Always, 0.01, 1.0, true),
        (CopyBatches::Never, 0.01, 0.1, false),
    ];
    for (copy_batches, copy, batch, batched) in cases {
        fake.copy_times(copy, batch);
        fake.calls();
        let device = find(&DriverOptions { copy_batches, ..fake.options() }).unwrap().open().unwrap();
        let method = device.copy_method().unwrap();
        assert_eq!(method.batched, batched, "{copy_batches}: {method:?}");
        let is_measured = copy_batches == CopyBatches::Auto;
        let expected = is_measured.then_some((2.0 * batch as f32, 128.0 * copy as f32));
        let near = |(a, b): (f32, f32), (c, d): (f32, f32)| (a - c).abs() < 1e-3 && (b - d).abs() < 1e-3;
        assert!(method.measured_ms.zip(expected).map_or(!is_measured, |(a, b)| near(a, b)), "{method:?}");
        assert_eq!(fake.calls().iter().any(|call| call == "cuMemcpyBatchAsync_v2"), is_measured);

        let from = upload(&device, &vec![7; 3 * SMALL + 1]);
        let to = upload(&device, &vec![0; 3 * SMALL + 1]);
        let piece = |at: usize, bytes| Copy { to: to.ptr() + at, from: from.ptr() + at, bytes };
        fake.calls();
        // SAFETY: the buffers are ours, and the pieces lie apart.
        unsafe {
            device.copy_batch(Stream::CopyIn, &[piece(0, SMALL), piece(SMALL, SMALL), piece(2 * SMALL, SMALL + 1)])
        }
        .unwrap();
        let of_small = if batched { vec!["cuMemcpyBatchAsync_v2"] } else { vec!["cuMemcpyAsync"; 2] };
        assert_eq!(fake.calls(), [vec!["cuMemcpyAsync"], of_small].concat(), "{copy_batches}");
        assert!(download(&device, &to) == vec![7; 3 * SMALL + 1]);
    }
    // Calls for tens of thousands of copies have crashed drivers.
    fake.copy_times(0.01, 0.1);
    let device = fake.find(false).unwrap().open().unwrap();
    let (from, to) = (upload(&device, &[7; 6000]), upload(&device, &[0; 6000]));
    let copies: Vec<Copy> =
        (0..3000).map(|i| Copy { to: to.ptr() + 2 * i, from: from.ptr() + 2 * i, bytes: 1 }).collect();
    fake.calls();
    // SAFETY: as above.
    unsafe { device.copy_batch(Stream::CopyIn, &copies) }.unwrap();
    assert_eq!(fake.calls(), ["cuMemcpyBatchAsync_v2"; 3]);
}

#[test]
fn waiting_for_a_finished_event_makes_no_call() {
    let Some(fake) = Fake::lock() else { return };
    let device = fake.find(false).unwrap().open().unwrap();
    fake.hold(true);
    let events: Vec<DeviceEvent> = (0..3).map(|_| device.record(Stream::Compute).unwrap()).collect();
    assert!(!device.is_done(events[0]).unwrap());
    fake.calls();
    device.wait(Stream::CopyOut, events[1]).unwrap();
    device.wait(Stream::Compute, events[1]).unwrap();
    assert_eq!(fake.calls(), ["cuStreamWaitEvent"], "a stream does not wait for itself");
    fake.hold(false);
    assert!(device.is_done(events[1]).unwrap());
    fake.calls();
    assert!(device.is_done(events[0]).unwrap());
    device.wait(Stream::CopyOut, events[0]).unwrap();
    assert_eq!(fake.calls(), [""; 0]);
    device.wait(Stream::CopyOut, events[2]).unwrap();
    assert_eq!(fake.calls(), ["cuStreamWaitEvent"]);
}

/// Decode attention with heads of 128 needs two blocks of 106 KiB on a multiprocessor.
#[test]
fn a_kernel_gets_the_shared_memory_that_its_blocks_need() {
    let Some(fake) = Fake::lock() else { return };
    let device = fake.find(false).unwrap().open().unwrap();
    let module = device.load_modules(&[source()]).unwrap()[0];
    for (shared_bytes, blocks, carve_out) in [(108_800, 2, 95), (50 << 10, 4, 90), (16 << 10, 4, 30)] {
        device.kernel(module, "add", shared_bytes).unwrap();
        let kernel = device.kernels().pop().unwrap();
        assert_eq!((kernel.name.as_str(), kernel.threads, kernel.registers), ("add", 128, 128));
        assert_eq!((kernel.blocks_per_sm, kernel.expected_blocks), (blocks, blocks), "{kernel}");
        assert_eq!(fake.carve_out(), carve_out, "{kernel}");
    }
    fake.blocks(1);
    device.kernel(module, "add", 50 << 10).expect("it works, if slowly");
    let kernel = device.kernels().pop().unwrap();
    assert!(kernel.to_string().contains("1 of 4 thread blocks"), "{kernel}");
    fake.blocks(0);
    let error = device.kernel(module, "add", 50 << 10).unwrap_err().to_string();
    assert!(error.contains("no thread block of add") && error.contains("51200 bytes"), "{error}");
}

/// The fake's kernel: adds a number to the one in memory.
fn add_params(to: DevicePtr, value: u64) -> Vec<u8> {
    [to.0.to_ne_bytes(), value.to_ne_bytes()].concat()
}

#[test]
fn a_recording_does_its_launches_when_it_is_launched() {
    let Some(fake) = Fake::lock() else { return };
    let device = fake.find(false).unwrap().open().unwrap();
    let module = device.load_modules(&[source()]).unwrap()[0];
    let kernel = device.kernel(module, "add", 0).unwrap();
    assert!(matches!(device.kernel(module, "none", 0), Err(DeviceError::Other(why)) if why.contains("none")));
    let sum = upload(&device, &0u64.to_ne_bytes());
    let value = || u64::from_ne_bytes(download(&device, &sum).try_into().unwrap());
    let grid = Grid { blocks: [1, 1, 1], threads: 32, shared_bytes: 0 };
    // SAFETY: the buffer is ours and lives until everything is done.
    unsafe {
        device.launch(kernel, grid, &add_params(sum.ptr(), 5)).unwrap();
        assert_eq!(value(), 5);
        device.begin_capture().unwrap();
        device.launch(kernel, grid, &add_params(sum.ptr(), 10)).unwrap();
        device.launch(kernel, grid, &add_params(sum.ptr(), 20)).unwrap();
        let graph = device.end_capture().unwrap();
        assert_eq!(value(), 5);
        device.launch_graph(graph).unwrap();
        device.launch_graph(graph).unwrap();
        assert_eq!(value(), 65);
        device.clear_graphs();
        // A step that fails while it is recorded leaves a device that works.
        device.begin_capture().unwrap();
        fake.fail("cuLaunchKernelEx", 701);
        assert!(matches!(device.launch(kernel, grid, &add_params(sum.ptr(), 1)), Err(DeviceError::Other(_))));
        device.synchronize().unwrap();
        device.launch(kernel, grid, &add_params(sum.ptr(), 1)).unwrap();
    }
    assert_eq!(value(), 66);
}

/// A kernel may start early behind one of ours, also in a recording, and not behind anything else.
#[test]
fn kernels_start_early_behind_kernels() {
    let Some(fake) = Fake::lock() else { return };
    let device = fake.find(false).unwrap().open().unwrap();
    let module = device.load_modules(&[source()]).unwrap()[0];
    let kernel = device.kernel(module, "add", 0).unwrap();
    let sum = upload(&device, &0u64.to_ne_bytes());
    let grid = Grid { blocks: [1, 1, 1], threads: 32, shared_bytes: 0 };
    // SAFETY: the buffer is ours and lives until everything is done.
    let launch = || unsafe { device.launch(kernel, grid, &add_params(sum.ptr(), 1)).unwrap() };
    let copy = |stream| {
        // SAFETY: as above.
        unsafe { device.fill(stream, sum.ptr(), 0, 8).unwrap() }
    };
    launch();
    fake.early_starts();
    (0..3).for_each(|_| launch());
    assert_eq!(fake.early_starts(), 3);
    copy(Stream::CopyOut);
    launch();
    assert_eq!(fake.early_starts(), 1, "other streams do not matter");
    copy(Stream::Compute);
    launch();
    device.record(Stream::Compute).unwrap();
    launch();
    let event = device.record(Stream::CopyIn).unwrap();
    fake.hold(true);
    device.wait(Stream::Compute, event).unwrap();
    fake.hold(false);
    launch();
    assert_eq!(fake.early_starts(), 0, "behind a copy, an event, and a wait for one");
    device.begin_capture().unwrap();
    launch();
    launch();
    let graph = device.end_capture().unwrap();
    assert_eq!(fake.early_starts(), 1);
    // SAFETY: as above.
    unsafe { device.launch_graph(graph).unwrap() };
    launch();
    check_product(&device, 2, DType::BF16, DType::BF16, false);
    launch();
    assert_eq!(fake.early_starts(), 0, "behind a graph and a product");
}

#[test]
#[should_panic(expected = "add takes 16 bytes of parameters, not 8")]
fn parameters_of_another_size_are_a_bug() {
    let Some(fake) = Fake::lock() else { panic!("add takes 16 bytes of parameters, not 8: skipped") };
    let device = fake.find(false).unwrap().open().unwrap();
    let module = device.load_modules(&[source()]).unwrap()[0];
    let kernel = device.kernel(module, "add", 0).unwrap();
    let grid = Grid { blocks: [1, 1, 1], threads: 32, shared_bytes: 0 };
    // SAFETY: it is never launched.
    let _ = unsafe { device.launch(kernel, grid, &[0; 8]) };
}

fn floats(count: usize, seed: usize) -> Vec<f32> {
    // Small whole numbers: exact in bfloat16, and so are their sums.
    (0..count).map(|i| ((i * 7 + seed * 3) % 5) as f32 - 2.0).collect()
}

fn bytes_of(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F32 => values.iter().flat_map(|value| value.to_ne_bytes()).collect(),
        _ => values.iter().flat_map(|value| ((value.to_bits() >> 16) as u16).to_ne_bytes()).collect(),
    }
}

/// Does a product on the device and compares it with its definition.
fn check_product(device: &Rc<dyn Device>, m: usize, dtype: DType, out: DType, bias: bool) {
    let (n, k) = (6, 4);
    let (x, w, b) = (floats(m * k, 1), floats(n * k, 2), floats(n, 3));
    let buffers = [bytes_of(&x, dtype), bytes_of(&w, dtype), bytes_of(&b, out), bytes_of(&vec![9.0; m * n], out)]
        .map(|bytes| upload(device, &bytes));
    let [x_ptr, w_ptr, bias_ptr, out_ptr] = [0, 1, 2, 3].map(|i| buffers[i].ptr());
    // SAFETY: the buffers are of these sizes and live until everything is done.
    unsafe { device.matmul(Matmul { m, n, k, dtype, out, bias }, x_ptr, w_ptr, bias_ptr, out_ptr).unwrap() };
    let expected: Vec<f32> = (0..m * n)
        .map(|i| {
            let (row, col) = (i / n, i % n);
            let sum: f32 = (0..k).map(|j| x[row * k + j] * w[col * k + j]).sum();
            sum + if bias { b[col] } else { 0.0 }
        })
        .collect();
    assert_eq!(download(device, &buffers[3]), bytes_of(&expected, out), "{m} rows, {dtype:?} to {out:?}, bias: {bias}");
}

#[test]
fn products_are_what_the_trait_says() {
    let Some(fake) = Fake::lock() else { return };
    for batch_invariant in [false, true] {
        let device = fake.find(batch_invariant).unwrap().open().unwrap();
        for (dtype, out) in [(DType::F32, DType::F32), (DType::BF16, DType::BF16), (DType::BF16, DType::F32)] {
            for m in [5, 1, 16, 33] {
                check_product(&device, m, dtype, out, false);
                check_product(&device, m, dtype, out, true);
            }
        }
    }
}

/// Small numbers of E4M3, whose products and sums are exact.
fn codes(count: usize, seed: usize) -> Vec<u8> {
    // 0, 1, 2, -1 and -2.
    (0..count).map(|i| [0x00, 0x38, 0x40, 0xb8, 0xc0][(i * 7 + seed * 3) % 5]).collect()
}

/// Powers of two.
fn scales(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| 2_f32.powi(((i * 5 + seed) % 4) as i32 - 2)).collect()
}

/// Does an FP8 product on the device and compares it with its definition.
fn check_fp8_product(device: &Rc<dyn Device>, m: usize, scaling: Fp8Scaling, out: DType, bias: bool) {
    let (n, k) = (144, 384);
    let (x, w, b) = (codes(m * k, 1), codes(n * k, 2), floats(n, 3));
    let x_scales = scales(m * scaling.scales_of_activations(k), 1);
    let w_scales = scales(scaling.rows(n) * scaling.scales_of_row(k), 2);
    let buffers = [
        x.clone(),
        bytes_of(&x_scales, DType::F32),
        w.clone(),
        bytes_of(&w_scales, DType::F32),
        out.encode(&b),
        out.encode(&vec![9.0; m * n]),
    ]
    .map(|bytes| upload(device, &bytes));
    let [x_ptr, x_scales_ptr, w_ptr, w_scales_ptr, bias_ptr, out_ptr] = [0, 1, 2, 3, 4, 5].map(|i| buffers[i].ptr());
    let operands = Fp8Operands {
        x: x_ptr,
        x_scales: x_scales_ptr,
        w: w_ptr,
        w_scales: w_scales_ptr,
        bias: bias_ptr,
        out: out_ptr,
    };
    // SAFETY: the buffers are of these sizes and live until everything is done.
    unsafe { device.fp8_matmul(Fp8Matmul { m, n, k, scaling, out, bias }, operands).unwrap() };
    let expected: Vec<f32> = (0..m * n)
        .map(|i| {
            let (row, col) = (i / n, i % n);
            let product = |j: usize| {
                let [x, w] = [x[row * k + j], w[col * k + j]].map(|code| E4M3_VALUES[usize::from(code)]);
                let scale = match scaling {
                    Fp8Scaling::Rows => x_scales[row] * w_scales[col],
                    // Three blocks of columns, for which weights have four scales.
                    Fp8Scaling::Blocks => x_scales[j / 128 * m + row] * w_scales[col / 128 * 4 + j / 128],
                };
                x * w * scale
            };
            (0..k).map(product).sum::<f32>() + if bias { b[col] } else { 0.0 }
        })
        .collect();
    assert_eq!(download(device, &buffers[5]), out.encode(&expected), "{m} rows, {scaling:?} to {out:?}, bias: {bias}");
}

#[test]
fn fp8_products_are_what_the_trait_says() {
    let Some(fake) = Fake::lock() else { return };
    let device = fake.find(false).unwrap().open().unwrap();
    assert_eq!(device.lacks_fp8_products(), None);
    for scaling in [Fp8Scaling::Rows, Fp8Scaling::Blocks] {
        for (out, bias) in [(DType::BF16, false), (DType::BF16, true), (DType::F16, true), (DType::F32, false)] {
            for m in [5, 1] {
                check_fp8_product(&device, m, scaling, out, bias);
            }
        }
    }
    // A plain product of the same sizes has descriptors of its own.
    check_product(&device, 5, DType::BF16, DType::BF16, true);
}

#[test]
fn the_fastest_algorithm_that_works_is_chosen_and_measured_once() {
    let Some(fake) = Fake::lock() else { return };
    let device = fake.find(false).unwrap().open().unwrap();
    fake.products();
    check_product(&device, 20, DType::F32, DType::F32, false);
    let [slow, broken, fast, split] = fake.products();
    // 1, 2, 4, 8, 16 and 32 rows; each candidate once at first, and recorded for the matrix and five copies, twice as
    // large as the cache; and then the product.
    assert_eq!([slow, broken, fast, split], [6 * 7, 0, 6 * 7 + 1, 6 * 7]);
    for m in [20, 3, 17, 1] {
        check_product(&device, m, DType::F32, DType::F32, false);
    }
    assert_eq!(fake.products(), [0, 0, 4, 0], "smaller numbers of rows have been measured, too");
    // 48 rows: the best one for up to 64 cannot do it.
    check_product(&device, 64, DType::F32, DType::F32, false);
    fake.products();
    check_product(&device, 48, DType::F32, DType::F32, false);
    assert_eq!(fake.products(), [0, 0, 0, 1], "the heuristic's first");
    // While a step is recorded nothing is measured, nor decided.
    let buffer = upload(&device, &[0; 256]);
    let matmul = Matmul { m: 1, n: 8, k: 4, dtype: DType::F32, out: DType::F32, bias: false };
    let [x, w, out] = [0, 64, 192].map(|offset| buffer.ptr() + offset);
    // SAFETY: the operands lie in the buffer, apart from each other; it lives until everything is done.
    let multiply = || unsafe { device.matmul(matmul, x, w, DevicePtr::NULL, out).unwrap() };
    fake.products();
    device.begin_capture().unwrap();
    multiply();
    device.end_capture().unwrap();
    assert_eq!(fake.products(), [0, 0, 0, 1]);
    multiply();
    // A matrix of 128 bytes and four copies.
    assert_eq!(fake.products(), [6, 0, 6 + 1, 6]);
}

#[test]
fn a_batch_invariant_product_has_one_algorithm_that_does_not_split_its_sums() {
    let Some(fake) = Fake::lock() else { return };
    let device = fake.find(true).unwrap().open().unwrap();
    // The largest step first, in which everything is tried.
    check_product(&device, 48, DType::F32, DType::F32, false);
    fake.products();
    for m in [16, 8, 24, 1, 48] {
        check_product(&device, m, DType::F32, DType::F32, false);
    }
    assert_eq!(fake.products(), [5, 0, 0, 0], "one algorithm, and nothing is tried again");
}

/// Bits of the rows of a product of generic numbers, whose sums depend on their order.
fn bits_of_rows(device: &Rc<dyn Device>, m: usize) -> Vec<Vec<u8>> {
    let (n, k) = (8, 40);
    let numbers = |count: usize, seed: usize| -> Vec<u8> {
        (0..count).flat_map(|i| (((i % (3 * k) + seed) as f32 * 0.7).sin() * 1.3).to_ne_bytes()).collect()
    };
    let buffers = [numbers(m * k, 1), numbers(n * k, 2), vec![0; m * n * 4]].map(|bytes| upload(device, &bytes));
    let matmul = Matmul { m, n, k, dtype: DType::F32, out: DType::F32, bias: false };
    let [x, w, out] = [0, 1, 2].map(|i| buffers[i].ptr());
    // SAFETY: the buffers are of these sizes and live until everything is done.
    unsafe { device.matmul(matmul, x, w, DevicePtr::NULL, out).unwrap() };
    download(device, &buffers[2]).chunks(n * 4).map(<[u8]>::to_vec).collect()
}

/// The algorithm that serves all other numbers of rows sums in another order from 40 rows on. Another one has the right
/// bits, but cannot do 48 rows. So these are done as 40 and 8.
#[test]
fn rows_that_an_algorithm_computes_otherwise_are_found_at_the_start() {
    let Some(fake) = Fake::lock() else { return };
    fake.backwards_from(40);
    let device = fake.find(true).unwrap().open().unwrap();
    bits_of_rows(&device, 64);
    // The rows repeat.
    let expected = bits_of_rows(&device, 3);
    for m in [1, 2, 8, 32, 40, 48, 56, 64] {
        fake.products();
        let rows = bits_of_rows(&device, m);
        assert!(rows.iter().enumerate().all(|(i, row)| *row == expected[i % 3]), "{m} rows");
        let of_algorithms = match m {
            48 => [1, 0, 1, 0],
            40.. => [0, 0, 1, 0],
            _ => [1, 0, 0, 0],
        };
        assert_eq!(fake.products(), of_algorithms, "{m} rows");
    }
    drop(device);
    assert_eq!(fake.alive(), [0; 10]);
}

#[test]
fn what_does_not_fit_says_how_much_was_wanted() {
    let Some(fake) = Fake::lock() else { return };
    let device = fake.find(false).unwrap().open().unwrap();
    fake.fail("cuMemAlloc_v2", 2);
    let error = DeviceBuffer::new(&device, 5000).unwrap_err();
    assert_eq!(error, DeviceError::OutOfMemory { wanted: 5000, free: 600, total: 1000 });
    fake.fail("cuMemHostAlloc", 2);
    let error = PinnedBuffer::new(&device, 5000).err();
    assert_eq!(error, Some(DeviceError::OutOfPinnedMemory { wanted: 5000 }));
    DeviceBuffer::new(&device, 5000).expect("it goes on");
}

#[test]
fn a_lost_device_says_the_same_for_ever_and_another_can_be_opened() {
    let Some(fake) = Fake::lock() else { return };
    let gpu = fake.find(false).unwrap();
    let device = gpu.open().unwrap();
    let buffer = upload(&device, &[1; 64]);
    let pinned = PinnedBuffer::new(&device, 64).unwrap();
    let event = device.record(Stream::Compute).unwrap();
    // CUDA_ERROR_ILLEGAL_ADDRESS.
    fake.fail("cuMemcpyAsync", 700);
    let copy = Copy { to: pinned.ptr(), from: buffer.ptr(), bytes: 64 };
    // SAFETY: both live until everything is done.
    let error = unsafe { device.copy(Stream::CopyOut, copy) }.unwrap_err();
    assert_eq!(error, DeviceError::Lost("cuMemcpyAsync: CUDA_ERROR_ILLEGAL_ADDRESS".into()));
    let again = [
        device.synchronize().err(),
        device.is_done(event).err(),
        device.record(Stream::CopyIn).err(),
        device.memory().err(),
        DeviceBuffer::new(&device, 64).err(),
        device.load_modules(&[source()]).err(),
        device.begin_capture().err(),
    ];
    assert!(again.iter().all(|again| again.as_ref() == Some(&error)), "{again:?}");
    drop((buffer, pinned, device));
    assert_eq!(fake.alive(), [0; 10]);

    // The next one works, though the driver may not want to.
    let device = gpu.open().unwrap();
    assert_eq!(download(&device, &upload(&device, &[2; 64])), [2; 64]);
    drop(device);
    fake.fail("cuMemsetD8Async", 719);
    let error = gpu.open().err().expect("it is tried when it is opened").to_string();
    assert!(error.contains("cannot be opened") && error.contains("CUDA_ERROR_LAUNCH_FAILED"), "{error}");
    assert_eq!(fake.alive(), [0; 10]);
}

/// CUDA's runtime, which cuBLASLt contains, uses the primary context, and may hold it longer than we do.
#[test]
fn the_primary_context_is_released_and_is_reset_only_where_it_was_lost() {
    let Some(fake) = Fake::lock() else { return };
    let gpu = fake.find(false).unwrap();
    fake.primary();
    let device = gpu.open().unwrap();
    assert_eq!(fake.primary(), (1, 0));
    fake.hold_primary(true);
    let buffer = upload(&device, &[1; 64]);
    drop((buffer, device));
    assert_eq!(fake.primary(), (1, 0), "the other holder keeps it");
    assert_eq!(fake.alive(), [1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);

    let device = gpu.open().unwrap();
    let buffer = upload(&device, &[1; 64]);
    fake.fail("cuMemcpyAsync", 700);
    let copy = Copy { to: buffer.ptr(), from: buffer.ptr() + 32, bytes: 32 };
    // SAFETY: the buffer lives until everything is done.
    assert!(matches!(unsafe { device.copy(Stream::CopyOut, copy) }, Err(DeviceError::Lost(_))));
    drop((buffer, device));
    assert_eq!(fake.primary(), (1, 1), "the other holder has not released it, and has lost it, too");
    assert_eq!(fake.alive(), [0; 10]);
    let device = gpu.open().unwrap();
    assert_eq!(download(&device, &upload(&device, &[2; 64])), [2; 64]);
    drop(device);
    fake.hold_primary(false);
    assert_eq!((fake.primary(), fake.alive()), ((0, 0), [0; 10]));
}

#[test]
fn a_failure_of_a_product_is_the_devices_where_that_is_lost() {
    let Some(fake) = Fake::lock() else { return };
    let device = fake.find(false).unwrap().open().unwrap();
    let buffer = upload(&device, &[0; 64]);
    let matmul = Matmul { m: 1, n: 4, k: 4, dtype: DType::F32, out: DType::F32, bias: false };
    // CUDA_ERROR_LAUNCH_FAILED, while the algorithms are measured.
    fake.fail("cuEventSynchronize", 719);
    // SAFETY: the buffer is large enough for each operand, and lives until everything is done.
    let error = unsafe { device.matmul(matmul, buffer.ptr(), buffer.ptr(), DevicePtr::NULL, buffer.ptr()) };
    assert_eq!(error, Err(DeviceError::Lost("cuEventSynchronize: CUDA_ERROR_LAUNCH_FAILED".into())));
    assert_eq!(device.synchronize(), error);
}
