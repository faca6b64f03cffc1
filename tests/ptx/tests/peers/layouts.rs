//! Fragments, swizzles and descriptors against CUTLASS's: `tests/data/cute_layouts.json`, which
//! `scripts/peer_kernels/make_cute_layouts.py` lets CuTe's own code write. Products of random small integers are exact,
//! so a number at a wrong place shows.

use ptx_interpreter::{GpuOptions, GridLaunch, Module, VirtualGpu};
use serde_json::Value;
use std::path::Path;

fn facts() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/cute_layouts.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn list(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap() as usize).collect()
}

/// Integers from -4 to 3, which all types of operands represent.
fn integers(count: usize, seed: u64) -> Vec<i32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 61) as i32 - 4
    };
    (0..count).map(|_| next()).collect()
}

/// `c[m + M·n] = Σ a[m + M·k] · b[n + N·k]`
fn product(a: &[i32], b: &[i32], m: usize, n: usize) -> Vec<i32> {
    let k = a.len() / m;
    (0..m * n).map(|i| (0..k).map(|j| a[i % m + m * j] * b[i / m + n * j]).sum()).collect()
}

/// A small integer in float8 with 4 bits of exponent and 3 of mantissa, whose bias is 7.
fn e4m3(value: i32) -> u8 {
    let size = value.unsigned_abs();
    let exponent = size.checked_ilog2();
    let bits = exponent.map_or(0, |exponent| (exponent + 7) << 3 | (size << (3 - exponent) & 7));
    bits as u8 | if value < 0 { 0x80 } else { 0 }
}

fn encode(value: i32, kind: &str) -> Vec<u8> {
    match kind {
        "f16" => half::f16::from_f32(value as f32).to_le_bytes().to_vec(),
        "bf16" => half::bf16::from_f32(value as f32).to_le_bytes().to_vec(),
        "tf32" | "f32" => (value as f32).to_le_bytes().to_vec(),
        "s8" => vec![value as i8 as u8],
        "e4m3" => vec![e4m3(value)],
        other => panic!("an operand of type {other}"),
    }
}

fn run(text: &str, grid: &GridLaunch, buffers: &[&[u8]]) -> Vec<u8> {
    let module = Module::parse(text).unwrap_or_else(|error| panic!("{error}:\n{text}"));
    let mut gpu = VirtualGpu::new(GpuOptions::default());
    let addresses: Vec<u64> = buffers
        .iter()
        .map(|bytes| {
            let address = gpu.memory.allocate(bytes.len());
            gpu.memory.write(address, bytes);
            address
        })
        .collect();
    let params: Vec<u8> = addresses.iter().flat_map(|word| word.to_le_bytes()).collect();
    let report = gpu.launch(&module, "test", grid, &params).unwrap();
    assert!(report.findings.is_empty(), "{}", report.failure().unwrap_or_default());
    gpu.memory.read(*addresses.last().expect("a result"), buffers.last().expect("a result").len())
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
}

/// `name0, name1, …` for operands of an instruction.
fn registers(name: &str, count: usize) -> String {
    let names: Vec<String> = (0..count).map(|i| format!("%{name}{i}")).collect();
    format!("{{{}}}", names.join(", "))
}

/// Loads `count` registers of each thread from the buffer of a parameter, thread by thread.
fn load_registers(name: &str, count: usize) -> String {
    let mut text = format!("ld.param.u64 %p, [{name}]; mad.wide.u32 %p, %tid, {}, %p;\n", count * 4);
    (0..count).for_each(|i| text += &format!("ld.global.b32 %{name}{i}, [%p+{}];\n", i * 4));
    text
}

fn store_registers(name: &str, count: usize) -> String {
    let mut text = format!("ld.param.u64 %p, [{name}]; mad.wide.u32 %p, %tid, {}, %p;\n", count * 4);
    (0..count).for_each(|i| text += &format!("st.global.b32 [%p+{}], %{name}{i};\n", i * 4));
    text
}

