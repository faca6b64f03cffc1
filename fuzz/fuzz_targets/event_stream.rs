#![no_main]

pagetide_fuzz::fuzz!("event_stream");
