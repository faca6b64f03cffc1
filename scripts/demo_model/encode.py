"""From documents to training rows: tokenizer, chat layout, packing."""

import random
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
END_OF_TEXT_ID, IM_START_ID, IM_END_ID = 0, 1, 2

# How much a token counts in the loss, by who wrote it.
ANSWER, QUESTION, TEXT = 1.0, 0.05, 0.5
# The first tokens of an answer decide which answer it is.
FIRST, FIRST_TOKENS = 3.0, 6


def train_tokenizer(texts, vocab: int) -> Tokenizer:
    """Byte-level BPE with the full byte alphabet, so any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def texts_of(document: dict) -> list[str]:
    if "text" in document:
        return [document["text"]]
    return [message["content"] for message in document["messages"]]


class Encoder:
    """Turns documents into token ids with a loss weight for each of them."""

    def __init__(self, tokenizer: Tokenizer, seed: int):
        self.tokenizer = tokenizer
        self.random = random.Random(seed)
        self.known: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        found = self.known.get(text)
        if found is None:
            found = self.tokenizer.encode(text, add_special_tokens=False).ids
            self.known[text] = found
        return found

    def __call__(self, document: dict) -> tuple[list[int], list[float]]:
        return self.text(document["text"]) if "text" in document else self.chat(document["messages"])

    def chat(self, messages: list[dict]) -> tuple[list[int], list[float]]:
        """The layout of ``chat_template.jinja``."""
        tokens, weights = [], []
        newline = self.ids("\n")
        for message in messages:
            role = [IM_START_ID] + self.ids(message["role"] + "\n")
            body = self.ids(message["content"]) + [IM_END_ID]
            if message["role"] == "assistant":
                weight = [FIRST if i < FIRST_TOKENS else ANSWER for i in range(len(body))]
            else:
                weight = [QUESTION] * len(body)
            tokens += role + body + newline
            weights += [0.0] * len(role) + weight + [0.0] * len(newline)
        return tokens, weights

    def text(self, text: str) -> tuple[list[int], list[float]]:
        """Plain text: with or without the start token, as clients send both."""
        tokens = self.ids(text) + [END_OF_TEXT_ID]
        weights = [TEXT] * len(tokens)
        if self.random.random() < 0.5:
            return [END_OF_TEXT_ID] + tokens, [0.0] + weights
        weights[0] = 0.0
        return tokens, weights


@dataclass
class Rows:
    """Packed rows of one length: ids, document numbers and loss weights."""

    tokens: np.ndarray
    documents: np.ndarray
    weights: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


def pack(encoded, length: int) -> Rows:
    """Fills rows of ``length + 1`` tokens, each document whole in one row."""
    size = length + 1
    open_rows: list[tuple[int, list]] = []
    rows = []
    for tokens, weights in encoded:
        need = len(tokens)
        place = next((i for i, (used, _) in enumerate(open_rows) if used + need <= size), None)
        if place is None:
            open_rows.append((0, []))
            place = len(open_rows) - 1
        used, members = open_rows[place]
        members.append((tokens, weights))
        open_rows[place] = (used + need, members)
        if used + need > size - 12 or len(open_rows) > 64:
            full = max(range(len(open_rows)), key=lambda i: open_rows[i][0])
            rows.append(open_rows.pop(full)[1])
    rows += [members for _, members in open_rows]

    result = Rows(
        np.zeros((len(rows), size), np.int64),
        np.full((len(rows), size), -1, np.int64),
        np.zeros((len(rows), size), np.float32),
    )
    for row, members in enumerate(rows):
        at = 0
        for number, (tokens, weights) in enumerate(members):
            end = at + len(tokens)
            result.tokens[row, at:end] = tokens
            result.documents[row, at:end] = number
            result.weights[row, at + 1 : end] = weights[1:]
            at = end
    return result
