//! What requests hear of memory pressure, what they may hold, and whose cache is whose.

use super::*;
use pagetide_engine::bill::KvBill;

fn under(preemption_mode: PreemptionMode, overlap: bool) -> World {
    World::with(Settings { preemption_mode, ..Settings::new(overlap) })
}

/// The last bill, and the pauses in their order: `None` where one begins, how long it was where it ends.
fn paid(events: &[Event]) -> (KvBill, Vec<Option<Duration>>) {
    let mut bill = KvBill::default();
    let mut pauses = Vec::new();
    for event in events {
        match event {
            Event::Bill(next) => {
                assert!(next.preemptions >= bill.preemptions && next.paused >= bill.paused, "{events:?}");
                bill = *next;
            }
            Event::Paused { index: 0 } => pauses.push(None),
            Event::Resumed { index: 0, after } => pauses.push(Some(*after)),
            _ => {}
        }
    }
    (bill, pauses)
}

#[test]
fn preempted_requests_are_told_and_what_it_cost() {
    for overlap in BOTH_LOOPS {
        for mode in [PreemptionMode::Swap, PreemptionMode::Recompute] {
            let world = under(mode, overlap);
            let hold = world.hold();
            // Each needs 6 blocks in the end, and there are 8.
            let senior = world.submit(vec![1; 9], 16).unwrap();
            let junior = world.submit(vec![2; 10], 14).unwrap();
            drop(hold);
            let (senior, junior) = (events(senior), events(junior));
            assert_eq!(tokens(&senior), (9..25).collect::<Vec<_>>());
            assert_eq!(tokens(&junior), (10..24).collect::<Vec<_>>());
            assert_eq!(paid(&senior), (KvBill::default(), vec![]), "{senior:?}");
            let (bill, pauses) = paid(&junior);
            assert!((1..=bill.preemptions).contains(&(pauses.len() / 2)), "{junior:?}");
            assert!(pauses.chunks(2).all(|pause| pause[0].is_none() && pause[1].is_some()), "{pauses:?}");
            assert_eq!(pauses.iter().flatten().sum::<Duration>(), bill.paused);
            assert!(bill.paused > Duration::ZERO);
            assert_eq!(bill.swapped_out_blocks > 0, mode == PreemptionMode::Swap, "{bill:?}");
            match mode {
                PreemptionMode::Swap => assert!(bill.swapped_in_blocks > 0 && bill.recomputed_tokens == 0, "{bill:?}"),
                // Its full blocks may still have been cached, on either tier.
                _ => assert!(bill.swapped_in_blocks + bill.recomputed_tokens > 0, "{bill:?}"),
            }
            world.wait_until_idle();
        }
    }
}

#[test]
fn a_bill_is_of_all_samples() {
    for overlap in BOTH_LOOPS {
        let world = under(PreemptionMode::Swap, overlap);
        // They share the prompt's 2 full blocks, and want 4 more each in the end.
        let params = SamplingParams { max_tokens: 16, ..SamplingParams::default() };
        let all = events(
            block_on(world.handle.submit(request(vec![1; 9], params).with(|request| request.core.n = 3))).unwrap(),
        );
        let count = |is_it: &dyn Fn(&Event) -> bool| all.iter().filter(|event| is_it(event)).count();
        assert_eq!(count(&|event| matches!(event, Event::Finished { .. })), 3);
        let last = all.iter().rposition(|event| matches!(event, Event::Bill(_))).unwrap();
        let Event::Bill(bill) = &all[last] else { unreachable!() };
        assert_eq!(count(&|event| matches!(event, Event::Paused { .. })), bill.preemptions, "{all:?}");
        // They say the same: what comes back may be found under its name.
        assert!(bill.preemptions >= 1 && bill.swapped_out_blocks > 0, "{bill:?}");
        let paused = |event: &Event| if let Event::Resumed { after, .. } = event { *after } else { Duration::ZERO };
        assert_eq!(all.iter().map(paused).sum::<Duration>(), bill.paused);
        // The sample that ends last is the one that was preempted.
        assert!(matches!(all.last(), Some(Event::Finished { index: 2, .. })), "{all:?}");
    }
}

