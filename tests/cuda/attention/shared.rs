//! Decodes whose sequences share blocks: chunks that are computed for several of them at once. The bytes are those of
//! the same sequences with blocks of their own.

use super::*;
use pagetide::backend::cuda::attention::{AttentionKind, AttentionPlan};

/// A sequence of a [`SharedCase`].
#[derive(Clone, Copy, Debug)]
struct SharedSeq {
    /// Tokens in the cache, and new ones.
    before: usize,
    rows: usize,
    /// An earlier sequence, and how many tokens it has in common with that. Whole blocks of them are shared.
    prefix: Option<(usize, usize)>,
}

/// A [`Case`] whose sequences have prefixes of others. Its own list of sequences is not used.
#[derive(Clone, Debug)]
struct SharedCase {
    case: Case,
    seqs: Vec<SharedSeq>,
}

fn decode(before: usize, prefix: Option<(usize, usize)>) -> SharedSeq {
    SharedSeq { before, rows: 1, prefix }
}

impl SharedCase {
    fn new(shape: AttentionShape, block_size: usize, codes: Option<CodeType>, seqs: Vec<SharedSeq>, seed: u64) -> Self {
        let case =
            Case { dtype: DType::BF16, shape, block_size, seqs: Vec::new(), batch_invariant: false, codes, seed };
        Self { case, seqs }
    }

    /// The kernels are compiled for one of 12 shapes, as in [`Case::random`].
    fn random(seed: u64) -> Self {
        let (i, random) = ((seed % 12) as usize, &mut Random(seed));
        let codes = [None, None, Some(CodeType::Int8), Some(CodeType::Fp8)][i % 4];
        let num_kv_heads = 1 + i / 2 % 2;
        let group = [1, 2, 3, 4, 5, 7, 8, 9][i % 8];
        let head_dim = [16, 32, 48, 64][(i + i / 4) % 4];
        let block_size = match codes {
            Some(_) => [8, 16, 64][i / 4],
            None => [1, 7, 16, 24, 256, 16][i / 4 * 2 + i % 4],
        };
        let window = random.one_in(3).then(|| random.pick(&[512, 600, 1000, 1500]));
        let softcap = [Some(0.7), None, None][i % 3];
        let scale = (head_dim as f32).powf(-0.5);
        let shape = AttentionShape { num_heads: num_kv_heads * group, num_kv_heads, head_dim, scale, softcap, window };
        let longest = 600 + random.below(1000);
        let mut seqs: Vec<SharedSeq> = Vec::new();
        for _ in 0..random.range(2, 7) {
            let before = longest - random.below(200);
            let prefix = (!seqs.is_empty() && !random.one_in(6)).then(|| {
                let from = random.below(seqs.len());
                (from, random.pick(&[before, before, 520, 300]).min(seqs[from].before))
            });
            let rows = if random.one_in(6) { random.range(2, 20) } else { 1 };
            seqs.push(SharedSeq { before, rows, prefix });
        }
        let mut case = Self::new(shape, block_size, codes, seqs, seed);
        (case.case.dtype, case.case.batch_invariant) = ([DType::BF16, DType::F16][i / 2 % 2], random.one_in(4));
        case
    }

    /// Tokens in blocks of an earlier sequence. The first new token has a block of its own.
    fn num_shared(&self, seq: &SharedSeq) -> usize {
        let block_size = self.case.block_size;
        seq.prefix.map_or(0, |(_, tokens)| tokens.min(seq.before) / block_size * block_size)
    }

    /// The sequence whose token is at a position of a sequence.
    fn owner(&self, index: usize, position: usize) -> usize {
        let seq = &self.seqs[index];
        match seq.prefix {
            Some((from, _)) if position < self.num_shared(seq) => self.owner(from, position),
            _ => index,
        }
    }

