#!/usr/bin/env python3
"""Writes tests/data/tokenizers/: small tokenizers of every kind that checkpoints have, with what transformers makes of some
texts and token ids. Needs `transformers` (5.x) and `tokenizers`.

    python scripts/make_tokenizer_goldens.py tests/data/tokenizers
"""

import json
import random
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

CORPUS = """
The tide comes in and the tide goes out, twice a day, and every page of the sea is written again.
A block of memory is a page of the book; a table of blocks says where each page lies. Don't lose it!
She'll ask: "What's a cache?" We've said that they're hits, if you've been there before. I'm sure, isn't it so?
Numbers: 0 1 2 3 10 42 1000 3.14159 2024-11-21. Symbols: + - * / = < > ( ) [ ] { } # $ % & @ ^ _ ~ |
Der Block ist größer als die Seite; où est la mémoire? ¿Dónde está la página? Это страница памяти. 東京の海。
def swap(block): return pool[block] + 1  # copy    four spaces	and a tab
""".strip().split("\n")

TEXTS = [
    "",
    " ",
    "Hello world",
    " leading and trailing ",
    "two  spaces   three\nnew line\n\n\ttab",
    "Don't we've they're I'm she'll isn't. What? No! Yes, so ' quoted '.",
    "größer où está 東京 памяти",
    "naïve cafe\u0301 e\u0301\u0302",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽 🙂",
    "<s>[INST] Hello [/INST]</s>",
    "<|begin|>system<|end|>\n<tool>x</tool> ",
    "a" * 40,
    "\u0000\u0001\u007f\u00a0\u200b\ufeff\ufffd",
    "3.14159 + 42 = 1000;  x_y[0] -> {z}",
    "▁under ▁score",
]

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def special(*tokens):
    return [{"content": token, "special": True} for token in tokens]


def byte_level_llama3():
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>", "<|eot|>"])
    tokenizer.add_tokens(["<tool>", "</tool>"])
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 420)]),
        ]
    )
    return tokenizer, {"bos_token": "<|begin|>", "eos_token": "<|end|>", "clean_up_tokenization_spaces": True}


def byte_level_gpt2():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    tokenizer.enable_truncation(5)
    # Tokens that only the configuration knows, one of them with letters of the byte alphabet.
    config = {
        "add_bos_token": True,
        "bos_token": {"__type": "AddedToken", "content": "</s>", "special": True, "lstrip": False, "rstrip": False, "single_word": False,
                      "normalized": True},
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": None,
        "added_tokens_decoder": {
            "400": {"content": "</s>", "special": True, "normalized": True, "lstrip": False, "rstrip": False,
                    "single_word": False},
            "401": {"content": "<pad>", "special": True, "normalized": True, "lstrip": False, "rstrip": False,
                    "single_word": False},
            "402": {"content": "<é x>", "special": False, "normalized": False, "lstrip": False, "rstrip": False,
                    "single_word": False},
        },
        "extra_special_tokens": ["<extra>"],
    }
    return tokenizer, config


def sentencepiece_llama2():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.train_from_iterator(
        CORPUS[:4],
        trainers.BpeTrainer(vocab_size=520, special_tokens=["<unk>", "<s>", "</s>", *BYTES], show_progress=False),
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    data = json.loads(tokenizer.to_str())
    data["pre_tokenizer"] = None
    data["added_tokens"] = [token for token in data["added_tokens"] if not token["content"].startswith("<0x")]
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
    }
    return Tokenizer.from_str(json.dumps(data)), config


def sentencepiece_gemma():
    """No leading space added or stripped; eos added by configuration; byte fallback."""
    tokenizer, config = sentencepiece_llama2()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer, config | {"add_bos_token": True, "add_eos_token": True}


def metaspace_unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=300, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer, {"eos_token": "</s>", "unk_token": "<unk>", "clean_up_tokenization_spaces": True}


def wordpiece_bert():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(
            vocab_size=420, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer, {"unk_token": "[UNK]", "sep_token": "[SEP]", "clean_up_tokenization_spaces": True}


def wordlevel():
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(
        CORPUS[:2], trainers.WordLevelTrainer(special_tokens=["<unk>", "<s>"], show_progress=False)
    )
    return tokenizer, {"unk_token": "<unk>", "bos_token": "<s>"}


KINDS = [
    byte_level_llama3,
    byte_level_gpt2,
    sentencepiece_llama2,
    sentencepiece_gemma,
    metaspace_unigram,
    wordpiece_bert,
    wordlevel,
]


def goldens(tokenizer, rng):
    encoded = [
        {"text": text, "add_special_tokens": add, "ids": tokenizer.encode(text, add_special_tokens=add)}
        for text in TEXTS
        for add in (False, True)
    ]
    sequences = [case["ids"] for case in encoded]
    for _ in range(80):
        sequences.append([rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 24))])
    decoded = [
        {"ids": ids, "skip_special_tokens": skip, "text": tokenizer.decode(ids, skip_special_tokens=skip)}
        for ids in sequences
        for skip in (False, True)
    ]
    return {
        "encoded": encoded,
        "decoded": decoded,
        "special_ids": sorted(i for i, t in tokenizer.added_tokens_decoder.items() if t.special),
        "vocab_size": max(tokenizer.get_vocab().values()) + 1,
        "bos": [tokenizer.bos_token, tokenizer.bos_token_id],
        "eos": [tokenizer.eos_token, tokenizer.eos_token_id],
        "pad": [tokenizer.pad_token, tokenizer.pad_token_id],
        "unk": [tokenizer.unk_token, tokenizer.unk_token_id],
    }


def main():
    root = Path(sys.argv[1])
    for kind in KINDS:
        folder = root / kind.__name__
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer, config = kind()
        tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        read = AutoTokenizer.from_pretrained(folder)
        # As the server reads it: settings of training do not apply.
        read.backend_tokenizer.no_truncation()
        golden = goldens(read, random.Random(7))
        (folder / "golden.json").write_text(json.dumps(golden, ensure_ascii=False) + "\n")
        print(folder, read.backend_tokenizer.get_vocab_size(), "tokens")


if __name__ == "__main__":
    main()
