use super::*;
use crate::BatchSeq;
use std::collections::HashMap;
use std::time::Instant;

const BLOCK_SIZE: usize = 16;

impl WorkRules {
    fn plan(&self, batch: &Batch) -> AttentionPlan {
        let mut plan = AttentionPlan::default();
        WorkPlanner::new(self.clone()).plan(batch, &mut plan);
        plan
    }
}

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
        block_size: BLOCK_SIZE,
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

/// Numbers below `n`.
fn random(mut state: u64) -> impl FnMut(usize) -> usize {
    move |n| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    }
}

fn random_batch(seed: u64) -> Batch {
    let mut below = random(seed * 77 + 1);
    let seqs: Vec<(usize, usize)> = (0..1 + below(40))
        .map(|_| {
            let before = [below(100), below(3000), 16_380 + below(10), below(70_000), 0][below(5)];
            (before, [1, 1, 1, 1 + below(4), 1 + below(300)][below(5)])
        })
        .collect();
    batch(&seqs)
}

/// What an item says of one of its tokens.
struct ItemToken {
    row: u32,
    /// Of the result of the item's chunk, and of the first of the token's chunks.
    partials: [u32; 2],
    chunk: u32,
    num_chunks: u32,
    first_chunk: u32,
}

/// As the kernels read it.
fn tokens_of(plan: &AttentionPlan, item: &AttentionItem) -> Vec<ItemToken> {
    let token = |token: u32| match item.first_member {
        NO_MEMBER => {
            let &AttentionItem { chunk, num_chunks, first_chunk, first_partial, .. } = item;
            let partials = [chunk, 0].map(|chunk| first_partial + chunk * item.num_tokens + token);
            ItemToken { row: item.first_row + token, partials, chunk, num_chunks, first_chunk }
        }
        first => {
            let member = plan.members[(first + token) as usize];
            let AttentionMember { row, num_chunks, first_chunk, first_partial } = member;
            let chunk = item.chunk - first_chunk;
            ItemToken { row, partials: [first_partial + chunk, first_partial], chunk, num_chunks, first_chunk }
        }
    };
    (0..item.num_tokens).map(token).collect()
}

/// The chunks of each row: its keys in each, from lists that are checked on the way.
fn chunks_of_rows(
    rules: &WorkRules,
    batch: &Batch,
    plan: &AttentionPlan,
    window: usize,
) -> HashMap<u32, Vec<(u32, u32)>> {
    let seq_of = |row: u32| {
        let index = batch.seqs.partition_point(|seq| seq.first_row as u32 <= row);
        &batch.seqs[index - 1]
    };
    let mut chunks: HashMap<u32, Vec<(u32, u32)>> = HashMap::new();
    for launch in plan.launches.iter().filter(|launch| launch.window == window) {
        let AttentionList { first_item, num_items } = plan.lists[launch.list];
        let items = &plan.items[first_item as usize..][..num_items as usize];
        let tiles = |item: &AttentionItem| (item.end_key - item.first_key).div_ceil(rules.kv_tile as u32);
        assert!(items.is_sorted_by_key(|item| Reverse(tiles(item))), "the longest first");
        let tokens = if launch.kind == AttentionKind::Decode { rules.decode_tokens } else { rules.prefill_tokens };
        let (mut partials, mut rows) = (HashMap::new(), HashMap::new());
        for item in items {
            assert!(item.first_key.is_multiple_of(rules.kv_tile as u32) && item.first_key < item.end_key);
            assert!((1..=tokens).contains(&(item.num_tokens as usize)));
            for token in tokens_of(plan, item) {
                let seq = seq_of(token.row);
                let position = (seq.num_computed + token.row as usize - seq.first_row) as u32;
                let first_seen = rules.windows[window].map_or(0, |w| (position + 1).saturating_sub(w as u32));
                let keys = (item.first_key.max(first_seen), item.end_key.min(position + 1));
                if keys.0 < keys.1 {
                    chunks.entry(token.row).or_default().push(keys);
                }
                assert!(token.chunk < token.num_chunks);
                assert!(item.first_member == NO_MEMBER || token.num_chunks > 1, "a chunk with its own key");
                if token.num_chunks > 1 {
                    assert!((token.partials[0] as usize) < rules.max_partials, "room for the results");
                    let before = partials.insert(token.partials[0], ());
                    assert!(before.is_none(), "results of their own");
                    // All items of a row say the same of it.
                    let of_row = (token.partials[1], token.num_chunks, token.first_chunk);
                    assert_eq!(*rows.entry(token.row).or_insert(of_row), of_row);
                }
                match item.first_member {
                    NO_MEMBER => assert_eq!(item.first_block as usize, seq.first_block),
                    _ => {
                        assert_eq!(keys, (item.first_key, item.end_key), "each member sees all keys");
                        let blocks = keys.0 as usize / BLOCK_SIZE..(keys.1 as usize).div_ceil(BLOCK_SIZE);
                        let of_item = &batch.block_tables[item.first_block as usize..];
                        let of_member = &batch.block_tables[seq.first_block..][..seq.num_blocks];
                        assert_eq!(of_item[blocks.clone()], of_member[blocks], "in the same blocks");
                    }
                }
            }
        }
    }
    chunks.values_mut().for_each(|keys| keys.sort_unstable());
    chunks
}

