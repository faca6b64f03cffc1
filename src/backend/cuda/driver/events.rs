//! Maps numbered events to the driver's event objects, and remembers which events are known to be done.

use super::super::device::{DeviceEvent, DeviceResult, Stream};
use std::collections::VecDeque;

/// The driver's operations on an event object of type `E`.
pub trait EventCalls<E> {
    fn create(&self) -> DeviceResult<E>;
    fn record(&self, event: E, stream: Stream) -> DeviceResult<()>;
    fn is_done(&self, event: E) -> DeviceResult<bool>;
}

/// Events of one stream. `pending[i]` has number `num_done + 1 + i`. All events before are done.
struct StreamLine<E> {
    num_done: u64,
    pending: VecDeque<E>,
}

impl<E> StreamLine<E> {
    /// Index in `pending`, or `None` if the event is done.
    fn place(&self, number: u64) -> Option<usize> {
        let last = self.num_done + self.pending.len() as u64;
        assert!((1..=last).contains(&number), "event {number} of a stream that has recorded {last}");
        (number > self.num_done).then(|| (number - self.num_done - 1) as usize)
    }
}

/// The events of a device.
pub struct EventLog<E> {
    lines: [StreamLine<E>; Stream::ALL.len()],
    /// Objects that are free to be recorded again. A stream that was told to wait for an object waits for what was
    /// recorded at that time.
    free: Vec<E>,
}

/// With more objects of a stream than this, `record` looks for some that are done, because nothing else may ever ask
/// for them.
const MANY: usize = 64;

impl<E: Copy> EventLog<E> {
    pub fn new() -> Self {
        Self { lines: std::array::from_fn(|_| StreamLine { num_done: 0, pending: VecDeque::new() }), free: Vec::new() }
    }

    pub fn record(&mut self, stream: Stream, calls: &impl EventCalls<E>) -> DeviceResult<DeviceEvent> {
        while self.line(stream).pending.len() >= MANY && self.pop_if_done(stream, 0, calls)? {}
        let object = match self.free.pop() {
            Some(object) => object,
            None => calls.create()?,
        };
        if let Err(error) = calls.record(object, stream) {
            self.free.push(object);
            return Err(error);
        }
        let line = self.line(stream);
        line.pending.push_back(object);
        Ok(DeviceEvent { stream, number: line.num_done + line.pending.len() as u64 })
    }

    pub fn is_done(&mut self, event: DeviceEvent, calls: &impl EventCalls<E>) -> DeviceResult<bool> {
        match self.line(event.stream).place(event.number) {
            None => Ok(true),
            Some(place) => self.pop_if_done(event.stream, place, calls),
        }
    }

    /// The object of `event`, or `None` if the event is known to be done.
    pub fn pending(&mut self, event: DeviceEvent) -> Option<E> {
        let line = self.line(event.stream);
        line.place(event.number).map(|place| line.pending[place])
    }

    /// Marks all recorded events as done.
    pub fn all_done(&mut self) {
        for line in &mut self.lines {
            line.num_done += line.pending.len() as u64;
            self.free.extend(line.pending.drain(..));
        }
    }

    /// Takes all objects, which the caller destroys.
    pub fn take(&mut self) -> Vec<E> {
        self.all_done();
        std::mem::take(&mut self.free)
    }

    /// If the event at `place` is done, removes it and all before it.
    fn pop_if_done(&mut self, stream: Stream, place: usize, calls: &impl EventCalls<E>) -> DeviceResult<bool> {
        let object = self.line(stream).pending[place];
        let is_done = calls.is_done(object)?;
        if is_done {
            let line = &mut self.lines[stream as usize];
            line.num_done += place as u64 + 1;
            self.free.extend(line.pending.drain(..=place));
        }
        Ok(is_done)
    }

