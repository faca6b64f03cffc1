//! Device memory: allocations with the bytes that were written.
//!
//! A device address is the host's address of the same byte. So memory of the host, such as pinned memory, can be mapped
//! and used by kernels without copies. This is the only module that uses raw pointers.

use crate::races::Shadow;
use std::alloc::Layout;
use std::collections::VecDeque;

/// Why an access is not possible.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AccessError {
    /// Nothing is allocated there. With the nearest allocation before it: its address and size.
    Outside { nearest: Option<(u64, usize)> },
    /// The allocation was freed.
    Freed { address: u64, bytes: usize },
}

/// Bits of bytes.
#[derive(Clone, Debug, Default)]
pub(crate) struct ByteSet(Vec<u64>);

impl ByteSet {
    pub fn new(bytes: usize) -> Self {
        Self(vec![0; bytes.div_ceil(64)])
    }

    fn parts(at: usize, bytes: usize) -> impl Iterator<Item = (usize, u64)> {
        let end = at + bytes;
        (at / 64..end.div_ceil(64)).map(move |word| {
            let from = at.max(word * 64) - word * 64;
            let to = end.min(word * 64 + 64) - word * 64;
            (word, if to - from == 64 { !0 } else { ((1 << (to - from)) - 1) << from })
        })
    }

    pub fn insert(&mut self, at: usize, bytes: usize) {
        for (word, mask) in Self::parts(at, bytes) {
            self.0[word] |= mask;
        }
    }

    pub fn remove(&mut self, at: usize, bytes: usize) {
        for (word, mask) in Self::parts(at, bytes) {
            self.0[word] &= !mask;
        }
    }

    pub fn contains(&self, at: usize, bytes: usize) -> bool {
        Self::parts(at, bytes).all(|(word, mask)| self.0[word] & mask == mask)
    }

    /// The bits of up to 64 bytes.
    pub fn within(&self, at: usize, bytes: usize) -> u64 {
        let (word, shift) = (at / 64, at % 64);
        let low = self.0[word] >> shift;
        let high = if shift + bytes > 64 { self.0[word + 1] << (64 - shift) } else { 0 };
        let mask = if bytes == 64 { !0 } else { (1 << bytes) - 1 };
        (low | high) & mask
    }
}

struct Region {
    address: u64,
    bytes: usize,
    /// The layout of memory that was allocated here; `None` for memory of the host.
    layout: Option<Layout>,
    freed: bool,
    /// The bytes that were written; `None`: all, as far as is known.
    written: Option<ByteSet>,
    /// Accesses of the running launch.
    shadow: Shadow,
}

/// An allocation: its index and the offset of an address within.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spot {
    pub region: usize,
    pub offset: usize,
}

/// The memory of a device.
#[derive(Default)]
pub struct GpuMemory {
    /// By address.
    regions: Vec<Region>,
    /// The region of the last access.
    last: usize,
    /// Freed memory that is not given back yet, so that its use is noticed.
    freed: VecDeque<u64>,
    freed_bytes: usize,
}

/// Freed bytes that are kept.
const QUARANTINE_BYTES: usize = 64 << 20;
const ALIGNMENT: usize = 256;
/// Bytes on both sides of an allocation that belong to none, so that an access beyond it hits no neighbour.
const GUARD_BYTES: usize = 256;

impl GpuMemory {
    /// Allocates `bytes` bytes, aligned to 256. Nothing is written: a kernel that reads them is reported.
    pub fn allocate(&mut self, bytes: usize) -> u64 {
        let layout = Layout::from_size_align(bytes + 2 * GUARD_BYTES, ALIGNMENT).expect("a size that fits");
        // SAFETY: the layout is not empty.
        let start = unsafe { std::alloc::alloc(layout) };
        assert!(!start.is_null(), "the host has no {bytes} bytes of memory");
        // SAFETY: all of it was just allocated. Unwritten bytes are the same in every run.
        unsafe { start.write_bytes(0xff, layout.size()) };
        let address = start as u64 + GUARD_BYTES as u64;
        self.insert(address, bytes, Some(layout), Some(ByteSet::new(bytes)));
        address
    }

    /// Frees an allocation. The host's memory is given back later, so that a use of it is reported and not random.
    pub fn free(&mut self, address: u64) {
        let index = self.index_of(address).expect("allocated and not freed");
        let region = &mut self.regions[index];
        assert!(!region.freed, "freed twice: {address:#x}");
        region.freed = true;
        self.freed.push_back(address);
        self.freed_bytes += region.bytes;
        while self.freed_bytes > QUARANTINE_BYTES {
            let Some(oldest) = self.freed.pop_front() else { break };
            let index = self.index_of(oldest).expect("a freed region stays until here");
            self.release(index);
        }
    }

