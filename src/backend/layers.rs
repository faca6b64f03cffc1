//! The parts of a model's layers: shapes, norms, activations, rotary embeddings.

use pagetide_base::error::StartError;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    Silu,
    /// Exact, with erf.
    Gelu,
    /// The tanh approximation (`gelu_new`, `gelu_pytorch_tanh`).
    GeluTanh,
    Relu,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NormKind {
    /// `x / rms(x) * weight`
    Rms { eps: f32 },
    /// `(x - mean(x)) / std(x) * weight + bias`
    Layer { eps: f32 },
}

/// A norm's parameters on the device: `weight: [cols]`, and `bias: [cols]` if the kind has one.
pub struct Norm<V> {
    pub kind: NormKind,
    pub weight: V,
    pub bias: Option<V>,
}

/// The weights of a layer of experts.
pub struct Experts<Matrix, Matrices> {
    /// `[num_experts, hidden]`
    pub router: Matrix,
    /// For each expert `[2 * intermediate, hidden]`: gate and up.
    pub up: Matrices,
    /// For each expert `[hidden, intermediate]`.
    pub down: Matrices,
}

/// The heads of a fused `[Q | K | V]` projection: `qkv: [num_rows, (num_heads + 2 * num_kv_heads) * head_dim]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    /// Factor on q·k, usually `head_dim^-0.5`.
    pub scale: f32,
    /// Scores, after the factor, become `cap · tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// A token attends to itself and to the `window - 1` tokens before it.
    pub window: Option<usize>,
}

impl AttentionShape {
    /// Columns of a row of `qkv`.
    pub fn qkv_cols(&self) -> usize {
        (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
    }
}

/// A layer of experts: a router chooses some of several gated MLPs for each row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsShape {
    pub num_experts: usize,
    /// Number of experts that a row goes through.
    pub num_chosen: usize,
    pub hidden_size: usize,
    /// Width of an expert's hidden layer.
    pub intermediate_size: usize,
    pub activation: Activation,
    /// Whether the chosen experts' weights are divided by their sum.
    pub renormalize: bool,
}

/// Rotary embedding in the half-split ("NeoX") layout: dimension `i` is rotated with dimension `i + rotary_dim / 2`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Leading dimensions of a head that are rotated, an even number. The rest stay as they are.
    pub rotary_dim: usize,
    /// `[rotary_dim / 2]`, in radians per position.
    pub inv_freq: Vec<f32>,
    /// Factor on cos and sin: YaRN's attention factor, otherwise 1.
    pub attention_factor: f32,
    /// All positions are below this.
    pub max_positions: usize,
}

impl Rope {
    /// `[max_positions][cos, sin][rotary_dim / 2]`, multiplied with the factor.
    pub(crate) fn table(&self) -> Result<Vec<f32>, StartError> {
        let mut table = self.empty_table()?;
        table.chunks_exact_mut(self.rotary_dim).enumerate().for_each(|(position, row)| self.write_row(position, row));
        Ok(table)
    }

    /// A table of zeros with the size of [`Rope::table`].
    pub(crate) fn empty_table(&self) -> Result<Vec<f32>, StartError> {
        let half = self.inv_freq.len();
        if self.rotary_dim != 2 * half || half == 0 {
            return Err(StartError::new(format!(
                "rotary embedding of {} dimensions with {half} frequencies: one is needed for every two dimensions",
                self.rotary_dim
            )));
        }
        let len = self.max_positions.saturating_mul(self.rotary_dim);
        let mut table = Vec::new();
        table.try_reserve_exact(len).map_err(|error| {
            StartError::new(format!("the rotary table of {} positions does not fit: {error}", self.max_positions))
        })?;
        table.resize(len, 0.0);
        Ok(table)
    }

    /// Writes the row of one position of [`Rope::table`].
    pub(crate) fn write_row(&self, position: usize, row: &mut [f32]) {
        let (cos, sin) = row.split_at_mut(self.inv_freq.len());
        for ((cos, sin), freq) in cos.iter_mut().zip(sin).zip(&self.inv_freq) {
            // Computed in float64: the angle grows with the position, and float32 would lose its fraction.
            let angle = position as f64 * f64::from(*freq);
            *cos = (angle.cos() * f64::from(self.attention_factor)) as f32;
            *sin = (angle.sin() * f64::from(self.attention_factor)) as f32;
        }
    }
}
