#![no_main]

pagetide_fuzz::fuzz!("gguf");
