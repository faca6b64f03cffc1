//! Runs each model under thousands of thread schedules. Half of the schedules are random; the other half come from
//! shuttle's PCT scheduler, which finds rare ones.
//!
//! `PAGETIDE_INTERLEAVINGS=n` sets the number of schedules of each kind.

use pagetide_interleavings::backend::cpu::models;
use pagetide_interleavings::ids::Tenant;
use pagetide_interleavings::limiter::{Limiter, Rates, Seat, Ticket};
use pagetide_interleavings::places::Places;
use shuttle::rand::Rng;
use shuttle::sync::mpsc;
use shuttle::thread;
use std::sync::Arc;

fn check(model: impl Fn() + Send + Sync + Copy + 'static) {
    let number = std::env::var("PAGETIDE_INTERLEAVINGS").ok();
    let number = number.map_or(2_000, |number| number.parse().expect("PAGETIDE_INTERLEAVINGS must be a number"));
    shuttle::check_random(model, number);
    shuttle::check_pct(model, number, 3);
}

#[test]
fn a_wait_ends_after_the_copy() {
    check(models::a_wait_ends_after_the_copy);
}

#[test]
fn a_copier_ends_what_it_was_given() {
    check(models::a_copier_ends_what_it_was_given);
}

#[test]
fn every_task_runs_once() {
    check(models::every_task_runs_once);
}

#[test]
fn tasks_write_what_the_caller_reads() {
    check(models::tasks_write_what_the_caller_reads);
}

#[test]
fn two_callers_share_a_team() {
    check(models::two_callers_share_a_team);
}

/// No more places are taken than there are, and no more by one tenant than its limit. All of them are given back.
#[test]
fn places_are_given_back_once() {
    check(|| {
        let places = Places::default();
        let takers = [1, 1, 2].map(|tenant| {
            let places = places.clone();
            thread::spawn(move || {
                for _ in 0..3 {
                    let first = places.try_take(Tenant(tenant), 3, 2);
                    let second = places.try_take(Tenant(tenant), 3, 2);
                    assert!(places.num_taken() <= 3);
                    // One tenant gives them back in this order, the other in reverse.
                    if tenant == 1 { drop((first, second)) } else { drop((second, first)) }
                }
            })
        });
        takers.into_iter().for_each(|taker| taker.join().unwrap());
        assert_eq!(places.num_taken(), 0);
        // The tenants' counts are back at zero, so each gets its full share again.
        let all: Vec<_> = (0..2).map(|_| places.try_take(Tenant(1), 3, 2).unwrap()).collect();
        assert!(places.try_take(Tenant(1), 3, 2).is_err() && places.try_take(Tenant(2), 3, 2).is_ok());
        drop(all);
    });
}

/// Requests of two keys, each under its key's limit and under a common one. A request that one limit refuses takes
/// nothing from the other limit. When all requests have ended, all limits are as before.
#[test]
fn limits_are_as_they_were_when_all_have_ended() {
    check(|| {
        let rates = |max_requests| Rates { max_requests, max_connections: 1, ..Rates::default() };
        let all = Arc::new(Limiter::of_all(rates(2)));
        let keys = [1, 2].map(|_| Arc::new(Limiter::of_key(rates(1))));
        let clients = [0, 0, 1].map(|key: usize| {
            let limiters = vec![keys[key].clone(), all.clone()];
            thread::spawn(move || {
                for _ in 0..2 {
                    let seat = Seat::take(Tenant(1 + key as u32), &limiters[0]);
                    if let Ok(ticket) = Ticket::enter(Tenant(1 + key as u32), limiters.clone()) {
                        ticket.take_tokens(5).expect("tokens have no limit");
                        ticket.set_used(3);
                    }
                    drop(seat);
                }
            })
        });
        clients.into_iter().for_each(|client| client.join().unwrap());
        // Each limit admits exactly as many requests as it says.
        let enter = |key: usize| Ticket::enter(Tenant(1), vec![keys[key].clone(), all.clone()]);
        let held = (enter(0).expect("a place of the first key"), enter(1).expect("a place of the second key"));
        assert!(enter(0).is_err() && enter(1).is_err());
        drop(held);
        let seats = [0, 1].map(|key: usize| Seat::take(Tenant(1), &keys[key]).expect("a connection of each key"));
        assert!(Seat::take(Tenant(1), &keys[0]).is_err());
        drop(seats);
    });
}

/// A request between its owner and the engine. The owner reads all tokens or leaves early; the engine sends tokens
/// until it ends or notices that the owner has left. In every order, the request's place and its share of the limits
/// are given back exactly once, and the stream closes.
#[test]
fn a_request_gives_back_its_place_however_it_ends() {
    check(|| {
        let places = Places::default();
        let limiter = Arc::new(Limiter::of_key(Rates { max_requests: 1, ..Rates::default() }));
        let (cancel, cancelled) = mpsc::channel::<()>();
        let (events, stream) = mpsc::channel::<u32>();
        let place = places.try_take(Tenant(1), 1, 1).expect("nobody else has one");
        let ticket = Ticket::enter(Tenant(1), vec![limiter.clone()]).expect("nobody else is limited");
        let engine = thread::spawn(move || {
            let _place = place;
            for token in 0..3 {
                // An owner that has left shows up as a message or as a closed stream.
                if cancelled.try_recv().is_ok() || events.send(token).is_err() {
                    return;
                }
            }
        });
        let owner = thread::spawn(move || {
            let _ticket = ticket;
            let stays = shuttle::rand::thread_rng().gen_bool(0.5);
            let heard: Vec<u32> = if stays { stream.iter().collect() } else { stream.iter().take(1).collect() };
            assert!(heard.iter().copied().eq(0..heard.len() as u32) && (!stays || heard.len() == 3));
            drop(stream);
            // The engine may have ended already.
            let _ = cancel.send(());
        });
        engine.join().unwrap();
        owner.join().unwrap();
        assert_eq!(places.num_taken(), 0);
        Ticket::enter(Tenant(1), vec![limiter]).expect("the limit is free again");
    });
}
