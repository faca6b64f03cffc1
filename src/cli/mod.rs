//! The commands of the `pagetide` program.
