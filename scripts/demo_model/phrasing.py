"""Ways to ask: question templates, follow-ups, and the disguises of a question
(lower case, typing errors, politeness) that make the model robust."""

import random

from asked import FILLERS, SETTINGS, SYNONYMS

WHAT = (
    "What is {}?", "What is {}?", "What is {}?", "What's {}?", "What does {} mean?", "Explain {}", "Explain {} to me", "Can you explain {}?", "Could you explain {} to me?",
    "Tell me about {}", "Tell me something about {}", "Define {}", "{}?", "{}", "Describe {}", "I don't understand {}", "What is meant by {}?", "Give me a short explanation of {}",
    "How would you explain {}?", "What do you know about {}?", "{} explained", "I would like to know what {} is", "Do you know what {} is?", "What exactly is {}?",
    "What are {}?", "Can you tell me what {} is?", "Please explain {}", "Explain {} in simple words", "What do you mean by {}?", "Give me a definition of {}", "I have a question about {}",
    "Who or what is {}?", "Help me understand {}", "Explain {} like I am five", "What is {} in Pagetide?", "Explain {} in one sentence", "I want to learn about {}", "Teach me about {}",
    "Can you describe {}?", "What do people mean when they say {}?", "I have never heard of {}", "Could you tell me about {}?", "What is this thing called {}?", "What does the term {} stand for?",
    "Do you know {}?", "Have you heard of {}?", "I keep reading about {}, what is it?", "So what is {}?", "Let's talk about {}", "Does Pagetide have {}?", "Does Pagetide use {}?", "Does Pagetide support {}?",
    "Is there {} in Pagetide?", "Summarize {}", "Give me an overview of {}", "What is the idea of {}?", "What is the idea behind {}?", "meaning of {}", "I am curious about {}",
    "And {}?", "And what is {}?", "How about {}?", "{} - what is that?", "{}, please", "Tell me what {} is about", "What is {} about?", "{} for beginners", "{}, what does it mean?", "And what does {} mean?", "What is that, {}?", "What kind of thing is {}?",
    "What on earth does {} mean?", "So {}, what is it?", "What would {} be?", "What do you call {}?", "What is the big idea of {}?", "What is {} supposed to be?", "What is {} in an LLM server?", "In short, what is {}?", "What role does {} have?", "They talk about {}. What is that?",
)
HOW = (
    "How does {} work?", "How does {} work?", "How do {} work?", "How is {} done?", "How does Pagetide do {}?", "What happens in {}?", "How does {} work in Pagetide?", "How exactly does {} work?",
    "Explain how {} works", "Can you explain how {} works?", "How is {} implemented?", "Tell me how {} works", "What are the steps of {}?", "How does Pagetide implement {}?", "Describe how {} works",
    "I want to understand how {} works", "What goes on inside {}?", "Could you explain how {} works in detail?", "How does {} function?", "What is the mechanism of {}?", "Do you know how {} works?",
    "How does that thing with {} work?", "What happens during {}?", "How does Pagetide handle {}?", "show me how {} works", "How does {} work internally?", "How is {} used?",
)
WHY = (
    "Why {}?", "Why do we need {}?", "Why is {} useful?", "What is {} good for?", "What's the point of {}?", "Why does Pagetide use {}?", "What is the benefit of {}?", "What are the advantages of {}?",
    "When is {} useful?", "Why should I use {}?", "What is the purpose of {}?", "What does {} give me?", "Why is {} important?", "What problem does {} solve?", "Why would I want {}?", "Why does {} exist?",
    "What are the benefits of {}?", "How does {} help?", "Why is there {}?", "What do I gain from {}?", "Is {} useful?", "Do I need {}?", "Why is {} a good idea?", "When should I use {}?", "Why does {} matter?",
    "What is the use of {}?", "What's so good about {}?", "Does {} help?", "why use {}", "Does {} make things faster?",
)
HOWTO = (
    "How do I {}?", "How do I {}?", "How do I {}?", "How can I {}?", "How can I {}?", "How to {}", "How do you {}?", "How does one {}?", "Can I {}?", "Is it possible to {}?", "I want to {}", "I need to {}", "I'd like to {}",
    "Help me {}", "Show me how to {}", "What is the command to {}?", "What do I type to {}?", "What flag do I use to {}?", "Which option lets me {}?", "Is there a way to {}?", "Where do I {}?",
    "Tell me how to {}", "What's the best way to {}?", "Could you tell me how to {}?", "I am trying to {}", "Explain how to {}", "What must I do to {}?", "I would like to {}", "How would I {}?", "{}",
    "What command do I need to {}?", "Can you help me to {}?", "How should I {}?", "I don't know how to {}", "Can Pagetide {}?", "What do I have to do to {}?", "Is there a flag to {}?", "Is there an option to {}?",
    "What's the way to {}?", "Give me the command to {}", "Can you show me how to {}?", "In Pagetide, how do I {}?", "How do I {} in Pagetide?", "We need to {}, how?", "What are the steps to {}?",
    "I cannot figure out how to {}", "Let me {}", "how could i {}", "Which flag do I need to {}?", "I'd like to know how to {}", "Teach me how to {}", "Is there some way to {}?", "Please tell me how I can {}",
    "Tell me how I {}", "Any way to {}?",
)
NOUN = (
    "Which option is there for {}?", "Which flag is there for {}?", "What is the flag for {}?", "What is the option for {}?", "{} option", "flag for {}", "Where is {} configured?", "What about {}?", "How do I configure {}?",
    "Tell me about {}", "I have a question about {}", "Where do I find {}?", "Is there a flag for {}?", "Is there an option for {}?", "How does {} work?", "Help with {}", "Give me help with {}", "What can you tell me about {}?",
    "Where can I set {}?", "What is the setting for {}?", "Which flag controls {}?", "Which setting controls {}?", "Explain {}", "I need help with {}", "How do I do {}?", "What command is there for {}?",
    "And {}?", "And what about {}?", "How about {}?", "{}, please", "{}", "{}?", "I am looking for {}", "Is there something for {}?", "I want to change {}", "How can I change {}?", "And for {}?", "Which switch is there for {}?", "What is the switch for {}?", "Which knob is there for {}?",
    "Where do I say {}?", "How is {} set?", "How do I set {}?", "Where do I enter {}?", "Anything for {}?", "Which parameter is there for {}?", "I'd like to know about {}", "Show me {}", "Can I see {}?", "{} - how?", "What do I do about {}?", "Got anything for {}?",
)
FLAG = (
    "What does {} do?", "What does {} mean?", "{}", "Explain {}", "What is {}?", "How do I use {}?", "What is {} for?", "Tell me about {}", "What is the flag {}?", "Explain the option {}", "When do I need {}?",
    "What does the option {} do?", "What does the flag {} do?", "What's {}?", "How does {} work?", "Give me an example of {}",
)
COMPARE = (
    "What is the difference between {} and {}?", "What's the difference between {} and {}?", "How does {} differ from {}?", "Compare {} and {}", "{} or {}?", "{} vs {}", "Is {} the same as {}?", "{} versus {}",
    "Which is better, {} or {}?", "Explain the difference between {} and {}", "When do I use {} and when {}?", "How is {} different from {}?", "Are {} and {} the same?", "Difference between {} and {}", "How do {} and {} compare?",
)
STORY = (
    "Tell me a story about {topic}", "Tell me a story about {topic}", "Tell me a story about {topic}", "Can you tell me a story about {topic}?", "Write a short story about {topic}", "Do you know a story about {topic}?", "A story about {topic} please",
    "I would like to hear a story about {topic}", "Story about {topic}", "Tell me a {bare} story", "I want a story with {topic}", "Write a story about {topic}", "Give me a little story about {topic}", "Please tell me a tale about {topic}",
    "Do you have a story about {topic}?", "Tell a story about {topic}", "Can you write a little story about {topic}?", "Once upon a time there was {topic}", "Tell the story of {topic}", "a bedtime story about {topic}", "Could you tell me a fairy tale about {topic}?",
    "Make up a story about {topic}", "Let me hear a story about {topic}", "My child wants a story about {topic}", "Something about {topic}, a story perhaps?", "Invent a story about {topic}", "I'd love a story about {topic}", "Tell us a story about {topic}",
)
STORY_ANY = (
    "Tell me a story", "Do you know a story?", "Can you tell me a story?", "A story please", "I want to hear a story", "Story time", "Tell me a fairy tale", "Tell me a bedtime story", "Write a short story", "Do you know any stories?", "Can you write a story?",
    "Tell me a little story", "Please tell me a story", "Read me a story", "I'd like a story", "Tell a story", "once upon a time", "Give me a story", "Which stories do you know?", "Tell me a short story",
)
STORY_MORE = ("Another one", "Tell me another story", "One more story please", "Another story", "More stories please", "One more", "Do you know another one?", "Tell me another one", "Can I hear one more?", "again", "more", "And another one?")

