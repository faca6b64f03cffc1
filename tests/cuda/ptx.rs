//! Kernels as executed PTX, for both architectures, and kernels that are broken on purpose: the interpreter has to say
//! what is wrong and where. With `PAGETIDE_TEST_DEVICE=ptx-sm_80` or `ptx-sm_90a` all other tests run on PTX too.

mod counters;
mod speed;

use crate::attention::hopper::{check_chunks_of_codes, check_chunks_of_warp_groups, check_warp_groups};
use crate::attention::shared::check_prefixes;
use crate::attention::{attend, check_fp8_tiles, check_long, check_tiles};
use crate::emulation::compile::kernels;
use crate::emulation::ptx::{Architecture, nvcc};
use crate::emulation::{EmulatedDevice, EmulatedOptions};
use crate::experts::check_on_warp_groups;
use crate::quantized::check_many_rows;
use crate::support::{failure_of_broken, parallel};
use pagetide::backend::cuda::device::Device;
use std::rc::Rc;

fn options(ptx: Architecture) -> EmulatedOptions {
    EmulatedOptions { ptx: Some(ptx), ..EmulatedOptions::default() }
}

/// Returns false, and says so, if there is no compiler.
fn has_nvcc() -> bool {
    let found = nvcc().is_some();
    if !found {
        println!("skipped: PAGETIDE_TEST_NVRTC is not set");
    }
    found
}

#[test]
fn attention_and_experts_run_as_ptx() {
    if !has_nvcc() {
        return;
    }
    for architecture in Architecture::ALL {
        let device = |thread_order| -> Rc<dyn Device> {
            Rc::new(EmulatedDevice::new(EmulatedOptions { thread_order, ..options(architecture) }))
        };
        check_tiles(&device);
        check_long(&device);
        check_prefixes(&device);
    }
    let device = |_| -> Rc<dyn Device> { Rc::new(EmulatedDevice::new(options(Architecture::Sm90a))) };
    check_warp_groups(&device);
    check_on_warp_groups(&device);
}

/// A file, a piece of its text, what replaces it, and what the failure has to name.
type Breakage = (&'static str, &'static str, &'static str, [&'static str; 2]);

fn check_breakages(
    breakages: &[Breakage],
    architecture: Architecture,
    run: impl Fn(&dyn Fn(u32) -> Rc<dyn Device>) + Sync,
) {
    parallel(0..breakages.len() as u64, |i| {
        let (file, from, to, wanted) = breakages[i as usize];
        let failure = failure_of_broken(file, from, to, &options(architecture), &run);
        let failure = failure.unwrap_or_else(|| panic!("nobody notices {to:?} in place of {from:?} in {file}"));
        assert!(wanted.iter().all(|part| failure.contains(part)), "{from:?}, {to:?}: {failure}");
    });
}

#[test]
fn broken_kernels_are_found_with_their_line() {
    if !has_nvcc() {
        return;
    }
    let breakages: [Breakage; 10] = [
        // Warps would overwrite V while others read it.
        (
            "attention.cu",
            "        copy_async_wait<0>();\n        __syncthreads();  // K is there",
            "        copy_async_wait<0>();  // K is there",
            ["race", "include/attention.cuh:"],
        ),
        // Warps read what other warps have copied.
        (
            "attention.cu",
            "        __syncthreads();  // the tile is there",
            "        // the tile is there",
            ["race", "attention.cu:"],
        ),
        (
            "attention.cu",
            "        copy_async_wait<0>();\n        __syncthreads();  // V is there",
            "        __syncthreads();  // V is there",
            ["missing wait", "include/ptx.cuh:"],
        ),
        // One row too many is beyond the block's shared memory.
        (
            "include/attention.cuh",
            "place_of_copy<TOKENS>(token, copy % ROW_CHUNKS), from",
            "place_of_copy<TOKENS>(token + 4096, copy % ROW_CHUNKS), from",
            ["out of bounds", "include/attention.cuh:"],
        ),
        // One row too low: what is read of the last row was never written.
        (
            "include/attention.cuh",
            "place_of_copy<TOKENS>(token, copy % ROW_CHUNKS), from",
            "place_of_copy<TOKENS>(max(token - 1, 0), copy % ROW_CHUNKS), from",
            ["uninitialized read", "include/"],
        ),
        // Rows of Q one too far.
        (
            "include/attention.cuh",
            "row_tile * 16 + lane % 16) * ROW_STRIDE + k * 16",
            "row_tile * 16 + lane % 16 + 1) * ROW_STRIDE + k * 16",
            ["race", "include/"],
        ),
        // Half of Q is never copied.
        (
            "include/attention.cuh",
            "copy < ROWS * CHUNKS;",
            "copy < ROWS * CHUNKS / 2;",
            ["uninitialized read", "include/ptx.cuh:"],
        ),
        // Not a multiple of 16 bytes.
        (
            "include/attention.cuh",
            "row_tile * 16 + lane % 16) * ROW_STRIDE + k * 16",
            "row_tile * 16 + lane % 16) * ROW_STRIDE + k * 16 + 1",
            ["misaligned", "include/ptx.cuh:"],
        ),
        // The thread block that merges chunks reads a maximum and a sum that no thread has written.
        (
            "include/attention_merge.cuh",
            "            store(partial + OF_CHUNK, max_and_sum);\n",
            "",
            ["uninitialized read", "include/attention_merge.cuh:"],
        ),
        // Other thread blocks may not see the results of a chunk that has arrived.
        (
            "include/attention_merge.cuh",
            "        __threadfence();\n        *shared",
            "        *shared",
            ["race", "include/attention_merge.cuh:"],
        ),
    ];
    check_breakages(&breakages, Architecture::Sm80, |device| {
        check_tiles(device);
        check_long(device);
    });
}

