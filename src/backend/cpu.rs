//! The CPU backend: the default on a machine without a GPU, and the reference for every other backend.
//!
//! - `backend`: the backend and its operations, over the parts below.
//! - `isa`: the choice of instruction set. All kernels of a backend use the same one.
//! - `simd`: sixteen float32 lanes on each instruction set. Kernels are written once over these.
//! - `team`: the threads; `rows`: work that is split by rows.
//! - `pack`, `gemm`: weights, plain and quantised, and matrix products; `row_switch`: how many rows are many;
//!   `experts`; `heads`, `attention`; `elementwise`: norms, activations and the like; `kv_codes`: the codes of a
//!   quantised KV cache.
//! - `sampling`: from logits to tokens.
//! - `countable`, `limits`: what a profile needs to know.
//! - `tensors`: activations; `memory`: buffers and the pools of KV blocks; `copier`: copies between these.
//!
//! Results do not depend on the number of threads. Work is split into tasks, each task owns its outputs, and no output
//! is a sum over several tasks in an order that could vary.

mod attention;
mod backend;
mod copier;
mod countable;
mod elementwise;
mod experts;
mod gemm;
mod heads;
mod isa;
mod kv_codes;
mod limits;
mod memory;
#[cfg(target_os = "linux")]
mod numa;
mod pack;
mod processor;
mod register_loops;
mod rotation;
mod row_switch;
mod rows;
mod sampling;
mod simd;
mod team;
mod tensors;
#[cfg(target_arch = "x86_64")]
mod tile_registers;

pub use backend::{CpuBackend, CpuOptions};
pub use elementwise::CpuRopeTable;
pub use experts::CpuExpertsWorkspace;
pub use gemm::{ManyRows, heights_of_many_rows};
pub use isa::Isa;
pub use limits::MachineLimits;
pub use memory::check_layout;
pub use pack::CpuMatrix;
pub use row_switch::many_rows;
pub use tensors::{CpuTensor, CpuVector};
#[cfg(target_arch = "x86_64")]
#[doc(hidden)]
pub use tile_registers::assume_tiles;