    /// Makes memory of the host accessible to kernels. All of it counts as written.
    ///
    /// # Safety
    /// The memory stays valid, and nobody else uses it during a launch, until [`GpuMemory::unmap_host`].
    pub unsafe fn map_host(&mut self, address: u64, bytes: usize) {
        self.insert(address, bytes, None, None);
    }

    /// The same for memory of which nothing was written yet.
    ///
    /// # Safety
    /// As [`GpuMemory::map_host`], and all bytes are initialised.
    pub unsafe fn map_unwritten(&mut self, address: u64, bytes: usize) {
        self.insert(address, bytes, None, Some(ByteSet::new(bytes)));
    }

    pub fn unmap_host(&mut self, address: u64) {
        let index = self.index_of(address).expect("mapped before");
        self.regions.remove(index);
    }

    fn insert(&mut self, address: u64, bytes: usize, layout: Option<Layout>, written: Option<ByteSet>) {
        let index = self.regions.partition_point(|region| region.address < address);
        let shadow = Shadow::new(bytes);
        self.regions.insert(index, Region { address, bytes, layout, freed: false, written, shadow });
    }

    fn release(&mut self, index: usize) {
        let region = self.regions.remove(index);
        self.freed_bytes -= region.bytes;
        if let Some(layout) = region.layout {
            // SAFETY: allocated in `allocate` with this layout, and no region refers to it any more.
            unsafe { std::alloc::dealloc((region.address - GUARD_BYTES as u64) as *mut u8, layout) };
        }
    }

    fn index_of(&self, address: u64) -> Option<usize> {
        let index = self.regions.partition_point(|region| region.address < address);
        self.regions.get(index).filter(|region| region.address == address).map(|_| index)
    }

    pub(crate) fn find(&mut self, address: u64, bytes: usize) -> Result<Spot, AccessError> {
        let holds = |region: &Region| {
            address >= region.address && address + bytes as u64 <= region.address + region.bytes as u64
        };
        if self.regions.get(self.last).is_none_or(|region| !holds(region)) {
            let after = self.regions.partition_point(|region| region.address <= address);
            let before = after.checked_sub(1).map(|index| (index, &self.regions[index]));
            match before {
                Some((index, region)) if holds(region) => self.last = index,
                Some((_, region)) => {
                    return Err(AccessError::Outside { nearest: Some((region.address, region.bytes)) });
                }
                None => return Err(AccessError::Outside { nearest: None }),
            }
        }
        let region = &self.regions[self.last];
        if region.freed {
            return Err(AccessError::Freed { address: region.address, bytes: region.bytes });
        }
        Ok(Spot { region: self.last, offset: (address - region.address) as usize })
    }