/// Chunks that several sequences share.
#[test]
fn broken_merges_of_members_are_found_with_their_line() {
    if !has_nvcc() {
        return;
    }
    let breakages = [
        // Warps write results while another thread block may read them.
        "        __syncthreads();  // this level's results are written, and no thread reads the words\n",
        // Other thread blocks may not see the results of a chunk that has arrived.
        "                __threadfence();\n",
        // Threads read whether a member is complete before another one has written it.
        "        __syncthreads();  // the words are there\n",
    ];
    parallel(0..breakages.len() as u64, |i| {
        let (file, from) = ("include/attention_merge.cuh", breakages[i as usize]);
        let failure = failure_of_broken(file, from, "", &options(Architecture::Sm80), |device| check_prefixes(device));
        let failure = failure.unwrap_or_else(|| panic!("nobody notices that {from:?} is missing"));
        assert!(failure.contains("race") && failure.contains(&format!("{file}:")), "{from:?}: {failure}");
    });
}

/// The prefill kernel on warp groups.
#[test]
fn broken_warp_groups_are_found_with_their_line() {
    if !has_nvcc() {
        return;
    }
    let file = "attention_hopper.cu";
    let breakages: [Breakage; 9] = [
        // Products read tiles that the other warps may not have copied.
        (
            file,
            "        mbarrier_wait(&control.k.full[k_place.stage], k_place.parity);\n",
            "",
            ["race", "include/ptx_hopper.cuh:"],
        ),
        (
            file,
            "        mbarrier_wait(&control.v.full[v_place.stage], v_place.parity);\n",
            "",
            ["race", "include/ptx_hopper.cuh:"],
        ),
        // Copies overwrite tiles that products may read.
        (
            file,
            "tokens = tokens_of(first);\n        mbarrier_wait(&barriers.empty[place.stage], place.parity ^ 1);\n",
            "tokens = tokens_of(first);\n",
            ["race", "include/ptx.cuh:"],
        ),
        // A warp's copies may not have ended when it says so.
        (
            file,
            "        copy_async_wait<0>();\n        fence_async_proxy();\n        barriers.publish",
            "        fence_async_proxy();\n        barriers.publish",
            ["missing wait", "include/ptx"],
        ),
        // Products may read what these tiles held before.
        (
            file,
            "        copy_async_wait<0>();\n        fence_async_proxy();\n        barriers.publish",
            "        copy_async_wait<0>();\n        barriers.publish",
            ["missing proxy fence", "include/ptx.cuh:"],
        ),
        // Products read queries that other warps have copied.
        (
            file,
            "    fence_async_proxy();\n    Consumers::synchronize();",
            "    fence_async_proxy();",
            ["race", "include/ptx"],
        ),
        // Scores, and the sums, are read before the products have ended.
        (file, "wgmma_wait<1>();", "wgmma_wait<2>();", ["missing wait", "include/attention.cuh:"]),
        (
            file,
            "        wgmma_wait<0>();\n        hold_registers(o);",
            "        hold_registers(o);",
            ["missing wait", "attention_hopper.cu:"],
        ),
        // Half of Q is never copied.
        (
            file,
            "i < PREFILL_ROWS * CHUNKS / CONSUMERS;",
            "i < PREFILL_ROWS * CHUNKS / CONSUMERS / 2;",
            ["uninitialized read", "include/ptx_hopper.cuh:"],
        ),
    ];
    check_breakages(&breakages, Architecture::Sm90a, |device| check_chunks_of_warp_groups(device));
}