/// Decodes, and some sequences with several new tokens, whose tables are paths of a random prefix tree: they leave it
/// at any block.
fn random_batch_with_prefixes(seed: u64) -> Batch {
    let mut below = random(seed * 99 + 5);
    let base = [0, 10_000, 40_000][below(3)];
    let mut batch = batch(
        &(0..1 + below(60))
            .map(|_| {
                (base + [below(500), 511, 512, 1023, below(9000)][below(5)], [1, 1, 1, 1, 1, 2 + below(8)][below(6)])
            })
            .collect::<Vec<_>>(),
    );
    let mut tables: Vec<Vec<u32>> = Vec::new();
    let mut next = 0;
    for seq in &mut batch.seqs {
        let num_blocks = (seq.num_computed + seq.num_rows).div_ceil(BLOCK_SIZE) + below(2);
        let mut table = Vec::new();
        if !tables.is_empty() && below(5) > 0 {
            let from = &tables[below(tables.len())];
            let kept = [from.len(), 32, 64, below(from.len() + 1)][below(4)];
            table.extend(from.iter().take(kept.min(num_blocks)));
        }
        while table.len() < num_blocks {
            table.push(next);
            next += 1;
        }
        if below(8) == 0 && num_blocks > 3 {
            // A block of its own before others that it shares.
            table[below(3)] = next;
            next += 1;
        }
        (seq.first_block, seq.num_blocks) = (batch.block_tables.len(), num_blocks);
        batch.block_tables.extend(&table);
        tables.push(table);
    }
    batch
}

