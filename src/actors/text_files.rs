//! Reads a model's files other than its weights.

use pagetide_base::error::StartError;
use pagetide_base::sampling::params::{MAX_REPETITION_PENALTY, MAX_TEMPERATURE, Pooling, SamplingDefaults};
use pagetide_config::{self as config, Config, LoadFormat};
use pagetide_model::files::ModelFiles;
use pagetide_text::chat_output::ChatFormat;
use pagetide_text::chat_template::ChatTemplate;
use pagetide_text::tokenizer::Tokenizer;
use serde_json::Value;

/// Everything that is read of a model besides its weights.
pub(super) struct Text {
    pub tokenizer: Tokenizer,
    pub chat_template: Option<ChatTemplate>,
    pub chat_format: ChatFormat,
    pub default_sampling: SamplingDefaults,
    pub pooling: Pooling,
}

impl Text {
    /// `vocab_size`: the model's, which its tokenizer is to fit.
    pub fn load(config: &Config, files: &ModelFiles, vocab_size: usize) -> Result<Self, StartError> {
        if config.model.skip_tokenizer_init {
            return Self::absent(files);
        }
        let (tokenizer, chat_template) = load_text(&text_files(config, files)?)?;
        if config.model.load_format == LoadFormat::Auto {
            check_vocabulary(tokenizer.vocab_size(), vocab_size)?;
        }
        let (tool_parser, reasoning_parser) = (config.model.tool_call_parser, config.model.reasoning_parser);
        let chat_format = ChatFormat::choose(tool_parser, reasoning_parser, chat_template.as_ref());
        let (default_sampling, pooling) = (load_sampling_defaults(files)?, load_pooling(files)?);
        Ok(Self { tokenizer, chat_template, chat_format, default_sampling, pooling })
    }

    /// Of a server without a tokenizer.
    fn absent(files: &ModelFiles) -> Result<Self, StartError> {
        Ok(Self {
            tokenizer: Tokenizer::absent(),
            chat_template: None,
            chat_format: ChatFormat::default(),
            default_sampling: load_sampling_defaults(files)?,
            pooling: load_pooling(files)?,
        })
    }
}

/// Tokenizers have some tokens that their model does not have; a request with one is refused. A tokenizer with many
/// times as many tokens belongs to another model.
fn check_vocabulary(of_tokenizer: usize, of_model: usize) -> Result<(), StartError> {
    let most = 2 * of_model + (1 << 16);
    if of_tokenizer <= most {
        return Ok(());
    }
    Err(StartError::new(format!(
        "tokenizer.json: token ids go up to {}, but the model's vocab_size is {of_model}: it belongs to another model",
        of_tokenizer - 1
    )))
}

/// The files of tokenizer and chat template: beside the weights, or those of the demo model if a model with dummy
/// weights has none. Its text is meaningless either way.
fn text_files(config: &Config, files: &ModelFiles) -> Result<ModelFiles, StartError> {
    if config.model.load_format != LoadFormat::Auto && files.read_text("tokenizer.json")?.is_none() {
        return ModelFiles::open(config::DEMO_MODEL);
    }
    Ok(files.clone())
}

fn load_text(files: &ModelFiles) -> Result<(Tokenizer, Option<ChatTemplate>), StartError> {
    let tokenizer = files
        .read_text("tokenizer.json")?
        .ok_or_else(|| StartError::new(format!("model: there is no {}", files.path("tokenizer.json"))))?;
    let config = files.read_text("tokenizer_config.json")?;
    let template = files.read_text("chat_template.jinja")?;
    let chat_template = ChatTemplate::from_files(template.as_deref(), config.as_deref())?;
    Ok((Tokenizer::from_json(&tokenizer, config.as_deref())?, chat_template))
}

/// Reads the pooling from the file of sentence-transformers, as models for embeddings have it.
fn load_pooling(files: &ModelFiles) -> Result<Pooling, StartError> {
    const FILE: &str = "1_Pooling/config.json";
    let Some(text) = files.read_text(FILE)? else { return Ok(Pooling::Last) };
    let config: Value =
        serde_json::from_str(&text).map_err(|error| StartError::new(format!("{}: {error}", files.path(FILE))))?;
    let is = |name: &str| config.get(name).and_then(Value::as_bool).unwrap_or(false);
    match (is("pooling_mode_mean_tokens"), is("pooling_mode_lasttoken")) {
        (true, false) => Ok(Pooling::Mean),
        (false, true) => Ok(Pooling::Last),
        _ => Err(StartError::new(format!(
            "{}: one of pooling_mode_mean_tokens and pooling_mode_lasttoken must be true: no other pooling is available",
            files.path(FILE)
        ))),
    }
}

fn load_sampling_defaults(files: &ModelFiles) -> Result<SamplingDefaults, StartError> {
    const FILE: &str = "generation_config.json";
    let Some(text) = files.read_text(FILE)? else { return Ok(SamplingDefaults::default()) };
    let wrong = |error: String| StartError::new(format!("{}: {error}", files.path(FILE)));
    let defaults: SamplingDefaults = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    check_sampling(&defaults).map_err(wrong)?;
    Ok(defaults)
}

/// Defaults have to be in the same range as a request's parameters.
fn check_sampling(defaults: &SamplingDefaults) -> Result<(), String> {
    let numbers = [
        ("temperature", defaults.temperature, MAX_TEMPERATURE),
        ("top_p", defaults.top_p, 1.0),
        ("min_p", defaults.min_p, 1.0),
        ("repetition_penalty", defaults.repetition_penalty, MAX_REPETITION_PENALTY),
    ];
    for (name, value, largest) in numbers {
        if let Some(value) = value.filter(|value| !(0.0..=largest).contains(&f64::from(*value))) {
            return Err(format!("{name}: {value} is not between 0 and {largest}"));
        }
    }
    Ok(())
}
