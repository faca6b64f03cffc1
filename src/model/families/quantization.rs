//! `quantization_config`: how the weights of a safetensors checkpoint are quantised.

use super::fields::Fields;
use crate::quantized::scheme::{CompressedCoding, CompressedWeights, GptqScheme, QuantScheme, ScaleSpan};
use pagetide_base::error::StartError;
use serde_json::{Map, Value};

const KEY: &str = "quantization_config";
const METHODS: &str = "supported are compressed-tensors, gptq, awq and fp8";
/// Groups and blocks of published checkpoints have 32 to 256 columns.
const MAX_SPAN: usize = 1 << 20;

/// The scheme of a configuration; `None` if the weights are not quantised.
pub fn quantization(config: &Fields) -> Result<Option<QuantScheme>, StartError> {
    let Some(value) = config.get(KEY) else { return Ok(None) };
    let members = value.as_object().ok_or_else(|| config.error(KEY, "not an object"))?;
    let fields = Fields { members, path: "quantization_config." };
    match fields.string("quant_method")? {
        Some("gptq") => gptq(&fields).map(QuantScheme::Gptq),
        Some("awq") => awq(&fields),
        Some("fp8") => fp8(&fields),
        Some("compressed-tensors") => compressed_tensors(&fields),
        Some(other) => Err(fields.error("quant_method", format!("'{other}' is not supported; {METHODS}"))),
        None => Err(fields.error("quant_method", format!("missing; {METHODS}"))),
    }
    .map(Some)
}

/// The text at `key`, or else `default`, which must be one of `supported`.
fn one_of<'a>(fields: &Fields<'a>, key: &str, default: &'a str, supported: &[&str]) -> Result<&'a str, StartError> {
    let found = fields.string(key)?.unwrap_or(default);
    if supported.contains(&found) {
        return Ok(found);
    }
    Err(fields.error(key, format!("'{found}' is not supported; supported: {}", supported.join(", "))))
}

/// The number of bits at `key`, which must be one of `supported`.
fn bits(fields: &Fields, key: &str, supported: &[u64]) -> Result<u32, StartError> {
    let wrong = |found: &str| {
        let supported: Vec<_> = supported.iter().map(u64::to_string).collect();
        fields.error(key, format!("{found} bits are not supported; supported: {}", supported.join(", ")))
    };
    let value = fields.get(key).ok_or_else(|| wrong("unknown"))?;
    let bits = value.as_u64().filter(|bits| supported.contains(bits));
    bits.map(|bits| bits as u32).ok_or_else(|| wrong(&value.to_string()))
}

/// Columns of a group; `None` for -1 or a missing key, which mean that a group is a row.
fn group_size(fields: &Fields, key: &str) -> Result<Option<usize>, StartError> {
    let Some(value) = fields.get(key) else { return Ok(None) };
    if value.as_i64() == Some(-1) {
        return Ok(None);
    }
    let size = value.as_u64().and_then(|size| usize::try_from(size).ok()).filter(|size| (1..=MAX_SPAN).contains(size));
    size.map(Some)
        .ok_or_else(|| fields.error(key, format!("{value} is neither -1 nor a whole number from 1 to {MAX_SPAN}")))
}

/// Rows and columns of a block.
fn block(fields: &Fields, key: &str) -> Result<Option<[usize; 2]>, StartError> {
    let Some(value) = fields.get(key) else { return Ok(None) };
    let size = |number: u64| usize::try_from(number).ok().filter(|size| (1..=MAX_SPAN).contains(size));
    let sizes: Option<Vec<usize>> = match value {
        Value::Array(list) => list.iter().map(|number| size(number.as_u64()?)).collect(),
        Value::String(text) => text.split('x').map(|number| size(number.parse().ok()?)).collect(),
        _ => None,
    };
    match sizes.as_deref() {
        Some([rows, cols]) => Ok(Some([*rows, *cols])),
        _ => Err(fields.error(key, format!("not two whole numbers from 1 to {MAX_SPAN}"))),
    }
}

fn gptq(fields: &Fields) -> Result<GptqScheme, StartError> {
    // GPTQModel gives single modules other settings, which it selects with regular expressions. Those that start with
    // `-:` leave modules plain.
    if let Some(rule) = fields.object("dynamic").and_then(|rules| rules.keys().find(|rule| !rule.starts_with("-:"))) {
        return Err(fields.error("dynamic", format!("modules with settings of their own ('{rule}') are not supported")));
    }
    if fields.bool_or("is_marlin_format", false)? {
        return Err(fields.error("is_marlin_format", "true is not supported; supported is the format of GPTQ itself"));
    }
    one_of(fields, "pack_dtype", "int32", &["int32"])?;
    let key = if fields.get("checkpoint_format").is_some() { "checkpoint_format" } else { "format" };
    Ok(GptqScheme {
        bits: bits(fields, "bits", &[4, 8])?,
        group_size: group_size(fields, "group_size")?,
        symmetric: fields.bool_or("sym", true)?,
        desc_act: fields.bool_or("desc_act", false)?,
        is_v1: one_of(fields, key, "gptq", &["gptq", "gptq_v2"])? == "gptq",
    })
}

