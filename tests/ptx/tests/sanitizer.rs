//! Kernels that are wrong on purpose, one for each kind of finding, and the same kernels when they are right.

mod common;

use common::{kernel, run};
use ptx_interpreter::findings::FindingKind;

const SHARED: &str = ".shared .align 16 .b8 tile[4096];";
/// `%r10`: the thread's word in shared memory; `%r11`: the next thread's; `%d2`: its 16 bytes in global memory.
const ADDRESSES: &str = "
    shl.b32 %r10, %r0, 2; mov.u32 %r9, tile; add.u32 %r10, %r10, %r9;
    add.u32 %r11, %r0, 1; and.b32 %r11, %r11, 63; shl.b32 %r11, %r11, 2; add.u32 %r11, %r11, %r9;
    mul.wide.u32 %d2, %r0, 16; add.s64 %d2, %d0, %d2;
    shl.b32 %r12, %r0, 4; add.u32 %r12, %r12, %r9;";

/// The kinds that are found under any of a few seeds, and the line of the first.
fn kinds(shared: &str, body: &str, threads: u32) -> Vec<FindingKind> {
    let text = kernel(shared, &format!("{ADDRESSES}\n{body}"));
    let mut all: Vec<FindingKind> = Vec::new();
    for seed in 0..8 {
        let (report, _) = run(&text, 2, threads, 512, seed);
        for finding in report.findings {
            assert!(finding.at.line.starts_with("PTX line "), "{finding}");
            all.push(finding.kind);
        }
    }
    all.sort();
    all.dedup();
    all
}

#[track_caller]
fn finds(kind: FindingKind, wrong: &str, right: &str, threads: u32) {
    // Without the order that it lacks, a kernel may also read what is not written yet.
    let found = kinds(SHARED, wrong, threads);
    assert!(found.contains(&kind), "{wrong}: {found:?}");
    assert_eq!(kinds(SHARED, right, threads), [], "{right}");
}

#[test]
fn a_missing_barrier_between_warps() {
    let body = |barrier: &str| format!("st.shared.u32 [%r10], %r0; {barrier} ld.shared.u32 %r1, [%r11];");
    finds(FindingKind::Race, &body("bar.warp.sync -1;"), &body("bar.sync 0;"), 64);
}

#[test]
fn a_missing_barrier_before_memory_is_used_again() {
    let body = |barrier: &str| {
        format!("st.shared.u32 [%r10], %r0; bar.sync 0; ld.shared.u32 %r1, [%r11]; {barrier} st.shared.u32 [%r10], 1;")
    };
    finds(FindingKind::Race, &body(""), &body("bar.sync 0;"), 64);
}

#[test]
fn a_missing_syncwarp() {
    // With 32 threads the last one reads its own word's neighbour, word 32, which it writes itself.
    let body = |barrier: &str| {
        format!("st.shared.u32 [%r10], %r0; st.shared.u32 [%r10+4], %r0; {barrier} ld.shared.u32 %r1, [%r11];")
    };
    let right =
        "st.shared.u32 [%r10], %r0; st.shared.u32 [%r10+128], %r0; bar.warp.sync -1; ld.shared.u32 %r1, [%r11];";
    let wrong = "st.shared.u32 [%r10], %r0; st.shared.u32 [%r10+128], %r0; ld.shared.u32 %r1, [%r11];";
    finds(FindingKind::Race, wrong, right, 32);
    assert_eq!(kinds(SHARED, &body("bar.warp.sync -1;"), 32), [FindingKind::Race], "two lanes write one word");
}

#[test]
fn a_shuffle_is_no_memory_barrier() {
    let body = "st.shared.u32 [%r10], %r0; st.shared.u32 [%r10+128], %r0; shfl.sync.idx.b32 %r2, %r0, 0, 31, -1;
        ld.shared.u32 %r1, [%r11];";
    assert_eq!(kinds(SHARED, body, 32), [FindingKind::Race]);
}

