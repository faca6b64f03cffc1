//! Small kernels as text.

use ptx_interpreter::{GpuOptions, GridLaunch, LaunchReport, Module, VirtualGpu};

/// A module with one entry `test` that takes an address `out`, with plenty of registers.
pub fn kernel(shared: &str, body: &str) -> String {
    format!(
        ".version 8.5\n.target sm_90a\n.address_size 64\n{shared}\n\
         .visible .entry test(.param .u64 out) {{\n\
         .reg .pred %p<16>; .reg .b16 %h<16>; .reg .b32 %r<64>; .reg .b64 %d<32>; .reg .f32 %f<64>; .reg .f64 %g<16>;\n\
         ld.param.u64 %d0, [out];\n\
         mov.u32 %r0, %tid.x;\n\
         mul.wide.u32 %d1, %r0, 4;\n\
         add.s64 %d1, %d0, %d1;\n\
         {body}\n\
         ret;\n}}\n"
    )
}

/// Runs a kernel of `threads` threads in each of `blocks` blocks over `words` words of zeros.
pub fn run(text: &str, blocks: u32, threads: u32, words: usize, seed: u64) -> (LaunchReport, Vec<u32>) {
    let module = Module::parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let mut gpu = VirtualGpu::new(GpuOptions { seed, ..GpuOptions::default() });
    let out = gpu.memory.allocate(4 * words);
    gpu.memory.fill(out, 0, 4 * words);
    let launch = GridLaunch::new([blocks, 1, 1], [threads, 1, 1], 0);
    let report = gpu.launch(&module, "test", &launch, &out.to_le_bytes()).unwrap();
    let contents = gpu.memory.read(out, 4 * words);
    (report, contents.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

/// What one thread leaves in `%r1`, without any finding.
#[allow(dead_code, reason = "not every test file needs it")]
pub fn value(body: &str) -> u32 {
    let (report, words) = run(&kernel("", &format!("{body}\nst.global.b32 [%d1], %r1;")), 1, 1, 1, 1);
    assert_eq!(report.failure(), None, "{body}");
    words[0]
}

/// The same for a float in `%f1`.
#[allow(dead_code, reason = "not every test file needs it")]
pub fn float(body: &str) -> f32 {
    f32::from_bits(value(&format!("{body}\nmov.b32 %r1, %f1;")))
}
