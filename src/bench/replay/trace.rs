//! A trace whose prompts name their blocks, as requests that share prefixes.

use super::super::workload::{RequestShape, read_trace};
use pagetide_base::error::StartError;
use pagetide_engine::prefix_cache::BlockHash;
use std::collections::HashMap;
use std::path::Path;

/// One request of a trace.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceRequest {
    /// Since the first request of the trace.
    pub arrival_s: f64,
    pub prompt_tokens: usize,
    /// At least 1.
    pub output_tokens: u32,
    /// One for each `tokens_per_block` of the prompt, the last perhaps for fewer. A number stands for the tokens of its
    /// block and all before it: equal numbers come with equal prefixes.
    pub blocks: Vec<u32>,
}

/// Requests in order of arrival, and the same again as often as is wanted, each time with other blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// In order of arrival.
    pub requests: Vec<TraceRequest>,
    /// Distinct blocks, numbered from 0.
    pub num_distinct: usize,
    /// Tokens that one number stands for.
    pub tokens_per_block: usize,
    /// From the first request of one round to the first of the next.
    period_s: f64,
}

impl Trace {
    /// The first `num` requests of a file.
    pub fn read(path: &Path, tokens_per_block: usize, num: Option<usize>) -> Result<Self, StartError> {
        let wrong = |what: String| StartError::new(format!("--simulate {}: {what}", path.display()));
        let mut shapes = read_trace(path).map_err(wrong)?;
        shapes.truncate(num.unwrap_or(usize::MAX));
        if shapes.is_empty() {
            return Err(wrong("it holds no request".into()));
        }
        Self::of(shapes, tokens_per_block).map_err(wrong)
    }

    /// Numbers the blocks so that a number stands for its prefix, whatever the ids of the file mean. Blocks without an
    /// id are shared with none.
    fn of(mut shapes: Vec<RequestShape>, tokens_per_block: usize) -> Result<Self, String> {
        shapes.sort_by(|a, b| a.timestamp_s.total_cmp(&b.timestamp_s));
        let first_s = shapes.first().map_or(0.0, |shape| shape.timestamp_s);
        let mut numbers: HashMap<(Option<u32>, u64), u32> = HashMap::new();
        let mut num_distinct = 0u32;
        let mut requests = Vec::with_capacity(shapes.len());
        for shape in shapes {
            let num_blocks = shape.prompt_tokens.div_ceil(tokens_per_block);
            if shape.prompt_tokens == 0 || shape.hash_ids.len() > num_blocks {
                let RequestShape { prompt_tokens, hash_ids, timestamp_s, .. } = &shape;
                return Err(format!(
                    "the request at {timestamp_s} s has {} hash_ids for {prompt_tokens} tokens: expected at least one \
                     token, and at most one id for each {tokens_per_block} (--hash-block)",
                    hash_ids.len()
                ));
            }
            let mut next = || {
                num_distinct += 1;
                num_distinct - 1
            };
            let mut parent = None;
            let named = shape.hash_ids.iter().map(|id| {
                let number = *numbers.entry((parent, *id)).or_insert_with(&mut next);
                parent = Some(number);
                number
            });
            let mut blocks: Vec<u32> = named.collect();
            blocks.resize_with(num_blocks, next);
            requests.push(TraceRequest {
                arrival_s: shape.timestamp_s - first_s,
                prompt_tokens: shape.prompt_tokens,
                output_tokens: shape.output_tokens.max(1),
                blocks,
            });
        }
        let last_s = requests.last().map_or(0.0, |request| request.arrival_s);
        let mean_gap_s = last_s / (requests.len().max(2) - 1) as f64;
        Ok(Self { requests, num_distinct: num_distinct as usize, tokens_per_block, period_s: last_s + mean_gap_s })
    }

    /// Request `index` of the trace repeated for ever, when it arrives, and in which round.
    pub fn get(&self, index: usize) -> (&TraceRequest, f64, u64) {
        let (round, place) = (index / self.requests.len(), index % self.requests.len());
        let request = &self.requests[place];
        (request, request.arrival_s + round as f64 * self.period_s, round as u64)
    }

