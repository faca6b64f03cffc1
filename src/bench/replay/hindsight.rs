//! What could be had by looking at blocks the way an eviction policy does, had it known beforehand how such blocks do.

use super::trace::TraceRequest;
use std::collections::HashMap;

/// Blocks that were used so often, or more often, are alike.
const MOST_USES: usize = 8;

/// How long a block was not used, in requests, and whether it was then used again.
type PauseSteps = (usize, bool);

/// An upper bound on the blocks hit by any policy that treats blocks alike that were used equally often (up to
/// [`MOST_USES`]) and equally long ago, in a cache that holds `capacity` blocks on average. LRU, LFU, ARC and S3-FIFO
/// use nothing else.
///
/// Such a policy keeps a block that was used `u` times for `k(u)` requests after its last use. Keeping these blocks for
/// `k` requests gives as many hits as there are gaps of at most `k` between uses. It costs the sum of the gaps, each
/// cut at `k`, in blocks times requests. The best choice of all `k(u)` under the budget of `capacity` times all
/// requests is a fractional knapsack, which the steepest items fill first.
pub fn best_by_uses_and_age(requests: &[TraceRequest], capacity: usize) -> f64 {
    let mut steps: Vec<(f64, f64)> = pauses(requests).into_iter().flat_map(concave_steps).collect();
    steps.sort_by(|a, b| (b.1 / b.0).total_cmp(&(a.1 / a.0)));
    let (mut left, mut num_hits) = (capacity as f64 * requests.len() as f64, 0.0);
    for (time, hits) in steps {
        let part = (left / time).min(1.0);
        num_hits += hits * part;
        left -= time * part;
    }
    num_hits
}

/// By number of uses.
fn pauses(requests: &[TraceRequest]) -> Vec<Vec<PauseSteps>> {
    let mut pauses = vec![Vec::new(); MOST_USES];
    // Uses and the last of them.
    let mut seen: HashMap<u32, (usize, usize)> = HashMap::new();
    for (time, request) in requests.iter().enumerate() {
        for block in &request.blocks {
            let (uses, last) = seen.entry(*block).or_insert((0, time));
            if *uses > 0 {
                pauses[*uses - 1].push((time - *last, true));
            }
            (*uses, *last) = ((*uses + 1).min(MOST_USES), time);
        }
    }
    for (uses, last) in seen.into_values() {
        pauses[uses - 1].push((requests.len() - last, false));
    }
    pauses
}

/// Time and hits that keeping blocks longer and longer adds, as the steps of the curve's concave hull.
fn concave_steps(mut pauses: Vec<PauseSteps>) -> Vec<(f64, f64)> {
    pauses.sort_unstable();
    let (mut hull, mut time, mut hits): (Vec<(f64, f64)>, _, _) = (vec![(0.0, 0.0)], 0.0, 0.0);
    for (place, (pause, is_hit)) in pauses.iter().enumerate() {
        time += *pause as f64;
        hits += f64::from(u8::from(*is_hit));
        if pauses.get(place + 1).is_some_and(|(next, _)| next == pause) {
            continue;
        }
        let longer = (pauses.len() - place - 1) as f64 * *pause as f64;
        let point = (time + longer, hits);
        let slope = |from: (f64, f64), to: (f64, f64)| (to.1 - from.1) / (to.0 - from.0);
        while hull.len() > 1 && slope(hull[hull.len() - 2], hull[hull.len() - 1]) <= slope(hull[hull.len() - 1], point)
        {
            hull.pop();
        }
        hull.push(point);
    }
    hull.windows(2).map(|pair| (pair[1].0 - pair[0].0, pair[1].1 - pair[0].1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::trace::tests::trace_of;

    #[test]
    fn what_pays_most_for_its_time_is_kept_first() {
        // Block 1 comes with every request, block 2 once more two requests later, the others never again.
        let trace = trace_of(&[&[1, 2], &[1, 3], &[1, 2], &[1, 4], &[1, 5], &[1, 6]]);
        let hits = |capacity| best_by_uses_and_age(&trace.requests, capacity);
        assert_eq!(concave_steps(vec![(1, true), (1, true)]), [(2.0, 2.0)]);
        assert_eq!(concave_steps(vec![(2, true), (3, false)]), [(4.0, 1.0), (1.0, 0.0)]);
        assert_eq!(hits(0), 0.0);
        assert_eq!(hits(100), 6.0, "all that comes again: block 1 five times and block 2");
        assert!(hits(1) < hits(2) && hits(2) <= 6.0, "{} {}", hits(1), hits(2));
        // A capacity of one is a budget of 6 blocks times requests. Block 1's gaps after its third use cost 1 each and
        // give 1 hit. Blocks 1 and 2 were used twice; keeping both for one request costs 2 and gives 1 hit. That leaves
        // 1 for the six blocks that were used once; keeping them for two requests costs 10 and gives 2 hits.
        assert!((hits(1) - (3.0 + 1.0 + 0.2)).abs() < 1e-9, "{}", hits(1));
    }
}
