//! Single instructions against results that follow from the PTX manual.

mod common;

use common::{float, kernel, run, value};

#[test]
fn integers() {
    for (body, expected) in [
        ("mov.u32 %r2, 7; add.u32 %r1, %r2, -9;", -2_i32 as u32),
        ("add.sat.s32 %r1, 2147483647, 5;", i32::MAX as u32),
        ("mov.u32 %r2, -7; div.s32 %r1, %r2, 2;", -3_i32 as u32),
        ("mov.u32 %r2, -7; rem.s32 %r1, %r2, 4;", -3_i32 as u32),
        ("mul.hi.u32 %r1, -1, -1;", 0xffff_fffe),
        ("mul.wide.s32 %d2, -3, 5; cvt.u32.u64 %r1, %d2;", -15_i32 as u32),
        ("mad.lo.s32 %r1, 3, 5, -1;", 14),
        ("mul24.lo.s32 %r1, 0xffffff, 2;", -2_i32 as u32),
        ("shl.b32 %r1, 1, 32;", 0),
        ("mov.u32 %r2, -8; shr.s32 %r1, %r2, 40;", u32::MAX),
        ("shf.l.wrap.b32 %r1, 0x80000000, 1, 33;", 3),
        ("shf.r.clamp.b32 %r1, 5, 7, 32;", 7),
        ("popc.b32 %r1, 0xf0f0;", 8),
        ("clz.b32 %r1, 1;", 31),
        ("brev.b32 %r1, 1;", 1 << 31),
        ("bfind.s32 %r1, -5;", 2),
        ("bfind.shiftamt.u32 %r1, 1;", 31),
        ("bfe.u32 %r1, 0xabcd, 4, 8;", 0xbc),
        ("bfe.s32 %r1, 0xf0, 4, 4;", u32::MAX),
        ("bfi.b32 %r1, 0xf, 0, 8, 4;", 0xf00),
        ("bmsk.clamp.b32 %r1, 4, 3;", 0x70),
        ("prmt.b32 %r1, 0x33221100, 0x77665544, 0x7531;", 0x7755_3311),
        ("prmt.b32 %r1, 0x80, 0, 0x8888;", u32::MAX),
        ("prmt.b32.rc8 %r1, 0x33221100, 0, 2;", 0x2222_2222),
        ("mov.b32 %r2, 0xff00ff00; lop3.b32 %r1, %r2, 0xf0f0f0f0, 0xcccccccc, 0xe8;", 0xfcc0_fcc0),
        ("dp4a.s32.u32 %r1, 0xff01ff01, 0x01010102, 10;", 11),
        ("dp2a.lo.u32.u32 %r1, 0x00030002, 0x0504, 1;", 24),
        ("sad.u32 %r1, 3, 8, 10;", 15),
        ("mov.b32 %r2, -1; add.cc.u32 %r3, %r2, 1; addc.u32 %r1, 4, 0;", 5),
        ("sub.cc.u32 %r3, 1, 2; subc.u32 %r1, 4, 0;", 3),
        ("min.s32 %r1, -1, 1;", u32::MAX),
        ("cnot.b32 %r1, 0;", 1),
        ("slct.b32.s32 %r1, 1, 2, -1;", 2),
        ("setp.lt.s32 %p1|%p2, 1, 2; selp.b32 %r1, 5, 6, %p2;", 6),
        ("setp.gt.u32 %p1, 1, 2; setp.eq.or.u32 %p2, 3, 4, !%p1; selp.b32 %r1, 5, 6, %p2;", 5),
        ("set.lt.u32.s32 %r1, 1, 2;", u32::MAX),
        ("mov.b32 {%h1, %h2}, 0x12345678; mov.b32 %r1, {%h2, %h1};", 0x5678_1234),
        ("cvt.s32.s8 %r1, 0x1ff;", u32::MAX),
        ("cvt.sat.u8.s32 %r1, 300;", 255),
        ("cvt.rzi.s32.f32 %r1, 0fC0200000;", -2_i32 as u32),
        ("cvt.rni.s32.f32 %r1, 0f40200000;", 2),
        ("cvt.rzi.u32.f32 %r1, 0f7F800000;", u32::MAX),
        ("cvt.rzi.s32.f32 %r1, 0f7FC00000;", 0),
        ("cvt.rn.bf16x2.f32 %r1, 0f3F800000, 0f40000000;", 0x3f80_4000),
        ("cvt.rn.f16x2.f32 %r1, 0f3F800000, 0f477FF000;", 0x3c00_7c00),
        ("cvt.rn.satfinite.e4m3x2.f32 %h1, 0f43E00000, 0fC4000000; cvt.u32.u16 %r1, %h1;", 0x7efe),
        ("mov.b16 %h1, 0x387e; cvt.rn.f16x2.e4m3x2 %r1, %h1;", 0x3c00_5f00),
        ("cvt.rna.tf32.f32 %r1, 0f3F801000;", 0x3f80_2000),
    ] {
        assert_eq!(value(body), expected, "{body}: {:#x}", value(body));
    }
}