MORE = ("Tell me more", "Tell me more about it", "More", "Go on", "Can you explain more?", "Give me more details", "Can you say more?", "Please go on", "I want to know more", "Continue", "More details please", "And what else?")
FOLLOW_HOW = ("How does it work?", "And how does that work?", "How?", "How does it do that?", "And how?", "How is it done?", "How exactly?", "How does this work?", "Can you explain how?", "How does that work in Pagetide?", "What happens exactly?")
FOLLOW_WHY = ("Why?", "Why is that useful?", "What is it good for?", "And why?", "What's the point?", "Why do I need it?", "Why would I want that?", "What is the benefit?", "And what is that good for?", "Why is it important?", "Why does that matter?", "What does it help?")
FOLLOW_HOWTO = (
    "And how do I change it?", "How do I set it?", "Can I change that?", "How can I change it?", "And how do I set it?", "How do I configure it?", "Is there a flag for it?", "Is there an option for that?", "Can I change it?", "Which flag is that?", "And how do I use it?",
    "Where do I set that?", "How can I set that?", "What is the flag?", "Can I configure it?", "How do I do that?", "How do I try it?", "And how can I configure that?",
)
FOLLOW_EXAMPLE = ("Give me an example", "Show me an example", "Can you give an example?", "An example please", "For example?")
DEFAULT_OF = (
    "Can I put that into a file?", "Can I set that in a config file?", "Is there an environment variable for that?", "Can I set it in the config file?", "How do I make that permanent?", "Do I have to type that every time?", "Can I use an environment variable?",
    "And in the config file?",
)

