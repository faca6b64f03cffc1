//! The rows that products begin with.

/// Rows `[rows, k]` of float32.
#[derive(Clone, Copy)]
pub struct FloatRows<'a> {
    pub values: &'a [f32],
    pub k: usize,
    /// From row to row.
    pub stride: usize,
}

impl<'a> FloatRows<'a> {
    pub fn row(&self, row: usize) -> &'a [f32] {
        &self.values[row * self.stride..][..self.k]
    }
}
