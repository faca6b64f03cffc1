//! The prefill kernel on warp groups, which a device of compute capability 9.0 has.

use super::*;
use crate::emulation::ptx::{Architecture, asked_for};
use crate::support::{breaks, on_emulation};

fn case(dtype: DType, shape: AttentionShape, block_size: usize, seqs: &[(usize, usize)], seed: u64) -> Case {
    Case { dtype, shape, block_size, seqs: seqs.to_vec(), batch_invariant: false, codes: None, seed }
}

/// Two chunks of 576 and 544 keys: more tiles of 128 than shared memory holds, of which the last is not whole. Tiles
/// are no whole number of blocks.
fn chunked() -> Case {
    case(DType::BF16, shape(4, 4, 64), 24, &[(1100, 20)], 1)
}

/// Rows of several sequences that see different keys of a tile. The last sequence's keys are 448 to 639 in two chunks,
/// of which the first ends at 512, within a tile.
fn windows() -> Case {
    let shape = AttentionShape { window: Some(150), ..shape(8, 2, 64) };
    case(DType::F16, shape, 16, &[(500, 40), (0, 9), (3, 1), (130, 7), (620, 20)], 2)
}

/// Heads of five panels, whose swizzle is that of 16 columns.
fn narrow_panels() -> Case {
    case(DType::BF16, shape(6, 2, 80), 16, &[(300, 30), (0, 45)], 7)
}

fn capped(shape: AttentionShape) -> AttentionShape {
    AttentionShape { softcap: Some(0.7), ..shape }
}

fn windowed(shape: AttentionShape, window: usize) -> AttentionShape {
    AttentionShape { window: Some(window), ..shape }
}

fn with_codes(case: Case, codes: CodeType) -> Case {
    Case { codes: Some(codes), ..case }
}

/// Both sequences end within eight tokens whose scales are copied together.
fn narrow_panels_of_codes() -> Case {
    with_codes(narrow_panels(), CodeType::Int8)
}

/// Checks chunks that are merged, with more tiles than shared memory holds.
pub fn check_chunks_of_warp_groups(device: &dyn Fn(u32) -> Rc<dyn Device>) {
    check_on(&chunked(), device);
}

/// The same over a cache of codes.
pub fn check_chunks_of_codes(device: &dyn Fn(u32) -> Rc<dyn Device>) {
    check_on(&with_codes(chunked(), CodeType::Int8), device);
}

/// Checks also rows that see different keys.
pub fn check_warp_groups(device: &dyn Fn(u32) -> Rc<dyn Device>) {
    check_on(&windows(), device);
    check_on(&narrow_panels(), device);
    check_chunks_of_warp_groups(device);
    check_on(&with_codes(windows(), CodeType::Fp8), device);
    check_on(&narrow_panels_of_codes(), device);
    check_chunks_of_codes(device);
}

#[test]
fn heads_groups_blocks_and_masks() {
    if asked_for() == Some(Architecture::Sm80) {
        return;
    }
    let cases = [
        chunked(),
        windows(),
        narrow_panels(),
        case(DType::F16, windowed(shape(4, 4, 96), 100), 32, &[(90, 50), (128, 1), (5, 3)], 8),
        // Tiles of 64 keys, the last of which are not whole.
        case(DType::BF16, capped(shape(8, 4, 256)), 16, &[(200, 30), (63, 2), (0, 7)], 9),
        case(DType::F16, windowed(shape(2, 1, 256), 70), 8, &[(600, 20)], 10),
        // All heads of a KV head do not fit into a tile of one token.
        case(DType::BF16, shape(130, 1, 64), 16, &[(70, 3)], 3),
        case(DType::BF16, capped(shape(4, 1, 128)), 1, &[(100, 35), (127, 2), (128, 3)], 4),
        case(DType::F16, windowed(shape(5, 1, 128), 40), 256, &[(260, 30), (0, 5)], 5),
        // More tokens than a tile has; a token sees only itself.
        case(DType::BF16, windowed(shape(2, 2, 64), 1), 7, &[(0, 200)], 6),
    ];
    parallel(0..cases.len() as u64, |i| check(&cases[i as usize]));
}

