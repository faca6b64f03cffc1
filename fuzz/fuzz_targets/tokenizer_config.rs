#![no_main]

pagetide_fuzz::fuzz!("tokenizer_config");
