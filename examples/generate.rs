//! The engine as a library: the same actors as the server, without HTTP.
//!
//! `cargo run --release --example generate -- [MODEL] [PROMPT ...]`

use pagetide::offline::{Engine, GenerateParams};
use pagetide::sampling::params::SamplingParams;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let model = args.next().unwrap_or_else(|| "demo".into());
    let mut prompts: Vec<String> = args.collect();
    if prompts.is_empty() {
        prompts = ["Pagetide is", "Once upon a time", "The tide"].map(str::to_owned).into();
    }

    let engine = Engine::builder().model(model).build()?;
    let sampling = SamplingParams { max_tokens: 40, temperature: 0.0, ..SamplingParams::default() };
    let params = GenerateParams { sampling, ..GenerateParams::default() };
    for (prompt, output) in prompts.iter().zip(engine.generate(prompts.clone(), &params)) {
        let output = output?;
        println!("{prompt}{}\n  [{:?}]", output.samples[0].text, output.samples[0].finish_reason);
    }
    Ok(())
}
