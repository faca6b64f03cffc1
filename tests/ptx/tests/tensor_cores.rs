//! Products on tensor cores against plain ones, with the fragments of the PTX manual's figures.

mod common;

use common::{kernel, run, value};
use ptx_interpreter::tensor_map::{Swizzle, TensorMap};

/// Small whole numbers, exact in every type.
fn small(row: usize, column: usize) -> f32 {
    ((row * 7 + column * 3 + 1) % 5) as f32 - 2.0
}

fn bf16(x: f32) -> u32 {
    x.to_bits() >> 16
}

/// m16n8k16 of bfloat16. The manual: a0, a1: row g, columns 2t, 2t + 1; a2, a3: row g + 8; a4 to a7: columns + 8;
/// b0, b1: rows 2t, 2t + 1 of column g; b2, b3: rows + 8; c0, c1: row g, columns 2t, 2t + 1; c2, c3: row g + 8.
#[test]
fn mma_bf16() {
    let text = kernel(
        "",
        "shl.b32 %r1, %r0, 5; cvt.u64.u32 %d2, %r1; add.s64 %d2, %d0, %d2;
         ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%d2]; ld.global.v2.b32 {%r6, %r7}, [%d2+16];
         mov.f32 %f1, 0f3F800000;
         mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f2, %f3, %f4, %f5}, {%r2, %r3, %r4, %r5}, {%r6, %r7}, {%f1, %f1, %f1, %f1};
         st.global.v4.f32 [%d2+1024], {%f2, %f3, %f4, %f5};",
    );
    let module = ptx_interpreter::Module::parse(&text).unwrap();
    let mut gpu = ptx_interpreter::VirtualGpu::default();
    let out = gpu.memory.allocate(2048);
    for lane in 0..32 {
        let (g, t) = (lane / 4, lane % 4);
        let a = |row: usize, column: usize| bf16(small(row, column)) | bf16(small(row, column + 1)) << 16;
        let b = |row: usize, column: usize| bf16(small(row, column + 50)) | bf16(small(row + 1, column + 50)) << 16;
        let words = [a(g, 2 * t), a(g + 8, 2 * t), a(g, 2 * t + 8), a(g + 8, 2 * t + 8), b(2 * t, g), b(2 * t + 8, g)];
        let contents: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        gpu.memory.write(out + 32 * lane as u64, &contents);
    }
    let launch = ptx_interpreter::GridLaunch::new([1; 3], [32, 1, 1], 0);
    let report = gpu.launch(&module, "test", &launch, &out.to_le_bytes()).unwrap();
    assert_eq!(report.failure(), None);
    assert_eq!(report.counters.total().tensor_operations, 2 * 16 * 8 * 16);
    for lane in 0..32 {
        let (g, t) = (lane / 4, lane % 4);
        let found = gpu.memory.read(out + 1024 + 32 * lane as u64, 16);
        for (i, word) in found.as_chunks().0.iter().enumerate() {
            let (row, column) = (g + 8 * (i / 2), 2 * t + i % 2);
            let expected: f32 = 1.0 + (0..16).map(|k| small(row, k) * small(k, column + 50)).sum::<f32>();
            assert_eq!(f32::from_le_bytes(*word), expected, "row {row}, column {column}");
        }
    }
}

#[test]
fn mma_of_bytes_adds_up() {
    // All ones: each element is the number of terms, plus 3.
    let body = "mov.b32 %r2, 0x01010101; mov.b32 %r3, 3;
        mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r4, %r5, %r6, %r7}, {%r2, %r2, %r2, %r2}, {%r2, %r2}, {%r3, %r3, %r3, %r3};
        st.global.b32 [%d1], %r7;";
    let (report, words) = run(&kernel("", body), 1, 32, 32, 1);
    assert_eq!((report.failure(), words), (None, vec![35; 32]));
    let body = "mov.b32 %r2, 0x38383838; mov.f32 %f1, 0f00000000;
        mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%f2, %f3, %f4, %f5}, {%r2, %r2, %r2, %r2}, {%r2, %r2}, {%f1, %f1, %f1, %f1};
        st.global.f32 [%d1], %f5;";
    let (report, words) = run(&kernel("", body), 1, 32, 32, 1);
    assert_eq!((report.failure(), words), (None, vec![32.0_f32.to_bits(); 32]));
}

