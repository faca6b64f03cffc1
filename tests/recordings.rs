//! Replays every recording in `tests/data/recordings`: the scheduler must make the recorded decisions again. A
//! recording from production becomes a regression test when it is put there. `docs/recorder.md` says how to take one.

use pagetide_recorder::{RecordedEvent, Recording, Replayer};
use std::path::Path;

#[test]
fn recordings_give_the_decisions_that_were_recorded() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/recordings");
    let (mut from_start, mut from_state, mut preempted, mut swapped_in) = (0, 0, 0, 0);
    for entry in std::fs::read_dir(folder).unwrap() {
        let file = entry.unwrap().path();
        let name = file.display();
        let recording =
            Recording::read(&std::fs::read(&file).unwrap()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut replayer = Replayer::new(recording.keyframe());
        for (place, timed) in recording.events().enumerate() {
            let event = timed.unwrap_or_else(|error| panic!("{name}: {error}")).event;
            if let Err(difference) = replayer.apply(&event) {
                panic!("{name}, event {place}: {difference}");
            }
            if let RecordedEvent::Plan { plan: Some(plan), .. } = event {
                preempted += plan.preempted.len();
                swapped_in += plan.swap_in.len();
            }
        }
        *(if recording.header().is_from_start { &mut from_start } else { &mut from_state }) += 1;
    }
    // At least one recording begins with a state, so that a change of the states' format is noticed.
    assert!(
        from_start > 0 && from_state > 0 && preempted > 0 && swapped_in > 0,
        "{from_start} files from the start, {from_state} from a state, {preempted} preemptions, {swapped_in} swap-ins"
    );
}
