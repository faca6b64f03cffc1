//! The CPU backend: the default where there is no GPU, and the reference for every other one.