#[test]
fn matrices_are_loaded_transposed_and_stored() {
    // Row i of the matrix holds 8 i, 8 i + 1, … as 16-bit numbers.
    let body = |load: &str| {
        format!(
            "mov.u32 %r9, tile; shl.b32 %r2, %r0, 2; add.u32 %r2, %r2, %r9;
             shl.b32 %r3, %r0, 1; add.u32 %r4, %r3, 1; shl.b32 %r4, %r4, 16; or.b32 %r3, %r3, %r4; st.shared.b32 [%r2], %r3;
             bar.warp.sync -1; and.b32 %r5, %r0, 7; shl.b32 %r5, %r5, 4; add.u32 %r5, %r5, %r9;
             {load} st.global.b32 [%d1], %r1;"
        )
    };
    let shared = ".shared .align 16 .b8 tile[512];";
    let each = |load: &str| {
        let (report, words) = run(&kernel(shared, &body(load)), 1, 32, 32, 1);
        assert_eq!(report.failure(), None, "{load}");
        words
    };
    let plain = each("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r5];");
    let transposed = each("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r1}, [%r5];");
    let moved =
        each("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r5]; movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r2;");
    let stored = each(
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r5]; add.u32 %r5, %r5, 128;
         stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%r5], {%r2}; bar.warp.sync -1;
         ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r5];",
    );
    for lane in 0..32 {
        let (g, t) = (lane / 4, lane % 4);
        assert_eq!(plain[lane as usize], (8 * g + 2 * t) | (8 * g + 2 * t + 1) << 16);
        assert_eq!(transposed[lane as usize], (16 * t + g) | (16 * t + 8 + g) << 16);
    }
    assert_eq!(moved, transposed);
    assert_eq!(stored, transposed);
}

#[test]
fn swizzles_permute_chunks_within_lines() {
    // CUTLASS: Swizzle<3, 4, 3> for 128 bytes, <2, 4, 3> for 64, <1, 4, 3> for 32.
    assert_eq!(Swizzle::Bytes128.apply(128 * 3 + 16 * 5 + 2), 128 * 3 + 16 * (5 ^ 3) + 2);
    assert_eq!(Swizzle::Bytes64.apply(128 * 3 + 16 * 5), 128 * 3 + 16 * (5 ^ 3));
    assert_eq!(Swizzle::Bytes64.apply(128 * 4 + 16 * 5), 128 * 4 + 16 * 5);
    assert_eq!(Swizzle::Bytes32.apply(128 + 16 * 2), 128 + 16 * 3);
    let map = TensorMap {
        address: 1 << 32,
        element_bytes: 2,
        sizes: vec![100, 7],
        strides: vec![208],
        box_sizes: vec![64, 8],
        swizzle: Swizzle::Bytes128,
        fills_nan: true,
    };
    assert_eq!(TensorMap::decode(&map.encode()), Some(map.clone()));
    assert_eq!((map.box_bytes(), TensorMap::decode(&[0; 128])), (1024, None));
}