#[test]
fn floats() {
    let tiny = f32::from_bits(1);
    for (body, expected) in [
        ("add.rn.f32 %f1, 0f3F800000, 0f33800000;", 1.0),
        ("add.rp.f32 %f1, 0f3F800000, 0f33800000;", 1.0_f32.next_up()),
        ("sub.rm.f32 %f1, 0f3F800000, 0f00000001;", 1.0_f32.next_down()),
        ("mul.rz.f32 %f1, 0f3F800001, 0f3F800001;", f32::from_bits(0x3f80_0002)),
        ("fma.rn.f32 %f1, 0f3F800001, 0f3F800001, 0fBF800002;", f32::from_bits(0x2880_0000)),
        ("add.f32 %f1, 0f00000001, 0f00000000;", tiny),
        ("add.ftz.f32 %f1, 0f00000001, 0f00000000;", 0.0),
        ("add.sat.f32 %f1, 0f3F800000, 0f3F800000;", 1.0),
        ("div.rn.f32 %f1, 0f3F800000, 0f40400000;", 1.0 / 3.0),
        ("div.rp.f32 %f1, 0f3F800000, 0f40400000;", (1.0_f32 / 3.0).max((1.0_f64 / 3.0) as f32)),
        ("sqrt.rn.f32 %f1, 0f40000000;", 2.0_f32.sqrt()),
        ("min.f32 %f1, 0f7FC00000, 0f3F800000;", 1.0),
        ("max.f32 %f1, 0f80000000, 0f00000000;", 0.0),
        ("copysign.f32 %f1, 0f80000000, 0f3F800000;", -1.0),
        ("ex2.approx.ftz.f32 %f1, 0fFF800000;", 0.0),
        ("lg2.approx.f32 %f1, 0f41000000;", 3.0),
        ("cvt.rn.f32.s64 %f1, 16777217;", 16_777_216.0),
        ("cvt.rp.f32.s64 %f1, 16777217;", 16_777_218.0),
        ("mov.b16 %h1, 0x0001; cvt.f32.f16 %f1, %h1;", 1.0 / 16_777_216.0),
        ("mov.f64 %g1, 0d3FF0000000000001; cvt.rn.f32.f64 %f1, %g1;", 1.0),
        ("cvt.rmi.f32.f32 %f1, 0fBFC00000;", -2.0),
        ("cvt.sat.f32.f32 %f1, 0fC0000000;", 0.0),
    ] {
        assert_eq!(float(body).to_bits(), f32::to_bits(expected), "{body}: {}", float(body));
    }
    assert!(float("max.NaN.f32 %f1, 0f7FC00000, 0f3F800000;").is_nan());
    assert_eq!(value("add.rn.f32 %f1, 0f7F800000, 0fFF800000; mov.b32 %r1, %f1;"), 0x7fff_ffff);
    // In each half: 1 + 1 and 2 + 2^-11 in float16, rounded to even.
    assert_eq!(value("mov.b32 %r2, 0x3c004000; add.rn.f16x2 %r1, %r2, 0x3c001000;"), 0x4000_4000);
    assert_eq!(value("mov.b32 %r2, 0x3f803f80; fma.rn.bf16x2 %r1, %r2, %r2, %r2;"), 0x4000_4000);
}

