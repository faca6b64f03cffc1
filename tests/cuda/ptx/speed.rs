//! How fast kernels are executed: `cargo test --test cuda ptx::speed -- --ignored --nocapture --test-threads 1`.

use super::has_nvcc;
use crate::attention::attend;
use crate::emulation::ptx::Architecture;
use crate::emulation::{EmulatedDevice, EmulatedOptions};
use crate::{experts, quantized, rows, sampling, transfers};
use pagetide::backend::DType;
use pagetide::backend::cuda::device::Device;
use pagetide::backend::quant::QuantFormat;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Thread instructions and seconds of each kernel, over launches of the kernels' tests.
fn measured(sanitizes: bool) -> BTreeMap<String, (u64, f64)> {
    let devices: RefCell<Vec<Rc<EmulatedDevice>>> = RefCell::default();
    let device = |_| -> Rc<dyn Device> {
        let ptx = Some(Architecture::Sm90a);
        let device =
            Rc::new(EmulatedDevice::new(EmulatedOptions { ptx, sanitizes, counts: true, ..Default::default() }));
        devices.borrow_mut().push(device.clone());
        device
    };
    attend(&device(0), (4, 1, 128), (511, 1));
    attend(&device(0), (4, 1, 128), (0, 128));
    quantized::multiply(&device(0), QuantFormat::Q4_0, (8, 256, 1024));
    quantized::multiply(&device(0), QuantFormat::Q4_0, (64, 256, 1024));
    for dtype in [DType::BF16, DType::F32] {
        experts::check_rows(dtype, 200, &device);
    }
    (0..4).for_each(|seed| sampling::check_vocab(seed, 5000, &device));
    (0..6).for_each(|seed| rows::check_on(seed, &device));
    transfers::check(&device);
    let mut kernels = BTreeMap::<String, (u64, f64)>::new();
    for (counters, seconds) in devices.borrow().iter().flat_map(|device| device.take_launches()) {
        let (threads, sum) = kernels.entry(counters.kernel.clone()).or_default();
        *threads += counters.thread_instructions();
        *sum += seconds;
    }
    kernels
}

#[test]
#[ignore = "measures"]
fn speed() {
    if !has_nvcc() {
        return;
    }
    let [with, without] = [true, false].map(measured);
    println!("| kernel | thread instructions, million | million a second | without the sanitizer |\n|---|---|---|---|");
    let mut total = [(0, 0.0); 2];
    for (kernel, of_kernel) in &with {
        let both = [*of_kernel, without[kernel]];
        for (total, (threads, seconds)) in total.iter_mut().zip(both) {
            *total = (total.0 + threads, total.1 + seconds);
        }
        print_row(kernel, both);
    }
    print_row("all", total);
}

fn print_row(kernel: &str, both: [(u64, f64); 2]) {
    let [with, without] = both.map(|(threads, seconds)| threads as f64 / seconds / 1e6);
    println!("| `{kernel}` | {:.2} | {with:.1} | {without:.1} |", both[0].0 as f64 / 1e6);
}
