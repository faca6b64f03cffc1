// Not compiled. Prefetching the K and V that a member of the team reads next, from commit 5e30897
// (src/backend/cpu/attention/tiles.rs); removed in 4d02f93. See README.md for figures.
//
// `partition` called `fetch_ahead` once for each tile, before the tile's products. The variants in README.md differ in
// the cache level of the hint, and in whether all lines are requested at once or a few between the rows of the softmax.

impl Work<'_> {
    /// Prefetches what this member reads next: the tile that begins at `start`, or the first tile of the next unit.
    /// Blocks are scattered over the pool, so the hardware prefetcher does not find them.
    fn fetch_ahead(&self, start: usize) {
        let window = self.call.shape.window;
        let (_, to) = self.unit.any_visible(window);
        if start < to {
            self.fetch(self.unit, start..to.min(start + TILE));
        } else if let Some(next) = self.next {
            let (from, to) = next.any_visible(window);
            self.fetch(next, from..to.min(from / TILE * TILE + TILE));
        }
    }

    fn fetch(&self, unit: &Unit, positions: Range<usize>) {
        const LINE_BYTES: usize = 64;
        let call = self.call;
        let layout = &call.kv.layout;
        let row_bytes = 2 * layout.head_dim;
        let offsets = [false, true].map(|value| call.kv.head_offset(call.layer, value, unit.kv_head));
        let table = &call.batch.block_tables[unit.seq.first_block..][..unit.seq.num_blocks];
        let blocks = positions.start / layout.block_size..positions.end.div_ceil(layout.block_size);
        for (index, block) in blocks.clone().zip(&table[blocks]) {
            let slots = positions.end.min((index + 1) * layout.block_size) - index * layout.block_size;
            let block = call.kv.device.as_ptr().wrapping_add(*block as usize * layout.block_bytes());
            for offset in offsets {
                for at in (0..slots * row_bytes).step_by(LINE_BYTES) {
                    // SAFETY: a hint, which reads nothing.
                    unsafe { _mm_prefetch::<_MM_HINT_T0>(block.wrapping_add(offset + at).cast()) };
                }
            }
        }
    }
}
