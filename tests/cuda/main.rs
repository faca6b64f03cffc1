//! The whole CUDA backend without a GPU: its kernels run on the CPU (`kernels/emulation`), and a test chooses how eager
//! its streams are. With `PAGETIDE_TEST_DEVICE=cuda` the same tests run on the first GPU.

mod attention;
mod bench;
mod blocks;
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "what these tests do not use, others do")]
mod common;
mod dependent_launch;
mod emulation;
mod experts;
mod few_rows;
mod fp8;
mod fp8_products;
mod goldens;
mod kv_codes;
mod loader;
mod model;
mod ptx;
mod quantized;
mod resume;
mod rows;
mod sampling;
mod sparse;
mod support;
mod transfers;
mod warp_exchanges;
