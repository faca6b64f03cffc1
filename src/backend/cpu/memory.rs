//! Memory of the CPU backend: zeroed buffers and the two pools of KV blocks.
//!
//! Buffers are anonymous mappings. They are page-aligned and therefore 64-byte-aligned. The system zeroes a page on
//! first touch, so an untouched KV block costs no memory. Large buffers get huge pages; without these a stream of
//! weights would spend much of its time in page walks. Buffers that are smaller than a few huge pages share a mapping:
//! see [`Arena`].

use crate::{AttentionShape, KvLayout};
use memmap2::{MmapMut, MmapOptions};
use pagetide_base::error::StartError;
use pagetide_base::ids::{BlockId, KvPlace};
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};

/// Plain numbers: any bit pattern is a value, and there is no padding and no drop.
pub(super) trait PlainNumber: Copy + Send + Sync + 'static {}
impl PlainNumber for u8 {}
impl PlainNumber for u32 {}
impl PlainNumber for f32 {}

/// Bytes behind every buffer that a vector load may read.
const SLACK_BYTES: usize = 128;
/// For smaller buffers a huge page would mostly be wasted.
const HUGE_PAGE_FROM_BYTES: usize = 4 << 20;
pub(super) const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Buffers of an arena begin at multiples of this.
const PAGE_BYTES: usize = 4096;

/// A zeroed array of numbers at a 64-byte boundary, followed by [`SLACK_BYTES`] readable bytes.
pub(super) struct Buffer<T> {
    start: Shared<T>,
    len: usize,
    /// The mapping that `start` points into. Other buffers may be in it too.
    _map: Arc<MmapMut>,
}

/// Maps zeroed memory. If it is large, it is in huge pages and begins at the start of one.
fn map(bytes: usize) -> std::io::Result<(Shared<u8>, Arc<MmapMut>)> {
    if bytes < HUGE_PAGE_FROM_BYTES {
        let mut map = MmapMut::map_anon(bytes)?;
        return Ok((Shared::new(map.as_mut_ptr()), Arc::new(map)));
    }
    // Without reserving swap space: much of a pool or an arena may never be touched.
    let mut map = MmapOptions::new().len(bytes + HUGE_PAGE_BYTES).no_reserve_swap().map_anon()?;
    #[cfg(target_os = "linux")]
    {
        // Only advice: without huge pages everything is slower but still right.
        let _ = map.advise(memmap2::Advice::HugePage);
        super::numa::interleave(map.as_mut_ptr(), bytes + HUGE_PAGE_BYTES);
    }
    let offset = map.as_ptr().align_offset(HUGE_PAGE_BYTES);
    Ok((Shared::new(map.as_mut_ptr().wrapping_add(offset)), Arc::new(map)))
}

/// Returns to the system the pages that lie entirely within `bytes` bytes from `start`. They are zero when they are
/// next read. On systems other than Linux nothing happens.
///
/// # Safety
/// The range belongs to a mapping made by [`map`]. Nothing else uses it meanwhile, and its contents are not needed.
#[cfg_attr(not(target_os = "linux"), expect(unused_variables, reason = "kept"))]
pub(super) unsafe fn give_back(start: *mut u8, bytes: usize) {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: the call has no preconditions.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let skipped = start.align_offset(page);
        let whole = bytes.saturating_sub(skipped) / page * page;
        if whole > 0 {
            // If the system refuses, the memory just stays.
            // SAFETY: these are whole pages of an anonymous private mapping, as the caller promised.
            unsafe { libc::madvise(start.wrapping_add(skipped).cast(), whole, libc::MADV_DONTNEED) };
        }
    }
}

/// `len` numbers and the slack, in bytes.
fn bytes_of<T>(len: usize) -> Option<usize> {
    len.checked_mul(size_of::<T>())?.checked_add(SLACK_BYTES)
}

/// `what` names the buffer.
fn too_large<T>(len: usize, what: &str, why: &dyn std::fmt::Display) -> StartError {
    let gib = len as f64 * size_of::<T>() as f64 / (1u64 << 30) as f64;
    StartError::new(format!("cannot get {gib:.2} GiB of memory for {what}: {why}"))
}

const TOO_MANY: &str = "more than can be addressed";

