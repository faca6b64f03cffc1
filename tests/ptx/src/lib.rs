//! Executes PTX, the instruction set that CUDA compilers write, on the CPU.
//!
//! It takes the text that NVRTC, nvcc or Triton make of a kernel, and runs grids: warps in lockstep where their lanes
//! agree, lanes apart where they diverge, blocks and warps in an order that a seed chooses. It also finds races,
//! missing waits, unwritten bytes and accesses beyond an allocation, and counts what a profiler counts.
//!
//! ```
//! use ptx_interpreter::{VirtualGpu, GridLaunch, Module, GpuOptions};
//!
//! let text = "
//!     .version 8.0
//!     .target sm_80
//!     .address_size 64
//!     .visible .entry twice(.param .u64 data) {
//!         .reg .b32 %r<3>; .reg .b64 %rd<4>;
//!         ld.param.u64 %rd1, [data];
//!         mov.u32 %r1, %tid.x;
//!         mul.wide.u32 %rd2, %r1, 4;
//!         add.s64 %rd3, %rd1, %rd2;
//!         ld.global.u32 %r2, [%rd3];
//!         shl.b32 %r2, %r2, 1;
//!         st.global.u32 [%rd3], %r2;
//!         ret;
//!     }";
//! let module = Module::parse(text)?;
//! let mut gpu = VirtualGpu::new(GpuOptions::default());
//! let data = gpu.memory.allocate(8);
//! gpu.memory.write(data, &[1, 0, 0, 0, 2, 0, 0, 0]);
//! let report = gpu.launch(&module, "twice", &GridLaunch::new([1; 3], [2, 1, 1], 0), &data.to_le_bytes())?;
//! assert!(report.findings.is_empty());
//! assert_eq!(gpu.memory.read(data, 8), [2, 0, 0, 0, 4, 0, 0, 0]);
//! # Ok::<(), ptx_interpreter::PtxError>(())
//! ```
//!
//! - `lexer`, `parser`, `syntax`, `source`: text to a syntax tree with source lines.
//! - `inline`: calls of functions.
//! - `table`: the instructions that are known; `decoder`: the meaning of each.
//! - `program`: a decoded kernel; `registers`: the registers that its variables share.
//! - `module`: what a program of the host loads.
//! - `machine`: warps, blocks and launches; `memory`: device memory.
//! - `float`, `mufu`: arithmetic with the bits of the hardware.
//! - `divergence`: where two kernels that should compute the same part.
//! - `races`, `findings`: the sanitizer; `counters`: the profiler.

#![allow(
    clippy::neg_cmp_op_on_partial_ord,
    clippy::double_comparisons,
    reason = "PTX's comparisons are defined by what they give for NaN"
)]

pub mod counters;
mod decoder;
pub mod divergence;
mod error;
pub mod findings;
pub mod float;
mod inline;
mod lanes;
mod lexer;
mod machine;
mod memory;
mod module;
mod mufu;
mod parser;
pub mod program;
mod races;
mod registers;
pub mod report;
pub mod source;
pub mod syntax;
pub mod table;
pub mod tensor_map;
pub mod types;

pub use error::{PtxError, PtxResult};
pub use machine::{GpuOptions, GridLaunch, LaunchReport, VirtualGpu};
pub use memory::GpuMemory;
pub use module::Module;