#[test]
fn a_missing_wait_for_a_copy() {
    let body = |wait: &str| {
        format!(
            "cp.async.ca.shared.global [%r12], [%d2], 16; cp.async.commit_group; {wait} bar.sync 0;
             ld.shared.u32 %r1, [%r9];"
        )
    };
    finds(FindingKind::MissingWait, &body("cp.async.wait_group 1;"), &body("cp.async.wait_group 0;"), 64);
    // A wait is not enough for another thread's copy.
    let no_barrier = "cp.async.ca.shared.global [%r12], [%d2], 16; cp.async.wait_all; ld.shared.u32 %r1, [%r9];";
    assert!(kinds(SHARED, no_barrier, 64).contains(&FindingKind::Race));
}

/// Each variable has bytes behind it that belong to none, also where another variable or dynamic memory follows.
#[test]
fn a_row_beyond_a_variable_in_shared_memory() {
    let shared = ".shared .align 16 .b8 tile[256]; .shared .align 16 .b8 next[256];
        .extern .shared .align 16 .b8 dynamic[];";
    let body = |first: &str, row: u32| {
        format!(
            "shl.b32 %r10, %r0, 2; mov.u32 %r9, {first}; add.u32 %r10, %r10, %r9; st.shared.u32 [%r10+{row}], %r0;
             mov.u32 %r9, next; mov.u32 %r8, dynamic; bar.sync 0; ld.shared.u32 %r1, [%r10+{row}];"
        )
    };
    for variable in ["tile", "next"] {
        let (report, _) = run(&kernel(shared, &body(variable, 128)), 1, 32, 512, 1);
        assert_eq!(report.failure(), None);
        let (report, _) = run(&kernel(shared, &body(variable, 256)), 1, 32, 512, 1);
        let expected = format!("4 bytes at byte 256 of {variable} in shared memory, which has 256");
        assert_eq!(
            report.findings.iter().map(|f| (f.kind, &*f.message)).collect::<Vec<_>>(),
            [(FindingKind::OutOfBounds, &*expected)]
        );
    }
}

#[test]
fn reads_of_what_was_never_written() {
    finds(
        FindingKind::Uninitialized,
        "ld.shared.u32 %r1, [%r10];",
        "st.shared.u32 [%r10], 0; ld.shared.u32 %r1, [%r10];",
        64,
    );
}

/// Unwritten global memory may be copied, also through shared memory, and computed with if nobody takes the result.
#[test]
fn uses_of_global_memory_that_was_never_written() {
    use ptx_interpreter::{GpuOptions, GridLaunch, Module, VirtualGpu};
    // The first 64 words are written, the others not. `%d2`: the thread's words; `%d3`: its words in the second half.
    let launch = |body: &str| {
        let body = format!("{ADDRESSES} add.s64 %d3, %d1, 256; {body}");
        let module = Module::parse(&kernel(SHARED, &body)).unwrap();
        let mut gpu = VirtualGpu::new(GpuOptions::default());
        let out = gpu.memory.allocate(512);
        gpu.memory.fill(out, 0, 256);
        let report = gpu.launch(&module, "test", &GridLaunch::new([1; 3], [32, 1, 1], 0), &out.to_le_bytes()).unwrap();
        report.findings.into_iter().map(|finding| (finding.kind, finding.message)).collect::<Vec<_>>()
    };
    let copied = "ld.global.u32 %r1, [%d3]; mov.b32 %r2, %r1; st.global.u32 [%d3+128], %r2;";
    let through_shared = "cp.async.ca.shared.global [%r10], [%d3], 4; cp.async.wait_all; ld.shared.u32 %r1, [%r10];
        st.global.u32 [%d3+128], %r1;";
    let dropped =
        "ld.global.u32 %r1, [%d3]; add.u32 %r2, %r1, 1; setp.lt.u32 %p1, %r0, 99; selp.u32 %r3, %r0, %r2, %p1;
        shl.b32 %r3, %r3, 1; st.global.u32 [%d1], %r3;";
    // The second half of each word stays unwritten, and the first is used.
    let halves = "cvt.u16.u32 %h0, %r0; st.global.u16 [%d3], %h0; ld.global.u32 %r1, [%d3];
        st.shared.u32 [%r10], %r1; ld.shared.u16 %h1, [%r10]; st.global.u16 [%d3+128], %h1; ld.global.u16 %h2, [%d3+128];
        add.u16 %h2, %h2, 1; st.global.u16 [%d1], %h2;";
    let by_an_mma = |lane: u32| {
        format!(
            "ld.global.u32 %r1, [%d1]; setp.ne.u32 %p1, %r0, {lane}; @%p1 mov.b32 %r1, 0;
             ld.global.u32 %r2, [%d3]; setp.lt.u32 %p2, %r0, 4; selp.u32 %r3, %r2, 0, %p2;
             mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {{%f0, %f1, %f2, %f3}}, {{%r1, %r1}}, {{%r3}},
                 {{0f00000000, 0f00000000, 0f00000000, 0f00000000}};"
        )
    };
    // Column 0 is undefined: the even registers of the first lanes of each four. Nobody takes it.
    let of_mma = |taken: &str| format!("{} st.global.f32 [%d1], {taken};", by_an_mma(0));
    for right in [copied, through_shared, dropped, halves, &of_mma("%f1")] {
        assert_eq!(launch(right), [], "{right}");
    }
    let used = |what: &str| {
        vec![(FindingKind::Uninitialized, format!("{what} depends on global memory that was never written"))]
    };
    for (wrong, what) in [
        ("ld.global.u32 %r1, [%d3]; add.u32 %r2, %r1, 1; st.global.u32 [%d1], %r2;", "a result"),
        ("ld.global.u32 %r1, [%d3]; and.b32 %r1, %r1, 0; add.u32 %r2, %r9, %r1; st.shared.u32 [%r2], 1;", "an address"),
        ("ld.global.u32 %r1, [%d3]; setp.eq.u32 %p1, %r1, 5; @%p1 bra END; END: nanosleep.u32 1;", "a decision"),
        (
            "ld.global.u32 %r1, [%d3]; shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1; xor.b32 %r2, %r2, 1;
          st.shared.u32 [%r10], %r2; ld.shared.u32 %r3, [%r10]; st.global.u32 [%d1], %r3;",
            "a result",
        ),
        (&of_mma("%f0"), "a result"),
    ] {
        assert_eq!(launch(wrong)[..1], used(what), "{wrong}");
    }
}

