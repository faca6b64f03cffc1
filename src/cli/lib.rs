//! The commands of the `pagetide` program.

mod config;
mod doctor;
mod generate;
mod health;
mod manual;
mod perplexity;
mod replay;
mod serve;
mod signals;
mod supervisor;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use pagetide_base::error::StartError;
use pagetide_terminal::options::ConfigOptions;
use pagetide_terminal::{log, output};
use pagetide_text::grammar::sandbox;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagetide                                            serve the demo model on http://127.0.0.1:8000
  pagetide serve Qwen/Qwen2.5-1.5B-Instruct           serve a model from the Hugging Face hub
  pagetide serve --model DIR --swap-space-gib 16      serve a local model with 16 GiB of swap space
  pagetide doctor --model DIR                         check whether the model can be served here
  pagetide config show                                print every setting, its value and its origin
  pagetide config defaults                            print a configuration file with all settings
  pagetide bench serve --url http://host:8000         measure a server";

/// Bytes of address space that a command needs for stacks and memory. With less, an allocation or a stack that cannot
/// grow would end the program, without a word about the limit.
const LEAST_ADDRESS_SPACE: usize = 32 << 20;
const TOO_LITTLE_ADDRESS_SPACE: &str =
    "pagetide: there are not 32 MiB of address space for its memory; is there a limit ('ulimit -v')?\n";
/// Bytes of address space that mimalloc reserves with the first allocation where it cannot have a gibibyte. If there
/// are fewer it does without.
const RESERVED_AT_FIRST: usize = 128 << 20;

/// A serving runtime for large language models, with PagedAttention, continuous batching and a KV cache that swaps.
///
/// Without a command, 'pagetide' serves the demo model on http://127.0.0.1:8000.
#[derive(Parser)]
#[command(
    name = "pagetide",
    version,
    arg_required_else_help = false,
    max_term_width = 110,
    after_help = EXAMPLES
)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Serve a model over an OpenAI-compatible HTTP API
    ///
    /// A setting comes from its flag, else from its environment variable (PAGETIDE_SECTION__KEY), else from the file
    /// given with --config, else from its default. 'pagetide config show' prints the result.
    Serve {
        /// The model, as with --model
        #[arg(value_name = "MODEL", conflicts_with = "model.path")]
        model: Option<String>,
        #[command(flatten)]
        options: ConfigOptions,
    },
    /// Answer a file of requests without a server
    ///
    /// Input and output have the format of OpenAI's batch API: one request per line, with 'custom_id', 'method'
    /// (POST), 'url' (/v1/chat/completions or /v1/completions) and 'body'. Results have the order of the input. A
    /// request that is wrong or fails gets an error as its result; the others go on.
    Generate(generate::GenerateArgs),
    /// Measure how well a model predicts a text, and how far it is from another model
    ///
    /// Prints the perplexity with its standard error, as llama.cpp's 'llama-perplexity' does. With
    /// --kl-divergence-base FILE, the log-probabilities of all tokens are written to a file. With --kl-divergence too,
    /// the file is read and the model compared with it, for example a quantised model with the original. Files of
    /// llama.cpp can be read, and llama.cpp reads these.
    Perplexity(perplexity::PerplexityArgs),
    /// Measure throughput, latency, memory use, a GPU or a server
    #[command(subcommand)]
    Bench(pagetide_bench::BenchCommand),
    /// Check whether a running server is healthy
    ///
    /// The address is the one that 'serve' with the same settings listens on. Exit status 1 if the server does not
    /// answer or is not healthy.
    Health(health::HealthArgs),
    /// Replay a recording: check its decisions, find out why a request waited, draw a timeline
    ///
    /// A recording is written by the flight recorder of a server (docs/recorder.md). The scheduler runs again on the
    /// recorded inputs, without a model, and each decision is compared with the recorded one. Exit status 1 if the
    /// file cannot be read or, with --check, if a decision differs.
    Replay(replay::ReplayArgs),
    /// Show or check the configuration
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Report GPU, libraries and CPU of this machine, and everything that would stop 'serve' from starting
    ///
    /// Opens the GPU that 'serve' would use and measures its copies. Reports where the model is, without using the
    /// network. Exit status 1 if the configured device cannot be used or the model cannot be loaded.
    Doctor(doctor::DoctorArgs),
    /// Compile grammars that the server sends on standard input ('serve' starts this itself)
    #[command(name = sandbox::COMMAND, hide = true)]
    GrammarHelper,
    /// Print a script for shell completion
    ///
    /// For bash: pagetide completions bash > ~/.local/share/bash-completion/completions/pagetide
    Completions(manual::CompletionsArgs),
    /// Print the manual page, or write all manual pages
    ///
    /// To read it: pagetide man | man -l -
    Man(manual::ManArgs),
}

/// Whether the system gives this process so many more bytes of address space.
fn has_address_space(bytes: usize) -> bool {
    let (protection, flags) = (libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: The pages are new and nothing refers to them. They are given back at once.
    unsafe {
        let pages = libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0);
        pages != libc::MAP_FAILED && libc::munmap(pages, bytes) == 0
    }
}

