//! The PTX interpreter against others: kernels of FlashInfer, SGLang and Liger Kernel compute what float64 references
//! say, and fragments, swizzles and descriptors are as CUTLASS has them.

mod kernels;
mod layouts;
mod reference;
