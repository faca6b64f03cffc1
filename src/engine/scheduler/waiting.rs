//! The waiting sequences: new ones and preempted ones.

use crate::bill::Tenant;
use crate::sequence::{Rank, Sequence};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::btree_map::Iter;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::iter::Peekable;
use std::ops::Bound::{Excluded, Unbounded};
use std::ops::Index;

/// Sequences by rank, and in lines. If the first sequence of a line may not start yet, none behind it may, and a step
/// need not look at them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(from = "SerializedWaiting")]
pub(super) struct WaitingSeqs {
    seqs: BTreeMap<Rank, Box<Sequence>>,
    #[serde(skip)]
    lines: BTreeSet<(WaitingLine, Rank)>,
    /// The first sequence of each line, by turn.
    #[serde(skip)]
    heads: BTreeMap<Rank, WaitingLine>,
    #[serde(skip)]
    num_swapped: usize,
}

/// The serialized form. The rest follows from it.
#[derive(Deserialize)]
struct SerializedWaiting {
    seqs: BTreeMap<Rank, Box<Sequence>>,
}

impl From<SerializedWaiting> for WaitingSeqs {
    fn from(written: SerializedWaiting) -> Self {
        let mut waiting = Self::default();
        written.seqs.into_values().for_each(|seq| waiting.insert(seq));
        waiting
    }
}

/// A line holds the new sequences of one tenant, with non-preemptible ones in a line of their own; or the tenant's
/// sequences that have run before, which no quota holds back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct WaitingLine {
    tenant: Tenant,
    preemptible: bool,
    has_run: bool,
}

impl WaitingLine {
    /// It changes only while a sequence runs.
    fn of(seq: &Sequence) -> Self {
        let has_run = seq.cached_tokens.is_some();
        Self { tenant: seq.tenant, preemptible: has_run || seq.terms.preemptible, has_run }
    }
}

impl WaitingSeqs {
    pub fn len(&self) -> usize {
        self.seqs.len()
    }

    pub fn is_empty(&self) -> bool {
        self.seqs.is_empty()
    }

    pub fn get(&self, rank: &Rank) -> Option<&Sequence> {
        self.seqs.get(rank).map(|seq| &**seq)
    }

    pub fn get_mut(&mut self, rank: &Rank) -> Option<&mut Sequence> {
        self.seqs.get_mut(rank).map(|seq| &mut **seq)
    }

    /// Most senior first.
    pub fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.seqs.values().map(|seq| &**seq)
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Sequence> {
        self.seqs.values_mut().map(|seq| &mut **seq)
    }

    /// How many of them have their KV in the swap pool.
    pub fn num_swapped(&self) -> usize {
        self.num_swapped
    }

    /// Lets sequences lose what they have in the swap pool, or a part of it.
    pub fn lose_kv(&mut self, lose: impl FnMut(&mut Sequence)) {
        self.iter_mut().for_each(lose);
        self.num_swapped = self.iter().filter(|seq| seq.is_swapped()).count();
    }

    pub fn insert(&mut self, seq: Box<Sequence>) {
        self.num_swapped += usize::from(seq.is_swapped());
        let (line, rank) = (WaitingLine::of(&seq), seq.rank);
        let before = self.lines.range(..(line, rank)).next_back();
        if before.is_none_or(|(other, _)| *other != line) {
            if let Some(next) = next_of(&self.lines, line, rank) {
                self.heads.remove(&next);
            }
            self.heads.insert(rank, line);
        }
        self.lines.insert((line, rank));
        let old = self.seqs.insert(rank, seq);
        assert!(old.is_none(), "a sequence waits once");
    }

    pub fn remove(&mut self, rank: &Rank) -> Option<Box<Sequence>> {
        let seq = self.seqs.remove(rank)?;
        self.num_swapped -= usize::from(seq.is_swapped());
        let line = WaitingLine::of(&seq);
        self.lines.remove(&(line, *rank));
        if self.heads.remove(rank).is_some() {
            self.heads.extend(next_of(&self.lines, line, *rank).map(|next| (next, line)));
        }
        Some(seq)
    }

    /// The tenants of waiting sequences. A tenant may occur more than once.
    pub fn tenants(&self) -> impl Iterator<Item = Tenant> {
        self.heads.values().map(|line| line.tenant)
    }

    pub fn is_of_several(&self) -> bool {
        let mut tenants = self.tenants();
        tenants.next().is_some_and(|first| tenants.any(|tenant| tenant != first))
    }

    /// Iterates over the sequences, most senior first. Sequences that are not reached cost no time.
    pub fn walk(&mut self) -> QueueWalk<'_> {
        let Self { seqs, lines, heads, .. } = self;
        let (entered, turns) = (BinaryHeap::new(), BinaryHeap::new());
        QueueWalk { seqs, lines, heads: heads.iter().peekable(), entered, turns, last: None }
    }

    pub fn check(&self) {
        let lines: BTreeSet<_> = self.iter().map(|seq| (WaitingLine::of(seq), seq.rank)).collect();
        assert_eq!(self.lines, lines, "lines are not those of the waiting sequences");
        let mut heads = BTreeMap::new();
        for (line, rank) in lines.iter().rev() {
            heads.insert(*line, *rank);
        }
        let heads: BTreeMap<_, _> = heads.into_iter().map(|(line, rank)| (rank, line)).collect();
        assert_eq!(self.heads, heads, "it is another's turn");
        assert_eq!(self.num_swapped, self.iter().filter(|seq| seq.is_swapped()).count());
    }
}

impl Index<&Rank> for WaitingSeqs {
    type Output = Sequence;

    fn index(&self, rank: &Rank) -> &Sequence {
        self.get(rank).expect("it waits")
    }
}

