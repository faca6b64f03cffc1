//! Runs each model in thousands of orders: at random, and by shuttle's probabilistic search for orders that are rare.
//!
//! `PAGETIDE_INTERLEAVINGS=n` sets how many of each.

use pagetide_interleavings::backend::cpu::models;
use pagetide_interleavings::engine::bill::Tenant;
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
fn copies_are_there_for_who_waits() {
    check(models::copies_are_there_for_who_waits);
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

/// Never more places than there are, nor more of one tenant than it may have; and all of them come back.
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
                    // In either order.
                    if tenant == 1 { drop((first, second)) } else { drop((second, first)) }
                }
            })
        });
        takers.into_iter().for_each(|taker| taker.join().unwrap());
        assert_eq!(places.num_taken(), 0);
        // Nothing is left of who had some.
        let all: Vec<_> = (0..2).map(|_| places.try_take(Tenant(1), 3, 2).unwrap()).collect();
        assert!(places.try_take(Tenant(1), 3, 2).is_err() && places.try_take(Tenant(2), 3, 2).is_ok());
        drop(all);
    });
}

/// Requests of two keys under their own limits and one of all: who is refused by one has nothing of the other, and when all
/// have ended everything is as it was.
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
        // Each limit lets in as many as it says, and no more.
        let enter = |key: usize| Ticket::enter(Tenant(1), vec![keys[key].clone(), all.clone()]);
        let held = (enter(0).expect("a place of the first key"), enter(1).expect("a place of the second key"));
        assert!(enter(0).is_err() && enter(1).is_err());
        drop(held);
        let seats = [0, 1].map(|key: usize| Seat::take(Tenant(1), &keys[key]).expect("a connection of each key"));
        assert!(Seat::take(Tenant(1), &keys[0]).is_err());
        drop(seats);
    });
}

/// A request as its owner and the engine have it: the owner hears, stops or goes, the engine says tokens and ends, or hears
/// of the end. Whatever comes first, its place and what it took of the limits come back once, and the stream closes.
#[test]
fn a_request_gives_back_what_it_took_whoever_ends_it() {
    check(|| {
        let places = Places::default();
        let limiter = Arc::new(Limiter::of_key(Rates { max_requests: 1, ..Rates::default() }));
        let (cancel, cancelled) = mpsc::channel::<()>();
        let (events, stream) = mpsc::channel::<u32>();
        let place = places.try_take(Tenant(1), 1, 1).expect("it is the first");
        let ticket = Ticket::enter(Tenant(1), vec![limiter.clone()]).expect("it is the first");
        let engine = thread::spawn(move || {
            let _place = place;
            for token in 0..3 {
                // Who has gone is heard of by the one or the other.
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
            // The engine may have ended before.
            let _ = cancel.send(());
        });
        (engine.join().unwrap(), owner.join().unwrap());
        assert_eq!(places.num_taken(), 0);
        Ticket::enter(Tenant(1), vec![limiter]).expect("the limit is free again");
    });
}