/// Its copies of codes.
#[test]
fn broken_copies_of_codes_are_found_with_their_line() {
    if !has_nvcc() {
        return;
    }
    let file = "attention_hopper.cu";
    let breakages: [Breakage; 5] = [
        // Codes are read that other lanes may not have copied.
        (file, "        __syncwarp();  // the codes", "        // the codes", ["race", "include/"]),
        // Copies of codes may not have ended when they are read.
        (file, "copy_async_wait<CODE_STAGES - 1>", "copy_async_wait<CODE_STAGES>", ["missing wait", "include/"]),
        // Products read tiles that are being made.
        (
            file,
            "copied\n        mbarrier_wait(&barriers.empty[place.stage], place.parity ^ 1);\n",
            "copied\n",
            ["race", "include/"],
        ),
        // Products may read what these tiles held before.
        (
            file,
            "        fence_async_proxy();\n        barriers.publish(place.stage);  //",
            "        barriers.publish(place.stage);  //",
            ["missing proxy fence", "include/"],
        ),
        // The next codes overwrite those that are read.
        (
            file,
            "        start_codes(later, code_stage);\n        code_stage",
            "        start_codes(later, (code_stage + 1) % CODE_STAGES);\n        code_stage",
            ["missing wait", "include/ptx.cuh:"],
        ),
    ];
    check_breakages(&breakages, Architecture::Sm90a, |device| check_chunks_of_codes(device));
}

/// The product of experts on warp groups.
#[test]
fn broken_expert_products_are_found_with_their_line() {
    if !has_nvcc() {
        return;
    }
    let file = "experts_hopper.cu";
    let breakages: [Breakage; 6] = [
        // Products read slices that the other warps may not have copied.
        (
            file,
            "        mbarrier_wait(&barriers.full[place.stage], place.parity);\n",
            "",
            ["race", "include/ptx_hopper.cuh:"],
        ),
        // Copies overwrite slices that products may read.
        (
            file,
            "        mbarrier_wait(&barriers.empty[place.stage], place.parity ^ 1);\n",
            "",
            ["race", "include/ptx.cuh:"],
        ),
        // A slice may not be there when a warp says so.
        (
            file,
            "copy_async_wait<COPIES_AHEAD>();",
            "copy_async_wait<COPIES_AHEAD + 1>();",
            ["missing wait", "include/ptx"],
        ),
        (file, "    copy_async_wait<0>();\n", "", ["missing wait", "include/ptx"]),
        // A slice is overwritten while products read it.
        (file, "wgmma_wait<1>();", "wgmma_wait<2>();", ["missing wait", "include/ptx"]),
        // The sums are read before the last products have ended.
        (file, "    wgmma_wait<0>();\n    hold_registers(sums[0]);", "", ["missing wait", "experts_hopper.cu:"]),
    ];
    check_breakages(&breakages, Architecture::Sm90a, |device| check_on_warp_groups(device));
}

/// The product of quantised weights with many rows.
#[test]
fn broken_products_are_found_with_their_line() {
    if !has_nvcc() {
        return;
    }
    let file = "include/quantized.cuh";
    let breakages: [Breakage; 3] = [
        // The last tiles of a thread block are beyond the weights.
        (
            file,
            "const bool is_valid = n_tile < num_n_tiles;",
            "const bool is_valid = num_n_tiles > 0;",
            ["out of bounds", "include/ptx.cuh:"],
        ),
        // Warps read what other warps have copied.
        (file, "        __syncthreads();  // the tile is there", "        // the tile is there", ["race", "include/"]),
        // A tile may not be there yet.
        (file, "copy_async_wait<TILED_STAGES - 2>();", "", ["missing wait", "include/"]),
    ];
    check_breakages(&breakages, Architecture::Sm80, |device| check_many_rows(device));
}

