//! All sequences: those that run, those that wait, and the indices to find them.

use super::running::RunningSeqs;
use super::waiting::WaitingSeqs;
use crate::allocation::Grown;
use crate::plan::StepPlan;
use crate::prefix_cache::{BlockHash, BlockHasher};
use crate::sequence::{Rank, Sequence};
use crate::step_time::StepLoad;
use pagetide_base::ids::{IdMap, RequestId, SeqId};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The number of sequences in each state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Population {
    pub running: usize,
    pub waiting: usize,
    pub swapped: usize,
}

/// The most waiting sequences that [`Sequences::prompt_backlog`] looks at, so that a step's work does not depend on how
/// many wait. Their prompts are more than enough to make steps as long as they may be.
const MAX_BACKLOG_SEQS: usize = 32;

/// A step that leaves out sequences has at least so many times as many others that are ready:
/// [`Sequences::too_many_await_results`].
const MIN_READY_PER_WAITING: usize = 3;

/// Owns all sequences. Each is in exactly one of `running` and `waiting`, by its rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Sequences {
    pub running: RunningSeqs,
    /// New sequences, preempted ones, and among these the swapped.
    pub waiting: WaitingSeqs,
    /// The sequences of each request that have not ended.
    of_request: IdMap<RequestId, Vec<Rank>>,
    ranks: IdMap<SeqId, Rank>,
    last_id: u64,
    /// Gives blocks their hashes.
    pub hasher: BlockHasher,
}

impl Sequences {
    pub fn new(hasher: BlockHasher) -> Self {
        Self {
            running: RunningSeqs::default(),
            waiting: WaitingSeqs::default(),
            of_request: IdMap::default(),
            ranks: IdMap::default(),
            last_id: 0,
            hasher,
        }
    }

    pub fn new_id(&mut self) -> SeqId {
        self.last_id += 1;
        SeqId(self.last_id)
    }

    /// Adds a sequence to the indices. It must be inserted into `running` or `waiting` too.
    pub fn register(&mut self, rank: Rank) {
        self.ranks.insert(rank.seq, rank);
        self.of_request.entry(rank.request).or_default().push(rank);
    }

    /// Removes a sequence, wherever it is, and from the indices.
    ///
    /// # Panics
    ///
    /// Where it is not there.
    pub fn remove(&mut self, rank: Rank) -> Box<Sequence> {
        let seq = self.running.remove(&rank).or_else(|| self.waiting.remove(&rank));
        self.ranks.remove(&rank.seq);
        if let Some(ranks) = self.of_request.get_mut(&rank.request) {
            ranks.retain(|other| *other != rank);
            if ranks.is_empty() {
                self.of_request.remove(&rank.request);
            }
        }
        seq.expect("a request's ranks are those of its living sequences")
    }

    pub fn get(&self, rank: Rank) -> Option<&Sequence> {
        self.running.get(&rank).or_else(|| self.waiting.get(&rank))
    }

    pub fn get_mut(&mut self, rank: Rank) -> Option<&mut Sequence> {
        self.running.get_mut(&rank).or_else(|| self.waiting.get_mut(&rank))
    }

    /// `None` where the sequence has ended.
    pub fn rank(&self, seq: SeqId) -> Option<Rank> {
        self.ranks.get(&seq).copied()
    }

    /// The rank of a sequence that is there.
    pub fn rank_of(&self, seq: SeqId) -> Rank {
        self.rank(seq).expect("the pools name only sequences that are there")
    }

    /// The sequences of a request; none where it has ended.
    pub fn of_request(&self, request: RequestId) -> &[Rank] {
        self.of_request.get(&request).map_or(&[], |ranks| ranks)
    }

    pub fn has_request(&self, request: RequestId) -> bool {
        self.of_request.contains_key(&request)
    }

