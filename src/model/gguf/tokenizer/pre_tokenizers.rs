//! How byte-level BPE splits a text into words: llama.cpp's table of `tokenizer.ggml.pre`. Where the tokenizer.json of
//! the original models is known, its patterns stand here, since llama.cpp has to write some of them in another way.

/// A row of the table.
#[derive(Debug, PartialEq)]
pub struct GgufPreTokenizer {
    names: &'static [&'static str],
    /// Regular expressions that are applied one after another. Matches and what is between them become words.
    pub patterns: &'static [&'static str],
    /// The text is normalised to NFC before it is split. llama.cpp does not do this.
    pub composes: bool,
    /// A word that is a token becomes this token, even if no merges lead to it.
    pub ignores_merges: bool,
    /// A BOS token begins a text, unless `tokenizer.ggml.add_bos_token` says otherwise.
    pub adds_bos: bool,
}

impl GgufPreTokenizer {
    /// The row of a name.
    pub fn of(name: &str) -> Option<&'static Self> {
        TABLE.iter().find(|row| row.names.contains(&name))
    }

    /// All names, for messages.
    pub fn names() -> String {
        let mut names: Vec<&str> = TABLE.iter().flat_map(|row| row.names).copied().collect();
        names.sort_unstable();
        names.join(", ")
    }
}

const fn row(names: &'static [&'static str], patterns: &'static [&'static str]) -> GgufPreTokenizer {
    GgufPreTokenizer { names, patterns, composes: false, ignores_merges: false, adds_bos: false }
}

const DIGIT: &str = r"\p{N}";
const UP_TO_THREE_DIGITS: &str = r"\p{N}{1,3}";
const THREE_DIGITS: &str = "[0-9][0-9][0-9]";
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|",
    r"\s+(?!\S)|\s+"
);

const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|",
    r"\s+(?!\S)|\s+"
);

const QWEN35: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|",
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
);

const MINICPM5: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|",
    r"\s+(?!\S)|\s+"
);

const SEED_CODER: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|",
    r"\s+(?!\S)|\s+"
);

const BAILING: &str = concat!(
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|",
    r"\s+(?!\S)|\s+"
);

const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|",
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

const LINE_BREAK: &str = r"[\r\n]";
const CJK: &str = "[一-龥ࠀ-一가-퟿]+";

// Written as numbers: the characters that an editor could replace by their normalised forms.
const DEEPSEEK_LLM_LETTERS: &str = concat!(
    r"\s?",
    "[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-",
    "\u{1f7d}ᾀ-ᾴᾶ-ᾼ\u{1fbe}ῂ-ῄῆ-ῌῐ-\u{1fd3}ῖ-\u{1fdb}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u{2126}ℨ\u{212a}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ",
    "-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
);

const DEEPSEEK_V3: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"##,
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// llama.cpp's table without the rows that it computes by code of its own.
static TABLE: &[GgufPreTokenizer] = &[
    row(&["default"], &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", THREE_DIGITS]),
    row(
        &[
            "gpt-2",
            "phi-2",
            "jina-es",
            "jina-de",
            "jina-v1-en",
            "jina-v2-es",
            "jina-v2-de",
            "jina-v2-code",
            "roberta-bpe",
            "modern-bert",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "exaone4",
            "jais",
            "trillion",
            "granite-docling",
        ],
        &[GPT2],
    ),
    GgufPreTokenizer { composes: true, ..row(&["mpt", "olmo"], &[GPT2]) },
    GgufPreTokenizer {
        ignores_merges: true,
        adds_bos: true,
        ..row(
            &["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"],
            &[LLAMA3],
        )
    },
    row(&["dbrx", "smaug-bpe", "chatglm-bpe"], &[LLAMA3]),
    GgufPreTokenizer { ignores_merges: true, ..row(&["glm4", "glm5"], &[LLAMA3]) },
    GgufPreTokenizer { ignores_merges: true, ..row(&["minicpm5"], &[UP_TO_THREE_DIGITS, MINICPM5]) },
    GgufPreTokenizer { composes: true, ..row(&["qwen2"], &[QWEN2]) },
    row(&["deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"], &[QWEN2]),
    GgufPreTokenizer { composes: true, ..row(&["qwen35"], &[QWEN35]) },
    row(&["smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"], &[DIGIT, GPT2]),
    GgufPreTokenizer { composes: true, ..row(&["command-r"], &[DIGIT, GPT2]) },
    row(&["falcon"], &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, THREE_DIGITS]),
    row(
        &["deepseek-llm"],
        &[LINE_BREAK, DEEPSEEK_LLM_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", CJK, r"\p{N}+"],
    ),
    row(&["deepseek-coder"], &[LINE_BREAK, r"\s?\p{L}+", r"\s?\p{P}+", CJK, DIGIT]),
    row(
        &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        &[UP_TO_THREE_DIGITS, "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK_V3],
    ),
    GgufPreTokenizer { ignores_merges: true, adds_bos: true, ..row(&["tekken"], &[TEKKEN]) },
    row(&["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], &[GPT4O]),
    row(&["superbpe"], &[r"\p{N}+", r"(?=(\d{3})+(?!\d))"]),
    row(&["bailingmoe", "bailingmoe2", "llada-moe"], &[BAILING]),
    row(&["seed-coder"], &[SEED_CODER]),
    row(&["bloom", "gpt3-finnish", "poro-chat"], &[BLOOM]),
    row(&["viking"], &[BLOOM, DIGIT]),
];
