//! Tensor maps: what `cp.async.bulk.tensor` copies boxes of.
//!
//! NVIDIA does not publish the 128 bytes of a `CUtensorMap`. This is a form of our own, with the arguments of
//! `cuTensorMapEncodeTiled`; whoever stands in for the driver encodes it with [`TensorMap::encode`].

/// How 16-byte chunks of a box's rows are permuted in shared memory, so that a column's chunks are in different banks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Swizzle {
    #[default]
    None,
    Bytes32,
    Bytes64,
    Bytes128,
}

impl Swizzle {
    /// `CU_TENSOR_MAP_SWIZZLE_…`
    fn code(self) -> u8 {
        self as u8
    }

    fn from_code(code: u8) -> Option<Self> {
        [Self::None, Self::Bytes32, Self::Bytes64, Self::Bytes128].get(code as usize).copied()
    }

    /// Where a byte of shared memory really is: the chunk's number within its row of 32, 64 or 128 bytes is combined
    /// with the number of the 128-byte line, within 256, 512 or 1024 bytes.
    pub fn apply(self, address: u64) -> u64 {
        let bits = match self {
            Self::None => return address,
            Self::Bytes32 => 1,
            Self::Bytes64 => 3,
            Self::Bytes128 => 7,
        };
        address ^ (address >> 7 & bits) << 4
    }

    /// Bytes after which the pattern repeats.
    fn period(self) -> u64 {
        match self {
            Self::None => 128,
            Self::Bytes32 => 256,
            Self::Bytes64 => 512,
            Self::Bytes128 => 1024,
        }
    }
}

/// A tensor in global memory, and the box that a copy moves.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TensorMap {
    pub address: u64,
    /// Bytes of an element: 1, 2, 4 or 8.
    pub element_bytes: u32,
    /// Elements of each dimension, the fastest first; 1 to 5 dimensions.
    pub sizes: Vec<u64>,
    /// Bytes from one element to the next of the second and further dimensions; multiples of 16.
    pub strides: Vec<u64>,
    /// Elements of the box.
    pub box_sizes: Vec<u32>,
    pub swizzle: Swizzle,
    /// Elements outside the tensor are NaN instead of zero.
    pub fills_nan: bool,
}

const MAGIC: u16 = 0x5458;

impl TensorMap {
    pub const BYTES: usize = 128;

    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut to = [0; Self::BYTES];
        to[..2].copy_from_slice(&MAGIC.to_le_bytes());
        to[2] = self.sizes.len() as u8;
        to[3] = self.element_bytes as u8;
        to[4] = self.swizzle.code();
        to[5] = u8::from(self.fills_nan);
        to[8..16].copy_from_slice(&self.address.to_le_bytes());
        for (i, size) in self.sizes.iter().enumerate() {
            to[16 + 8 * i..][..8].copy_from_slice(&size.to_le_bytes());
        }
        for (i, stride) in self.strides.iter().enumerate() {
            to[56 + 8 * i..][..8].copy_from_slice(&stride.to_le_bytes());
        }
        for (i, size) in self.box_sizes.iter().enumerate() {
            to[96 + 4 * i..][..4].copy_from_slice(&size.to_le_bytes());
        }
        to
    }

    /// `None` if these bytes are no tensor map.
    pub fn decode(from: &[u8; Self::BYTES]) -> Option<Self> {
        let long = |at: usize| u64::from_le_bytes(from[at..at + 8].try_into().expect("eight bytes"));
        let rank = from[2] as usize;
        if from[..2] != MAGIC.to_le_bytes() || !(1..=5).contains(&rank) {
            return None;
        }
        Some(Self {
            address: long(8),
            element_bytes: from[3].into(),
            sizes: (0..rank).map(|i| long(16 + 8 * i)).collect(),
            strides: (0..rank - 1).map(|i| long(56 + 8 * i)).collect(),
            box_sizes: (0..rank).map(|i| long(96 + 4 * i) as u32).collect(),
            swizzle: Swizzle::from_code(from[4])?,
            fills_nan: from[5] != 0,
        })
    }

    pub fn box_bytes(&self) -> u64 {
        self.box_sizes.iter().map(|size| u64::from(*size)).product::<u64>() * u64::from(self.element_bytes)
    }

    pub(crate) fn alignment(&self) -> u64 {
        if self.swizzle == Swizzle::None { 128 } else { self.swizzle.period().min(1024) }
    }

    /// The pieces of a box in shared memory from `start` on: offset, global address (`None`: outside the tensor),
    /// bytes.
    pub(crate) fn chunks(&self, at: &[i64], start: u64) -> Vec<(u64, Option<u64>, usize)> {
        let element = u64::from(self.element_bytes);
        let row_elements = u64::from(self.box_sizes[0]);
        let num_rows: u64 = self.box_sizes[1..].iter().map(|size| u64::from(*size)).product();
        let mut pieces = Vec::new();
        for row in 0..num_rows {
            let (mut address, mut inside, mut rest) = (self.address, true, row);
            for (dimension, stride) in (1..self.sizes.len()).zip(&self.strides) {
                let size = u64::from(self.box_sizes[dimension]);
                let index = at[dimension] + (rest % size) as i64;
                rest /= size;
                inside &= index >= 0 && (index as u64) < self.sizes[dimension];
                address = address.wrapping_add_signed(index * *stride as i64);
            }
            for i in 0..row_elements {
                let index = at[0] + i as i64;
                let inside = inside && index >= 0 && (index as u64) < self.sizes[0];
                let offset = self.swizzle.apply(start + (row * row_elements + i) * element);
                let source = inside.then(|| address.wrapping_add_signed(index * element as i64));
                pieces.push((offset, source, element as usize));
            }
        }
        pieces
    }

    pub(crate) fn fill(&self, element: &mut [u8]) {
        let byte = if self.fills_nan { 0xff } else { 0 };
        element.fill(byte);
    }
}
