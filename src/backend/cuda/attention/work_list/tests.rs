use super::*;
use crate::BatchSeq;
use std::collections::HashMap;
use std::time::Instant;

/// A group of 4, heads of up to 128, on 132 multiprocessors.
fn rules(windows: &[Option<usize>], batch_invariant: bool) -> WorkRules {
    rules_up_to(1 << 17, windows, batch_invariant)
}

/// The same for sequences of up to `max_len` tokens.
fn rules_up_to(max_len: usize, windows: &[Option<usize>], batch_invariant: bool) -> WorkRules {
    let mut rules = WorkRules {
        decode_tokens: 4,
        prefill_tokens: 32,
        kv_tile: 64,
        prefill_head_tiles: 8,
        resident_prefills: 264,
        windows: windows.to_vec(),
        batch_invariant,
        max_partials: 0,
    };
    rules.max_partials = rules.partials_for(256, 8192, max_len);
    rules
}

/// Sequences of `(tokens in the cache, new tokens)`.
fn batch(seqs: &[(usize, usize)]) -> Batch {
    let mut batch = Batch::default();
    for (num_computed, num_rows) in seqs {
        let first_row = batch.tokens.len();
        batch.tokens.resize(first_row + num_rows, 0);
        let first_block = batch.seqs.len();
        batch.seqs.push(BatchSeq {
            first_row,
            num_rows: *num_rows,
            num_computed: *num_computed,
            first_block,
            num_blocks: 0,
        });
    }
    batch
}

fn random_batch(seed: u64) -> Batch {
    let mut state = seed * 77 + 1;
    let mut below = |n: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    };
    let seqs: Vec<(usize, usize)> = (0..1 + below(40))
        .map(|_| {
            let before = [below(100), below(3000), 16_380 + below(10), below(70_000), 0][below(5)];
            (before, [1, 1, 1, 1 + below(4), 1 + below(300)][below(5)])
        })
        .collect();
    batch(&seqs)
}

/// The chunks of each row: its keys in each, from lists that are checked on the way.
fn chunks_of_rows(rules: &WorkRules, plan: &AttentionPlan, window: usize) -> HashMap<u32, Vec<(u32, u32)>> {
    let mut chunks: HashMap<u32, Vec<(u32, u32)>> = HashMap::new();
    for launch in plan.launches.iter().filter(|launch| launch.window == window) {
        let AttentionList { first_item, num_items } = plan.lists[launch.list];
        let items = &plan.items[first_item as usize..][..num_items as usize];
        let tiles = |item: &AttentionItem| (item.end_key - item.first_key).div_ceil(rules.kv_tile as u32);
        assert!(items.is_sorted_by_key(|item| Reverse(tiles(item))), "the longest first");
        let tokens = if launch.kind == AttentionKind::Decode { rules.decode_tokens } else { rules.prefill_tokens };
        let mut partials = HashMap::new();
        for item in items {
            assert!(item.first_key.is_multiple_of(rules.kv_tile as u32) && item.first_key < item.end_key);
            assert!(item.num_tokens as usize <= tokens && item.chunk < item.num_chunks);
            for token in 0..item.num_tokens {
                let position = item.first_position + token;
                let first_seen = rules.windows[window].map_or(0, |w| (position + 1).saturating_sub(w as u32));
                let keys = (item.first_key.max(first_seen), item.end_key.min(position + 1));
                if keys.0 < keys.1 {
                    chunks.entry(item.first_row + token).or_default().push(keys);
                }
                if item.num_chunks > 1 {
                    let partial = item.first_partial + item.chunk * item.num_tokens + token;
                    assert!((partial as usize) < rules.max_partials, "room for the results");
                    assert!(partials.insert(partial, ()).is_none(), "results of their own");
                }
            }
        }
    }
    chunks.values_mut().for_each(|keys| keys.sort_unstable());
    chunks
}

#[test]
fn each_row_has_each_key_that_it_sees_once() {
    for seed in 0..60 {
        let batch = random_batch(seed);
        for invariant in [false, true] {
            let rules = rules(&[None, Some(1000), Some(40_000)], invariant);
            let plan = rules.plan(&batch);
            for (index, window) in rules.windows.iter().enumerate() {
                let chunks = chunks_of_rows(&rules, &plan, index);
                assert_eq!(chunks.len(), batch.num_rows());
                for seq in &batch.seqs {
                    for row in 0..seq.num_rows {
                        let position = (seq.num_computed + row) as u32;
                        let mut next = window.map_or(0, |window| (position + 1).saturating_sub(window as u32));
                        for (first, end) in &chunks[&((seq.first_row + row) as u32)] {
                            assert_eq!(*first, next, "no gap, and nothing twice");
                            next = *end;
                        }
                        assert_eq!(next, position + 1);
                    }
                }
            }
        }
    }
}