/// Ends the process if there is room for the memory that the allocator reserves with the first allocation, and then not
/// for what it allocates beside it: it would abort. To be called before the first allocation, so it makes none.
pub extern "C" fn check_address_space() {
    if has_address_space(RESERVED_AT_FIRST) && !has_address_space(RESERVED_AT_FIRST + LEAST_ADDRESS_SPACE) {
        // SAFETY: the text is as long as is said. Nothing has to be done at the end of a process that has not begun.
        unsafe {
            libc::write(libc::STDERR_FILENO, TOO_LITTLE_ADDRESS_SPACE.as_ptr().cast(), TOO_LITTLE_ADDRESS_SPACE.len());
            libc::_exit(1);
        }
    }
}

/// Runs the program. Exit status: 0 for success, 1 for a failure that has been reported, 2 for a wrong command line.
pub fn run() -> ExitCode {
    signals::survive_file_size_limits();
    if !has_address_space(LEAST_ADDRESS_SPACE) {
        eprint!("{TOO_LITTLE_ADDRESS_SPACE}");
        return ExitCode::FAILURE;
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are "errors" too. A closed pipe must not make this panic.
            let _ = error.print();
            let asked_for = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            return if asked_for { ExitCode::SUCCESS } else { ExitCode::from(2) };
        }
    };
    if matches!(cli.command, Some(Command::GrammarHelper)) {
        return sandbox::run();
    }
    use_this_program();
    let done = match cli.command {
        None => serve::run(&ConfigOptions::default()),
        Some(Command::Serve { model, options }) => serve::run(&options.with_model(model)),
        Some(Command::Generate(args)) => generate::run(&args),
        Some(Command::Perplexity(args)) => perplexity::run(&args),
        Some(Command::Bench(command)) => pagetide_bench::run(command),
        Some(Command::Replay(args)) => replay::run(&args),
        Some(Command::Config(command)) => config::run(&command),
        Some(Command::Doctor(args)) => doctor::run(&args),
        Some(Command::Completions(args)) => manual::completions(&args, Cli::command()),
        Some(Command::Man(args)) => manual::man(&args, Cli::command()),
        Some(Command::Health(args)) => health::run(&args),
        Some(Command::GrammarHelper) => unreachable!("it has been run above"),
    };
    let code = done.unwrap_or_else(|StartError(message)| {
        output::complain(&format!("pagetide: {message}"));
        ExitCode::FAILURE
    });
    log::finish();
    code
}

/// Lets grammars be compiled in processes that run this program.
fn use_this_program() {
    // On Linux this is the running program, even if its file has been replaced by a newer one.
    let itself = std::path::Path::new("/proc/self/exe");
    match std::env::current_exe() {
        _ if itself.exists() => sandbox::use_program(itself),
        Ok(program) => sandbox::use_program(program),
        // A request with a grammar will report it.
        Err(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    /// Scripts outside the repository use these words.
    #[test]
    fn the_agreed_flags_exist() {
        let line = "pagetide serve --model demo --config f.toml --served-model-name m --host h --port 1 --device cpu \
                    --dtype float32 --max-model-len 1 --block-size 1 --num-device-blocks 1 \
                    --device-memory-utilization 0.5 --swap-space-gib 1 --max-num-seqs 1 --max-num-batched-tokens 1 \
                    --preemption-mode swap --scheduling-policy priority --enable-prefix-caching false --api-key k \
                    --set server.port=2";
        let cli = Cli::try_parse_from(line.split_whitespace()).unwrap_or_else(|error| panic!("{error}"));
        let Some(Command::Serve { options, .. }) = cli.command else { panic!("it is the serve command") };
        assert_eq!(options.values.len(), 18);
        assert_eq!(options.file.as_deref(), Some(std::path::Path::new("f.toml")));
        for line in [
            "pagetide",
            "pagetide generate --model DIR --input requests.jsonl --output results.jsonl",
            "pagetide perplexity --model DIR --text FILE --context 1024 --chunks 9 --kl-divergence-base FILE --json",
            "pagetide perplexity --model DIR --kl-divergence-base FILE --kl-divergence",
            "pagetide bench throughput --fixed 128:64",
            "pagetide bench latency --fixed 128:64",
            "pagetide bench serve --url http://x --trace t.csv --rate 2",
            "pagetide bench replay --simulate t.jsonl --capacity 1%,5%,4000 --cache-only",
            "pagetide bench replay --simulate t.jsonl --num-device-blocks 900 --block-size 256 --repeat 9 --step-ms 5",
            "pagetide bench memory --out DIR --only waste,second-level --pools 1/3,4096t --modes auto,oracle --hide-lengths",
            "pagetide bench memory --out DIR --model-config a/config.json,b/config.json --device-gb 80",
            "pagetide bench paper --out DIR --quick --simulate --traces t.csv --traces-scale 0.25",
            "pagetide bench paper --out DIR --only measured --transformers python3 --kv-tokens 4096 --fresh",
            "pagetide replay a.recording --check",
            "pagetide replay a.recording --why r12 --svg a.svg --trace a.json",
            "pagetide config show --port 1",
            "pagetide config check f.toml",
            "pagetide config defaults",
            "pagetide doctor --json --device cuda",
            "pagetide completions fish",
            "pagetide man --out DIR",
            "pagetide health --ready --port 9",
        ] {
            Cli::try_parse_from(line.split_whitespace()).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
    }
}
