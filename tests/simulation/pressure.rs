//! Loads that are known to make schedulers thrash: sequences that come back from a preemption only to be preempted
//! again.

use crate::model::*;
use crate::settings::plain_config;
use crate::world::*;
use pagetide_base::ids::RequestId;
use pagetide_base::sampling::params::SamplingParams;
use pagetide_engine::scheduler::{AdmissionPolicy, PreemptionMode, SchedulerConfig};

/// The lengths of a request: its prompt, and the most and the least tokens of its output.
struct Request {
    prompt: usize,
    max_tokens: usize,
    min_tokens: usize,
}

/// All arrive before the first step.
struct Load {
    name: &'static str,
    num_swap_blocks: usize,
    requests: Vec<Request>,
    /// The most preemptions of one request, if lengths become known only as outputs end.
    most: usize,
}

const NUM_DEVICE_BLOCKS: usize = 128;
const BLOCK_SIZE: usize = 8;
const POOL_TOKENS: usize = NUM_DEVICE_BLOCKS * BLOCK_SIZE;

fn loads() -> Vec<Load> {
    let mut random = Random(3);
    let mut between = |from: usize, to: usize| random.range(from as u64, to as u64) as usize;
    let equal = |num: usize, prompt, min_tokens| {
        (0..num).map(|_| Request { prompt, max_tokens: 500, min_tokens }).collect::<Vec<_>>()
    };
    vec![
        // Their first chunks fit together, their prompts do not.
        Load {
            name: "prompts of a third of the pool, in chunks",
            num_swap_blocks: 256,
            requests: (0..20).map(|_| Request { prompt: between(250, 400), max_tokens: 300, min_tokens: 20 }).collect(),
            most: 3,
        },
        // All fit when they begin, few when they end.
        Load { name: "short prompts, long outputs", num_swap_blocks: 256, requests: equal(60, 10, 200), most: 3 },
        Load { name: "a full swap pool", num_swap_blocks: 6, requests: equal(60, 30, 150), most: 3 },
        Load { name: "no swap pool", num_swap_blocks: 0, requests: equal(60, 30, 150), most: 3 },
        Load {
            name: "prompts of nearly the whole pool among short ones",
            num_swap_blocks: 256,
            requests: (0..40)
                .map(|place| match place % 10 {
                    5 => Request { prompt: POOL_TOKENS - 60, max_tokens: 50, min_tokens: 50 },
                    _ => Request { prompt: between(10, 60), max_tokens: 300, min_tokens: 30 },
                })
                .collect(),
            most: 3,
        },
        Load { name: "equal ages and lengths", num_swap_blocks: 256, requests: equal(64, 64, 128), most: 3 },
        Load {
            name: "lengths that vary",
            num_swap_blocks: 256,
            requests: (0..100)
                .map(|_| Request { prompt: between(5, 200), max_tokens: 700, min_tokens: between(1, 10).pow(2) })
                .collect(),
            most: 4,
        },
    ]
}

/// The result of a load.
#[derive(Debug)]
struct Course {
    steps: usize,
    preemptions: usize,
    /// Of one request.
    most: usize,
    recomputed: usize,
    oldest_preempted: bool,
}

fn run(load: &Load, mode: PreemptionMode, admission: AdmissionPolicy, overlap: bool) -> Course {
    let config = SchedulerConfig {
        num_swap_blocks: load.num_swap_blocks,
        max_num_batched_tokens: 128,
        preemption_mode: mode,
        admission,
        watermark_blocks: 1,
        write_behind_blocks: 16,
        max_tail_blocks: 4,
        prefix_caching: true,
        overlap,
        ..plain_config(BLOCK_SIZE, NUM_DEVICE_BLOCKS)
    };
    let mut world = World::calm(config);
    let mut random = Random(5);
    for Request { prompt, max_tokens, min_tokens } in &load.requests {
        let params = SamplingParams {
            max_tokens: *max_tokens as u32,
            min_tokens: *min_tokens as u32,
            eos_token_ids: vec![EOS],
            ..SamplingParams::default()
        };
        world.ask(random_tokens(&mut random, *prompt), params, 0);
    }
    world.drain();
    Course {
        steps: world.num_steps,
        preemptions: world.preemptions.values().sum(),
        most: world.preemptions.values().copied().max().unwrap_or(0),
        recomputed: world.total.recomputed_tokens,
        oldest_preempted: world.preemptions.contains_key(&RequestId(0)),
    }
}

/// Whatever the load, each request is preempted a few times at most, and the most senior never. If admission only
/// checks that a prompt fits, the same loads are preempted much more often.
#[test]
fn pressure_does_not_become_thrash() {
    // Preemptions, and tokens computed again.
    let (mut greedy, mut expecting) = ([0; 2], [0; 2]);
    for overlap in [false, true] {
        for mode in [PreemptionMode::Auto, PreemptionMode::Swap, PreemptionMode::Recompute] {
            for load in loads() {
                let course = run(&load, mode, AdmissionPolicy::Expected, overlap);
                let by_prompt = run(&load, mode, AdmissionPolicy::Prompt, overlap);
                eprintln!("{} {mode:?} {overlap}:\n  {course:?}\n  {by_prompt:?}", load.name);
                assert!(course.most <= load.most, "{}, {mode:?}: {course:?}", load.name);
                assert!(!course.oldest_preempted, "{}, {mode:?}: {course:?}", load.name);
                // Admission by expectations leaves some blocks free, but not many.
                assert!(course.steps * 10 <= by_prompt.steps * 14, "{}, {mode:?}: {course:?}", load.name);
                for (sums, course) in [(&mut expecting, course), (&mut greedy, by_prompt)] {
                    sums[0] += course.preemptions;
                    sums[1] += course.recomputed;
                }
            }
        }
    }
    let is_half = expecting.iter().zip(greedy).all(|(expecting, greedy)| expecting * 2 < greedy);
    assert!(is_half, "preemptions and tokens computed again: {expecting:?}, {greedy:?} by prompt");
}

/// If admission reserves room for all tokens that may come, nothing is preempted.
#[test]
fn with_room_for_all_tokens_no_sequence_is_preempted() {
    for overlap in [false, true] {
        for load in loads() {
            let course = run(&load, PreemptionMode::Auto, AdmissionPolicy::MaxTokens, overlap);
            assert_eq!(course.preemptions, 0, "{} {overlap}: {course:?}", load.name);
        }
    }
}
