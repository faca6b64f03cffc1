//! A kernel beside a version of it: where they part.

mod common;

use common::kernel;
use ptx_interpreter::divergence::KernelDivergence;
use ptx_interpreter::{GpuOptions, GridLaunch, Module, VirtualGpu};

/// Rows of four chunks of 16 bytes, each chunk stored at its number xor (row & 3), and read at its number xor
/// (row & `mask`).
fn swizzled(mask: u32, more: &str) -> String {
    let shared = ".shared .align 16 .b8 tile[512];";
    let body = format!(
        "{more}
         and.b32 %r1, %r0, 7; shr.u32 %r2, %r0, 3; and.b32 %r3, %r1, 3; xor.b32 %r4, %r2, %r3;
         mov.u32 %r9, tile; mad.lo.u32 %r5, %r1, 64, %r9; mad.lo.u32 %r6, %r4, 16, %r5;
         mul.lo.u32 %r7, %r0, 3; add.u32 %r8, %r7, 1;
         st.shared.v4.u32 [%r6], {{%r7, %r8, %r0, %r7}};
         bar.sync 0;
         and.b32 %r3, %r1, {mask}; xor.b32 %r4, %r2, %r3; mad.lo.u32 %r6, %r4, 16, %r5;
         ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r6];
         add.u32 %r10, %r10, %r13;
         st.global.u32 [%d1], %r10;"
    );
    kernel(shared, &body)
}

fn compare(a: &str, b: &str) -> Option<KernelDivergence> {
    let [a, b] = [a, b].map(|text| Module::parse(text).unwrap());
    let mut gpu = VirtualGpu::new(GpuOptions::default());
    let out = gpu.memory.allocate(128);
    gpu.compare((&a, "test"), (&b, "test"), &GridLaunch::new([1; 3], [32, 1, 1], 0), &out.to_le_bytes()).unwrap()
}

fn text_line(text: &str, part: &str) -> String {
    format!("PTX line {}", text.lines().position(|line| line.contains(part)).unwrap() + 1)
}

#[test]
fn a_wrong_swizzle_is_found_where_it_is_read() {
    let (right, wrong) = (swizzled(3, ""), swizzled(1, ""));
    assert_eq!(compare(&right, &right), None);
    let divergence = compare(&wrong, &right).expect("they differ");
    assert_eq!(divergence.instruction, "ldmatrix", "{divergence}");
    assert_eq!(divergence.lines, [text_line(&wrong, "ldmatrix"), text_line(&right, "ldmatrix")]);
    assert_eq!((divergence.occurrence, divergence.is_missing), (0, false));
}

/// Instructions that are only in one of the modules are left out, and the others are found behind them.
#[test]
fn lines_may_have_moved() {
    let right = swizzled(3, "");
    let moved = "setp.eq.u32 %p1, %r0, 40; @%p1 bra SKIP;\n mul.lo.u32 %r20, %r0, 5;\n SKIP: add.u32 %r21, %r0, 1;\n";
    assert_eq!(compare(&swizzled(3, moved), &right), None);
    let wrong = swizzled(1, moved);
    let divergence = compare(&wrong, &right).expect("they differ");
    assert_eq!(divergence.lines, [text_line(&wrong, "ldmatrix"), text_line(&right, "ldmatrix")], "{divergence}");
    assert!(!divergence.unmatched_lines[0].is_empty() && divergence.unmatched_lines[1].is_empty(), "{divergence}");
}
