//! How many thread blocks of a kernel run on a multiprocessor at the same time.

use super::super::device::{DeviceError, DeviceResult, KernelOccupancy};
use super::context::Context;
use cudarc::driver::sys::{self, CUdevice_attribute, CUfunction_attribute};

/// A multiprocessor's resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmLimits {
    pub registers: u32,
    /// What thread blocks can have together, with the part that the system reserves in each of them.
    pub shared_bytes: u32,
    pub reserved_shared_bytes: u32,
    pub threads: u32,
    pub blocks: u32,
}

const WARP: u32 = 32;
/// Each quarter of a multiprocessor has its own registers and gives them to a warp in units.
const QUARTERS: u32 = 4;
const REGISTER_UNIT: u32 = 256;
const SHARED_UNIT: u32 = 128;

impl SmLimits {
    /// The limits of a device.
    pub fn of(context: &Context, device: sys::CUdevice) -> DeviceResult<Self> {
        use CUdevice_attribute::*;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: the number is ours to write.
            let read = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) };
            context.check(read, "cuDeviceGetAttribute").map(|()| value.max(0) as u32)
        };
        Ok(Self {
            registers: attribute(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR)?,
            shared_bytes: attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
            reserved_shared_bytes: attribute(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK)?,
            threads: attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?,
            blocks: attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR)?,
        })
    }

    /// Shared memory that a thread block takes of a multiprocessor's.
    fn shared_bytes_of(&self, shared_bytes: u32) -> u32 {
        (shared_bytes + self.reserved_shared_bytes).next_multiple_of(SHARED_UNIT)
    }

    /// Thread blocks of `threads` threads with so many registers each that run at the same time, by the rules of
    /// NVIDIA's occupancy calculator.
    pub fn blocks(&self, threads: u32, registers: u32, shared_bytes: u32) -> u32 {
        let warps = threads.div_ceil(WARP).max(1);
        let of_warp = (registers.max(1) * WARP).next_multiple_of(REGISTER_UNIT);
        let by_registers = self.registers / QUARTERS / of_warp * QUARTERS / warps;
        let by_threads = self.threads / (warps * WARP);
        let by_shared = self.shared_bytes / self.shared_bytes_of(shared_bytes).max(1);
        self.blocks.min(by_registers).min(by_threads).min(by_shared)
    }

    /// The share of the memory for L1 and shared memory, in percent of the most shared memory, that `blocks` thread
    /// blocks need as shared memory.
    pub fn carve_out(&self, blocks: u32, shared_bytes: u32) -> u32 {
        let wanted = u64::from(blocks) * u64::from(self.shared_bytes_of(shared_bytes));
        (wanted * 100).div_ceil(u64::from(self.shared_bytes.max(1))).min(100) as u32
    }
}

/// Gives a kernel the shared memory that it needs for as many thread blocks as its registers and threads allow, and
/// compares the number that the driver says with the one that follows from the kernel's figures. With less than that,
/// a kernel waits for memory when another of its blocks could compute.
///
/// `shared_bytes` is its dynamic shared memory. Its blocks have as many threads as it was compiled for.
pub fn prepare(
    context: &Context,
    limits: &SmLimits,
    function: sys::CUfunction,
    name: &str,
    shared_bytes: u32,
) -> DeviceResult<KernelOccupancy> {
    use CUfunction_attribute::*;
    let call = |call: &str| format!("{call}({name})");
    let get = |attribute| {
        let mut value = 0;
        // SAFETY: the function belongs to a loaded module, and the number is ours to write.
        let read = unsafe { sys::cuFuncGetAttribute(&mut value, attribute, function) };
        context.check(read, &call("cuFuncGetAttribute")).map(|()| value.max(0) as u32)
    };
    let set = |attribute, value: u32, what: &str| {
        // SAFETY: the function belongs to a loaded module.
        let set = unsafe { sys::cuFuncSetAttribute(function, attribute, value as i32) };
        context.check(set, &call(&format!("{what}: cuFuncSetAttribute")))
    };
    let threads = get(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?;
    let registers = get(CU_FUNC_ATTRIBUTE_NUM_REGS)?;
    let all_shared_bytes = get(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)? + shared_bytes;
    // Without this a kernel has only the 48 KiB that all architectures offer.
    if shared_bytes > 48 << 10 {
        let what = format!("{shared_bytes} bytes of shared memory");
        set(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes, &what)?;
    }
    let expected_blocks = limits.blocks(threads, registers, all_shared_bytes);
    if all_shared_bytes > 0 {
        // By itself the driver may leave more to the first-level cache than the kernels have use for.
        let percent = limits.carve_out(expected_blocks, all_shared_bytes);
        set(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, percent, "the share of shared memory")?;
    }
    let mut blocks = 0;
    // SAFETY: as above.
    let asked = unsafe {
        sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, function, threads as i32, shared_bytes as usize)
    };
    context.check(asked, &call("cuOccupancyMaxActiveBlocksPerMultiprocessor"))?;
    let blocks_per_sm = blocks.max(0) as u32;
    let occupancy = KernelOccupancy {
        name: name.into(),
        threads,
        registers,
        shared_bytes: all_shared_bytes,
        blocks_per_sm,
        expected_blocks,
    };
    if blocks_per_sm == 0 {
        return Err(DeviceError::Other(format!("no thread block of {occupancy} fits on a multiprocessor")));
    }
    if blocks_per_sm < expected_blocks {
        tracing::warn!("a kernel is slower than it could be: {occupancy}");
    }
    Ok(occupancy)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hopper() -> SmLimits {
        SmLimits { registers: 65_536, shared_bytes: 228 << 10, reserved_shared_bytes: 1024, threads: 2048, blocks: 32 }
    }

    /// Rows of `kernels/machine-code.csv`, whose last but one figure `scripts/machine_code.py` computes.
    #[test]
    fn blocks_are_those_of_the_table_of_machine_code() {
        let text = include_str!("../../../../kernels/machine-code.csv");
        let mut lines = text.lines().map(|line| line.split(',').collect::<Vec<_>>());
        let header = lines.next().expect("a header");
        let column = |name: &str| header.iter().position(|column| *column == name).expect("a column");
        let [arch, count, threads, registers, shared, blocks] =
            ["arch", "specialisations", "threads", "registers", "shared_bytes", "blocks_per_sm"].map(column);
        let number = |row: &[&str], column: usize| row[column].parse::<u32>().expect("a number");
        let mut checked = 0;
        // A row of one specialisation has its own figures, and not the worst ones of several.
        for row in lines.filter(|row| row[arch] == "sm_90a" && row[count] == "1") {
            let found = hopper().blocks(number(&row, threads), number(&row, registers), number(&row, shared));
            assert_eq!(found, number(&row, blocks), "{row:?}");
            checked += 1;
        }
        assert!(checked > 5, "{checked} rows");
    }

    #[test]
    fn the_carve_out_holds_all_blocks() {
        let limits = hopper();
        // Decode attention with heads of 128: two blocks of 106 KiB.
        let decode = 108_800;
        assert_eq!(limits.blocks(128, 128, decode), 2);
        assert_eq!(limits.carve_out(2, decode), 95);
        assert_eq!(limits.carve_out(32, 1 << 20), 100);
        for shared in (1024..200 << 10).step_by(1000) {
            let blocks = limits.blocks(128, 64, shared);
            let bytes = u64::from(limits.carve_out(blocks, shared)) * u64::from(limits.shared_bytes) / 100;
            assert!(bytes >= u64::from(blocks) * u64::from(shared), "{blocks} blocks of {shared} bytes in {bytes}");
        }
    }
}