/// Four warps multiply what eight have written, and then the other four overwrite it.
#[test]
fn operands_of_a_product_that_may_still_be_read() {
    let shared = ".shared .align 1024 .b8 tile[9216];";
    let stores: String = (0..9).map(|i| format!("st.shared.u32 [%r20+{}], 0;", 4 * i)).collect();
    // Descriptors of 64 x 64 and 8 x 64 numbers of 16 bits with the swizzle of 128 bytes.
    let body = |behind: &str| {
        format!(
            "mul.lo.u32 %r20, %r0, 36; add.u32 %r20, %r20, %r9; {stores} fence.proxy.async; bar.sync 0;
             setp.ge.u32 %p1, %r0, 128; @%p1 bra WRITE;
             shr.u32 %r23, %r9, 4; cvt.u64.u32 %d4, %r23; or.b64 %d4, %d4, {}; add.s64 %d5, %d4, 512;
             mov.f32 %f1, 0f00000000; mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1;
             wgmma.fence.sync.aligned;
             wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f1, %f2, %f3, %f4}}, %d4, %d5, 1, 1, 1, 0, 0;
             wgmma.commit_group.sync.aligned; {behind} bra DONE;
             WRITE: bar.sync 1, 256; st.shared.u32 [%r10], 1; DONE: nanosleep.u32 1;",
            1_u64 << 62 | 64 << 32 | 1 << 16
        )
    };
    let (wait, arrive) = ("wgmma.wait_group.sync.aligned 0;", "bar.sync 1, 256;");
    let right = body(&format!("{wait} {arrive}"));
    assert_eq!(kinds(shared, &right, 256), []);
    // A fence of the warps that read is as good as one of those that have written.
    let fence = "fence.proxy.async; bar.sync 0;";
    assert_eq!(kinds(shared, &right.replacen(fence, "bar.sync 0; fence.proxy.async;", 1), 256), []);
    for without in ["bar.sync 0;", "fence.proxy.async; st.shared.u32 [%r20], 1; bar.sync 0;"] {
        assert_eq!(kinds(shared, &right.replacen(fence, without, 1), 256), [FindingKind::Proxy], "{without}");
    }
    // Whether the product has ended when the write comes depends on the order.
    let found = kinds(shared, &body(&format!("{arrive} {wait}")), 256);
    assert_eq!(found, [FindingKind::Race, FindingKind::MissingWait]);
}

