# Recipes for https://just.systems. The commands of CI live in .ci/run alone; these recipes call it by the names of its
# steps. Without just, run the same by hand: `.ci/run clippy tests`.

# Lists the recipes.
default:
    @just --list --unsorted

# Runs everything that has to hold before a change is merged.
ci:
    .ci/run

# Runs the named steps of CI and what they need: `just steps clippy soak`.
steps +names:
    .ci/run {{ names }}

# Checks format, lints, links, circles of files and the API docs: what to run before each commit.
check:
    .ci/run format clippy links circles docs

# Runs all of `cargo test`.
test:
    .ci/run tests

# Fuzzes each target for a few seconds.
fuzz:
    .ci/run fuzz

# Runs the multi-threaded code in thousands of interleavings.
interleavings:
    .ci/run interleavings

# Runs the CUDA kernels on the CPU, under AddressSanitizer.
asan:
    .ci/run asan

# Checks the kernels for aarch64, in an emulator.
aarch64:
    .ci/run aarch64

# Compiles every CUDA kernel with NVRTC and checks its machine code; needs no GPU.
kernels:
    .ci/run kernels

# Runs a minute of mixed traffic against the program.
soak:
    .ci/run soak

# Runs the tests of vLLM, llama.cpp and SGLang that have to pass.
peers:
    .ci/run peers

# Runs the tests with real clients, a browser and Prometheus.
clients:
    .ci/run clients frameworks schema victims

# Formats the code.
fmt:
    cargo fmt --all

# Serves the demo model: `just serve --port 9000`.
serve *flags:
    cargo run --release -- serve {{ flags }}

# Runs the tests whose name contains NAME, with their output: `just one arbiter`.
one name:
    cargo test --locked {{ name }} -- --nocapture

# Runs one seed of the simulation, in one test: `just seed 17 random_loads`.
seed number test operations="5000":
    PAGETIDE_SIM_SEED={{ number }} PAGETIDE_SIM_OPERATIONS={{ operations }} cargo test --locked --test simulation {{ test }} -- --nocapture

# Updates the generated pages and config/pagetide.toml from the code.
pages:
    UPDATE_DOCS=1 cargo test --locked --test docs