#[test]
fn each_row_has_each_key_that_it_sees_once() {
    let of_prefixes = (0..150).map(random_batch_with_prefixes);
    for batch in (0..60).map(random_batch).chain(of_prefixes) {
        for invariant in [false, true] {
            let rules = rules(&[None, Some(1000), Some(40_000)], invariant);
            let plan = rules.plan(&batch);
            for (index, window) in rules.windows.iter().enumerate() {
                let chunks = chunks_of_rows(&rules, &batch, &plan, index);
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
                let chunks = chunks_of_rows(&rules, &batch, &plan, index);
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
            for (row, chunks) in chunks_of_rows(&rules, &batch, &plan, index) {
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

/// Decodes of so many tokens with tables of which the first blocks are the same: `(tokens, tokens of the prefix)`.
fn with_prefix(seqs: &[(usize, usize)]) -> Batch {
    let mut batch = batch(&seqs.iter().map(|(tokens, _)| (tokens - 1, 1)).collect::<Vec<_>>());
    let mut next = 1 << 20;
    for (seq, (tokens, prefix)) in batch.seqs.iter_mut().zip(seqs) {
        (seq.first_block, seq.num_blocks) = (batch.block_tables.len(), tokens.div_ceil(BLOCK_SIZE));
        let shared = prefix / BLOCK_SIZE;
        batch.block_tables.extend((0..seq.num_blocks as u32).map(|i| if (i as usize) < shared { i } else { next + i }));
        next += seq.num_blocks as u32;
    }
    batch
}

/// Keys that a plan's first list reads, those that it would read without sharing, and its shared items.
fn keys_and_shared(batch: &Batch, window: Option<usize>) -> (u64, u64, usize) {
    let plan = rules(&[window], false).plan(batch);
    let (read, unshared) = plan.keys(0);
    (read, unshared, plan.items.iter().filter(|item| item.first_member != NO_MEMBER).count())
}

#[test]
fn a_shared_chunk_is_read_once_for_a_tile_of_sequences() {
    // A tile has four of the eight. 2,000 tokens are three whole chunks.
    let eight = vec![(3000, 2000); 8];
    assert_eq!(keys_and_shared(&with_prefix(&eight), None), (8 * (3000 - 1536) + 2 * 1536, 8 * 3000, 6));
    // Less than a chunk, or chunks of different lengths.
    assert_eq!(keys_and_shared(&with_prefix(&[(3000, 496); 8]), None), (24_000, 24_000, 0));
    assert_eq!(keys_and_shared(&with_prefix(&[(20_000, 4096), (3000, 3000)]), None), (23_000, 23_000, 0));
    // The fifth is alone in its item.
    let (read, ..) = keys_and_shared(&with_prefix(&[(3000, 2000); 5]), None);
    assert_eq!(read, 5 * (3000 - 1536) + 2 * 1536);
    // A window of 1,000 tokens has the whole chunk at 2,048, or no whole chunk.
    assert_eq!(keys_and_shared(&with_prefix(&[(2600, 2592); 2]), Some(1000)).2, 1);
    assert_eq!(keys_and_shared(&with_prefix(&[(2540, 2540); 2]), Some(1000)).2, 0);
}

/// Branches of a prefix tree, in any order.
#[test]
fn prefixes_of_prefixes_are_shared() {
    let mut batch = with_prefix(&[(2100, 2048); 16]);
    // Two halves from 512 on, and quarters from 1,024 on.
    for (index, seq) in batch.seqs.iter().enumerate() {
        let table = &mut batch.block_tables[seq.first_block..][..seq.num_blocks];
        table[32..].iter_mut().for_each(|block| *block += 1000 * (index as u32 % 2));
        table[64..].iter_mut().for_each(|block| *block += 3000 * (index as u32 / 2 % 2));
    }
    // Four items of each chunk: of all 16, of 8 and 8, and of 4 times 4.
    assert_eq!(keys_and_shared(&batch, None), (4 * 2048 + 16 * 52, 16 * 2100, 16));
}

/// Blocks are compared, and not only those in which chunks end.
#[test]
fn a_block_of_its_own_within_a_chunk_is_not_shared() {
    let mut batch = with_prefix(&[(1100, 1024); 2]);
    let second = batch.seqs[1].first_block;
    batch.block_tables[second + 3] = 777;
    assert_eq!(keys_and_shared(&batch, None), (2200, 2200, 0));
    batch.block_tables[second + 3] = 3;
    batch.block_tables[second + 40] = 777;
    assert_eq!(keys_and_shared(&batch, None), (1688, 2200, 1));
}

/// `cargo test --release -p pagetide-backend --lib -- work_list::tests::speed --ignored --nocapture`
#[test]
#[ignore = "measures"]
fn speed() {
    let mut interleaved = with_prefix(&vec![(8192, 4096); 256]);
    for (index, seq) in interleaved.seqs.iter().enumerate() {
        let table = &mut interleaved.block_tables[seq.first_block..][..seq.num_blocks];
        table.iter_mut().for_each(|block| *block += (1 << 16) * (index as u32 % 16));
    }
    for (what, batch) in [
        ("256 sequences of 1,024", with_prefix(&vec![(1024, 0); 256])),
        ("256 sequences of 8,192", with_prefix(&vec![(8192, 0); 256])),
        ("256 sequences of 1,024, a common prefix of 512", with_prefix(&vec![(1024, 512); 256])),
        ("256 sequences of 8,192, a common prefix of 4,096", with_prefix(&vec![(8192, 4096); 256])),
        ("256 sequences of 8,192, 16 prefixes of 4,096 in turn", interleaved),
        ("256 sequences of 8,192 with the same blocks", with_prefix(&vec![(8192, 8192); 256])),
        ("a prompt of 8,192", batch(&[(0, 8192)])),
        ("a prompt of 1,100 on a prefix of 32,768", batch(&[(32_768, 1100)])),
    ] {
        let (mut planner, mut plan) = (WorkPlanner::new(rules(&[None], false)), AttentionPlan::default());
        let mut times: Vec<f64> = (0..2000)
            .map(|_| {
                let started = Instant::now();
                planner.plan(std::hint::black_box(&batch), &mut plan);
                std::hint::black_box(&plan);
                started.elapsed().as_secs_f64() * 1e6
            })
            .collect();
        times.sort_by(f64::total_cmp);
        let items = plan.items.len();
        println!("{what}: {items} items, {:.1} µs (median), {:.1} µs (p99)", times[1000], times[1980]);
    }
}