#[test]
fn lanes_diverge_and_meet_again() {
    let body = "
        and.b32 %r2, %r0, 3; mov.u32 %r3, 0;
        LOOP:
        setp.ge.u32 %p1, %r3, %r2; @%p1 bra DONE;
        add.u32 %r3, %r3, 1; bra LOOP;
        DONE:
        activemask.b32 %r4; bar.warp.sync -1; vote.sync.ballot.b32 %r5, %p1, -1;
        setp.eq.u32 %p2, %r5, -1; @!%p2 mov.u32 %r3, 99;
        st.global.u32 [%d1], %r3;";
    for seed in 0..20 {
        let (report, words) = run(&kernel("", body), 1, 32, 32, seed);
        assert_eq!(report.failure(), None);
        assert!(words.iter().enumerate().all(|(i, word)| *word == i as u32 % 4), "{words:?}");
    }
}

#[test]
fn warps_exchange_values() {
    let each = |body: &str| {
        let (report, words) = run(&kernel("", &format!("{body} st.global.b32 [%d1], %r1;")), 1, 32, 32, 3);
        assert_eq!(report.failure(), None, "{body}");
        words
    };
    assert_eq!(each("shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;")[..4], [1, 0, 3, 2]);
    assert_eq!(each("shfl.sync.up.b32 %r1|%p1, %r0, 2, 0, -1;")[..4], [0, 1, 0, 1]);
    assert_eq!(each("shfl.sync.down.b32 %r1, %r0, 4, 31, -1;")[26..], [30, 31, 28, 29, 30, 31]);
    // Segments of eight lanes.
    assert_eq!(each("shfl.sync.idx.b32 %r1, %r0, 1, 0x181f, -1;")[7..10], [1, 9, 9]);
    assert_eq!(each("redux.sync.add.u32 %r1, %r0, -1;")[5], 496);
    assert_eq!(each("shr.u32 %r2, %r0, 1; match.any.sync.b32 %r1, %r2, -1;")[2..4], [12, 12]);
    assert_eq!(each("elect.sync %r1|%p1, -1; @%p1 mov.u32 %r1, 77;")[..2], [77, 0]);
    assert_eq!(each("setp.lt.u32 %p1, %r0, 3; vote.sync.ballot.b32 %r1, %p1, -1;")[9], 7);
}

#[test]
fn blocks_meet_at_barriers_and_atomics_add_up() {
    let shared = ".shared .align 4 .b32 sum;";
    let body = "
        mov.u32 %r9, sum;
        setp.eq.u32 %p1, %r0, 0; @%p1 st.shared.u32 [%r9], 0;
        bar.sync 0;
        atom.shared.add.u32 %r2, [%r9], %r0;
        bar.sync 0;
        ld.shared.u32 %r1, [%r9];
        setp.lt.u32 %p2, %r0, 10;
        bar.red.popc.u32 %r3, 0, %p2;
        add.u32 %r1, %r1, %r3;
        @%p1 red.global.add.u32 [%d0], %r1;";
    for seed in 0..10 {
        let (report, words) = run(&kernel(shared, body), 5, 96, 1, seed);
        assert_eq!(report.failure(), None);
        assert_eq!(words[0], 5 * (95 * 96 / 2 + 10));
    }
}

