//! How a checkpoint is quantised, as its `quantization_config` says.

/// The method of a checkpoint, with what its tensors do not say themselves.
#[derive(Clone, Debug, PartialEq)]
pub enum QuantScheme {
    Gptq(GptqScheme),
    /// 4 bits with zero points.
    Awq {
        /// Columns of a group; `None`: a group is a row.
        group_size: Option<usize>,
    },
    /// E4M3.
    Fp8 {
        /// Rows and columns that share a scale; `None`: all share one.
        block: Option<[usize; 2]>,
    },
    /// The schemes of its groups of modules.
    CompressedTensors(Vec<CompressedWeights>),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GptqScheme {
    /// 4 or 8.
    pub bits: u32,
    /// Columns of a group; `None`: a group is a row.
    pub group_size: Option<usize>,
    /// All zero points are in the middle.
    pub symmetric: bool,
    /// Columns were quantised in the order of their activations, so `g_idx` must say to which group each belongs.
    pub desc_act: bool,
    /// Zero points are stored less one.
    pub is_v1: bool,
}

/// The weights of a group of modules of compressed-tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CompressedWeights {
    pub coding: CompressedCoding,
    pub symmetric: bool,
    pub span: ScaleSpan,
}

/// How codes are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompressedCoding {
    /// Several in a word of 32 bits, of 4 or 8 bits each.
    Packed { bits: u32 },
    /// Signed bytes.
    Bytes,
    /// E4M3.
    Floats,
}

/// The weights that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleSpan {
    /// All.
    Tensor,
    /// A row.
    Channel,
    /// So many columns of a row.
    Group(usize),
    /// So many rows and columns.
    Block([usize; 2]),
}

impl ScaleSpan {
    /// `[rows, cols]` of the weights that share a scale, in a matrix of this shape.
    pub fn sizes(self, [rows, cols]: [usize; 2]) -> [usize; 2] {
        match self {
            Self::Tensor => [rows, cols],
            Self::Channel => [1, cols],
            Self::Group(size) => [1, size],
            Self::Block(block) => block,
        }
    }

    /// Groups of columns; `None` means one group for each row.
    pub fn of_groups(group_size: Option<usize>) -> Self {
        group_size.map_or(Self::Channel, Self::Group)
    }
}
