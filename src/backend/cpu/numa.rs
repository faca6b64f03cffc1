//! Placement of memory on a machine with several NUMA nodes.
//!
//! Tasks go to whichever member of the team is free, so the threads of a node own no part of the weights or of the KV
//! cache. By default the system puts each page on the node of the thread that first touches it, so that each stream of
//! weights would be on one node. If pages are spread over all nodes, each stream uses all memory controllers.

use std::sync::OnceLock;

/// Nodes that a mask has room for.
const MAX_NODES: usize = 1024;

/// Asks the system to spread the pages of a mapping over the nodes that this process may use. None of the pages may
/// have been touched yet. Nothing happens on a machine with one node, or if the user chose a policy (`numactl`). The
/// system may ignore it.
///
/// `start` is the beginning of a page.
pub(super) fn interleave(start: *mut u8, bytes: usize) {
    static NODES: OnceLock<Vec<usize>> = OnceLock::new();
    let nodes = NODES.get_or_init(|| if has_default_policy() { allowed_nodes() } else { Vec::new() });
    if nodes.len() > 1 {
        bind(start, bytes, nodes);
    }
}

fn allowed_nodes() -> Vec<usize> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:"));
    list.and_then(|list| parse_list(list.trim())).unwrap_or_default()
}

/// Numbers of a list such as `0-1,4`.
fn parse_list(list: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse().ok()?, last.parse().ok()?);
        numbers.extend((first..=last).take_while(|node: &usize| *node < MAX_NODES));
    }
    Some(numbers)
}

fn has_default_policy() -> bool {
    let mut policy: libc::c_int = -1;
    let nowhere = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: the call writes the policy of this thread to `policy`, and nothing else.
    let result = unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut policy, nowhere, 0, nowhere, 0) };
    result == 0 && policy == libc::MPOL_DEFAULT
}

/// Returns whether the system accepted the policy.
fn bind(start: *mut u8, bytes: usize, nodes: &[usize]) -> bool {
    const BITS: usize = libc::c_ulong::BITS as usize;
    let mut mask = [0 as libc::c_ulong; MAX_NODES / BITS];
    nodes.iter().for_each(|node| mask[node / BITS] |= 1 << (node % BITS));
    // SAFETY: the call changes where pages of the mapping will be, not their contents.
    let result =
        unsafe { libc::syscall(libc::SYS_mbind, start, bytes, libc::MPOL_INTERLEAVE, mask.as_ptr(), MAX_NODES + 1, 0) };
    result == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_nodes() {
        assert_eq!(parse_list("0"), Some(vec![0]));
        assert_eq!(parse_list("0-2,5,1022-4000"), Some(vec![0, 1, 2, 5, 1022, 1023]));
        assert_eq!(parse_list(""), None);
        assert_eq!(parse_list("0-x"), None);
    }

    #[test]
    fn advice_leaves_the_memory_as_it_is() {
        const BYTES: usize = 1 << 20;
        let mut map = memmap2::MmapMut::map_anon(BYTES).unwrap();
        let nodes = allowed_nodes();
        assert!(!nodes.is_empty(), "there is a node");
        // A sandbox may forbid the call; nothing depends on it.
        bind(map.as_mut_ptr(), BYTES, &nodes);
        interleave(map.as_mut_ptr(), BYTES);
        assert!(map.iter().all(|byte| *byte == 0));
        map.fill(7);
        assert!(map.iter().all(|byte| *byte == 7));
    }
}