SYSTEM = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful assistant.", "You are the Pagetide demo model.", "You are Pagetide's assistant. Answer briefly.", "Be brief.", "You answer questions about Pagetide.",
    "You are a friendly assistant.", "Answer in whole sentences.", "You are a helpful, honest and harmless assistant.", "You are an AI assistant.", "Answer the questions of the user politely.", "You are a concise expert for LLM serving.",
    "You are ChatGPT, a large language model.", "Be friendly and answer in English.", "You help people to use Pagetide. Keep your answers short and correct.", "You tell stories.", "You are a pirate.", "system prompt",
)

BEFORE = (
    "please ", "hi, ", "hello, ", "hey, ", "quick question: ", "I have a question. ", "sorry, ", "excuse me, ", "ok, ", "so ", "and ", "hm, ", "now ", "could you help me? ", "Hi! ", "Hello! ", "one more thing: ", "I am new here. ", "well, ",
    "ok so ", "also, ", "thanks. ", "Great. ", "dear Pagetide, ", "question: ", "I wonder: ", "just curious, ", "btw ", "Hey Pagetide, ", "first of all, ", "Thank you. ", "but ", "then ", "Good morning! ", "um, ",
)
AFTER = (
    " please", " thanks", ", please", " in simple words", " briefly", " in one sentence", " Thank you!", " I am a beginner.", " I really want to know.", " for a beginner", "?", "??", "!", "...", " pls", " thx", ", thanks", " Keep it short.",
    " I am curious.", " then", " exactly", " again", " :)", " here", " Be brief.", " now", " today", " Any idea?", ", can you help?", " quickly",
)
NEIGHBOURS = {"a": "s", "b": "v", "c": "x", "d": "f", "e": "r", "f": "d", "g": "h", "h": "j", "i": "o", "k": "l", "l": "k", "m": "n", "n": "m", "o": "p", "p": "o", "r": "t", "s": "a", "t": "r", "u": "i", "v": "b", "w": "e", "y": "t"}


