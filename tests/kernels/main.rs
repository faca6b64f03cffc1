//! Every operation of the CPU backend against a straightforward float64 reference, on every instruction set of this
//! machine, and the contract that a row's result has the same bytes in any batch.

mod attention;
mod blocks;
mod experts;
mod fused;
mod linear;
mod profile;
mod quant;
mod random;
mod rows;
mod support;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod tile_emulator;
