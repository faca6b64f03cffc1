//! The copies of a step between the host's memory and the device's.

use crate::support::*;
use pagetide::backend::cuda::device::{Copy, Device, DeviceError, DevicePtr, PinnedBuffer};
use pagetide::backend::cuda::transfers::{TransferKernels, source};
use std::rc::Rc;

const BYTES: usize = 60_000;

fn pinned(device: &Rc<dyn Device>, contents: &[u8]) -> PinnedBuffer {
    let mut buffer = PinnedBuffer::new(device, contents.len()).unwrap();
    // SAFETY: no enqueued operation uses it.
    unsafe { buffer.as_mut_slice() }.copy_from_slice(contents);
    buffer
}

/// One launch copies to the device and from there, from any address and as much as is wanted.
pub fn check(device: &dyn Fn(u32) -> Rc<dyn Device>) {
    let random = &mut Random(11);
    let contents: Vec<u8> = (0..BYTES).map(|_| random.bits() as u8).collect();
    for thread_order in thread_orders() {
        let device = device(thread_order);
        let transfers = TransferKernels::new(&device, device.load_modules(&[source()]).unwrap()[0]).unwrap();
        for lengths in [[0, 5], [16, 0], [16_384, 100], [3, 50_001], [40_000, 16_400]] {
            // Where the copies begin: aligned for wide accesses, and not.
            for (from, to) in [(0, 0), (32, 16), (4, 16), (3, 5)] {
                let what = format!("{lengths:?} bytes from {from} to {to}");
                let (host_source, device_source) = (pinned(&device, &contents), upload_bytes(&device, &contents));
                let host_target = pinned(&device, &[0x55; BYTES]);
                let device_target = upload_bytes(&device, &[0x55; BYTES]);
                let copies = [
                    Copy { to: device_target.ptr() + to, from: host_source.ptr() + from, bytes: lengths[0] },
                    Copy { to: host_target.ptr() + to, from: device_source.ptr() + from, bytes: lengths[1] },
                ];
                // SAFETY: all four live until everything is done.
                unsafe { transfers.copy_both(copies) }.unwrap();
                device.synchronize().unwrap();
                let expected = lengths.map(|len| {
                    let mut expected = vec![0x55; BYTES];
                    expected[to..to + len].copy_from_slice(&contents[from..from + len]);
                    expected
                });
                assert!(download_bytes(&device, &device_target) == expected[0], "to the device: {what}");
                // SAFETY: the copy is done.
                assert!(unsafe { host_target.as_slice() } == expected[1], "to the host: {what}");
            }
        }
    }
}

#[test]
fn both_directions_in_one_launch() {
    check(&device);
}

#[test]
fn broken_kernels_are_noticed() {
    for (from, to) in [
        ("end - end % 16", "end"),
        ("blockIdx.y == 0", "true"),
        ("at < vectors_end) {\n            *", "at <= vectors_end) {\n            *"),
        ("vectors_end + threadIdx.x", "start + COPY_THREADS + threadIdx.x"),
    ] {
        breaks("transfers.cu", from, to, check);
    }
}

/// On a GPU, where an access to an address of nobody ends the context: the error is named, and the device can be opened
/// again in the same process. The emulation has no such addresses.
#[test]
fn an_illegal_access_is_named_and_another_device_can_be_opened() {
    if !on_gpu() {
        println!("skipped: not on a GPU");
        return;
    }
    let lost = device(0);
    let transfers = TransferKernels::new(&lost, lost.load_modules(&[source()]).unwrap()[0]).unwrap();
    let target = upload_bytes(&lost, &[0; 16]);
    let illegal = Copy { to: target.ptr(), from: DevicePtr(1 << 20), bytes: 16 };
    // SAFETY: the kernel reads an address that belongs to nobody, which the device refuses.
    let error = unsafe { transfers.copy(illegal) }.and_then(|()| lost.synchronize()).unwrap_err();
    assert!(matches!(error, DeviceError::Lost(_)), "{error}");
    drop((target, transfers, lost));
    let device = device(0);
    let again = upload_bytes(&device, &[7; 16]);
    assert_eq!(download_bytes(&device, &again), [7; 16]);
}
