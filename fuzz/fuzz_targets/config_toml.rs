#![no_main]

pagetide_fuzz::fuzz!("config_toml");
