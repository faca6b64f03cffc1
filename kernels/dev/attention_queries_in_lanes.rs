// Not compiled. Attention on AMX tiles with queries in vector lanes, as it was before commit 4d02f93
// (src/backend/cpu/attention/tiles.rs). Excerpt: the parts that differ from today's code. See README.md for figures.
//
// K is read as rows of the KV cache. Scores are K · Qᵀ, so the sixteen lanes of a vector are the sixteen queries of a
// block: the softmax needs no reduction across lanes, but a decode with four queries computes sixteen. The weights have
// to be transposed for the product with V, and V is laid out in pairs of positions each time it is read.

impl Work<'_> {
    /// The softmax over the positions of one partition.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn partition(&self, partition: usize, state: State) {
        let queries = self.num_blocks * LANES;
        unsafe {
            state.acc.write_bytes(0, queries * self.num_chunks * CHUNK);
            for i in 0..queries {
                *state.max.add(i) = f32::NEG_INFINITY;
                *state.sum.add(i) = 0.0;
            }
        }
        let (from, to) = self.unit.any_visible(self.call.shape.window);
        let from = from.max(partition * PARTITION);
        let to = to.min((partition + 1) * PARTITION);
        for tile in from / TILE..to.div_ceil(TILE) {
            unsafe {
                let positions = self.positions(tile * TILE, from, to);
                self.load_values(&positions);
                self.fetch_ahead((tile + 1) * TILE);
                // The products of one block are interleaved with the softmax of another: the processor does both at
                // once.
                for i in 0..self.num_blocks + 2 {
                    if i < self.num_blocks {
                        self.scores(i, &positions);
                    }
                    if i > 0 && i <= self.num_blocks {
                        self.softmax(i - 1, &positions, state);
                    }
                    if i > 1 {
                        self.add_values(i - 2, &positions, state);
                    }
                }
            }
        }
    }

    /// Lays V out for the products. One instruction makes pairs of positions from the low, and another from the high
    /// halves of each 128-bit lane, so dimensions are permuted within a chunk; [`Self::write`] puts them in order.
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load_values(&self, positions: &Positions) {
        let offset = self.call.kv.head_offset(self.call.layer, true, self.unit.kv_head);
        let seen = positions.from - positions.start..positions.to - positions.start;
        let row = |i: usize| {
            if seen.contains(&i) { positions.rows[i].wrapping_add(offset) } else { ZEROS.as_ptr().cast() }
        };
        for pair in seen.start / STEP * LANES..seen.end.div_ceil(STEP) * LANES {
            let rows = [row(2 * pair), row(2 * pair + 1)];
            for chunk in 0..self.num_chunks {
                let mask = first_lanes(self.call.shape.head_dim - chunk * CHUNK);
                let at = 2 * chunk * CHUNK;
                unsafe {
                    let even = _mm512_maskz_loadu_epi16(mask, rows[0].wrapping_add(at).cast());
                    let odd = _mm512_maskz_loadu_epi16(mask, rows[1].wrapping_add(at).cast());
                    let tile = (pair / LANES * self.num_chunks + chunk) * 2;
                    let to = self.scratch.values.add(tile * TILE_LEN + pair % LANES * LANES);
                    _mm512_store_si512(to.cast(), _mm512_unpacklo_epi16(even, odd));
                    _mm512_store_si512(to.add(TILE_LEN).cast(), _mm512_unpackhi_epi16(even, odd));
                }
            }
        }
    }

    /// Turns the scores of a block into weights; updates the maximum, the sum and the weighted sum of V.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn softmax(&self, block: usize, positions: &Positions, state: State) {
        unsafe {
            let steps = self.steps(block, positions);
            if steps.is_empty() {
                return;
            }
            let visible = self.visible(block);
            let scale = self.scale_scores(block, &steps);
            let (max, sum) = (state.max.add(block * LANES), state.sum.add(block * LANES));
            let old_max = _mm512_loadu_ps(max);
            let tile_max = self.max_score(block, positions.start, &steps, &visible);
            let new_max = _mm512_max_ps(_mm512_mul_ps(tile_max, _mm512_set1_ps(scale)), old_max);
            let factor = factor(old_max, new_max);
            let mut weights = _mm512_setzero_ps();
            for step in steps {
                let start = positions.start;
                weights = if visible.whole(start + step * STEP) {
                    self.weights::<false>(block, start, step, &visible, scale, new_max, weights)
                } else {
                    self.weights::<true>(block, start, step, &visible, scale, new_max, weights)
                };
            }
            _mm512_storeu_ps(max, new_max);
            _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_loadu_ps(sum), factor, weights));
            if _mm512_cmpneq_ps_mask(old_max, new_max) != 0 {
                self.rescale(block, factor, state);
            }
        }
    }

    /// Each query's largest score.
    #[target_feature(enable = "avx512f")]
    unsafe fn max_score(&self, block: usize, start: usize, steps: &Range<usize>, visible: &Visible) -> __m512 {
        let mut max = [_mm512_set1_ps(f32::NEG_INFINITY); 4];
        for step in steps.clone() {
            let scores = self.scores_of(block).wrapping_add(step * STEP * LANES);
            let start = start + step * STEP;
            unsafe {
                if visible.whole(start) {
                    for i in (0..STEP).step_by(max.len()) {
                        for (j, max) in max.iter_mut().enumerate() {
                            *max = _mm512_max_ps(_mm512_load_ps(scores.add((i + j) * LANES)), *max);
                        }
                    }
                } else {
                    for i in 0..STEP {
                        let score = _mm512_load_ps(scores.add(i * LANES));
                        max[0] = _mm512_mask_max_ps(max[0], visible.mask(start + i), score, max[0]);
                    }
                }
            }
        }
        _mm512_max_ps(_mm512_max_ps(max[0], max[1]), _mm512_max_ps(max[2], max[3]))
    }

    /// Turns the scores of a step into weights, and adds them to each query's `sum`.
    #[allow(clippy::too_many_arguments)]
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
    unsafe fn weights<const MASKED: bool>(
        &self,
        block: usize,
        start: usize,
        step: usize,
        visible: &Visible,
        scale: f32,
        max: __m512,
        mut sum: __m512,
    ) -> __m512 {
        /// Two bfloat16 of 1.
        const ONES: i32 = 0x3f80_3f80;
        let (scale, ones) = (_mm512_set1_ps(scale), _mm512_set1_epi32(ONES));
        let pair_up = {
            let mut order = [0u16; 2 * LANES];
            for (i, word) in order.iter_mut().enumerate() {
                *word = (i / 2 + i % 2 * LANES) as u16;
            }
            unsafe { _mm512_loadu_si512(order.as_ptr().cast()) }
        };
        let mut pairs = [_mm512_setzero_ps(); LANES];
        for (i, pair) in pairs.iter_mut().enumerate() {
            let mut weights = [_mm512_setzero_ps(); 2];
            for (j, weight) in weights.iter_mut().enumerate() {
                let position = step * STEP + 2 * i + j;
                let score = unsafe { _mm512_load_ps(self.scores_of(block).add(position * LANES)) };
                *weight = exp2(_mm512_fmsub_ps(score, scale, max));
                if MASKED {
                    *weight = _mm512_maskz_mov_ps(visible.mask(start + position), *weight);
                }
            }
            // SAFETY: the types differ only in name.
            unsafe {
                let halves = _mm512_cvtne2ps_pbh(weights[1], weights[0]);
                let words = _mm512_permutexvar_epi16(pair_up, std::mem::transmute::<__m512bh, __m512i>(halves));
                let ones = std::mem::transmute::<__m512i, __m512bh>(ones);
                sum = _mm512_dpbf16_ps(sum, std::mem::transmute::<__m512i, __m512bh>(words), ones);
                *pair = _mm512_castsi512_ps(words);
            }
        }
        unsafe {
            transpose(&mut pairs);
            let to = self.weights_of(block).add(step * TILE_LEN);
            for (i, row) in pairs.iter().enumerate() {
                _mm512_store_ps(to.add(i * LANES).cast(), *row);
            }
        }
        sum
    }

    /// Multiplies each query's sum of V with its factor.
    #[target_feature(enable = "avx512f")]
    unsafe fn rescale(&self, block: usize, factors: __m512, state: State) {
        let mut factor = [0.0f32; LANES];
        unsafe {
            _mm512_storeu_ps(factor.as_mut_ptr(), factors);
            let acc = state.acc.add(block * self.num_chunks * 2 * TILE_LEN);
            for (i, factor) in factor.iter().enumerate() {
                let factor = _mm512_set1_ps(*factor);
                for tile in 0..2 * self.num_chunks {
                    let at = acc.add(tile * TILE_LEN + i * LANES);
                    _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), factor));
                }
            }
        }
    }

}
