//! Memory of the emulated device and of its host, with guards on both sides.
//!
//! Large memory is sparse: the system gives a page when it is first written, and all others are zeros. So a pool may be
//! larger than the host's memory.

use std::alloc::Layout;
use std::ptr::{NonNull, null_mut};

/// Guard bytes on both sides of an allocation. Nothing may write to them.
const GUARD_BYTES: usize = 256;
/// What is in guards, and in memory that is not sparse, before something is written: NaN in every type.
const POISON: u8 = 0xff;
/// Allocations from this size on are sparse.
const SPARSE_FROM: usize = 1 << 30;

pub(super) fn is_sparse(bytes: usize) -> bool {
    bytes >= SPARSE_FROM
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes + 2 * GUARD_BYTES, 256).expect("a size that fits")
}

/// Memory that is aligned to 256 bytes, with guards around it.
pub(super) fn allocate(bytes: usize) -> NonNull<u8> {
    let layout = layout(bytes);
    let start = if is_sparse(bytes) {
        let start = map(layout.size());
        for guard in [0, GUARD_BYTES + bytes] {
            // SAFETY: within the allocation.
            unsafe { std::ptr::write_bytes(start.add(guard), POISON, GUARD_BYTES) };
        }
        start
    } else {
        // SAFETY: the layout is not empty.
        let start = unsafe { std::alloc::alloc(layout) };
        assert!(!start.is_null(), "out of memory");
        // SAFETY: all of it is ours.
        unsafe { std::ptr::write_bytes(start, POISON, layout.size()) };
        start
    };
    // SAFETY: within the allocation.
    NonNull::new(unsafe { start.add(GUARD_BYTES) }).expect("not null")
}

/// Returns false if something has written to the guards.
///
/// # Safety
/// [`allocate`] gave this address for so many bytes, and nobody uses the memory any more.
pub(super) unsafe fn free(address: u64, bytes: usize) -> bool {
    let (start, layout) = ((address as usize - GUARD_BYTES) as *mut u8, layout(bytes));
    // SAFETY: all of it was allocated by `allocate`.
    let memory = unsafe { std::slice::from_raw_parts(start, layout.size()) };
    let is_intact = |guard: &[u8]| guard.iter().all(|byte| *byte == POISON);
    let intact = is_intact(&memory[..GUARD_BYTES]) && is_intact(&memory[GUARD_BYTES + bytes..]);
    if is_sparse(bytes) {
        // SAFETY: `allocate` has mapped so many bytes there.
        let unmapped = unsafe { libc::munmap(start.cast(), layout.size()) };
        assert_eq!(unmapped, 0, "{}", std::io::Error::last_os_error());
    } else {
        // SAFETY: allocated with this layout.
        unsafe { std::alloc::dealloc(start, layout) };
    }
    intact
}

/// Sparse memory of zeros, aligned to a page.
fn map(bytes: usize) -> *mut u8 {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANON | libc::MAP_NORESERVE;
    // SAFETY: a new mapping, at an address that the system chooses, changes no other memory.
    let start = unsafe { libc::mmap(null_mut(), bytes, access, flags, -1, 0) };
    assert!(start != libc::MAP_FAILED, "no {bytes} bytes of addresses: {}", std::io::Error::last_os_error());
    start.cast()
}