#[test]
fn codes_of_every_head_size() {
    if asked_for() == Some(Architecture::Sm80) {
        return;
    }
    let cases = [
        with_codes(chunked(), CodeType::Int8),
        with_codes(windows(), CodeType::Fp8),
        narrow_panels_of_codes(),
        with_codes(case(DType::F16, windowed(shape(4, 4, 96), 100), 32, &[(90, 50), (5, 3)], 8), CodeType::Fp8),
        // Shared memory has room for one tile of codes.
        with_codes(case(DType::BF16, capped(shape(8, 4, 256)), 16, &[(200, 30), (63, 2), (0, 7)], 9), CodeType::Int8),
        with_codes(case(DType::F16, windowed(shape(2, 1, 256), 70), 8, &[(300, 20)], 10), CodeType::Fp8),
        with_codes(case(DType::BF16, capped(shape(4, 1, 128)), 8, &[(400, 35), (127, 2), (1, 3)], 4), CodeType::Fp8),
        with_codes(case(DType::F16, windowed(shape(5, 1, 128), 40), 256, &[(260, 30), (0, 5)], 5), CodeType::Int8),
    ];
    parallel(0..cases.len() as u64, |i| {
        let case = &cases[i as usize];
        check(case);
        if [64, 128].contains(&case.shape.head_dim) {
            // The other kernel for prompts has codes, too.
            check(&Case { batch_invariant: true, ..case.clone() });
        }
    });
}

#[test]
fn broken_kernels_are_noticed() {
    if !on_emulation() {
        return;
    }
    let (chunked, windows, narrow_panels) = (chunked(), windows(), narrow_panels());
    let (chunked_codes, narrow_codes) = (with_codes(chunked.clone(), CodeType::Int8), narrow_panels_of_codes());
    let file = "attention_hopper.cu";
    let breakages: [(&Case, &str, &str, &str); 16] = [
        (&windows, "include/swizzle.cuh", "% PANEL_CHUNKS ^ pattern", "% PANEL_CHUNKS ^ pattern % 4"),
        (&narrow_panels, "include/swizzle.cuh", "row * PANEL_CHUNKS / 8 % PANEL_CHUNKS", "row % PANEL_CHUNKS"),
        (&narrow_panels, file, "copy < COPIES; copy += WIDTH", "copy < COPIES - WIDTH; copy += WIDTH"),
        (&windows, file, "mbarrier_wait(&control.k.full[k_place.stage], k_place.parity);", ""),
        (
            &chunked,
            file,
            "tokens = tokens_of(first);\n        mbarrier_wait(&barriers.empty[place.stage], place.parity ^ 1);",
            "tokens = tokens_of(first);",
        ),
        (&windows, file, "            factors[half] = softmax", "            factors[half] = 1.0f; softmax"),
        (&windows, file, "first < all_see_from ||", "all_see_from == NONE ||"),
        (&windows, file, "keys.to[0] = min(keys.to[0], item.end_key);", ""),
        (&chunked, file, "if (position < end) {", "{"),
        (&chunked, "include/attention_merge.cuh", "i += Team::THREADS", "i += 2 * Team::THREADS"),
        (&narrow_codes, "include/attention.cuh", "first + token < end ?", "true ?"),
        (&narrow_codes, file, "block = token / WARP_SIZE == i ?", "block = i == 0 ?"),
        (&narrow_codes, file, "__syncwarp();  // the codes", "// the codes"),
        (&chunked_codes, file, "copy_async_wait<CODE_STAGES - 1>", "copy_async_wait<CODE_STAGES>"),
        (&chunked_codes, file, "code_stage = (code_stage + 1) % CODE_STAGES;", ""),
        (&chunked_codes, file, "        barriers.publish(place.stage);  //", "        //"),
    ];
    parallel(0..breakages.len() as u64, |i| {
        let (case, file, from, to) = breakages[i as usize];
        breaks(file, from, to, |device| check_on(case, device));
    });
}