    fn line(&mut self, stream: Stream) -> &mut StreamLine<E> {
        &mut self.lines[stream as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::device::DeviceError;
    use super::*;
    use std::cell::{Cell, RefCell};

    /// A fake driver. Objects are numbers, and `passed` is the number of recordings that each stream has passed.
    #[derive(Default)]
    struct Fake {
        made: Cell<usize>,
        /// For each stream, the objects of its recordings.
        recorded: RefCell<[Vec<usize>; 3]>,
        passed: RefCell<[usize; 3]>,
        queries: Cell<usize>,
        broken: Cell<bool>,
    }

    impl EventCalls<usize> for Fake {
        fn create(&self) -> DeviceResult<usize> {
            self.made.set(self.made.get() + 1);
            Ok(self.made.get() - 1)
        }

        fn record(&self, object: usize, stream: Stream) -> DeviceResult<()> {
            if self.broken.get() {
                return Err(DeviceError::Lost("gone".into()));
            }
            self.recorded.borrow_mut()[stream as usize].push(object);
            Ok(())
        }

        fn is_done(&self, object: usize) -> DeviceResult<bool> {
            self.queries.set(self.queries.get() + 1);
            // An object stands for its last recording.
            let recorded = self.recorded.borrow();
            let places = recorded
                .iter()
                .enumerate()
                .filter_map(|(stream, objects)| Some((stream, objects.iter().rposition(|other| *other == object)?)));
            let (stream, place) = places.max_by_key(|(_, place)| *place).expect("it was recorded");
            Ok(place < self.passed.borrow()[stream])
        }
    }

    #[test]
    fn numbers_grow_along_a_stream_and_a_later_one_says_the_same_of_all_before() {
        let (fake, mut log) = (Fake::default(), EventLog::new());
        let events: Vec<DeviceEvent> = (0..5).map(|_| log.record(Stream::Compute, &fake).unwrap()).collect();
        assert!(events.iter().zip(1..).all(|(event, number)| event.number == number));
        assert_eq!(log.record(Stream::CopyIn, &fake).unwrap(), DeviceEvent { stream: Stream::CopyIn, number: 1 });
        assert!(!log.is_done(events[3], &fake).unwrap());
        fake.passed.borrow_mut()[Stream::Compute as usize] = 4;
        assert!(log.is_done(events[3], &fake).unwrap());
        let asked = fake.queries.get();
        assert!(events[..4].iter().all(|event| log.is_done(*event, &fake).unwrap() && log.pending(*event).is_none()));
        assert_eq!(fake.queries.get(), asked, "nothing is asked about what is known to be done");
        assert!(!log.is_done(events[4], &fake).unwrap());
        assert_eq!(log.pending(events[4]), Some(4));
    }

    #[test]
    fn objects_are_used_again_and_never_more_than_needed() {
        let (fake, mut log) = (Fake::default(), EventLog::new());
        for round in 0..1000 {
            let event = log.record(Stream::CopyOut, &fake).unwrap();
            assert_eq!(event.number, round + 1);
            // The stream is five recordings behind, and nothing asks for its events.
            fake.passed.borrow_mut()[Stream::CopyOut as usize] = (round as usize).saturating_sub(5);
        }
        assert!(fake.made.get() <= MANY + 1, "{} objects", fake.made.get());
        log.all_done();
        assert!(log.is_done(DeviceEvent { stream: Stream::CopyOut, number: 1000 }, &fake).unwrap());
        assert_eq!(log.take().len(), fake.made.get(), "every object is destroyed once");
    }

    #[test]
    fn a_recording_that_fails_leaves_no_number() {
        let (fake, mut log) = (Fake::default(), EventLog::new());
        log.record(Stream::Compute, &fake).unwrap();
        fake.broken.set(true);
        assert!(log.record(Stream::Compute, &fake).is_err());
        fake.broken.set(false);
        assert_eq!(log.record(Stream::Compute, &fake).unwrap().number, 2);
        assert_eq!(log.take().len(), 2);
    }

    #[test]
    #[should_panic(expected = "event 2 of a stream that has recorded 1")]
    fn an_event_that_was_never_recorded_is_a_bug() {
        let (fake, mut log) = (Fake::default(), EventLog::new());
        log.record(Stream::Compute, &fake).unwrap();
        let _ = log.is_done(DeviceEvent { stream: Stream::Compute, number: 2 }, &fake);
    }
}
