//! Whether a device multiplies with warp groups (`wgmma`): what all kernels on them need.

use super::device::DeviceInfo;
use super::options::CudaOptions;
use crate::DType;

/// `Err` says why no kernel is on warp groups.
pub(super) fn check(options: &CudaOptions, info: &DeviceInfo) -> Result<(), &'static str> {
    if info.compute_capability != (9, 0) {
        return Err("the device's compute capability is not 9.0");
    }
    if options.dtype == DType::F32 {
        return Err("the model's type is float32");
    }
    if options.batch_invariant {
        return Err("device.batch_invariant needs kernels with the same bits for any number of rows");
    }
    Ok(())
}
