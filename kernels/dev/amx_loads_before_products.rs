// Not compiled. The loop of two tiles of rows by two panels on AMX, as it was before commit febf5e6
// (src/backend/cpu/gemm/amx.rs). See README.md for figures.
//
// Each tile is loaded right before its first product, with plain `tileloadd`, and every thread always prefetches. Today
// a tile is loaded right after the last product that reads the same register, most loads are `tileloaddt1`, and each
// thread measures from time to time whether prefetches pay.

/// The loop over the inner dimension. It starts with zeros, or with the results at `out`. The caller names the operands
/// of the body.
macro_rules! tile_loop {
    ($($body:expr),* ; $($operands:tt)*) => {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "test {go_on}, {go_on}",
            "jz 2f",
            "tileloadd tmm0, [{out} + {line}]",
            "tileloadd tmm1, [{out} + {line} + 1024]",
            "tileloadd tmm2, [{out} + {line} + 2048]",
            "tileloadd tmm3, [{out} + {line} + 3072]",
            "2:",
            $($body,)*
            "dec {steps}",
            "jnz 2b",
            "tilestored [{out} + {line}], tmm0",
            "tilestored [{out} + {line} + 1024], tmm1",
            "tilestored [{out} + {line} + 2048], tmm2",
            "tilestored [{out} + {line} + 3072], tmm3",
            line = in(reg) 64usize,
            $($operands)*
            options(nostack),
        )
    };
}

impl Block<'_> {
    /// Two tiles of rows by up to two panels. Results are stored at `results`. Unless `steps` begins at 0, the sums
    /// start with what is there. Each step prefetches four lines from each of the addresses `ahead`.
    unsafe fn two_by(&self, num_panels: usize, steps: Range<usize>, results: *mut f32, ahead: [*const u8; 2]) {
        let (x, _) = self.x(steps.start);
        unsafe {
            tile_loop!(
                "tileloadd tmm4, [{x} + {line}]",
                "tileloadd tmm6, [{w0} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "prefetcht1 [{ahead0}]",
                "prefetcht1 [{ahead0} + 64]",
                "prefetcht1 [{ahead0} + 128]",
                "prefetcht1 [{ahead0} + 192]",
                "tileloadd tmm7, [{w1} + {line}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{x1} + {line}]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "prefetcht1 [{ahead1}]",
                "prefetcht1 [{ahead1} + 64]",
                "prefetcht1 [{ahead1} + 128]",
                "prefetcht1 [{ahead1} + 192]",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {x}, 1024",
                "add {x1}, 1024",
                "add {w0}, 1024",
                "add {w1}, 1024",
                "add {ahead0}, 256",
                "add {ahead1}, 256";
                x = inout(reg) x => _,
                x1 = inout(reg) x.add(self.part.product.layout.tile) => _,
                w0 = inout(reg) self.weights(0, num_panels, steps.start) => _,
                w1 = inout(reg) self.weights(1, num_panels, steps.start) => _,
                ahead0 = inout(reg) ahead[0] => _,
                ahead1 = inout(reg) ahead[1] => _,
                steps = inout(reg) steps.len() => _,
                go_on = in(reg) steps.start,
                out = in(reg) results,
            );
        }
    }
}
