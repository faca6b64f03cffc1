use super::*;

/// A matrix of E4M3 with a scale for each span.
fn of_floats<'c>(codes: &'c [u8], scales: &'c [u8], [rows, cols]: [usize; 2], span: ScaleSpan) -> QuantModule<'c> {
    let [span_rows, span_cols] = span.sizes([rows, cols]);
    let (lines, groups) = (rows.div_ceil(span_rows), cols.div_ceil(span_cols));
    let scales =
        HostTensor { format: DType::F32.into(), rows: lines, cols: groups, bytes: &scales[..lines * groups * 4] };
    let parts = ModuleParts {
        stored_as: "FP8".into(),
        codes: Codes::Floats(&codes[..rows * cols]),
        scales,
        is_turned: false,
        zeros: None,
        symmetric: true,
        span,
        g_idx: None,
    };
    let (name, tensors) = (String::new(), Vec::new());
    QuantModule { name, tensors, parts, rows, cols, group_of: None, format: DType::F32.into() }.held_in(DType::F32)
}

/// Where blocks of 64 columns have one scale, FP8 that is kept stands for the same weights as converted FP8.
#[test]
fn fp8_is_kept_with_any_scales_that_its_blocks_can_have() {
    let codes: Vec<u8> = (0..7 * 320u32).map(|i| (i * 89 % 251) as u8).filter(|code| code & 0x7f != 0x7f).collect();
    let scales: Vec<u8> = (0..40u32).flat_map(|i| ((i + 1) as f32 * 0.0371).to_le_bytes()).collect();
    let cases = [
        (ScaleSpan::Tensor, [6, 320], true),
        (ScaleSpan::Channel, [6, 192], true),
        (ScaleSpan::Block([4, 128]), [6, 320], true),
        (ScaleSpan::Block([3, 192]), [6, 128], true),
        (ScaleSpan::Group(64), [5, 128], true),
        (ScaleSpan::Group(32), [5, 128], false),
        (ScaleSpan::Block([4, 96]), [5, 192], false),
        (ScaleSpan::Tensor, [6, 96], false),
    ];
    for (span, [rows, cols], is_kept) in cases {
        let module = || of_floats(&codes, &scales, [rows, cols], span);
        let (converted, kept) = (module(), module().keep_fp8());
        assert_eq!(kept.format() == WeightFormat::Fp8, is_kept, "{span:?} of {rows} x {cols}");
        let weights = |module: &QuantModule<'_>| {
            let bytes = module.convert().unwrap();
            assert_eq!(bytes.len(), module.held_bytes());
            HostTensor { format: module.format(), rows, cols, bytes: &bytes }.to_f32()
        };
        assert_eq!(weights(&kept), weights(&converted), "{span:?} of {rows} x {cols}");
    }
}

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[test]
fn codes_are_read_from_where_each_method_puts_them() {
    // Two rows of eight columns: row 0 has codes 0 to 7, row 1 has 8 to 15.
    let mut out = [0; 8];
    let words = bytes(&[0x7654_3210, 0xfedc_ba98]);
    for codes in [Codes::Down { words: &words, bits: 4 }, Codes::Along { words: &words, bits: 4 }] {
        codes.read([2, 8], 1, 0, &mut out);
        assert_eq!(out, [8, 9, 10, 11, 12, 13, 14, 15]);
    }
    // With 8 bits, the second word of GPTQ is that of the next row, and of compressed-tensors that of the next columns.
    let words = bytes(&[0x0302_0100, 0x1312_1110, 0x0706_0504, 0x1716_1514]);
    Codes::Down { words: &words, bits: 8 }.read([2, 8], 1, 0, &mut out);
    assert_eq!(out, [0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17]);
    Codes::Along { words: &words, bits: 8 }.read([2, 8], 1, 0, &mut out);
    assert_eq!(out, [0x04, 0x05, 0x06, 0x07, 0x14, 0x15, 0x16, 0x17]);
    // One column of eight rows. AWQ stores rows 0, 2, 4, 6, 1, 3, 5 and 7.
    let words = bytes(&[0x7531_6420]);
    for row in 0..8 {
        Codes::Awq { words: &words }.read([8, 1], row, 0, &mut out[..1]);
        assert_eq!(usize::from(out[0]), row);
    }
    // A row that does not fill its last word.
    Codes::Along { words: &bytes(&[0x0000_0021, 0x0000_0043]), bits: 4 }.read([2, 2], 1, 0, &mut out[..2]);
    assert_eq!(out[..2], [3, 4]);
    Codes::Bytes(&[128, 255, 0, 127]).read([2, 2], 0, 0, &mut out[..2]);
    assert_eq!(out[..2], [0, 127]);
}