fn awq(fields: &Fields) -> Result<QuantScheme, StartError> {
    bits(fields, if fields.get("w_bit").is_some() { "w_bit" } else { "bits" }, &[4])?;
    one_of(fields, "version", "gemm", &["gemm", "GEMM"])?;
    if !fields.bool_or("zero_point", true)? {
        return Err(fields.error("zero_point", "false is not supported"));
    }
    let key = if fields.get("q_group_size").is_some() { "q_group_size" } else { "group_size" };
    Ok(QuantScheme::Awq { group_size: group_size(fields, key)? })
}

fn fp8(fields: &Fields) -> Result<QuantScheme, StartError> {
    one_of(fields, "fmt", "e4m3", &["e4m3", "float8_e4m3fn"])?;
    Ok(QuantScheme::Fp8 { block: block(fields, "weight_block_size")? })
}

fn compressed_tensors(fields: &Fields) -> Result<QuantScheme, StartError> {
    for key in ["transform_config", "sparsity_config"] {
        let changes = |members: &Map<String, Value>| match members.get("format").and_then(Value::as_str) {
            Some("dense") => false,
            _ => members.values().any(|value| !value.is_null() && value.as_object().is_none_or(|map| !map.is_empty())),
        };
        if fields.object(key).is_some_and(changes) {
            return Err(fields.error(key, "sparse or transformed weights are not supported"));
        }
    }
    let groups = fields.object("config_groups").ok_or_else(|| fields.error("config_groups", "missing or empty"))?;
    let mut schemes = Vec::new();
    for group in groups.values().filter_map(Value::as_object) {
        let group = Fields { members: group, path: "quantization_config.config_groups.*." };
        let Some(weights) = group.object("weights") else { continue };
        let weights = Fields { members: weights, path: "quantization_config.config_groups.*.weights." };
        // A group may have a format of its own.
        let named = if group.get("format").is_some() { &group } else { fields };
        let scheme = compressed_weights(named, &weights)?;
        if !schemes.contains(&scheme) {
            schemes.push(scheme);
        }
    }
    Ok(QuantScheme::CompressedTensors(schemes))
}

/// The weights of a group, whose format `named` has.
fn compressed_weights(named: &Fields, weights: &Fields) -> Result<CompressedWeights, StartError> {
    const FORMATS: [&str; 4] = ["pack-quantized", "int-quantized", "float-quantized", "naive-quantized"];
    let format = one_of(named, "format", "missing", &FORMATS)?;
    let is_float = one_of(weights, "type", "int", &["int", "float"])? == "float";
    let coding = match format {
        "pack-quantized" => CompressedCoding::Packed { bits: bits(weights, "num_bits", &[4, 8])? },
        _ if is_float => CompressedCoding::Floats,
        _ => CompressedCoding::Bytes,
    };
    let expected = match format {
        "float-quantized" => true,
        "naive-quantized" => is_float,
        _ => false,
    };
    if is_float != expected {
        return Err(weights.error("type", format!("contradicts the format {format}")));
    }
    if !matches!(coding, CompressedCoding::Packed { .. }) {
        bits(weights, "num_bits", &[8])?;
    }
    let symmetric = weights.bool_or("symmetric", true)?;
    let group_size = group_size(weights, "group_size")?;
    let default = if group_size.is_some() { "group" } else { "tensor" };
    let span = match one_of(weights, "strategy", default, &["tensor", "channel", "group", "block"])? {
        "tensor" => ScaleSpan::Tensor,
        "channel" => ScaleSpan::Channel,
        "group" => ScaleSpan::of_groups(group_size),
        _ => {
            let block = block(weights, "block_structure")?;
            ScaleSpan::Block(block.ok_or_else(|| weights.error("block_structure", "missing"))?)
        }
    };
    let has_rows = matches!(span, ScaleSpan::Channel | ScaleSpan::Group(_));
    if !symmetric && (is_float || (coding != CompressedCoding::Bytes && !has_rows)) {
        return Err(weights.error("symmetric", "false is supported for integers with a scale for each row or group"));
    }
    Ok(CompressedWeights { coding, symmetric, span })
}
