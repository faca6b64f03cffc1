use super::*;

#[test]
fn e4m3_is_decoded_as_in_its_specification() {
    let values = [(0x00, 0.0), (0x01, 2f32.powi(-9)), (0x07, 7.0 / 512.0), (0x08, 2f32.powi(-6)), (0x38, 1.0)];
    for (byte, value) in values.into_iter().chain([(0x3c, 1.5), (0x7e, 448.0)]) {
        assert_eq!(E4M3_VALUES[byte], value, "{byte:#x}");
        assert_eq!(E4M3_VALUES[byte + 128], -value, "{byte:#x} with a sign");
    }
    assert!(E4M3_VALUES[0x7f].is_nan() && E4M3_VALUES[0xff].is_nan());
    assert_eq!(E4M3_VALUES.iter().filter(|value| value.is_nan()).count(), 2);
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