/// The sequence behind `rank` in its line.
fn next_of(lines: &BTreeSet<(WaitingLine, Rank)>, line: WaitingLine, rank: Rank) -> Option<Rank> {
    let behind = lines.range((Excluded((line, rank)), Unbounded)).next();
    behind.filter(|(other, _)| *other == line).map(|(_, rank)| *rank)
}

/// The order of sequences if tenants take turns: by priority, by whether they are new, by what their tenant holds, and
/// by rank.
type TurnOrder = (i32, bool, u64, Rank);

/// See [`WaitingSeqs::walk`].
pub(super) struct QueueWalk<'a> {
    seqs: &'a mut BTreeMap<Rank, Box<Sequence>>,
    lines: &'a BTreeSet<(WaitingLine, Rank)>,
    /// The first sequences of lines that have not been entered.
    heads: Peekable<Iter<'a, Rank, WaitingLine>>,
    /// The next sequences of lines that have been entered.
    entered: BinaryHeap<Reverse<(Rank, WaitingLine)>>,
    /// The next sequence of each line, if tenants take turns: see [`TurnOrder`].
    turns: BinaryHeap<Reverse<(TurnOrder, WaitingLine)>>,
    last: Option<(Rank, WaitingLine)>,
}

impl QueueWalk<'_> {
    pub fn next(&mut self) -> Option<&mut Sequence> {
        if let Some((rank, line)) = self.last.take() {
            self.entered.extend(next_of(self.lines, line, rank).map(|next| Reverse((next, line))));
        }
        let head = self.heads.peek().map(|(rank, line)| (**rank, **line));
        let entered = self.entered.peek().map(|Reverse(next)| *next);
        let next = match (head, entered) {
            (Some(head), Some(entered)) => head.min(entered),
            (head, entered) => head.or(entered)?,
        };
        if Some(next) == head {
            self.heads.next();
        } else {
            self.entered.pop();
        }
        self.last = Some(next);
        self.seqs.get_mut(&next.0).map(|seq| &mut **seq)
    }

    /// The next sequence, if tenants take turns. The tenant with the smallest `share` goes first. Sequences that have
    /// run before come before all new ones, most senior first, because their clients receive nothing meanwhile and
    /// other beams may hold memory while they wait for them. A walk uses either this or [`QueueWalk::next`], not both.
    pub fn next_in_turn(&mut self, share: impl Fn(Tenant) -> u64) -> Option<&mut Sequence> {
        let turn = |rank: Rank, line: WaitingLine| {
            let share = if line.has_run { 0 } else { share(line.tenant) };
            Reverse(((rank.priority, !line.has_run, share, rank), line))
        };
        self.turns.extend(self.heads.by_ref().map(|(rank, line)| turn(*rank, *line)));
        if let Some((rank, line)) = self.last.take() {
            self.turns.extend(next_of(self.lines, line, rank).map(|next| turn(next, line)));
        }
        let Reverse(((_, _, _, rank), line)) = self.turns.pop()?;
        self.last = Some((rank, line));
        self.seqs.get_mut(&rank).map(|seq| &mut **seq)
    }

    /// Skips all sequences behind the last one in its line.
    pub fn leave_line(&mut self) {
        self.last = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bill::Terms;
    use crate::prefix_cache::BlockHasher;
    use crate::scheduler::EngineRequest;
    use crate::scheduler::test_engine::arrival;
    use pagetide_base::ids::{RequestId, SeqId};

    fn seq(id: u64, tenant: u32, preemptible: bool, has_run: bool) -> Box<Sequence> {
        let rank = Rank { priority: 0, request: RequestId(id), seq: SeqId(id) };
        let terms = Terms { preemptible, ..Terms::default() };
        let arrival = EngineRequest { tenant: Tenant(tenant), terms, ..arrival(id, 4, 4) };
        let mut seq = Box::new(Sequence::new(rank, arrival, 100, &BlockHasher::new([0; 32], 4), b""));
        seq.cached_tokens = has_run.then_some(0);
        seq
    }

    fn walk(waiting: &mut WaitingSeqs, leaves: impl Fn(u64) -> bool) -> Vec<u64> {
        let (mut walk, mut ids) = (waiting.walk(), Vec::new());
        while let Some(seq) = walk.next() {
            let id = seq.rank.seq.0;
            ids.push(id);
            if leaves(id) {
                walk.leave_line();
            }
        }
        ids
    }

    #[test]
    fn a_queue_is_left_at_its_first_refused_sequence() {
        let mut waiting = WaitingSeqs::default();
        // Out of order, as preempted sequences come.
        for (id, tenant, preemptible, has_run) in [
            (5, 1, true, false),
            (2, 1, true, false),
            (7, 2, true, false),
            (3, 1, false, false),
            (4, 1, true, true),
            (6, 1, false, false),
            (1, 2, true, true),
            (8, 2, true, true),
        ] {
            waiting.insert(seq(id, tenant, preemptible, has_run));
            waiting.check();
        }
        assert_eq!(walk(&mut waiting, |_| false), [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(walk(&mut waiting, |id| id == 2), [1, 2, 3, 4, 6, 7, 8]);
        assert_eq!(walk(&mut waiting, |id| id == 3), [1, 2, 3, 4, 5, 7, 8]);
        assert_eq!(walk(&mut waiting, |_| true), [1, 2, 3, 4, 7]);
        for id in [2, 1, 7, 3, 8, 4, 6, 5] {
            let rank = Rank { priority: 0, request: RequestId(id), seq: SeqId(id) };
            assert!(waiting.remove(&rank).is_some() && waiting.remove(&rank).is_none());
            waiting.check();
        }
        assert!(waiting.is_empty() && walk(&mut waiting, |_| false).is_empty());
    }
}