#[test]
fn accesses_outside() {
    let shared = "add.u32 %r2, %r9, 4092; ld.shared.v2.u32 {%r1, %r3}, [%r2];";
    assert_eq!(kinds(SHARED, shared, 1), [FindingKind::Misaligned]);
    finds(FindingKind::OutOfBounds, "st.shared.u32 [%r9+4096], 1;", "st.shared.u32 [%r10+4], 1; bar.sync 0;", 1);
    finds(FindingKind::OutOfBounds, "ld.global.u32 %r1, [%d0+2048];", "ld.global.u32 %r1, [%d0+2044];", 64);
}

#[test]
fn freed_memory() {
    use ptx_interpreter::{GpuOptions, GridLaunch, Module, VirtualGpu};
    let module = Module::parse(&kernel("", "ld.global.u32 %r1, [%d0];")).unwrap();
    let mut gpu = VirtualGpu::new(GpuOptions::default());
    let out = gpu.memory.allocate(64);
    gpu.memory.free(out);
    let launch = GridLaunch::new([1; 3], [1; 3], 0);
    let report = gpu.launch(&module, "test", &launch, &out.to_le_bytes()).unwrap();
    assert_eq!(report.findings[0].kind, FindingKind::UseAfterFree);
    assert!(report.findings[0].message.contains("byte 0 of an allocation of 64 bytes that was freed"));
}

#[test]
fn barriers_that_some_lanes_do_not_reach() {
    let wrong = "setp.lt.u32 %p1, %r0, 7; @%p1 bra SKIP; bar.sync 0; SKIP: st.shared.u32 [%r10], 1; bar.sync 0;";
    assert_eq!(kinds(SHARED, wrong, 64), [FindingKind::BarrierDivergence]);
    let stuck = "setp.lt.u32 %p1, %r0, 32; @%p1 bar.sync 1, 64;";
    assert_eq!(kinds(SHARED, stuck, 64), [FindingKind::Deadlock]);
}

#[test]
fn blocks_are_ordered_by_fences_and_atomics() {
    // The last block to arrive reads what the first wrote: `__threadfence` and a counter.
    let body = |fence: &str| {
        format!(
            "mov.u32 %r2, %ctaid.x; mul.wide.u32 %d3, %r2, 4; add.s64 %d3, %d0, %d3;
             st.global.u32 [%d3+8], 5; {fence} atom.global.add.u32 %r3, [%d0], 1;
             setp.eq.u32 %p1, %r3, 1; @!%p1 bra DONE;
             {fence} ld.global.u32 %r4, [%d0+8]; ld.global.u32 %r5, [%d0+12];
             DONE: nanosleep.u32 1;"
        )
    };
    finds(FindingKind::Race, &body(""), &body("fence.acq_rel.gpu;"), 1);
}

#[test]
fn mbarriers_order_bulk_copies() {
    let shared = ".shared .align 128 .b8 tile[4096]; .shared .align 8 .b64 full;";
    let body = |wait: &str| {
        format!(
            "mov.u32 %r20, full; setp.ne.u32 %p1, %r0, 0;
             @!%p1 mbarrier.init.shared.b64 [%r20], 1; bar.sync 0;
             @%p1 bra WAIT;
             mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 256;
             cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%d0], 256, [%r20];
             WAIT: {wait}
             ld.shared.u32 %r1, [%r10];"
        )
    };
    let wait = "mbarrier.try_wait.parity.shared.b64 %p2, [%r20], 0; @!%p2 bra WAIT;";
    assert_eq!(kinds(shared, &body(wait), 64), []);
    let found = kinds(shared, &body(""), 64);
    assert!(found.contains(&FindingKind::MissingWait), "{found:?}");
    let never = "mov.u32 %r20, full; setp.ne.u32 %p1, %r0, 0; @!%p1 mbarrier.init.shared.b64 [%r20], 2; bar.sync 0;
        WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r20], 0; @!%p2 bra WAIT;";
    assert_eq!(kinds(shared, never, 64), [FindingKind::Deadlock]);
    let missing = "mov.u32 %r20, full; mbarrier.arrive.shared.b64 _, [%r20];";
    assert_eq!(kinds(shared, missing, 1), [FindingKind::Mbarrier]);
}
