#![no_main]

pagetide_fuzz::fuzz!("grammar_text");