impl<T: PlainNumber> Buffer<T> {
    /// `what` names the buffer in the error.
    pub fn zeroed(len: usize, what: &str) -> Result<Self, StartError> {
        let bytes = bytes_of::<T>(len).ok_or_else(|| too_large::<T>(len, what, &TOO_MANY))?;
        let (start, map) = map(bytes).map_err(|error| too_large::<T>(len, what, &error))?;
        Ok(Self { start: Shared::new(start.get().cast()), len, _map: map })
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn as_ptr(&self) -> *const T {
        self.start.get()
    }

    pub fn as_mut_ptr(&mut self) -> *mut T {
        self.start.get()
    }

    pub fn as_slice(&self) -> &[T] {
        // SAFETY: the mapping holds `len` initialised numbers, is page-aligned and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) }
    }

    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as in `as_slice`; the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.len) }
    }
}

/// Buffers side by side in large mappings. A small matrix in a mapping of its own would be in small pages, and a stream
/// of weights from these reaches a third of the memory's bandwidth. A larger one would waste half of its last huge page
/// on average.
#[derive(Default)]
pub(super) struct Arena {
    open: Mutex<Option<Chunk>>,
}

/// The mapping that the next buffers come from, and how much of it is used.
struct Chunk {
    start: Shared<u8>,
    map: Arc<MmapMut>,
    bytes: usize,
    used: usize,
}

impl Arena {
    const SMALLEST_CHUNK_BYTES: usize = 32 << 20;
    /// The unused part of a chunk is not resident, but a system may count it.
    const LARGEST_CHUNK_BYTES: usize = 1 << 30;
    /// A chunk has room for at least this many buffers of the size of its first one. Larger buffers get a mapping of
    /// their own.
    const BUFFERS_OF_CHUNK: usize = 4;

    /// As [`Buffer::zeroed`]. The memory is freed when all buffers of its mapping are dropped.
    pub fn zeroed<T: PlainNumber>(&self, len: usize, what: &str) -> Result<Buffer<T>, StartError> {
        let bytes = bytes_of::<T>(len).ok_or_else(|| too_large::<T>(len, what, &TOO_MANY))?;
        if bytes > Self::LARGEST_CHUNK_BYTES / Self::BUFFERS_OF_CHUNK {
            return Buffer::zeroed(len, what);
        }
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.as_ref().is_none_or(|chunk| chunk.used + bytes > chunk.bytes) {
            let last = open.as_ref().map_or(Self::SMALLEST_CHUNK_BYTES / 2, |chunk| chunk.bytes);
            let chunk_bytes = (2 * last).max(Self::BUFFERS_OF_CHUNK * bytes).min(Self::LARGEST_CHUNK_BYTES);
            let (start, map) = map(chunk_bytes).map_err(|error| too_large::<T>(len, what, &error))?;
            *open = Some(Chunk { start, map, bytes: chunk_bytes, used: 0 });
        }
        let chunk = open.as_mut().expect("opened above");
        let start = chunk.start.get().wrapping_add(chunk.used).cast();
        chunk.used += bytes.next_multiple_of(PAGE_BYTES);
        Ok(Buffer { start: Shared::new(start), len, _map: chunk.map.clone() })
    }
}

/// A raw pointer that members of the team share; each writes its own part of what it points to.
pub(super) struct Shared<T>(*mut T);

// SAFETY: the pointer itself is plain data. That uses do not overlap is asserted at each dereference.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Shared<T> {}

impl<T> Shared<T> {
    pub fn new(pointer: *mut T) -> Self {
        Self(pointer)
    }

    /// A method, so that closures capture the wrapper and not the bare pointer.
    pub fn get(self) -> *mut T {
        self.0
    }
}

/// Scratch buffers, one for each member of the team.
pub(super) struct PerMember<'a> {
    buffers: Shared<Buffer<f32>>,
    len: usize,
    borrow: PhantomData<&'a mut Buffer<f32>>,
}

impl<'a> PerMember<'a> {
    pub fn new(buffers: &'a mut [Buffer<f32>]) -> Self {
        Self { buffers: Shared::new(buffers.as_mut_ptr()), len: buffers.len(), borrow: PhantomData }
    }

    /// The member's scratch memory. Only the member itself may use it.
    pub fn of(&self, member: usize) -> *mut f32 {
        assert!(member < self.len);
        // SAFETY: the buffer exists and is borrowed for `'a`; no other member looks at it.
        unsafe { (*self.buffers.get().add(member)).as_mut_ptr() }
    }
}