/// With heads of 64, every warp writes a part of a chunk's result.
#[test]
fn a_chunk_that_arrives_before_all_warps_have_written_is_found() {
    if !has_nvcc() {
        return;
    }
    let first = "    if (Team::thread() == 0) {";
    let (from, to) = (&*format!("    Team::synchronize();\n{first}"), first);
    let run = |device: &dyn Fn(u32) -> Rc<dyn Device>| attend(&device(0), (1, 1, 64), (600, 1));
    let failure = failure_of_broken("include/attention_merge.cuh", from, to, &options(Architecture::Sm80), run);
    let failure = failure.expect("warps write while another thread block reads");
    assert!(failure.contains("race") && failure.contains("include/attention_merge.cuh:"), "{failure}");
}

/// The line of a piece of text in a file of the kernels.
fn line_of(file: &str, text: &str) -> usize {
    let contents = std::fs::read_to_string(kernels().join(file)).unwrap();
    let at = contents.find(text).unwrap_or_else(|| panic!("{file} has no {text:?}"));
    contents[..at].matches('\n').count() + 1
}

/// Kernels with wrong fragments and strides run without a finding. Beside the right ones, the first instruction whose
/// result differs is in the line that is wrong.
#[test]
fn wrong_fragments_are_found_beside_right_ones() {
    if !has_nvcc() {
        return;
    }
    let breakages = [
        ("include/attention.cuh", "mma(s[r][2 * n], a[r], b[0], b[1]", "mma(s[r][2 * n], a[r], b[0], b[2]"),
        ("include/attention.cuh", "pair[i % 2 * 2], pair[i % 2 * 2 + 1]", "pair[i % 2 * 2 + 1], pair[i % 2 * 2]"),
        ("include/attention.cuh", "load_matrix_x4_trans(b, v", "load_matrix_x4(b, v"),
        ("include/attention.cuh", "row_tile * 16 + lane % 16", "row_tile * 16 + lane % 8"),
        ("include/attention.cuh", "lane / 8 % 2 * 8);", "(lane / 8 + 1) % 2 * 8);"),
    ];
    parallel(0..breakages.len() as u64, |i| {
        let (file, from, to) = breakages[i as usize];
        let options = EmulatedOptions { against: Some(kernels()), ..options(Architecture::Sm90a) };
        let failure = failure_of_broken(file, from, to, &options, |device| check_tiles(device));
        let failure = failure.unwrap_or_else(|| panic!("nobody notices {to:?} in {file}"));
        let line = format!("{file}:{}", line_of(file, from));
        assert!(failure.contains("divergence") && failure.contains(&line), "{to:?}, {line}: {failure}");
    });
}

/// These run without a finding, and give wrong results.
#[test]
fn wrong_fragments_give_wrong_results() {
    if !has_nvcc() {
        return;
    }
    let breakages = [
        ("include/attention.cuh", "mma(s[r][2 * n], a[r], b[0], b[1]", "mma(s[r][2 * n], a[r], b[0], b[2]"),
        ("include/attention.cuh", "pair[i % 2 * 2], pair[i % 2 * 2 + 1]", "pair[i % 2 * 2 + 1], pair[i % 2 * 2]"),
        ("include/ptx.cuh", "x4.trans.shared", "x4.shared"),
        ("include/ptx.cuh", "e4m3x2.f32 %0, %1, %2", "e4m3x2.f32 %0, %2, %1"),
        ("include/ptx.cuh", "f16x2.e4m3x2", "f16x2.e5m2x2"),
        ("include/swizzle.cuh", "% PANEL_CHUNKS ^ pattern", "% PANEL_CHUNKS ^ pattern % 4"),
    ];
    parallel(0..breakages.len() as u64, |i| {
        let (file, from, to) = breakages[i as usize];
        let failure = failure_of_broken(file, from, to, &options(Architecture::Sm90a), |device| {
            check_tiles(device);
            check_chunks_of_warp_groups(device);
            check_fp8_tiles(device);
        });
        let failure = failure.unwrap_or_else(|| panic!("nobody notices {to:?} in {file}"));
        assert!(failure.contains("element"), "{failure}");
    });
}
