//! The functions of CUDA's libraries that this program calls, and whether the libraries have them.

use cudarc::cublaslt::sys as lt;
use cudarc::driver::sys;
use std::ffi::c_void;

/// Functions of the driver that a device needs. They are looked up before the first one is called, because cudarc
/// panics if one is missing.
pub(super) const DRIVER_FUNCTIONS: &[&str] = &[
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxReset_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncGetAttribute",
    "cuFuncGetParamInfo",
    "cuFuncLoad",
    "cuFuncSetAttribute",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuInit",
    "cuLaunchKernelEx",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemHostGetDevicePointer_v2",
    "cuMemcpyAsync",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuProfilerStart",
    "cuProfilerStop",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
];

/// An optional function that only newer drivers have.
pub(super) const COPY_BATCH_FUNCTION: &str = "cuMemcpyBatchAsync_v2";

/// The functions that are called before the driver's version is known.
pub(super) const FIRST_DRIVER_FUNCTIONS: &[&str] = &["cuInit", "cuDriverGetVersion", "cuDeviceGetCount"];

pub(super) const NVRTC_FUNCTIONS: &[&str] = &[
    "nvrtcCompileProgram",
    "nvrtcCreateProgram",
    "nvrtcDestroyProgram",
    "nvrtcGetCUBIN",
    "nvrtcGetCUBINSize",
    "nvrtcGetNumSupportedArchs",
    "nvrtcGetProgramLog",
    "nvrtcGetProgramLogSize",
    "nvrtcGetSupportedArchs",
    "nvrtcVersion",
];

pub(super) const CUBLASLT_FUNCTIONS: &[&str] = &[
    "cublasLtCreate",
    "cublasLtDestroy",
    "cublasLtGetVersion",
    "cublasLtMatmul",
    "cublasLtMatmulAlgoCheck",
    "cublasLtMatmulAlgoConfigGetAttribute",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
    "cublasLtMatrixLayoutSetAttribute",
];

pub(super) fn address<E>(symbol: Result<impl std::ops::Deref<Target = *const c_void>, E>) -> Option<*const c_void> {
    symbol.ok().map(|symbol| *symbol)
}

/// `[13, 0, 2]`. The library is open.
pub(super) fn cublaslt_release() -> [usize; 3] {
    // SAFETY: no preconditions.
    let version = unsafe { lt::cublasLtGetVersion() };
    // 120805 is 12.8.5, 130002 is 13.0.2.
    [version / 10_000, version / 100 % 100, version % 100]
}

pub(super) fn driver_function(name: &str) -> Option<*const c_void> {
    // SAFETY: the library is open, as `is_culib_present` said, and is never closed. The address is only compared.
    unsafe { address(sys::culib().get::<*const c_void>(name)) }
}

/// Whether the driver has a function.
pub(super) fn has_function(name: &str) -> bool {
    driver_function(name).is_some()
}
