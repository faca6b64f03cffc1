//! `ptx-run kernel.ptx --entry NAME --grid 4 --block 128 --args …`: runs a kernel on the CPU, and prints what is wrong
//! with it, what it counted, and its results.

use ptx_interpreter::report::{DEVICES, hot_lines, roofline, table};
use ptx_interpreter::{GpuOptions, GridLaunch, Module, VirtualGpu};
use std::process::ExitCode;

const USAGE: &str = "\
usage: ptx-run FILE [options]

  --list                 print the module's entries with their parameters, and stop
  --entry NAME           the kernel; needed if there are several
  --grid X[,Y[,Z]]       thread blocks (1)
  --block X[,Y[,Z]]      threads of a block (32)
  --cluster X[,Y[,Z]]    blocks of a cluster (1)
  --shared BYTES         dynamic shared memory of a block (0)
  --args A B …           the parameters, up to the next option:
                           u32:7 s32:-1 u64:9 f32:0.5 f64:1     a number
                           buffer:BYTES                         unwritten device memory
                           zeros:BYTES                          device memory of zeros
                           f32s:N  u32s:N                       N numbers: random in [-1, 1), or 0, 1, 2, …
                           file:PATH                            device memory with a file's contents
  --print I:TYPE:N       after the launch, the first N numbers (u32, s32, f32) of argument I, from 0; ?: not written
  --against FILE         run the kernel of another module over the same memory too, and name the first instruction
                         whose result differs
  --seed N               the order of blocks, warps and lanes (1)
  --approximation E      results of ex2.approx and the like are off by E times the manual's bound, -1 to 1 (0)
  --fast                 do not look for races and unwritten bytes
  --device a100|h100|h200 the device of the roofline (h100)
  --lines N              the N source lines with the most issue slots (10)

The exit status is 1 if something was found, and 2 if the kernel could not be run.";

fn main() -> ExitCode {
    match run(std::env::args().skip(1).collect()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("ptx-run: {message}");
            ExitCode::from(2)
        }
    }
}

#[derive(Default)]
struct Arguments {
    file: Option<String>,
    against: Option<String>,
    list: bool,
    entry: Option<String>,
    grid: Option<[u32; 3]>,
    block: Option<[u32; 3]>,
    cluster: Option<[u32; 3]>,
    shared_bytes: u32,
    values: Vec<String>,
    prints: Vec<String>,
    seed: Option<u64>,
    fast: bool,
    approximation_error: f64,
    device: Option<String>,
    lines: Option<usize>,
}

fn number<T: std::str::FromStr>(text: &str, what: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("{what}: {text:?} is not a number in its range"))
}

fn extent(text: &str, what: &str) -> Result<[u32; 3], String> {
    let mut extent = [1; 3];
    let parts: Vec<&str> = text.split(',').collect();
    if parts.len() > 3 {
        return Err(format!("{what}: {text:?} has more than three parts"));
    }
    for (to, part) in extent.iter_mut().zip(parts) {
        *to = number(part, what)?;
    }
    Ok(extent)
}

fn parse(words: Vec<String>) -> Result<Arguments, String> {
    let mut arguments = Arguments::default();
    let mut words = words.into_iter().peekable();
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--list" => arguments.list = true,
            "--fast" => arguments.fast = true,
            "--against" => arguments.against = Some(value()?),
            "--entry" => arguments.entry = Some(value()?),
            "--grid" => arguments.grid = Some(extent(&value()?, "--grid")?),
            "--block" => arguments.block = Some(extent(&value()?, "--block")?),
            "--cluster" => arguments.cluster = Some(extent(&value()?, "--cluster")?),
            "--shared" => arguments.shared_bytes = number(&value()?, "--shared")?,
            "--seed" => arguments.seed = Some(number(&value()?, "--seed")?),
            "--approximation" => arguments.approximation_error = number(&value()?, "--approximation")?,
            "--device" => arguments.device = Some(value()?),
            "--lines" => arguments.lines = Some(number(&value()?, "--lines")?),
            "--print" => arguments.prints.push(value()?),
            "--args" => {
                while let Some(value) = words.next_if(|word| !word.starts_with("--")) {
                    arguments.values.push(value);
                }
            }
            "--help" | "-h" => {
                println!("{USAGE}");
                std::process::exit(0);
            }
            _ if word.starts_with("--") => return Err(format!("unknown option {word}\n{USAGE}")),
            _ => arguments.file = Some(word),
        }
    }
    Ok(arguments)
}

/// The bytes of a parameter, and its device memory.
fn argument(gpu: &mut VirtualGpu, text: &str) -> Result<(Vec<u8>, Option<u64>), String> {
    let (kind, value) = text.split_once(':').ok_or(format!("--args: {text:?} has no kind, such as u32:"))?;
    let mut memory = |contents: Option<Vec<u8>>, bytes: usize| {
        let address = gpu.memory.allocate(bytes);
        if let Some(contents) = contents {
            gpu.memory.write(address, &contents);
        }
        (address.to_le_bytes().to_vec(), Some(address))
    };
    Ok(match kind {
        "u32" => (number::<u32>(value, text)?.to_le_bytes().to_vec(), None),
        "s32" => (number::<i32>(value, text)?.to_le_bytes().to_vec(), None),
        "u64" => (number::<u64>(value, text)?.to_le_bytes().to_vec(), None),
        "f32" => (number::<f32>(value, text)?.to_le_bytes().to_vec(), None),
        "f64" => (number::<f64>(value, text)?.to_le_bytes().to_vec(), None),
        "buffer" => memory(None, number(value, text)?),
        "zeros" => {
            let bytes = number(value, text)?;
            memory(Some(vec![0; bytes]), bytes)
        }
        "u32s" => {
            let contents: Vec<u8> = (0..number::<u32>(value, text)?).flat_map(u32::to_le_bytes).collect();
            let bytes = contents.len();
            memory(Some(contents), bytes)
        }
        "f32s" => {
            let mut state = 1_u32;
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 23) as f32 - 1.0
            };
            let contents: Vec<u8> = (0..number::<usize>(value, text)?).flat_map(|_| next().to_le_bytes()).collect();
            let bytes = contents.len();
            memory(Some(contents), bytes)
        }
        "file" => {
            let contents = std::fs::read(value).map_err(|error| format!("{value}: {error}"))?;
            let bytes = contents.len();
            memory(Some(contents), bytes)
        }
        _ => return Err(format!("--args: unknown kind {kind:?}")),
    })
}

