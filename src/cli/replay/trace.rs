//! The timeline in Chrome's trace format (JSON), which Perfetto reads.

use super::timeline::Timeline;
use serde_json::{Value, json};

/// What is shown as processes.
const ENGINE: u32 = 1;
const REQUESTS: u32 = 2;

pub fn write(timeline: &Timeline) -> String {
    let name = |pid: u32, tid: u64, what: &str, name: String| json!({"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}});
    let mut events: Vec<Value> = vec![
        name(ENGINE, 0, "process_name", "engine".into()),
        name(ENGINE, 0, "thread_name", "steps".into()),
        name(REQUESTS, 0, "process_name", "requests".into()),
    ];
    for step in &timeline.steps {
        events.push(json!({
            "ph": "X", "pid": ENGINE, "tid": 0, "name": "step", "ts": step.from_us, "dur": step.to_us - step.from_us,
            "args": {
                "sequences": step.num_seqs, "tokens": step.num_tokens,
                "blocks out": step.swap_out, "blocks in": step.swap_in,
            },
        }));
    }
    for level in &timeline.levels {
        let counter = |name: &str, args: Value| json!({"ph": "C", "pid": ENGINE, "tid": 0, "name": name, "ts": level.at_us, "args": args});
        let (device, swap) = (&level.device, &level.swap);
        events
            .push(counter("device blocks", json!({"used": device.used, "cached": device.cached, "free": device.free})));
        events.push(counter("swap blocks", json!({"used": swap.used, "cached": swap.cached, "free": swap.free})));
        let sequences = json!({"running": level.running, "waiting": level.waiting, "swapped": level.swapped});
        events.push(counter("sequences", sequences));
    }
    for (request, spans) in &timeline.requests {
        events.push(name(REQUESTS, request.0, "thread_name", request.to_string()));
        for span in spans {
            events.push(json!({
                "ph": "X", "pid": REQUESTS, "tid": request.0, "name": span.phase.name(), "ts": span.from_us,
                "dur": span.to_us - span.from_us,
            }));
        }
    }
    for mark in &timeline.preemptions {
        let cause = mark.cause.map_or("nobody".into(), |cause| cause.to_string());
        events.push(json!({
            "ph": "i", "s": "t", "pid": REQUESTS, "tid": mark.request.0, "name": "preempted", "ts": mark.at_us,
            "args": {"to": cause},
        }));
    }
    for at_us in &timeline.failures {
        let failure = json!({"ph": "i", "s": "g", "pid": ENGINE, "tid": 0, "name": "executor fails", "ts": at_us});
        events.push(failure);
    }
    json!({"displayTimeUnit": "ms", "traceEvents": events}).to_string()
}