fn kernel(params: &[&str], registers: &[(&str, usize)], body: &str) -> String {
    let params: Vec<String> = params.iter().map(|name| format!(".param .u64 {name}")).collect();
    let registers: String = registers.iter().map(|(name, count)| format!(".reg .b32 %{name}<{count}>;\n")).collect();
    format!(
        ".version 8.5\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 shared[];\n\
         .visible .entry test({})\n{{\n.reg .b64 %p, %q<8>;\n.reg .b32 %tid, %i<8>;\n.reg .pred %if;\n\
         {registers}mov.u32 %tid, %tid.x;\n{body}ret;\n}}\n",
        params.join(", ")
    )
}

/// The registers of all threads, for an operand that is laid out by `layout`.
fn fragments(layout: &[usize], operand: &[i32], kind: &str) -> Vec<u8> {
    layout.iter().flat_map(|element| encode(operand[*element], kind)).collect()
}

#[test]
fn fragments_of_mma_are_cutlass_s() {
    let facts = facts();
    for (shape, kind, layout) in [
        ("m16n8k16", "f16", "m16n8k16.16bit"),
        ("m16n8k16", "bf16", "m16n8k16.16bit"),
        ("m16n8k8", "f16", "m16n8k8.16bit"),
        ("m16n8k8", "bf16", "m16n8k8.16bit"),
        ("m16n8k8", "tf32", "m16n8k8.tf32"),
        ("m16n8k4", "tf32", "m16n8k4.tf32"),
        ("m16n8k16", "s8", "m16n8k16.8bit"),
        ("m16n8k32", "s8", "m16n8k32.8bit"),
        ("m16n8k32", "e4m3", "m16n8k32.fp8"),
    ] {
        let fact = &facts["mma"][layout];
        let [m, n, k] = list(&fact["shape"])[..] else { panic!("three sizes") };
        let [of_a, of_b, of_c] = ["a", "b", "c"].map(|operand| list(&fact[operand]));
        let (a, b) = (integers(m * k, 1), integers(n * k, 2));
        let (a_bytes, b_bytes) = (fragments(&of_a, &a, kind), fragments(&of_b, &b, kind));
        let sum = if kind == "s8" { "s32" } else { "f32" };
        let (num_a, num_b) = (a_bytes.len() / 128, b_bytes.len() / 128);
        let (d, a_registers, b_registers) = (registers("d", 4), registers("a", num_a), registers("b", num_b));
        let body = format!(
            "{}{}{}mma.sync.aligned.{shape}.row.col.{sum}.{kind}.{kind}.{sum} \
             {d}, {a_registers}, {b_registers}, {d};\n{}",
            load_registers("a", num_a),
            load_registers("b", num_b),
            load_registers("d", 4),
            store_registers("d", 4)
        );
        let text = kernel(&["a", "b", "d"], &[("a", num_a), ("b", num_b), ("d", 4)], &body);
        let zeros = vec![0; 32 * 4 * 4];
        let result = words(&run(&text, &GridLaunch::new([1; 3], [32, 1, 1], 0), &[&a_bytes, &b_bytes, &zeros]));
        let expected = product(&a, &b, m, n);
        for (got, element) in result.iter().zip(&of_c) {
            let got = if sum == "s32" { *got as i32 } else { f32::from_bits(*got) as i32 };
            assert_eq!(got, expected[*element], "{shape} of {kind}, element {element}");
        }
    }
}

/// FlashInfer keeps two of four results.
#[test]
fn results_of_mma_can_be_dropped() {
    let ones: Vec<u8> = (0..32 * 4 * 2).flat_map(|_| encode(1, "f16")).collect();
    let body = format!(
        "{}{}{}mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{%d0, _, %d2, _}}, {}, {}, {};\n{}",
        load_registers("a", 4),
        load_registers("b", 2),
        load_registers("d", 4),
        registers("a", 4),
        registers("b", 2),
        registers("d", 4),
        store_registers("d", 4)
    );
    let text = kernel(&["a", "b", "d"], &[("a", 4), ("b", 2), ("d", 4)], &body);
    let grid = GridLaunch::new([1; 3], [32, 1, 1], 0);
    let result = words(&run(&text, &grid, &[&ones, &ones[..256], &vec![0; 32 * 4 * 4]]));
    let lane = [16.0_f32, 0.0, 16.0, 0.0].map(f32::to_bits);
    assert!(result.chunks(4).all(|got| got == lane), "{result:?}");
}

