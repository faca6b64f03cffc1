//! Launches of `kernels/experts.cu` and `kernels/experts_hopper.cu`: layers of experts. The host does not know the
//! router's decisions.

mod warp_groups;

use super::device::{
    Device, DeviceBuffer, DeviceInfo, DevicePtr, DeviceResult, Grid, KernelId, Matmul, ModuleId, ModuleSource,
};
use super::fp8_products::Fp8Product;
use super::options::{CudaOptions, scalar_define};
use super::products::{self, QuantizedProduct};
use super::rows::{BatchRows, FloatOrScalar, activation_number};
use super::tensors::{CudaExpertWeights, CudaWeights};
use super::{CudaMatrices, CudaMatrix, CudaTensor};
use crate::{DType, Experts, ExpertsShape};
use bytemuck::NoUninit;
use pagetide_base::error::StartError;
use std::rc::Rc;
pub use warp_groups::SHARED_BYTES as HOPPER_PRODUCT_SHARED_BYTES;

const WARP: usize = 32;
const ROUTE_WARPS: usize = 4;
const MAX_CHOSEN: usize = WARP;
/// A limit of the router's kernels, which keep some words for each expert in shared memory.
const MAX_EXPERTS: usize = 2048;
const GROUP_THREADS: usize = 1024;
const TILE_ROWS: usize = 64;
const PRODUCT_WARPS: usize = 4;
const WARP_COLS: usize = 8;
const TILE_COLS: usize = PRODUCT_WARPS * 16;
const ROW_THREADS: usize = 256;
/// Rows that are computed at a time: enough to keep the device busy, few enough for little memory.
const MAX_ROWS: usize = 2048;

