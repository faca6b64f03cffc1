#![no_main]

use std::sync::LazyLock;

static TARGET: LazyLock<String> = LazyLock::new(|| std::env::var("PAGETIDE_FUZZ_TARGET").unwrap_or_default());

pagetide_fuzz::fuzz!(&TARGET);