#[test]
fn zero_points_are_read_from_where_each_method_puts_them() {
    // Two groups of eight lines.
    let words = bytes(&[0x7654_3210, 0xfedc_ba98]);
    let get = |zeros: &Zeros<'_>, line, group| zeros.get([8, 2], line, group);
    let v2 = Zeros::Across { words: &words, bits: 4, is_v1: false };
    assert_eq!((get(&v2, 3, 0), get(&v2, 3, 1)), (3, 11));
    let down = Zeros::Down { words: &words, bits: 4 };
    assert_eq!((get(&down, 3, 0), get(&down, 3, 1)), (3, 11));
    // Row 3 is in place 5.
    let awq = Zeros::Awq { words: &words };
    assert_eq!((get(&awq, 3, 0), get(&awq, 3, 1)), (5, 13));
    // Version 1 subtracted 0x11111111 from 0x00000010 and from 0x88888888.
    let words = bytes(&[0xeeee_eeff, 0x7777_7777]);
    let v1 = Zeros::Across { words: &words, bits: 4, is_v1: true };
    assert_eq!((get(&v1, 0, 0), get(&v1, 1, 0), get(&v1, 7, 0), get(&v1, 7, 1)), (0, 1, 0, 8));
    let v1 = Zeros::Across { words: &words, bits: 8, is_v1: true };
    assert_eq!(v1.get([4, 2], 0, 1), 0x78);
    assert_eq!(Zeros::Bytes(&[0, 1, 0xff, 2]).get([2, 2], 1, 0), 127);
}

/// Scale and minimum are each rounded to float16 once.
#[test]
fn a_weight_of_q4_1_is_off_by_at_most_half_a_unit_of_its_minimum() {
    let codes: Vec<u8> = (0..BLOCK as u8).map(|code| code % 16).collect();
    let mut block = [0; 20];
    let mut weights = [0.0; BLOCK];
    for scale in (1..2000u16).map(|bits| f16::from_bits(0x2000 + bits)) {
        for zero in 0..17 {
            write_block(QuantFormat::Q4_1, scale.to_f32(), zero, &codes, &mut block);
            QuantFormat::Q4_1.dequantize(&block, &mut weights);
            let minimum = f16::from_f32(scale.to_f32() * f32::from(zero));
            let half_unit = (f16::from_bits(minimum.to_bits() + 1).to_f32() - minimum.to_f32()) / 2.0;
            for (weight, code) in weights.iter().zip(&codes) {
                let exact = scale.to_f32() * f32::from(i16::from(*code) - zero);
                assert!((weight - exact).abs() <= half_unit, "{scale} · ({code} - {zero}): {weight}");
            }
        }
    }
}

#[test]
fn symmetric_blocks_are_exact() {
    let codes: Vec<u8> = (0..BLOCK as u8).map(|code| code.wrapping_mul(37) % 16).collect();
    let mut weights = [0.0; BLOCK];
    let mut block = [0; 18];
    write_block(QuantFormat::Q4_0, 0.375, 8, &codes, &mut block);
    QuantFormat::Q4_0.dequantize(&block, &mut weights);
    assert!(weights.iter().zip(&codes).all(|(weight, code)| *weight == 0.375 * (f32::from(*code) - 8.0)));
    let codes: Vec<u8> = (0..BLOCK as u8).map(|code| code.wrapping_mul(89)).collect();
    let mut block = [0; 34];
    write_block(QuantFormat::Q8_0, 0.375, 128, &codes, &mut block);
    QuantFormat::Q8_0.dequantize(&block, &mut weights);
    assert!(weights.iter().zip(&codes).all(|(weight, code)| *weight == 0.375 * (f32::from(*code) - 128.0)));
}