fn read_module(file: &str) -> Result<Module, String> {
    let text = std::fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))?;
    Module::parse(&text).map_err(|error| format!("{file}: {error}"))
}

fn run(words: Vec<String>) -> Result<bool, String> {
    let arguments = parse(words)?;
    let module = read_module(&arguments.file.ok_or(USAGE)?)?;
    if arguments.list {
        for program in module.entries() {
            let params: Vec<String> =
                program.params.iter().map(|(_, at, bytes)| format!("{bytes} bytes at {at}")).collect();
            println!("{}: {} instructions; parameters: {}", program.name, program.code.len(), params.join(", "));
        }
        return Ok(true);
    }
    let entry = match &arguments.entry {
        Some(entry) => entry.clone(),
        None => {
            let names: Vec<&str> = module.entries().map(|program| program.name.as_str()).collect();
            let [name] = names[..] else { return Err(format!("--entry must be one of {}", names.join(", "))) };
            name.into()
        }
    };
    let program = module.entry(&entry).map_err(|error| error.to_string())?;
    let mut gpu = VirtualGpu::new(GpuOptions {
        seed: arguments.seed.unwrap_or(1),
        sanitize: !arguments.fast,
        approximation_error: arguments.approximation_error,
        ..GpuOptions::default()
    });
    let mut params = vec![0; program.param_bytes as usize];
    let mut buffers = Vec::new();
    // One struct by value is filled field by field; otherwise each argument is a parameter.
    let is_struct = program.params.len() == 1 && arguments.values.len() > 1;
    let mut at = 0;
    for (i, value) in arguments.values.iter().enumerate() {
        let (bytes, buffer) = argument(&mut gpu, value)?;
        buffers.push(buffer);
        let start = if is_struct {
            at = usize::next_multiple_of(at, bytes.len());
            at
        } else {
            program.params.get(i).map(|(_, at, _)| *at as usize).ok_or("--args: too many")?
        };
        at = start + bytes.len();
        params.get_mut(start..at).ok_or("--args: more bytes than the parameters have")?.copy_from_slice(&bytes);
    }
    let launch = GridLaunch {
        grid: arguments.grid.unwrap_or([1; 3]),
        block: arguments.block.unwrap_or([32, 1, 1]),
        shared_bytes: arguments.shared_bytes,
        cluster: arguments.cluster.unwrap_or([1; 3]),
    };
    let device = arguments.device.as_deref().unwrap_or("h100");
    let device = DEVICES.iter().find(|one| one.name == device).ok_or("--device must be a100, h100 or h200")?;
    if let Some(against) = &arguments.against {
        let other = read_module(against)?;
        let divergence = gpu.compare((&module, &entry), (&other, &entry), &launch, &params);
        let divergence = divergence.map_err(|error| error.to_string())?;
        match &divergence {
            Some(divergence) => println!("{divergence}"),
            None => println!("{entry}: both kernels compute the same"),
        }
        return Ok(divergence.is_none());
    }
    let started = std::time::Instant::now();
    let report = gpu.launch(&module, &entry, &launch, &params).map_err(|error| error.to_string())?;
    let seconds = started.elapsed().as_secs_f64();
    println!("{}", table(&report.counters));
    println!("{}", roofline(&report.counters, device));
    println!("{}", hot_lines(&report.counters, module.lines(), arguments.lines.unwrap_or(10)));
    let rate = report.counters.thread_instructions() as f64 / seconds / 1e6;
    println!("interpreted in {seconds:.3} s: {rate:.1} million thread instructions a second\n");
    for print in &arguments.prints {
        let parts: Vec<&str> = print.split(':').collect();
        let [index, kind, count] = parts[..] else { return Err(format!("--print {print}: must be I:TYPE:N")) };
        let buffer = buffers.get(number::<usize>(index, "--print")?).copied().flatten();
        let address = buffer.ok_or(format!("--print {print}: the argument is not device memory"))?;
        let count = number::<usize>(count, "--print")?;
        let contents = gpu.memory.read(address, 4 * count);
        let mut words = Vec::new();
        for (i, word) in contents.as_chunks().0.iter().enumerate() {
            words.push(match kind {
                _ if !gpu.memory.is_defined(address + 4 * i as u64, 4) => "?".into(),
                "f32" => f32::from_le_bytes(*word).to_string(),
                "s32" => i32::from_le_bytes(*word).to_string(),
                _ => u32::from_le_bytes(*word).to_string(),
            });
        }
        println!("{}", words.join(" "));
    }
    for finding in &report.findings {
        println!("{finding}");
    }
    Ok(report.findings.is_empty())
}