/// Dynamic shared memory of the product on tensor cores.
pub const PRODUCT_SHARED_BYTES: usize = 3 * (TILE_ROWS + TILE_COLS) * (64 + 8) * 2;

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct ExpertsPiece {
    batch: DevicePtr,
    first_row: u32,
    max_rows: u32,
    num_experts: u32,
    num_chosen: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct RouteParams {
    piece: ExpertsPiece,
    logits: DevicePtr,
    chosen: DevicePtr,
    weights: DevicePtr,
    renormalize: u32,
    padding: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct GroupParams {
    piece: ExpertsPiece,
    chosen: DevicePtr,
    choices: DevicePtr,
    num_tiles: DevicePtr,
    tiles: DevicePtr,
    tile_rows: u32,
    padding: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct ProductParams {
    piece: ExpertsPiece,
    chosen: DevicePtr,
    choices: DevicePtr,
    num_tiles: DevicePtr,
    tiles: DevicePtr,
    x: DevicePtr,
    w: DevicePtr,
    out: DevicePtr,
    n: u32,
    k: u32,
    gathers: u32,
    padding: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct ExpertActivationParams {
    piece: ExpertsPiece,
    x: DevicePtr,
    out: DevicePtr,
    cols: u32,
    kind: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct CombineParams {
    piece: ExpertsPiece,
    x: DevicePtr,
    weights: DevicePtr,
    out: DevicePtr,
    cols: u32,
    padding: u32,
}

/// Bytes of a tile's entry: expert, first index, rows.
const TILE_BYTES: usize = 12;

/// The memory that the current rows need between kernels. A choice is a pair of row and rank.
pub struct CudaExpertsWorkspace {
    /// `[max_rows, num_experts]` float32
    logits: DeviceBuffer,
    /// `[max_rows * num_chosen]` words, each
    chosen: DeviceBuffer,
    weights: DeviceBuffer,
    choices: DeviceBuffer,
    num_tiles: DeviceBuffer,
    tiles: DeviceBuffer,
    /// `[choices, 2 * intermediate]`, `[choices, intermediate]` and `[choices, hidden]`
    up: DeviceBuffer,
    activated: DeviceBuffer,
    down: DeviceBuffer,
}

/// A layer's operands.
pub(super) struct ExpertsCall<'a> {
    pub shape: &'a ExpertsShape,
    pub experts: &'a Experts<CudaMatrix, CudaMatrices>,
    pub work: &'a CudaExpertsWorkspace,
    /// `[rows, hidden]`
    pub x: &'a CudaTensor,
    pub out: &'a CudaTensor,
    /// Whether a row's sums must have the same order whatever the number of rows is.
    pub batch_invariant: bool,
}

/// The modules, and their kernels.
pub(super) struct ExpertKernels {
    device: Rc<dyn Device>,
    dtype: DType,
    route: KernelId,
    group_choices: KernelId,
    product_rows: KernelId,
    /// The product on tensor cores, for 16-bit types.
    product: Option<KernelId>,
    /// The product on warp groups, where the device has them.
    hopper_product: Option<KernelId>,
    activation: KernelId,
    combine: KernelId,
}

/// The sources of [`ExpertKernels`] on this device: one, or two if it multiplies with warp groups; none if the model
/// has no experts.
pub(super) fn sources(options: &CudaOptions, info: &DeviceInfo) -> Vec<ModuleSource> {
    if !options.experts {
        return Vec::new();
    }
    let mut defines = vec![scalar_define(options.dtype)];
    if options.dtype != DType::F32 {
        defines.push(("TENSOR_CORES", "1".into()));
    }
    let source = ModuleSource { file: "experts.cu", defines };
    [source].into_iter().chain(warp_groups::source(options, info)).collect()
}

/// How the plain products of a layer are computed.
#[derive(Clone, Copy)]
enum PlainProduct {
    /// By `expert_product_hopper`.
    OnWarpGroups(KernelId),
    /// By `expert_product`.
    OnWarps(KernelId),
    /// By `expert_product_rows`, each row by itself.
    OfRows,
}

impl ExpertsCall<'_> {
    fn check(&self, rows: usize, dtype: DType) {
        let Self { shape, experts: Experts { router, up, down }, x, out, .. } = self;
        let (count, hidden, width) = (shape.num_experts, shape.hidden_size, shape.intermediate_size);
        x.check(rows, hidden);
        out.check(rows, hidden);
        assert!(x.dtype == dtype && out.dtype == dtype, "experts take and give activations");
        assert!([router.n, up.count, down.count] == [count; 3] && router.k == hidden, "experts of another layer");
        assert!([up.n, up.k, down.n, down.k] == [2 * width, hidden, hidden, width], "an expert's width");
    }
}

impl CudaExpertsWorkspace {
    pub(super) fn new(
        device: &Rc<dyn Device>,
        dtype: DType,
        max_rows: usize,
        shape: &ExpertsShape,
    ) -> Result<Self, StartError> {
        let ExpertsShape { num_experts, num_chosen, hidden_size, intermediate_size, .. } = *shape;
        if num_experts > MAX_EXPERTS || num_chosen > MAX_CHOSEN {
            return Err(StartError::new(format!(
                "{num_chosen} of {num_experts} experts for each token: on a GPU up to {MAX_CHOSEN} of {MAX_EXPERTS} are \
                 supported: use --device cpu"
            )));
        }
        let rows = max_rows.min(MAX_ROWS);
        let choices = rows * num_chosen;
        let words = |count: usize| DeviceBuffer::new(device, count * 4);
        let scalars = |cols: usize| DeviceBuffer::new(device, choices * cols * dtype.size_bytes());
        Ok(Self {
            logits: words(rows * num_experts)?,
            chosen: words(choices)?,
            weights: words(choices)?,
            choices: words(choices)?,
            num_tiles: words(1)?,
            tiles: DeviceBuffer::new(device, max_tiles(choices, num_experts, TILE_ROWS) * TILE_BYTES)?,
            up: scalars(2 * intermediate_size)?,
            activated: scalars(intermediate_size)?,
            down: scalars(hidden_size)?,
        })
    }
}

/// Dynamic shared memory of `route` and `group_choices`, which keep some words for each expert.
pub fn routing_shared_bytes(num_experts: usize) -> [usize; 2] {
    [ROUTE_WARPS * num_experts * 4, 3 * num_experts * 4]
}

/// The most tiles of a product: each expert may have one that is not full.
fn max_tiles(choices: usize, num_experts: usize, tile_rows: usize) -> usize {
    choices.min(choices / tile_rows + num_experts)
}

impl ExpertKernels {
    /// `modules` are those of [`sources`].
    pub fn new(device: &Rc<dyn Device>, options: &CudaOptions, modules: &[ModuleId]) -> DeviceResult<Self> {
        let kernel = |name, shared_bytes: usize| device.kernel(modules[0], name, shared_bytes as u32);
        let hopper_kernel =
            |&module| device.kernel(module, "expert_product_hopper", HOPPER_PRODUCT_SHARED_BYTES as u32);
        let is_half = options.dtype != DType::F32;
        let [route_bytes, group_bytes] = routing_shared_bytes(MAX_EXPERTS);
        Ok(Self {
            device: device.clone(),
            dtype: options.dtype,
            route: kernel("route", route_bytes)?,
            group_choices: kernel("group_choices", group_bytes)?,
            product_rows: kernel("expert_product_rows", 0)?,
            product: is_half.then(|| kernel("expert_product", PRODUCT_SHARED_BYTES)).transpose()?,
            hopper_product: modules.get(1).map(hopper_kernel).transpose()?,
            activation: kernel("expert_activation", 0)?,
            combine: kernel("combine_experts", 0)?,
        })
    }

    fn launch(
        &self,
        kernel: KernelId,
        blocks: [usize; 2],
        (threads, shared_bytes): (usize, usize),
        params: &impl NoUninit,
    ) -> DeviceResult<()> {
        let blocks = [blocks[0] as u32, blocks[1] as u32, 1];
        let grid = Grid { blocks, threads: threads as u32, shared_bytes: shared_bytes as u32 };
        // SAFETY: the structs are those that the kernels expect. `mix` passes addresses of tensors and of a workspace
        // that live as long as the backend's graphs and have the sizes of the call's shape.
        unsafe { self.device.launch(kernel, grid, bytemuck::bytes_of(params)) }
    }

    /// `out[row] = Σ weight · expert(x[row])` for all rows.
    pub fn mix(&self, rows: BatchRows, call: &ExpertsCall<'_>) -> DeviceResult<()> {
        call.check(rows.num_rows, self.dtype);
        let mut pieces = (0..rows.num_rows).step_by(MAX_ROWS);
        pieces.try_for_each(|first| self.mix_piece(rows, (first, MAX_ROWS.min(rows.num_rows - first)), call))
    }

    /// [`Self::mix`] for rows `first .. first + max_rows`.
    fn mix_piece(
        &self,
        rows: BatchRows,
        (first, max_rows): (usize, usize),
        call: &ExpertsCall<'_>,
    ) -> DeviceResult<()> {
        let ExpertsCall { shape, experts, work, x, out, batch_invariant } = *call;
        let Experts { router, up, down } = experts;
        let ExpertsShape { num_experts, num_chosen, hidden_size, intermediate_size, activation, renormalize } = *shape;
        let piece = ExpertsPiece {
            batch: rows.header,
            first_row: first as u32,
            max_rows: max_rows as u32,
            num_experts: num_experts as u32,
            num_chosen: num_chosen as u32,
        };
        let choices = max_rows * num_chosen;
        let (chosen, weights, places) = (work.chosen.ptr(), work.weights.ptr(), work.choices.ptr());
        let (num_tiles, tiles) = (work.num_tiles.ptr(), work.tiles.ptr());
        let offset = first * hidden_size * self.dtype.size_bytes();

        let logits = work.logits.ptr();
        let (x_rows, k) = (x.ptr() + offset, hidden_size);
        match &router.weights {
            CudaWeights::Plain(router) => {
                let matmul = Matmul { m: max_rows, n: num_experts, k, dtype: self.dtype, out: DType::F32, bias: false };
                // SAFETY: the sizes are checked, and the workspace has room for a piece.
                unsafe { self.device.matmul(matmul, x_rows, router.ptr(), DevicePtr::NULL, logits)? };
            }
            CudaWeights::Quantized(parts) => {
                let out = FloatOrScalar::at(logits, DType::F32);
                let bias = DevicePtr::NULL;
                let product = QuantizedProduct { x: x_rows, bias, out, rows: max_rows, k, batch_invariant };
                products::product(parts, &product)?;
            }
            CudaWeights::Fp8(router) => {
                router.product(&Fp8Product { x: x_rows, bias: None, out: (logits, DType::F32), rows: max_rows })?;
            }
        }
        let renormalize = u32::from(renormalize);
        let params = RouteParams { piece, logits, chosen, weights, renormalize, padding: 0 };
        let [route_bytes, group_bytes] = routing_shared_bytes(num_experts);
        self.launch(self.route, [max_rows.div_ceil(ROUTE_WARPS), 1], (ROUTE_WARPS * WARP, route_bytes), &params)?;
        let plain = self.plain_product(max_rows, call);
        let tile_rows = if let PlainProduct::OnWarpGroups(_) = plain { warp_groups::TILE_ROWS } else { TILE_ROWS };
        let num_blocks = [max_tiles(choices, num_experts, tile_rows), choices];
        let tile_rows = tile_rows as u32;
        let params = GroupParams { piece, chosen, choices: places, num_tiles, tiles, tile_rows, padding: 0 };
        self.launch(self.group_choices, [1, 1], (GROUP_THREADS, group_bytes), &params)?;

        let product = |x: DevicePtr, w: DevicePtr, out: DevicePtr, (n, k): (usize, usize), gathers: bool| {
            let (n, k, gathers) = (n as u32, k as u32, u32::from(gathers));
            ProductParams { piece, chosen, choices: places, num_tiles, tiles, x, w, out, n, k, gathers, padding: 0 }
        };
        let (gate_up, activated, by_choice) = (work.up.ptr(), work.activated.ptr(), work.down.ptr());
        let params = product(x_rows, up.weights.ptr(), gate_up, (2 * intermediate_size, hidden_size), true);
        self.product(&up.weights, plain, num_blocks, &params)?;
        let (cols, kind) = (intermediate_size as u32, activation_number(activation));
        let params = ExpertActivationParams { piece, x: gate_up, out: activated, cols, kind };
        let per_block = ROW_THREADS * 16 / self.dtype.size_bytes();
        self.launch(self.activation, [choices, intermediate_size.div_ceil(per_block)], (ROW_THREADS, 0), &params)?;
        let params = product(activated, down.weights.ptr(), by_choice, (hidden_size, intermediate_size), false);
        self.product(&down.weights, plain, num_blocks, &params)?;

        let (out, cols) = (out.ptr() + offset, hidden_size as u32);
        let params = CombineParams { piece, x: by_choice, weights, out, cols, padding: 0 };
        self.launch(self.combine, [max_rows, hidden_size.div_ceil(ROW_THREADS)], (ROW_THREADS, 0), &params)
    }

    fn plain_product(&self, rows: usize, call: &ExpertsCall<'_>) -> PlainProduct {
        let ExpertsCall { shape, experts: Experts { up, down, .. }, .. } = call;
        // The kernels on tensor cores copy 16 bytes at a time, so rows must be a multiple of that.
        let is_aligned = shape.hidden_size.is_multiple_of(8) && shape.intermediate_size.is_multiple_of(8);
        let are_plain = [up, down].iter().all(|matrices| matches!(matrices.weights, CudaExpertWeights::Plain(_)));
        match (self.hopper_product, self.product) {
            (Some(kernel), _) if is_aligned && are_plain && warp_groups::has_enough_rows(rows, shape) => {
                PlainProduct::OnWarpGroups(kernel)
            }
            (_, Some(kernel)) if is_aligned => PlainProduct::OnWarps(kernel),
            _ => PlainProduct::OfRows,
        }
    }

    /// One of a layer's two products.
    fn product(
        &self,
        weights: &CudaExpertWeights,
        plain: PlainProduct,
        [max_tiles, max_choices]: [usize; 2],
        params: &ProductParams,
    ) -> DeviceResult<()> {
        let n = params.n as usize;
        if let CudaExpertWeights::Quantized(rows) = weights {
            return rows.expert_product(params, max_tiles, n);
        }
        match plain {
            PlainProduct::OnWarpGroups(kernel) => {
                let blocks = [max_tiles, n.div_ceil(warp_groups::TILE_COLS)];
                self.launch(kernel, blocks, (warp_groups::THREADS, HOPPER_PRODUCT_SHARED_BYTES), params)
            }
            PlainProduct::OnWarps(kernel) => {
                let blocks = [max_tiles, n.div_ceil(TILE_COLS)];
                self.launch(kernel, blocks, (PRODUCT_WARPS * WARP, PRODUCT_SHARED_BYTES), params)
            }
            PlainProduct::OfRows => {
                let blocks = [max_choices, n.div_ceil(PRODUCT_WARPS * WARP_COLS)];
                self.launch(self.product_rows, blocks, (PRODUCT_WARPS * WARP, 0), params)
            }
        }
    }
}
