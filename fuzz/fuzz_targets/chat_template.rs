#![no_main]

pagetide_fuzz::fuzz!("chat_template");