def misspell(r: random.Random, text: str) -> str:
    """One typing error inside a word of four letters or more."""
    words = text.split(" ")
    long = [i for i, word in enumerate(words) if len(word) >= 4 and word.isalpha()]
    if not long:
        return text
    i = r.choice(long)
    word = words[i]
    at = r.randrange(1, len(word) - 1)
    kind = r.randrange(4)
    if kind == 0:
        word = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    elif kind == 1:
        word = word[:at] + word[at + 1 :]
    elif kind == 2:
        word = word[:at] + word[at] + word[at:]
    else:
        word = word[:at] + NEIGHBOURS.get(word[at].lower(), word[at]) + word[at + 1 :]
    words[i] = word
    return " ".join(words)


DROPPED = {"the", "a", "an", "of", "to", "do", "i", "is", "me", "you", "my", "it", "for", "in", "does", "can", "that", "are", "with"}


def reword(r: random.Random, question: str) -> str:
    """Other words and another order: only what matters stays in place."""
    words = question.split(" ")
    if r.random() < 0.5:
        for i, word in enumerate(words):
            bare = word.rstrip("?.,!")
            if bare.lower() in SYNONYMS and r.random() < 0.3:
                other = r.choice(SYNONYMS[bare.lower()])
                words[i] = (other.capitalize() if bare[0].isupper() else other) + word[len(bare):]
    if r.random() < 0.12:
        words.insert(r.randrange(1, len(words) + 1), r.choice(FILLERS))
    if len(words) > 3 and r.random() < 0.12:
        words = [word for word in words if word.lower() not in DROPPED or r.random() < 0.5] or words
    if len(words) > 2 and r.random() < 0.05:
        i = r.randrange(len(words) - 1)
        words[i], words[i + 1] = words[i + 1], words[i]
    if len(words) > 3 and r.random() < 0.03:
        r.shuffle(words)
    return " ".join(words)


def disguise(r: random.Random, question: str) -> str:
    """The same question as a person might type it."""
    question = reword(r, question)
    if r.random() < 0.10:
        question = r.choice(SETTINGS) + " " + question
    if r.random() < 0.22:
        before = r.choice(BEFORE)
        if r.random() < 0.5:
            before = before[0].upper() + before[1:]
        tail = question if before.endswith((". ", "! ", "? ")) else question[0].lower() + question[1:] if not question.startswith(("I ", "I'", "KV", "LLM")) else question
        question = before + tail
    if r.random() < 0.13:
        question = question.rstrip("?") + r.choice(AFTER) if r.random() < 0.6 else question + r.choice(AFTER)
    if r.random() < 0.15:
        question = misspell(r, question)
        if r.random() < 0.25:
            question = misspell(r, question)
    draw = r.random()
    if draw < 0.40:
        question = question.lower()
    elif draw < 0.42:
        question = question.upper()
    draw = r.random()
    if draw < 0.38:
        question = question.rstrip("?.! ") or question
    elif draw < 0.45 and question[-1].isalnum():
        question += r.choice(".?")
    for long, short in (("What is", "What's"), ("what is", "whats"), ("do not", "don't"), ("I am", "I'm"), ("cannot", "can't")):
        if long in question and r.random() < 0.12:
            question = question.replace(long, short, 1)
    return question