    /// With shared blocks, or with a copy of them for each sequence.
    fn input(&self, shares: bool) -> CaseInput {
        let Case { block_size, dtype, seed, .. } = self.case;
        let blocks_of = |seq: &SharedSeq| (seq.before + seq.rows).div_ceil(block_size);
        let num_blocks = self.seqs.iter().map(blocks_of).sum::<usize>() + 3;
        let random = &mut Random(seed ^ 1);
        let mut free: Vec<u32> = (0..num_blocks as u32).collect();
        for i in (1..free.len()).rev() {
            free.swap(i, random.below(i + 1));
        }
        let mut tables: Vec<Vec<u32>> = Vec::new();
        let (mut before, mut new) = (Batch::default(), Batch::default());
        let mut numbers = [Vec::new(), Vec::new()];
        for (index, seq) in self.seqs.iter().enumerate() {
            let num_shared = if shares { self.num_shared(seq) } else { 0 };
            let mut table = Vec::new();
            if let Some((from, _)) = seq.prefix {
                table.extend(&tables[from][..num_shared / block_size]);
            }
            table.extend(free.split_off(free.len() - (blocks_of(seq) - table.len())));
            let mut add_rows = |batch: &mut Batch, kind: usize, from: usize, count: usize| {
                add(batch, from, count, &table, block_size);
                for position in from..from + count {
                    let token = Random(seed ^ (self.owner(index, position) << 32 | position) as u64).bits();
                    numbers[kind].extend(Random(token).floats(self.case.cols(), dtype));
                }
            };
            add_rows(&mut before, 0, num_shared, seq.before - num_shared);
            add_rows(&mut new, 1, seq.before, seq.rows);
            tables.push(table);
        }
        CaseInput { before, new, num_blocks, numbers }
    }

    /// The new tokens' attention, and keys of the decode kernel: those that are read, and those of all decodes. With
    /// `graphs`, another step is recorded first, with blocks that are not shared, and this one is a replay.
    fn run(&self, device: &Rc<dyn Device>, shares: bool, graphs: bool) -> (Vec<f32>, (u64, u64)) {
        let (case, input) = (&self.case, self.input(shares));
        let separate = self.input(false);
        let max_rows = separate.before.num_rows().max(input.new.num_rows());
        let mut options = options(case.dtype, case.shape.num_heads, case.layout());
        (options.max_rows, options.batch_invariant, options.graphs) = (max_rows, case.batch_invariant, graphs);
        (options.softcap, options.windows) = (case.shape.softcap.is_some(), vec![case.shape.window]);
        options.max_model_len = 8192;
        let mut backend = CudaBackend::new(device.clone(), options).unwrap();
        backend.allocate_kv(case.layout(), input.num_blocks, 0).unwrap();
        let cols = case.shape.num_heads * case.shape.head_dim;
        let mut qkv = backend.tensor(max_rows, case.cols(), TensorRole::Activation).unwrap();
        let mut out = backend.tensor(max_rows, cols, TensorRole::Activation).unwrap();
        let mut keys = (0, 0);
        let steps = if graphs { vec![&separate, &separate, &input] } else { vec![&input] };
        for input in steps {
            for (kind, batch) in [&input.before, &input.new].into_iter().enumerate() {
                let mut batch = batch.clone();
                if graphs && kind == 1 {
                    batch.logit_rows = (0..batch.num_rows() as u32).collect();
                }
                set(device, &qkv, &input.numbers[kind]);
                backend.begin(&batch);
                backend.replay(&mut |backend| {
                    backend.rope_and_write_kv(&mut qkv, &case.shape, None, 1);
                    if kind == 1 {
                        backend.attention(&qkv, &case.shape, 1, &mut out);
                    }
                });
                keys = keys_of_decodes(backend.attention_plan());
                backend.end_step();
                backend.finish_step();
            }
        }
        let arrivals = backend.attention_arrivals().expect("kernels on tensor cores");
        assert!(download_bytes(device, arrivals).iter().all(|byte| *byte == 0), "counters of results that are there");
        (get(device, &out, input.new.num_rows() * cols), keys)
    }

    /// The results with shared blocks are those with blocks of their own, and near those of the CPU. Returns the keys
    /// that are read with shared blocks, and those of all decodes.
    fn check(&self, device: &dyn Fn(u32) -> Rc<dyn Device>) -> (u64, u64) {
        let separate = self.input(false);
        let expected: Vec<f64> = on_cpu(&self.case, &separate).into_iter().map(f64::from).collect();
        let (alone, keys_alone) = self.run(&device(0), false, false);
        assert_eq!(keys_alone.0, keys_alone.1, "nothing is shared");
        assert_close(&alone, &expected, tolerance(self.case.dtype), &format!("{self:?}"));
        let mut keys = (0, 0);
        for order in thread_orders() {
            let shared;
            (shared, keys) = self.run(&device(order), true, false);
            assert_eq!(bits(&shared), bits(&alone), "{self:?} under order {order}");
            assert_eq!(keys.1, keys_alone.1, "keys of all decodes");
        }
        keys
    }
}

fn keys_of_decodes(plan: &AttentionPlan) -> (u64, u64) {
    let decodes = plan.launches.iter().filter(|launch| launch.kind == AttentionKind::Decode);
    decodes.fold((0, 0), |(read, all), launch| {
        let keys = plan.keys(launch.list);
        (read + keys.0, all + keys.1)
    })
}

