#![no_main]

pagetide_fuzz::fuzz!("request_body");