/// Copies a parameter's buffer to the start of shared memory, 16 bytes a thread at a time.
fn fill_shared(name: &str, at: usize, bytes: usize, threads: usize) -> String {
    let mut text = format!(
        "ld.param.u64 %p, [{name}]; mad.wide.u32 %p, %tid, 16, %p;\n\
         mov.u32 %i0, shared; mad.lo.u32 %i0, %tid, 16, %i0;\n"
    );
    for first in (0..bytes).step_by(threads * 16) {
        text += &format!(
            "ld.global.v4.b32 {{%i1, %i2, %i3, %i4}}, [%p+{first}]; \
             st.shared.v4.b32 [%i0+{}], {{%i1, %i2, %i3, %i4}};\n",
            at + first
        );
    }
    text
}

#[test]
fn ldmatrix_gives_lanes_what_cutlass_expects() {
    let facts = facts();
    for count in [1, 2, 4] {
        for trans in ["", ".trans"] {
            let fact = &facts["ldmatrix"][format!("x{count}{trans}")];
            let (rows, results) = (list(&fact["rows"]), list(&fact["results"]));
            let numbers: Vec<u8> = (0..256_u16).flat_map(u16::to_le_bytes).collect();
            let offsets: Vec<u8> = rows.iter().flat_map(|bit| (*bit as u32 / 8).to_le_bytes()).collect();
            let body = format!(
                "{}bar.sync 0;\n{}mov.u32 %i5, shared; add.u32 %o0, %o0, %i5;\n\
                 ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {}, [%o0];\n{}",
                fill_shared("numbers", 0, 512, 32),
                load_registers("o", 1),
                registers("d", count),
                store_registers("d", count)
            );
            let text = kernel(&["numbers", "o", "d"], &[("o", 1), ("d", count)], &body);
            let grid = GridLaunch::new([1; 3], [32, 1, 1], 512);
            let got = run(&text, &grid, &[&numbers, &offsets, &vec![0; 32 * count * 4]]);
            let got: Vec<u16> = got.as_chunks::<2>().0.iter().map(|number| u16::from_le_bytes(*number)).collect();
            let expected: Vec<u16> = results.iter().map(|bit| (bit / 16) as u16).collect();
            assert_eq!(got, expected, "x{count}{trans}");
        }
    }
}

/// The contents of shared memory that holds an operand, by the offsets of its elements.
fn shared_image(offsets: &[usize], operand: &[i32]) -> Vec<u8> {
    let mut image = vec![0; offsets.len() * 2];
    for (offset, value) in offsets.iter().zip(operand) {
        image[offset * 2..offset * 2 + 2].copy_from_slice(&encode(*value, "f16"));
    }
    image
}