/// A tile has room for four sequences. Five have two chunks in common, of which one is shared with a sixth.
fn prefixes() -> SharedCase {
    let mut seqs = vec![decode(1100, None)];
    seqs.extend([1030, 1040, 1279, 1024].map(|before| decode(before, Some((0, 1024)))));
    seqs.push(decode(700, Some((0, 600))));
    SharedCase::new(shape(8, 2, 32), 16, None, seqs, 1)
}

/// Nine chunks, the results of which are merged in two segments.
fn long_prefix() -> SharedCase {
    let seqs = vec![decode(4700, None), decode(4620, Some((0, 4608))), decode(4650, Some((1, 4608)))];
    SharedCase::new(shape(4, 1, 16), 16, None, seqs, 2)
}

/// Windows that begin at different keys, within chunks. Three sequences see all of the fourth chunk, and two all of the
/// third one.
fn windows() -> SharedCase {
    let mut seqs = vec![decode(2200, None)];
    seqs.extend([2202, 2300, 1800, 1650].map(|before| decode(before, Some((0, 2192)))));
    SharedCase::new(AttentionShape { window: Some(1000), ..shape(2, 1, 16) }, 16, None, seqs, 3)
}

/// Checks shared chunks.
pub fn check_prefixes(device: &dyn Fn(u32) -> Rc<dyn Device>) {
    prefixes().check(device);
}

/// Computes decodes with common prefixes, in blocks that they share or not, and returns the keys that are read, for
/// each KV head. There are two of these, and heads have 32 dimensions.
pub fn attend_to_prefixes(device: &Rc<dyn Device>, shares: bool) -> u64 {
    prefixes().run(device, shares, false).1.0
}

#[test]
fn shared_chunks_are_read_once() {
    let cases = [
        // The first chunk of six sequences takes two items, and the second one of five too.
        (prefixes(), [1101, 1031, 1041, 1280, 1025, 701].iter().sum(), (6 - 2) * 512 + (5 - 2) * 512),
        (long_prefix(), 4701 + 4621 + 4651, 2 * 4608),
        // Tiles of 64 keys from the one in which the window begins.
        (windows(), (2201 - 1152) + (2203 - 1152) + (2301 - 1280) + (1801 - 768) + (1651 - 640), (2 + 1) * 512),
    ];
    parallel(0..cases.len() as u64, |i| {
        let (case, all, saved) = &cases[i as usize];
        assert_eq!(case.check(&device), (all - saved, *all));
    });
}

#[test]
fn random_prefixes() {
    let num_cases = if executes_ptx() { 6 } else { 24 };
    let shared = std::sync::atomic::AtomicUsize::new(0);
    parallel(0..num_cases, |seed| {
        let (read, all) = SharedCase::random(seed * 7919 + 11).check(&device);
        shared.fetch_add(usize::from(read < all), std::sync::atomic::Ordering::Relaxed);
    });
    let shared = shared.into_inner();
    assert!(shared * 3 >= num_cases as usize, "{shared} of {num_cases} cases share");
}

/// A recorded decode step serves batches that share nothing and batches that share chunks.
#[test]
fn a_graph_replays_with_other_groups() {
    let case = prefixes();
    let (alone, _) = case.run(&device(0), false, false);
    let (replayed, (read, all)) = case.run(&device(0), true, true);
    assert!(read < all);
    assert_eq!(bits(&replayed), bits(&alone));
}

#[test]
fn broken_kernels_are_noticed() {
    if !on_emulation() {
        return;
    }
    let (prefixes, long, windows) = (prefixes(), long_prefix(), windows());
    let merge = "include/attention_merge.cuh";
    let breakages: [(&SharedCase, &str, &str, &str); 8] = [
        (&prefixes, "include/attention.cuh", "item.first_member + token);", "item.first_member);"),
        (&windows, "include/attention.cuh", "+ item.chunk - member.first_chunk", "+ item.chunk"),
        (&prefixes, "attention.cu", "? item.end_key : item.first_position + 1", "? 1 : item.first_position + 1"),
        (&prefixes, merge, "shared[threadIdx.x] = is_last;", "shared[threadIdx.x] = 0;"),
        (&long, merge, "(level == 0 ? segment.start : 0)", "0"),
        (&prefixes, merge, "alone.item.first_row = member.row;", ""),
        (&prefixes, merge, "alone.item.first_partial = member.first_partial;", ""),
        (&long, merge, "goes_on = goes_on || !is_one;", ""),
    ];
    parallel(0..breakages.len() as u64, |i| {
        let (case, file, from, to) = breakages[i as usize];
        breaks(file, from, to, |device| {
            case.check(device);
        });
    });
}
