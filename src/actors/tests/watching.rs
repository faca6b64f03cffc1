//! Tests of snapshots.

use super::*;
use crate::snapshot::Snapshot;
use pagetide_base::ids::BlockId;
use pagetide_engine::block_pool::BlockState;
use pagetide_engine::scheduler::SeqPhase;
use std::sync::atomic::Ordering;

fn look(world: &World) -> Snapshot {
    block_on(world.handle.look(100)).unwrap()
}

#[test]
fn the_policy_and_the_pools_are_seen_at_one_moment() {
    for overlap in BOTH_LOOPS {
        let world = World::start(overlap);
        // Long enough to be seen.
        world.device.step_ms.store(10, Ordering::SeqCst);
        let empty = look(&world);
        assert!(empty.seqs.is_empty());
        assert_eq!(
            (empty.device.states(), empty.swap.states()),
            (vec![BlockState::Free; NUM_BLOCKS], vec![BlockState::Free; 8])
        );
        let hold = world.hold();
        // Each needs 6 blocks in the end, and there are 8.
        let senior = world.submit(vec![1; 9], 16).unwrap();
        let junior = world.submit(vec![2; 10], 14).unwrap();
        drop(hold);
        let (mut phases, mut moved) = (Vec::new(), 0);
        while world.places.num_taken() > 0 {
            let snapshot = look(&world);
            moved += snapshot.moves.out.len() + snapshot.moves.back.len();
            let is_used = |pool: &[BlockState], block: &BlockId| matches!(pool[block.index()], BlockState::Used(_));
            let (device, swap) = (snapshot.device.states(), snapshot.swap.states());
            for seq in &snapshot.seqs {
                let view = &seq.view;
                assert!(seq.arrived <= Instant::now());
                assert!(view.table.iter().all(|block| is_used(&device, block)), "{snapshot:?}");
                assert!(view.swapped.iter().chain(&view.backing).all(|block| is_used(&swap, block)));
                assert_eq!(view.phase == SeqPhase::Swapped, view.table.is_empty() && !view.swapped.is_empty());
                phases.push(view.phase);
            }
        }
        let (tokens_of_senior, bill) = (tokens(&events(senior)).len(), events(junior));
        assert_eq!((tokens_of_senior, tokens(&bill).len()), (16, 14));
        assert!(phases.contains(&SeqPhase::Decode), "{phases:?}");
        wait_until("what has ended is counted", || look(&world).totals.ended == 2);
        let totals = look(&world).totals;
        assert_eq!((totals.prompt_tokens, totals.generated_tokens), (19, 30));
        assert_eq!((totals.first_token.count, totals.inter_token.count), (2, 28));
        assert!(totals.preempted_swap > 0 && totals.blocks_out > 0 && totals.blocks_in > 0, "{totals:?}");
        assert_eq!(moved as u64, totals.blocks_out + totals.blocks_in, "somebody looked all the time");
    }
}

#[test]
fn the_number_of_waiting_requests_shown_is_limited() {
    let world = World::start(false);
    let hold = world.hold();
    // The first step has one of them, and there is room for no other.
    let requests: Vec<_> = (0..3).map(|_| world.submit(vec![1; 28], 4).unwrap()).collect();
    world.wait_for_steps(1);
    let waiting = |most| {
        let seqs = block_on(world.handle.look(most)).unwrap().seqs;
        seqs.iter()
            .filter(|seq| seq.view.phase == SeqPhase::Waiting)
            .map(|seq| seq.view.rank.request.0)
            .collect::<Vec<_>>()
    };
    wait_until("all have arrived", || waiting(10).len() == 2);
    assert_eq!(waiting(1), [2]);
    assert_eq!(waiting(0), [0_u64; 0]);
    drop(hold);
    drop(requests);
    world.wait_until_idle();
}