/// Each part of 16 columns of two operands in shared memory, with every swizzle, either way up, by CUTLASS's
/// descriptors.
#[test]
fn swizzles_and_descriptors_of_wgmma_are_cutlass_s() {
    let facts = &facts()["wgmma"];
    let of_c = list(&facts["c.64x64"]);
    for kind in ["k.none", "k.32", "k.64", "k.128", "mn.none", "mn.32", "mn.64", "mn.128"] {
        let fact = &facts[kind];
        let (offsets, starts) = (list(&fact["offsets"]), list(&fact["starts"]));
        let descriptors: Vec<u64> =
            fact["descriptors"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap()).collect();
        let k = offsets.len() / 64;
        let (a, b) = (integers(64 * k, 3), integers(64 * k, 4));
        let images = [shared_image(&offsets, &a), shared_image(&offsets, &b)];
        let bytes = images[0].len();
        let transposed = i32::from(kind.starts_with("mn"));
        let mut body = format!("{}{}", fill_shared("a", 0, bytes, 128), fill_shared("b", bytes, bytes, 128));
        body += "bar.sync 0; fence.proxy.async.shared::cta; bar.sync 0;\nmov.u32 %i5, shared; cvt.u64.u32 %q0, %i5;\n";
        (0..32).for_each(|i| body += &format!("mov.b32 %d{i}, 0;\n"));
        body += "setp.eq.u32 %if, %i5, %i5;\nwgmma.fence.sync.aligned;\n";
        for (descriptor, start) in descriptors.iter().zip(&starts) {
            // Bits 0 to 13 are the address without its last four bits.
            for (register, operand) in [("%q1", 0), ("%q2", bytes)] {
                body += &format!(
                    "add.u64 {register}, %q0, {}; shr.b64 {register}, {register}, 4; \
                     and.b64 {register}, {register}, 0x3fff; \
                     or.b64 {register}, {register}, {:#x};\n",
                    operand + start * 2,
                    descriptor & !0x3fff
                );
            }
            body += &format!(
                "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 \
                 {}, %q1, %q2, %if, 1, 1, {transposed}, {transposed};\n",
                registers("d", 32)
            );
        }
        body += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;\n";
        body += &store_registers("d", 32);
        let text = kernel(&["a", "b", "d"], &[("d", 32)], &body);
        let grid = GridLaunch::new([1; 3], [128, 1, 1], 2 * bytes as u32);
        let result = words(&run(&text, &grid, &[&images[0], &images[1], &vec![0; 128 * 32 * 4]]));
        let expected = product(&a, &b, 64, 64);
        for (got, element) in result.iter().zip(&of_c) {
            assert_eq!(f32::from_bits(*got) as i32, expected[*element], "{kind}, element {element}");
        }
    }
}

/// The left operand in registers.
#[test]
fn fragments_of_wgmma_are_cutlass_s() {
    let facts = &facts()["wgmma"];
    let (of_a, of_c) = (list(&facts["a.64x16"]), list(&facts["c.64x64"]));
    let fact = &facts["k.32"];
    let offsets = list(&fact["offsets"]);
    let descriptor = fact["descriptors"][0].as_u64().unwrap();
    let k = offsets.len() / 64;
    // Only the first 16 columns take part.
    let (a, b) = (integers(64 * 16, 5), integers(64 * k, 6));
    let a_bytes = fragments(&of_a, &a, "f16");
    let image = shared_image(&offsets, &b);
    let mut body = format!("{}{}", fill_shared("b", 0, image.len(), 128), load_registers("a", 4));
    body += "bar.sync 0; fence.proxy.async.shared::cta; bar.sync 0;\nmov.u32 %i5, shared; cvt.u64.u32 %q0, %i5;\n";
    body += &format!("shr.b64 %q1, %q0, 4; and.b64 %q1, %q1, 0x3fff; or.b64 %q1, %q1, {:#x};\n", descriptor & !0x3fff);
    (0..32).for_each(|i| body += &format!("mov.b32 %d{i}, 0;\n"));
    body += "setp.eq.u32 %if, %i5, %i5;\nwgmma.fence.sync.aligned;\n";
    body += &format!(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {}, {}, %q1, %if, 1, 1, 0;\n",
        registers("d", 32),
        registers("a", 4)
    );
    body += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;\n";
    body += &store_registers("d", 32);
    let text = kernel(&["b", "a", "d"], &[("a", 4), ("d", 32)], &body);
    let grid = GridLaunch::new([1; 3], [128, 1, 1], image.len() as u32);
    let result = words(&run(&text, &grid, &[&image, &a_bytes, &vec![0; 128 * 32 * 4]]));
    let expected = product(&a, &b[..64 * 16], 64, 64);
    for (got, element) in result.iter().zip(&of_c) {
        assert_eq!(f32::from_bits(*got) as i32, expected[*element], "element {element}");
    }
}