/// The largest head size that attention works on.
pub(super) const MAX_HEAD_DIM: usize = 256;

/// The two pools of KV blocks. A block is `layout.block_bytes()` contiguous bytes.
pub(super) struct CpuKvPools {
    pub layout: KvLayout,
    /// Whether the slots of a head are in the layout of `attention::groups` instead of rows `[block_size, head_dim]`.
    /// Codes have a layout of their own: see `kv_codes`.
    pub grouped: bool,
    pub num_device_blocks: usize,
    pub num_swap_blocks: usize,
    pub device: Buffer<u8>,
    pub swap: Buffer<u8>,
}

/// Checks that the CPU's attention supports blocks of this shape.
pub fn check_layout(layout: &KvLayout) -> Result<(), StartError> {
    if !(1..=256).contains(&layout.block_size) {
        return Err(StartError::new(format!("block size {}: must be from 1 to 256", layout.block_size)));
    }
    if layout.head_dim == 0 || !layout.head_dim.is_multiple_of(8) || layout.head_dim > MAX_HEAD_DIM {
        return Err(StartError::new(format!(
            "head size {}: the CPU backend supports multiples of 8 up to {}",
            layout.head_dim, MAX_HEAD_DIM
        )));
    }
    Ok(())
}

impl CpuKvPools {
    pub fn new(
        layout: KvLayout,
        grouped: bool,
        num_device_blocks: usize,
        num_swap_blocks: usize,
    ) -> Result<Self, StartError> {
        check_layout(&layout)?;
        let pool = |num_blocks: usize, what: &str| {
            let what = format!("{num_blocks} {what} blocks");
            Buffer::zeroed(num_blocks.saturating_mul(layout.block_bytes()), &what)
        };
        Ok(Self {
            layout,
            grouped,
            num_device_blocks,
            num_swap_blocks,
            device: pool(num_device_blocks, "KV")?,
            swap: pool(num_swap_blocks, "swap")?,
        })
    }

    /// Panics unless `layer` and the heads of `shape` are those of the cache, and a row of Q, K and V has `cols`
    /// columns.
    pub fn check_shape(&self, shape: &AttentionShape, layer: usize, cols: usize) {
        let KvLayout { num_layers, num_kv_heads, head_dim, .. } = self.layout;
        assert!(layer < num_layers, "layer {layer} of a KV cache of {num_layers}");
        assert!(shape.num_kv_heads == num_kv_heads && shape.head_dim == head_dim, "the KV cache is of another shape");
        assert!(
            shape.num_heads > 0 && shape.num_heads.is_multiple_of(num_kv_heads),
            "the query heads do not share KV heads evenly"
        );
        assert_eq!(cols, shape.qkv_cols(), "the QKV width");
    }

    /// The memory of these blocks of the swap pool: the start and the bytes of each run of neighbouring blocks.
    pub fn swap_ranges(&mut self, blocks: &[BlockId]) -> Vec<(Shared<u8>, usize)> {
        let bytes = self.layout.block_bytes();
        let mut blocks = blocks.to_vec();
        blocks.sort_unstable();
        let runs = blocks.chunk_by(|a, b| a.0 + 1 == b.0);
        let offset = |run: &[BlockId]| self.block_offset(run[0], self.num_swap_blocks);
        let ranges: Vec<_> = runs.map(|run| (offset(run), run.len() * bytes)).collect();
        let pool = self.swap.as_mut_ptr();
        ranges.into_iter().map(|(offset, bytes)| (Shared::new(pool.wrapping_add(offset)), bytes)).collect()
    }

    /// Byte offset of K (`value = false`) or V of a head within a block.
    pub fn head_offset(&self, layer: usize, value: bool, kv_head: usize) -> usize {
        ((layer * 2 + usize::from(value)) * self.layout.num_kv_heads + kv_head) * self.layout.head_bytes()
    }

    /// The content of a block. No copy may be writing it.
    pub fn block(&self, place: KvPlace) -> &[u8] {
        let (pool, start) = match place {
            KvPlace::Device(block) => (&self.device, self.block_offset(block, self.num_device_blocks)),
            KvPlace::Swap(block) => (&self.swap, self.block_offset(block, self.num_swap_blocks)),
        };
        &pool.as_slice()[start..start + self.layout.block_bytes()]
    }