/// A box by a tensor copy, swizzled, and a product of it by `wgmma`: A and B are 64 x 64 and 8 x 64 of bfloat16,
/// K-major.
#[test]
fn a_warp_group_multiplies_what_tensor_copies_bring() {
    let shared = ".shared .align 1024 .b8 tile[16384]; .shared .align 8 .b64 full;";
    let step = |k: usize| {
        format!(
            "add.s64 %d6, %d4, {k}; add.s64 %d7, %d5, {k};
             wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f1, %f2, %f3, %f4}}, %d6, %d7, 1, 1, 1, 0, 0;"
        )
    };
    // A descriptor: start / 16, leading offset, stride of 8 rows (1024 / 16), 128-byte swizzle.
    let body = |swizzle: u64, wait: &str| {
        format!(
        "mov.u32 %r20, full; mov.u32 %r21, tile; setp.ne.u32 %p1, %r0, 0;
         @!%p1 mbarrier.init.shared.b64 [%r20], 1; bar.sync 0; @%p1 bra WAIT;
         mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 9216;
         cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r21], [%d0, {{0, 0}}], [%r20];
         add.u32 %r22, %r21, 8192;
         cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r22], [%d0+128, {{0, 64}}], [%r20];
         WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r20], 0; @!%p2 bra WAIT;
         shr.u32 %r23, %r21, 4; cvt.u64.u32 %d4, %r23; or.b64 %d4, %d4, {0}; add.s64 %d5, %d4, 512;
         mov.f32 %f1, 0f00000000; mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1;
         wgmma.fence.sync.aligned; {1} {2} {3} {4}
         wgmma.commit_group.sync.aligned; {5}
         shl.b32 %r24, %r0, 4; cvt.u64.u32 %d8, %r24; add.s64 %d8, %d0, %d8;
         st.global.v4.f32 [%d8+16384], {{%f1, %f2, %f3, %f4}};",
        swizzle << 62 | 64 << 32 | 1 << 16,
        step(0), step(2), step(4), step(6), wait
    )
    };
    let wait = "wgmma.wait_group.sync.aligned 0;";
    let wrong = [(1, wait), (2, wait), (1, "")].map(|(swizzle, wait)| {
        let module = ptx_interpreter::Module::parse(&kernel(shared, &body(swizzle, wait))).unwrap();
        let mut gpu = ptx_interpreter::VirtualGpu::default();
        let out = gpu.memory.allocate(32768);
        let matrix: Vec<u8> = (0..72 * 64).flat_map(|i| (bf16(small(i / 64, i % 64)) as u16).to_le_bytes()).collect();
        gpu.memory.write(out + 1024, &matrix);
        for (i, rows) in [64, 8].into_iter().enumerate() {
            let map = TensorMap {
                address: out + 1024,
                element_bytes: 2,
                sizes: vec![64, 72],
                strides: vec![128],
                box_sizes: vec![64, rows],
                swizzle: Swizzle::Bytes128,
                fills_nan: false,
            };
            gpu.memory.write(out + 128 * i as u64, &map.encode());
        }
        let launch = ptx_interpreter::GridLaunch::new([1; 3], [128, 1, 1], 0);
        let report = gpu.launch(&module, "test", &launch, &out.to_le_bytes()).unwrap();
        match report.failure() {
            Some(failure) => assert!(wait.is_empty() && failure.contains("missing wait"), "{failure}"),
            None => assert!(!wait.is_empty()),
        }
        let mut wrong = 0;
        for thread in 0..128_usize {
            let found = gpu.memory.read(out + 16384 + 16 * thread as u64, 16);
            for (i, word) in found.as_chunks().0.iter().enumerate() {
                let (row, column) = (thread / 32 * 16 + thread % 32 / 4 + 8 * (i / 2), 2 * (thread % 4) + i % 2);
                let expected: f32 = (0..64).map(|k| small(row, k) * small(64 + column, k)).sum();
                wrong += usize::from(f32::from_le_bytes(*word) != expected);
            }
        }
        wrong
    });
    assert_eq!(wrong[0], 0);
    assert!(wrong[1] > 100, "a wrong swizzle is noticed");
}

#[test]
fn clusters_share_memory() {
    let text = kernel(
        ".shared .align 4 .b32 word;",
        "mov.u32 %r2, %cluster_ctarank; mov.u32 %r3, word; st.shared.u32 [%r3], %r2;
         barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
         xor.b32 %r4, %r2, 1; mapa.shared::cluster.u32 %r5, %r3, %r4; ld.shared::cluster.u32 %r6, [%r5];
         barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
         mul.wide.u32 %d3, %r2, 4; add.s64 %d3, %d0, %d3; st.global.u32 [%d3], %r6;",
    )
    .replace("{\n.reg .pred", " .reqnctapercluster 2, 1, 1 {\n.reg .pred");
    let (report, words) = run(&text, 2, 1, 2, 5);
    assert_eq!((report.failure(), words), (None, vec![1, 0]));
    assert_eq!(value("mov.u32 %r1, %cluster_nctarank;"), 1);
}
