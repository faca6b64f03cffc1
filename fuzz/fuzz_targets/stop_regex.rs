#![no_main]

pagetide_fuzz::fuzz!("stop_regex");