#[test]
fn a_client_that_ends_its_sample_has_heard_what_it_cost() {
    let world = under(PreemptionMode::Swap, false);
    let hold = world.hold();
    let senior = world.submit(vec![1; 9], 16).unwrap();
    let mut junior = world.submit(vec![2; 10], 14).unwrap().events;
    drop(hold);
    let mut heard = Vec::new();
    block_on(async {
        while tokens(&heard).last() != Some(&22) {
            heard.push(junior.next().await.expect("it has not ended"));
        }
        junior.stop_sample(0);
    });
    let (bill, pauses) = paid(&heard);
    assert!(bill.swapped_in_blocks > 0 && (1..=bill.preemptions).contains(&(pauses.len() / 2)), "{heard:?}");
    events(senior);
    world.wait_until_idle();
}

#[test]
fn an_embedding_hears_its_bill_before_it() {
    let world = under(PreemptionMode::Swap, false);
    let params = || SamplingParams { pooling: Some(Pooling::Last), max_tokens: 1, ..SamplingParams::default() };
    events(world.submit_with(vec![3; 12], params()).unwrap());
    let all = events(world.submit_with(vec![3; 12], params()).unwrap());
    assert!(matches!(all[0], Event::Bill(KvBill { cached_device_tokens: 8, .. })), "{all:?}");
    assert!(matches!(all.last(), Some(Event::Finished { .. })), "{all:?}");
}

#[test]
fn tenants_share_no_prefix() {
    let world = World::start(false);
    let caller = |tenant, salt: &str| Caller { tenant: Tenant(tenant), salt: Some(salt.into()) };
    let (first, second) = (caller(1, "aa"), caller(2, "bb"));
    let cached = |caller: &Caller, own: Option<&str>| {
        let handle = world.handle.on_behalf_of(caller.clone());
        let params = SamplingParams { max_tokens: 1, ..SamplingParams::default() };
        let request = request(vec![7; 9], params).with(|request| request.core.cache_salt = own.map(str::to_owned));
        let all = events(block_on(handle.submit(request)).unwrap());
        let (bill, _) = paid(&all);
        assert!(all.contains(&Event::Started { cached_tokens: bill.cached_device_tokens as u32 }), "{all:?}");
        bill.cached_device_tokens
    };
    assert_eq!(cached(&first, None), 0);
    assert_eq!(cached(&first, None), 8, "its own");
    assert_eq!(cached(&second, None), 0, "another's");
    assert_eq!(cached(&second, None), 8);
    assert_eq!(cached(&first, Some("own")), 0, "its own, under another salt");
    assert_eq!(cached(&Caller::default(), None), 0);
}

#[test]
fn what_may_not_be_preempted_has_to_fit_into_its_part_of_the_pool() {
    let world = World::start(false);
    let ask = |prompt: usize, max_tokens: u32, n: u32| {
        let params = SamplingParams { max_tokens, ..SamplingParams::default() };
        let terms = Terms { preemptible: false, ..Terms::default() };
        let request = request(vec![1; prompt], params).with(|request| {
            request.core.terms = terms;
            request.core.n = n;
        });
        block_on(world.handle.submit(request))
    };
    // 4 of 8 blocks of 4 tokens: 16 slots, and the last token needs none.
    assert_eq!(tokens(&events(ask(10, 7, 1).unwrap())).len(), 7);
    for (prompt, max_tokens, n, words) in [
        (10, 8, 1, "5 KV blocks of 4 tokens (10 tokens in the prompt, 8 for the output)"),
        (17, 0, 1, "5 KV blocks of 4 tokens (17 tokens in the prompt, 1 for the output)"),
        // The samples share the prompt's one full block.
        (4, 6, 2, "5 KV blocks of 4 tokens (4 tokens in the prompt, 6 for each of 2 outputs)"),
    ] {
        let error = ask(prompt, max_tokens, n).unwrap_err();
        assert_eq!((error.status, error.param.as_deref()), (400, Some("preemptible")), "{error}");
        assert!(error.message.contains(words), "{error}");
        assert!(
            error.message.contains("hold 4 of this server's 8 blocks (scheduler.non_preemptible_share)"),
            "{error}"
        );
    }
    assert_eq!(tokens(&events(ask(4, 5, 2).unwrap())).len(), 10);
    // Not given: as many as fit there.
    assert_eq!(tokens(&events(ask(10, 0, 1).unwrap())).len(), 7);
    assert_eq!(ask(100, 0, 1).unwrap_err().param.as_deref(), Some("prompt"), "longer than the model can");
    world.wait_until_idle();
}