    /// Requests that have not ended, in any order.
    pub fn requests(&self) -> impl ExactSizeIterator<Item = RequestId> {
        self.of_request.keys().copied()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.running.iter().chain(self.waiting.iter())
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Sequence> {
        self.running.iter_mut().chain(self.waiting.iter_mut())
    }

    /// Whether a sequence is one of several beams. The prompt of a search is a sequence like any other.
    pub fn is_one_of_many_beams(&self, seq: &Sequence) -> bool {
        seq.is_beam() && self.of_request(seq.rank.request).len() > 1
    }

    /// Whether the beams of a waiting beam's request that run have computed all but their last token, and published
    /// their full blocks. Beams are admitted one after the other, so that each finds the blocks that it shares with
    /// those before it in the prefix cache. Otherwise beams that were preempted could need more memory than they had.
    pub fn may_join(&self, beam: &Sequence, block_size: usize) -> bool {
        let mut others = self.of_request(beam.rank.request).iter().filter_map(|rank| self.running.get(rank));
        others.all(|other| {
            other.num_computed + 1 == other.num_tokens() && other.num_published == other.num_computed / block_size
        })
    }

    /// Gives every running sequence all the tokens that it has to compute. Returns the load of those that have one
    /// token: that is what they get. The others get less where the step has no room.
    pub fn schedule_decodes(&mut self) -> StepLoad {
        let (mut decodes, mut has_beams) = (StepLoad::default(), false);
        for seq in self.running.iter_mut() {
            seq.scheduled = seq.remaining();
            add_decode(&mut decodes, seq);
            has_beams |= seq.is_beam();
        }
        if has_beams {
            self.hold_back_incomplete_beams();
            decodes = StepLoad::default();
            self.running.iter().for_each(|seq| add_decode(&mut decodes, seq));
        }
        decodes
    }

    /// Whether a step that is planned now would leave out so many sequences, because they await results, that it is
    /// better planned when the results are there.
    ///
    /// A step takes about the same time `t` with a few sequences fewer. Let `h` be the time for which the device waits
    /// for the host before a step that is not planned ahead. With `r` ready and `w` waiting sequences, planning ahead
    /// gives `(r + w / 2) / t` tokens a second, because the waiting ones are in every second step. Not planning ahead
    /// gives `(r + w) / (t + h)`. Where `r >= 3 w`, planning ahead costs at most an eighth of the tokens, even if `h`
    /// is 0, and none if `h >= t / 7`.
    pub fn too_many_await_results(&self) -> bool {
        let (mut ready, mut waiting) = (0, 0);
        for seq in self.running.iter() {
            ready += usize::from(seq.remaining() > 0);
            waiting += usize::from(seq.awaits_results());
        }
        ready < MIN_READY_PER_WAITING * waiting
    }

    /// The tokens of the prompts that wait for another prompt: of the running sequences after the first that computes
    /// one, and of as many new ones, most senior first, as may run beside them. Cached prefixes among these are not
    /// known yet and count too.
    pub fn prompt_backlog(&self, max_num_seqs: usize) -> usize {
        let running = self.running.iter().map(|seq| seq.scheduled).filter(|scheduled| *scheduled > 1);
        let seats = max_num_seqs.saturating_sub(self.running.len()).min(MAX_BACKLOG_SEQS);
        let waiting = self.waiting.iter().take(seats).filter(|seq| !seq.is_swapped()).map(Sequence::remaining);
        running.chain(waiting).skip(1).sum()
    }

    /// Beams do not compute their last token in this step while others of their search are not there.
    fn hold_back_incomplete_beams(&mut self) {
        let is_there = |rank: &Rank| self.running.get(rank).is_some_and(|beam| beam.remaining() == 1);
        let is_incomplete =
            |seq: &&Sequence| self.is_one_of_many_beams(seq) && !self.of_request(seq.rank.request).iter().all(is_there);
        let held: Vec<Rank> = self.running.iter().filter(is_incomplete).map(|seq| seq.rank).collect();
        for rank in held {
            let seq = self.running.get_mut(&rank).expect("it runs");
            seq.scheduled = seq.scheduled.saturating_sub(1); // none where its KV has yet to come
        }
    }

    /// Beams do not compute their last token in this step where one of their search has just been preempted.
    pub fn hold_back_beams_of(&mut self, preempted: &[SeqId]) {
        for seq in preempted {
            let Some(ranks) = self.of_request.get(&self.ranks[seq].request) else { continue };
            for rank in ranks {
                if let Some(beam) = self.running.get_mut(rank).filter(|seq| seq.is_beam()) {
                    let most = beam.num_tokens() - 1 - beam.num_planned();
                    beam.scheduled = beam.scheduled.min(most);
                }
            }
        }
    }

    /// Takes the blocks that running sequences have been given into their tables. `grown`: in order of rank.
    pub fn extend_tables(&mut self, grown: Vec<Grown>, plan: &mut StepPlan) {
        let mut running = self.running.iter_mut();
        for grown in grown {
            let seq = running.find(|seq| seq.rank.seq == grown.seq).expect("only running sequences grow");
            let table = Arc::make_mut(&mut seq.table);
            if let Some((place, from, to)) = grown.copy {
                assert_eq!(std::mem::replace(&mut table[place], to), from, "the pool copied another block");
                plan.copy.push((from, to));
            }
            table.extend(grown.blocks);
            seq.tail_shared = false;
        }
    }

    /// Hashes all full blocks whose tokens are known. Returns the hashes that are new, for each sequence.
    pub fn hash_known_blocks(&mut self, block_size: usize) -> Vec<(SeqId, Vec<BlockHash>)> {
        let mut new = Vec::new();
        for seq in self.running.iter_mut().chain(self.waiting.iter_mut()) {
            let (before, num_full) = (seq.hashes.len(), seq.num_tokens() / block_size);
            if before < num_full {
                seq.extend_hashes(&self.hasher, block_size, num_full);
                new.push((seq.rank.seq, seq.hashes[before..].to_vec()));
            }
        }
        new
    }

    pub fn population(&self) -> Population {
        let swapped = self.waiting.num_swapped();
        Population { running: self.running.len(), waiting: self.waiting.len() - swapped, swapped }
    }

    /// Asserts that the indices name the sequences that are there.
    pub fn check(&self) {
        assert!(self.running.iter().is_sorted_by_key(|seq| seq.rank), "running sequences are out of order");
        self.waiting.check();
        let total = self.running.len() + self.waiting.len();
        assert_eq!(self.ranks.len(), total);
        assert_eq!(self.of_request.values().map(Vec::len).sum::<usize>(), total);
    }
}

fn add_decode(decodes: &mut StepLoad, seq: &Sequence) {
    if seq.scheduled == 1 {
        decodes.add(1, seq.num_planned());
    }
}