#[test]
fn an_unknown_instruction_is_named_with_its_line() {
    let text = kernel("", "add.u32 %r1, %r2, 3;\nfrobnicate.b32 %r1, %r2;");
    let error = ptx_interpreter::Module::parse(&text).unwrap_err().to_string();
    assert!(error.starts_with("PTX line 12: frobnicate.b32: the instruction is not supported"), "{error}");
    let text = kernel("", "add.rn.u32 %r1, %r2, 3;");
    let error = ptx_interpreter::Module::parse(&text).unwrap_err().to_string();
    assert!(error.contains("add.rn.u32: these modifiers are not supported"), "{error}");
}

#[test]
fn every_pattern_of_the_table_can_be_matched() {
    use ptx_interpreter::table::{ROWS, SETS, find};
    for row in ROWS {
        // The first choice of each needed element.
        let mut opcode = row.name().to_string();
        for element in row.pattern.split(' ').skip(1).filter(|element| !element.ends_with('?')) {
            let first = element.split('|').next().unwrap();
            let first = match first.strip_prefix('$') {
                Some(name) => {
                    let set = SETS.iter().find(|(set, _)| *set == name).unwrap_or_else(|| panic!("no set {name}"));
                    set.1.split('|').next().unwrap()
                }
                None => first,
            };
            opcode = format!("{opcode}.{}", first.replace('N', "64"));
        }
        let (found, _) = find(&opcode).unwrap_or_else(|| panic!("{opcode} is not found"));
        assert_eq!(found.name(), row.name());
    }
}

#[test]
fn approximations_stay_within_the_manual_s_bounds() {
    use ptx_interpreter::{GpuOptions, GridLaunch, Module, VirtualGpu};
    // Two units in the last place of 2^x, for x from 0 to 1: mantissas from 1 to 2.
    let text = kernel(
        "",
        "cvt.rn.f32.u32 %f1, %r0; mul.f32 %f1, %f1, 0f3C800000; ex2.approx.ftz.f32 %f2, %f1; st.global.f32 [%d1], %f2;",
    );
    let module = Module::parse(&text).unwrap();
    let with = |approximation_error| {
        let mut gpu = VirtualGpu::new(GpuOptions { approximation_error, ..GpuOptions::default() });
        let out = gpu.memory.allocate(4 * 64);
        gpu.launch(&module, "test", &GridLaunch::new([1; 3], [64, 1, 1], 0), &out.to_le_bytes()).unwrap();
        gpu.memory.read(out, 4 * 64).as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect::<Vec<_>>()
    };
    let exact = with(0.0);
    for error in [-1.0, 1.0] {
        let found = with(error);
        assert!(found != exact && found.iter().zip(&exact).all(|(a, b)| a.abs_diff(*b) <= 2), "{error}");
    }
}

/// Halves of pairs are compared apart. The words are 1 and -2, and 1 and 3, as float16.
#[test]
fn pairs_are_compared_half_by_half() {
    let pair = "mov.b32 %r2, 0xc0003c00; mov.b32 %r3, 0x42003c00;";
    assert_eq!(value(&format!("{pair} set.eq.f16x2.f16x2 %r1, %r2, %r3;")), 0x3c00);
    assert_eq!(value(&format!("{pair} set.lt.f16x2.f16x2 %r1, %r2, %r3;")), 0x3c00_0000);
    let both = "setp.le.f16x2 %p1|%p2, %r3, %r2; selp.b32 %r1, 1, 0, %p1; @%p2 add.u32 %r1, %r1, 2;";
    assert_eq!(value(&format!("{pair} {both}")), 1);
    assert_eq!(value("mov.b16 %h0, 0x3f80; set.eq.bf16.bf16 %h1, %h0, %h0; cvt.u32.u16 %r1, %h1;"), 0x3f80);
}

/// libcu++ names the operation before the order.
#[test]
fn atomics_may_name_their_operation_first() {
    let body = "atom.add.acquire.gpu.u32 %r2, [%d0], 2; atom.cas.release.gpu.b32 %r2, [%d0], 64, 5;";
    let (report, words) = run(&kernel("", body), 1, 32, 1, 3);
    assert_eq!((report.failure(), &words[..]), (None, &[5][..]));
}