    /// Names of the full blocks of `block_size` tokens of a request's prompt. `block_size` divides `tokens_per_block`.
    pub fn names(&self, request: &TraceRequest, round: u64, block_size: usize) -> Vec<BlockHash> {
        let parts = self.tokens_per_block / block_size;
        let num_full = request.prompt_tokens / block_size;
        let first = u128::from(round) * self.num_distinct as u128;
        let parts_of = |block: &u32| {
            let number = (first + u128::from(*block)) * parts as u128;
            (0..parts).map(move |part| BlockHash::of_number(number + part as u128))
        };
        let mut names = Vec::with_capacity(num_full);
        names.extend(request.blocks.iter().flat_map(parts_of).take(num_full));
        names
    }

    /// The hashes of a request's blocks. The last block may not be full.
    pub fn all_names(&self, request: &TraceRequest) -> Vec<BlockHash> {
        request.blocks.iter().map(|block| BlockHash::of_number(u128::from(*block))).collect()
    }

    /// Blocks that all requests ask for.
    pub fn num_asked(&self) -> usize {
        self.requests.iter().map(|request| request.blocks.len()).sum()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Requests a second apart, of blocks of 512 tokens.
    pub fn trace_of(ids: &[&[u64]]) -> Trace {
        let shape = |(second, ids): (usize, &&[u64])| RequestShape {
            prompt_tokens: ids.len() * 512,
            output_tokens: 3,
            timestamp_s: 10.0 + second as f64,
            hash_ids: ids.to_vec(),
        };
        Trace::of(ids.iter().enumerate().map(shape).collect(), 512).unwrap()
    }

    #[test]
    fn equal_numbers_are_equal_prefixes() {
        let trace = trace_of(&[&[7, 1, 2], &[7, 1, 3], &[1, 2], &[7, 1, 2, 9]]);
        let blocks: Vec<_> = trace.requests.iter().map(|request| request.blocks.clone()).collect();
        assert_eq!(blocks, [vec![0, 1, 2], vec![0, 1, 3], vec![4, 5], vec![0, 1, 2, 6]]);
        assert_eq!((trace.num_distinct, trace.num_asked()), (7, 12));
    }

    #[test]
    fn rounds_share_nothing_and_follow_each_other() {
        let trace = trace_of(&[&[1, 2], &[1, 3], &[1]]);
        let (request, arrival_s, round) = trace.get(4);
        assert_eq!((arrival_s, round), (4.0, 1));
        let names = |index| {
            let (request, _, round) = trace.get(index);
            trace.names(request, round, 256)
        };
        assert_eq!(names(1).len(), 4);
        assert_eq!(names(0)[..2], names(1)[..2]);
        assert_ne!(names(0)[2..], names(1)[2..]);
        let first: Vec<_> = (0..3).flat_map(names).collect();
        assert!((3..6).flat_map(names).all(|name| !first.contains(&name)));
        assert_eq!(request, &trace.requests[1]);
    }

    #[test]
    fn only_full_blocks_are_hashed_and_without_a_key_id_they_are_private() {
        let shape = |prompt_tokens, hash_ids: &[u64]| RequestShape {
            prompt_tokens,
            output_tokens: 0,
            timestamp_s: 0.0,
            hash_ids: hash_ids.to_vec(),
        };
        let trace = Trace::of(vec![shape(1100, &[5]), shape(1100, &[5, 6, 7])], 512).unwrap();
        assert_eq!(trace.requests[0].blocks, [0, 1, 2]);
        assert_eq!(trace.requests[1].blocks, [0, 3, 4]);
        assert_eq!(trace.requests[0].output_tokens, 1);
        let names = |block_size| trace.names(&trace.requests[0], 0, block_size).len();
        assert_eq!((names(512), names(16)), (2, 68));
        assert!(Trace::of(vec![shape(512, &[1, 2])], 512).unwrap_err().contains("2 hash_ids for 512 tokens"));
        assert!(Trace::of(vec![shape(0, &[])], 512).is_err());
    }
}
