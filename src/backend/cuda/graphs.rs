//! Decode steps as CUDA graphs: recorded once for each kind of step, at the start, and replayed with one call.

use super::device::{Device, DeviceResult, GraphId};
use std::collections::HashMap;
use std::rc::Rc;

/// Decode steps of one kind: their launches are the same.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GraphKey {
    /// Rows that the launches cover. Rows beyond the batch have no work.
    pub num_rows: usize,
}

/// The state of a kind of step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GraphRecording {
    /// It was not recorded at the start, and has run once. Everything that is loaded at first use is loaded now,
    /// because nothing may be loaded during a recording.
    Warm,
    Ready(GraphId),
}

/// The recordings of one device.
pub struct Graphs {
    device: Rc<dyn Device>,
    recordings: HashMap<GraphKey, GraphRecording>,
}

impl Graphs {
    pub fn new(device: &Rc<dyn Device>) -> Self {
        Self { device: device.clone(), recordings: HashMap::new() }
    }

    /// Runs a step of this kind, by a replay or by `run`, which enqueues it.
    pub fn step(&mut self, key: GraphKey, run: impl FnOnce()) -> DeviceResult<()> {
        let graph = match self.recordings.get(&key) {
            None => {
                run();
                self.recordings.insert(key, GraphRecording::Warm);
                return Ok(());
            }
            Some(GraphRecording::Warm) => {
                self.device.begin_capture()?;
                run();
                let graph = self.device.end_capture()?;
                self.recordings.insert(key, GraphRecording::Ready(graph));
                graph
            }
            Some(GraphRecording::Ready(graph)) => *graph,
        };
        // SAFETY: the recorded addresses are of buffers that live as long as the backend; `clear` is called before one
        // of them moves.
        unsafe { self.device.launch_graph(graph) }
    }

    /// Records a step of this kind, which `run` enqueues, without doing it. Everything that it loads or allocates at
    /// first use must be there.
    pub fn record(&mut self, key: GraphKey, run: impl FnOnce()) -> DeviceResult<()> {
        if matches!(self.recordings.get(&key), Some(GraphRecording::Ready(_))) {
            return Ok(());
        }
        self.device.begin_capture()?;
        run();
        let graph = self.device.end_capture()?;
        self.recordings.insert(key, GraphRecording::Ready(graph));
        Ok(())
    }

    /// Forgets all recordings, because an address in them is no longer valid.
    pub fn clear(&mut self) {
        self.device.clear_graphs();
        self.recordings.clear();
    }
}

/// The sizes that [`bucket`] gives for up to `max_rows` rows.
pub fn buckets(max_rows: usize) -> Vec<usize> {
    let mut sizes: Vec<usize> = (1..=max_rows).map(|rows| bucket(rows, max_rows)).collect();
    sizes.dedup();
    sizes
}

/// The number of rows that a graph is recorded for: one of a few sizes, not much larger than needed.
pub fn bucket(num_rows: usize, max_rows: usize) -> usize {
    let bucket = match num_rows {
        0..=8 => num_rows.next_power_of_two(),
        9..=64 => num_rows.next_multiple_of(8),
        65..=256 => num_rows.next_multiple_of(16),
        _ => num_rows.next_multiple_of(64),
    };
    bucket.min(max_rows)
}

#[cfg(test)]
mod tests {
    use super::{bucket, buckets};

    #[test]
    fn buckets_hold_their_rows_and_waste_little() {
        for rows in 1..=1000 {
            let bucket = bucket(rows, 1000);
            assert!(bucket >= rows && bucket <= 1000, "{rows} rows in a bucket of {bucket}");
            assert!(bucket < 2 * rows, "{rows} rows in a bucket of {bucket}");
        }
        assert_eq!(buckets(256).len(), 4 + 7 + 12);
        assert_eq!(buckets(6), [1, 2, 4, 6]);
    }
}