    /// A block of the device pool. No copy may be using it.
    pub fn device_block_mut(&mut self, block: BlockId) -> &mut [u8] {
        let (start, bytes) = (self.block_offset(block, self.num_device_blocks), self.layout.block_bytes());
        &mut self.device.as_mut_slice()[start..start + bytes]
    }

    /// Byte range of a block in its pool.
    pub fn block_offset(&self, block: BlockId, num_blocks: usize) -> usize {
        assert!(block.index() < num_blocks, "block {block} is not in its pool of {num_blocks}");
        block.index() * self.layout.block_bytes()
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::{DType, KvDType};

    const BF16: KvDType = KvDType::Plain(DType::BF16);

    fn resident_bytes(buffer: &Buffer<u8>) -> usize {
        const PAGE: usize = 4096;
        let mut pages = vec![0u8; buffer.len().div_ceil(PAGE)];
        // SAFETY: the mapping is page-aligned and ours, and there is a byte for each of its pages.
        let result = unsafe { libc::mincore(buffer.as_ptr() as *mut _, buffer.len(), pages.as_mut_ptr()) };
        assert_eq!(result, 0);
        pages.iter().filter(|page| **page & 1 == 1).count() * PAGE
    }

    #[test]
    fn untouched_blocks_cost_nothing() {
        let layout = KvLayout { num_layers: 32, num_kv_heads: 8, head_dim: 128, block_size: 16, dtype: BF16 };
        let mut pools = CpuKvPools::new(layout, false, 512, 512).unwrap();
        assert_eq!((resident_bytes(&pools.device), resident_bytes(&pools.swap)), (0, 0));
        let middle = pools.block_offset(BlockId(256), 512);
        pools.device.as_mut_slice()[middle] = 1;
        assert!(resident_bytes(&pools.device) <= 2 << 20, "a huge page at most");
    }

    #[test]
    fn swap_blocks_that_are_given_back_cost_nothing_and_can_be_written_again() {
        // Blocks of a page and a half.
        let layout = KvLayout { num_layers: 3, num_kv_heads: 1, head_dim: 32, block_size: 16, dtype: BF16 };
        assert_eq!(layout.block_bytes(), 6_144);
        let mut pools = CpuKvPools::new(layout, false, 1, 2_000).unwrap();
        pools.swap.as_mut_slice().fill(7);
        let all = resident_bytes(&pools.swap);
        let given: Vec<BlockId> = (500..1_500).rev().chain([3, 1, 1_700]).map(BlockId).collect();
        let ranges = pools.swap_ranges(&given);
        assert_eq!(ranges.iter().map(|range| range.1 / layout.block_bytes()).collect::<Vec<_>>(), [1, 1, 1_000, 1]);
        // SAFETY: these are ranges of the pool, which nothing else uses.
        ranges.iter().for_each(|(start, bytes)| unsafe { give_back(start.get(), *bytes) });
        let freed = all - resident_bytes(&pools.swap);
        assert!(freed >= given.len() * layout.block_bytes() - 4 * 2 * 4_096, "{freed} bytes");
        let block = |block: u32| pools.block_offset(BlockId(block), 2_000);
        let [kept, gone] = [block(499), block(500)];
        let bytes = pools.swap.as_mut_slice();
        assert!(bytes[kept..gone].iter().all(|byte| *byte == 7), "a neighbour has lost something");
        bytes[gone] = 9;
        assert_eq!(bytes[gone], 9);
    }

    #[test]
    fn buffers_of_an_arena_share_pages_and_nothing_else() {
        const NUM_BUFFERS: usize = 40;
        let arena = Arena::default();
        let mut buffers: Vec<Buffer<u8>> =
            (0..NUM_BUFFERS).map(|_| arena.zeroed((4 << 20) + 100, "a test").unwrap()).collect();
        for (i, buffer) in buffers.iter_mut().enumerate() {
            buffer.as_mut_slice().fill(i as u8 + 1);
        }
        for (i, buffer) in buffers.iter().enumerate() {
            assert!(buffer.as_slice().iter().all(|byte| *byte == i as u8 + 1), "buffer {i}");
        }
        let chunks = buffers.iter().map(|buffer| buffer._map.as_ptr()).collect::<std::collections::BTreeSet<_>>();
        assert!(chunks.len() <= 4, "{} mappings for {NUM_BUFFERS} buffers", chunks.len());
    }
}