    pub(crate) fn load(&self, spot: Spot, to: &mut [u8]) {
        let region = &self.regions[spot.region];
        assert!(spot.offset + to.len() <= region.bytes, "checked by `find`");
        // SAFETY: within the region, which is valid memory; `to` is the caller's own.
        unsafe {
            let from = (region.address as *const u8).add(spot.offset);
            std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len());
        }
    }

    pub(crate) fn store(&mut self, spot: Spot, from: &[u8]) {
        let region = &mut self.regions[spot.region];
        assert!(spot.offset + from.len() <= region.bytes, "checked by `find`");
        if let Some(written) = &mut region.written {
            written.insert(spot.offset, from.len());
        }
        // SAFETY: as in `load`.
        unsafe {
            let to = (region.address as *mut u8).add(spot.offset);
            std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len());
        }
    }

    pub(crate) fn is_written(&self, spot: Spot, bytes: usize) -> bool {
        self.regions[spot.region].written.as_ref().is_none_or(|written| written.contains(spot.offset, bytes))
    }

    /// The bits of up to 64 bytes that nothing wrote.
    pub(crate) fn unwritten(&self, spot: Spot, bytes: usize) -> u64 {
        match &self.regions[spot.region].written {
            Some(written) => written.within(spot.offset, bytes) ^ if bytes == 64 { !0 } else { (1 << bytes) - 1 },
            None => 0,
        }
    }

    /// Bytes of a place hold a copy of what nothing wrote.
    pub(crate) fn forget(&mut self, spot: Spot, bytes: std::ops::Range<usize>) {
        if let Some(written) = &mut self.regions[spot.region].written {
            written.remove(spot.offset + bytes.start, bytes.len());
        }
    }

    pub(crate) fn shadow(&mut self, spot: Spot) -> &mut Shadow {
        &mut self.regions[spot.region].shadow
    }

    /// A region's address.
    pub(crate) fn start(&self, region: usize) -> u64 {
        self.regions[region].address
    }

    /// A region's bytes, its accesses, and the bytes that were written; `None`: all.
    pub(crate) fn region(&mut self, region: usize) -> (&mut [u8], &mut Shadow, Option<&mut ByteSet>) {
        let Region { address, bytes, shadow, written, .. } = &mut self.regions[region];
        // SAFETY: the region is valid memory of initialised bytes, and while the memory is borrowed, nobody else uses
        // it: that of the host by the promise of `map_host`.
        let contents = unsafe { std::slice::from_raw_parts_mut(*address as *mut u8, *bytes) };
        (contents, shadow, written.as_mut())
    }

    /// Forgets the accesses of a launch.
    pub(crate) fn clear_shadows(&mut self) {
        self.regions.iter_mut().for_each(|region| region.shadow.clear());
    }

    fn spot(&mut self, address: u64, bytes: usize) -> Spot {
        self.find(address, bytes).unwrap_or_else(|error| panic!("{bytes} bytes at {address:#x}: {error:?}"))
    }

    /// Reads memory from the host. Panics if it is not allocated.
    pub fn read(&mut self, address: u64, bytes: usize) -> Vec<u8> {
        let spot = self.spot(address, bytes);
        let mut contents = vec![0; bytes];
        self.load(spot, &mut contents);
        contents
    }

    /// Whether all of these bytes were written, and not with a copy of what nothing wrote. Panics if they are not
    /// allocated.
    pub fn is_defined(&mut self, address: u64, bytes: usize) -> bool {
        let spot = self.spot(address, bytes);
        self.is_written(spot, bytes)
    }

    /// Writes memory from the host. Panics if it is not allocated.
    pub fn write(&mut self, address: u64, contents: &[u8]) {
        let spot = self.spot(address, contents.len());
        self.store(spot, contents);
    }

    /// Copies within the device, or from or to mapped memory of the host. Bytes that were never written stay so.
    pub fn copy(&mut self, to: u64, from: u64, bytes: usize) {
        let (source, target) = (self.spot(from, bytes), self.spot(to, bytes));
        let mut contents = vec![0; bytes];
        self.load(source, &mut contents);
        self.store(target, &contents);
        let unwritten: Vec<usize> = match &self.regions[source.region].written {
            Some(written) if !written.contains(source.offset, bytes) => {
                (0..bytes).filter(|i| !written.contains(source.offset + i, 1)).collect()
            }
            _ => Vec::new(),
        };
        if let Some(written) = &mut self.regions[target.region].written {
            unwritten.iter().for_each(|i| written.remove(target.offset + i, 1));
        }
    }

    pub fn fill(&mut self, address: u64, value: u8, bytes: usize) {
        self.write(address, &vec![value; bytes]);
    }

    /// The contents of all memory.
    pub(crate) fn snapshot(&self) -> Vec<(Vec<u8>, Option<ByteSet>)> {
        let contents = |(index, region): (usize, &Region)| {
            let mut contents = vec![0; region.bytes];
            self.load(Spot { region: index, offset: 0 }, &mut contents);
            (contents, region.written.clone())
        };
        self.regions.iter().enumerate().map(contents).collect()
    }

    /// Gives all memory the contents of a snapshot. Nothing was allocated or freed since.
    pub(crate) fn restore(&mut self, snapshot: &[(Vec<u8>, Option<ByteSet>)]) {
        assert_eq!(self.regions.len(), snapshot.len(), "the caller's promise");
        for (index, (contents, written)) in snapshot.iter().enumerate() {
            self.store(Spot { region: index, offset: 0 }, contents);
            self.regions[index].written.clone_from(written);
        }
    }

    /// Bytes that are allocated and not freed.
    pub fn allocated_bytes(&self) -> usize {
        self.regions.iter().filter(|region| region.layout.is_some() && !region.freed).map(|region| region.bytes).sum()
    }
}

impl Drop for GpuMemory {
    fn drop(&mut self) {
        while !self.regions.is_empty() {
            self.freed_bytes += self.regions[0].bytes;
            self.release(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_bytes_are_remembered() {
        let mut set = ByteSet::new(200);
        set.insert(60, 10);
        assert!(set.contains(60, 10) && !set.contains(59, 2) && !set.contains(69, 2));
        set.remove(63, 2);
        assert!(set.contains(60, 3) && !set.contains(60, 4) && set.contains(65, 5));
        assert_eq!(set.within(58, 12), 0b1111_1001_1100);
        assert_eq!(set.within(0, 64), 0b111 << 60);
    }

    #[test]
    fn accesses_stay_within_allocations() {
        let mut memory = GpuMemory::default();
        let (a, b) = (memory.allocate(16), memory.allocate(8));
        memory.write(a, &[1; 16]);
        memory.copy(b, a + 8, 8);
        assert_eq!(memory.read(b, 8), [1; 8]);
        assert_eq!(memory.find(a + 12, 8).unwrap_err(), AccessError::Outside { nearest: Some((a, 16)) });
        memory.free(a);
        assert_eq!(memory.find(a, 4).unwrap_err(), AccessError::Freed { address: a, bytes: 16 });
        assert_eq!(memory.allocated_bytes(), 8);
    }
}