/// Contexts of 2^20 tokens and of 2^31, the most that `model.max_model_len` may be: each row has each key once, there
/// is room for all results, and a decode has at most 32 chunks, or 33 if a window begins within one.
#[test]
fn the_longest_contexts_have_lists() {
    for (max_len, windows) in [(1 << 20, [None, Some(1 << 19)]), (1 << 31, [None, Some(1 << 30)])] {
        let batch = batch(&[(max_len - 1, 1), (max_len - 3, 3), (max_len - 100, 100), (max_len / 2 + 5, 300), (9, 1)]);
        for invariant in [false, true] {
            let rules = rules_up_to(max_len, &windows, invariant);
            let plan = rules.plan(&batch);
            assert!(plan.items.len() <= rules.max_items(256, 8192, max_len));
            for (index, window) in windows.iter().enumerate() {
                let chunks = chunks_of_rows(&rules, &plan, index);
                assert_eq!(chunks.len(), batch.num_rows());
                for (row, chunks) in chunks {
                    let seq = batch.seqs.iter().rfind(|seq| seq.first_row as u32 <= row).expect("a sequence");
                    let position = (seq.num_computed + row as usize - seq.first_row) as u32;
                    let first = window.map_or(0, |window: usize| (position + 1).saturating_sub(window as u32));
                    let joins = chunks.windows(2).all(|pair| pair[0].1 == pair[1].0);
                    assert!(joins && chunks[0].0 == first && chunks[chunks.len() - 1].1 == position + 1, "{chunks:?}");
                    assert!(chunks.len() <= MAX_CHUNKS + 1 || seq.num_rows > rules.decode_tokens, "{}", chunks.len());
                }
            }
        }
    }
}

/// With `batch_invariant`, and in the decode kernel always, a row's chunks follow from what it sees.
#[test]
fn chunks_do_not_depend_on_the_batch() {
    for seed in 0..40 {
        let batch = random_batch(seed);
        let rules = rules(&[None, Some(20_000)], true);
        let plan = rules.plan(&batch);
        for (index, window) in rules.windows.iter().enumerate() {
            for (row, chunks) in chunks_of_rows(&rules, &plan, index) {
                let seq = batch.seqs.iter().rfind(|seq| seq.first_row as u32 <= row).expect("a sequence");
                let position = seq.num_computed + row as usize - seq.first_row;
                let len = chunk_len(window.unwrap_or(usize::MAX).min(position + 1)) as u32;
                assert!(chunks.windows(2).all(|pair| pair[0].1.is_multiple_of(len)), "{position}: {chunks:?}");
                assert!(chunks.iter().all(|keys| keys.0 / len == (keys.1 - 1) / len), "{position}: {chunks:?}");
                assert!(chunks.len() <= max_chunks(1 << 17));
            }
        }
    }
    assert_eq!([1, 16_384, 16_385, 32_768, 32_769].map(chunk_len), [512, 512, 1024, 1024, 2048]);
}

/// Thread blocks that have work, and the largest share of all keys that one of them has, over the even share, when
/// each takes the next item as it gets free.
fn load(rules: &WorkRules, plan: &AttentionPlan, head_tiles: usize) -> (usize, f64) {
    let mut blocks = vec![0_u64; rules.resident_prefills];
    for item in &plan.items {
        for _ in 0..head_tiles {
            let next = blocks.iter_mut().min().expect("a device has thread blocks");
            *next += u64::from((item.end_key - item.first_key).div_ceil(64));
        }
    }
    let busy = blocks.iter().filter(|block| **block > 0).count();
    let even = blocks.iter().sum::<u64>() as f64 / blocks.len() as f64;
    (busy, blocks.iter().copied().max().unwrap_or(0) as f64 / even)
}

#[test]
fn the_device_is_filled() {
    let rules = rules(&[None], false);
    let loads = |seqs: &[(usize, usize)]| load(&rules, &rules.plan(&batch(seqs)), 8);
    for (what, seqs) in [
        ("one decode", vec![(32_767, 1)]),
        ("a long decode among short ones", [vec![(32_767, 1)], vec![(999, 1); 31]].concat()),
        ("many decodes", vec![(999, 1); 256]),
        ("a short prompt on a long prefix", vec![(32_768, 32)]),
        ("a prompt that would leave a second round nearly empty", vec![(32_768, 1100)]),
        ("a long prompt", vec![(0, 8192)]),
    ] {
        let (busy, over) = loads(&seqs);
        assert!(busy >= 250 && over <= 1.1, "{what}: {busy} thread blocks, {over:.2} times the even share");
    }
}

/// Prompts whose results of chunks need more room than there is are computed in several launches, decodes never.
#[test]
fn only_invariant_prompts_take_several_launches() {
    let launches =
        |batch_invariant, seqs: &[(usize, usize)]| rules(&[None], batch_invariant).plan(&batch(seqs)).launches.len();
    let decodes = vec![((1 << 17) - 1, 1); 256];
    assert_eq!((launches(false, &decodes), launches(true, &decodes)), (1, 1));
    let prompts = [(100_000, 4096), (50_000, 4096)];
    assert_eq!(launches(false, &prompts), 1);
    assert!(launches(true, &prompts) > 1);
}

/// `cargo test --release -p pagetide-backend --lib -- work_list::tests::speed --ignored --nocapture`
#[test]
#[ignore = "measures"]
fn speed() {
    for (what, seqs) in [
        ("256 sequences of 1,024", vec![(1023, 1); 256]),
        ("256 sequences of 8,192", vec![(8191, 1); 256]),
        ("a prompt of 8,192", vec![(0, 8192)]),
        ("a prompt of 1,100 on a prefix of 32,768", vec![(32_768, 1100)]),
    ] {
        let (rules, batch) = (rules(&[None], false), batch(&seqs));
        let mut times: Vec<f64> = (0..2000)
            .map(|_| {
                let started = Instant::now();
                std::hint::black_box(rules.plan(std::hint::black_box(&batch)));
                started.elapsed().as_secs_f64() * 1e6
            })
            .collect();
        times.sort_by(f64::total_cmp);
        let items = rules.plan(&batch).items.len();
        println!("{what}: {items} items, {:.1} µs (median), {:.1} µs (p99)", times[1000], times[1980]);
    }
}
