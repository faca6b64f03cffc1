#![no_main]

pagetide_fuzz::fuzz!("slot_file");
