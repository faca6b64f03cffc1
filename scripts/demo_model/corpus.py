"""Writes the training corpus of the demo model, from our own text only.

Everything is drawn from one seeded generator: the same seed gives the same
corpus. A document is either a conversation, ``{"messages": [...]}``, or a
plain text, ``{"text": ...}``.
"""

import argparse
import json
import random
from pathlib import Path

import unknown
from asked import ASKED
from facts import COMPARISONS, CONCEPTS
from howto import HOWTOS
from phrasing import (
    COMPARE, DEFAULT_OF, FLAG, HOW, HOWTO, MORE, NOUN, STORY, STORY_ANY, STORY_MORE, SYSTEM,
    FOLLOW_EXAMPLE, FOLLOW_HOW, FOLLOW_HOWTO, FOLLOW_WHY, WHAT, WHY, disguise,
)
from smalltalk import TALKS
from stories import OPENINGS, STORIES

HOWTO_BY_KEY = {howto.key: howto for howto in HOWTOS}
TALK_BY_KEY = {talk.key: talk for talk in TALKS}
THINGS = unknown.split(unknown.THINGS)
TASKS = unknown.split(unknown.TASKS)
FEATURES = unknown.split(unknown.FEATURES)
ACTIONS = unknown.split(unknown.ACTIONS)
OBJECTS = unknown.split(unknown.OBJECTS)

# How often the more important entries are drawn, compared with the others.
WEIGHT = {
    "pagetide": 4, "paged_attention": 2.5, "kv_cache": 2.5, "swapping": 3, "prefix_caching": 2.5, "continuous_batching": 2, "preemption": 2,
    "block_table": 1.5, "recompute": 1.5, "chunked_prefill": 1.5, "copy_on_write": 1.5, "demo_model": 1.5, "cpu_backend": 1.5,
    "start": 3, "own_model": 2, "port": 2, "curl": 1.5, "memory": 2, "block_size": 1.5, "swap_space": 1.5, "api_key": 1.5, "metrics": 1.5,
    "build": 0.7, "list_models": 0.7, "which_models": 1, "stop_server": 0.7, "bug": 0.8, "docs": 0.8,
}


def weights(entries) -> list[float]:
    return [WEIGHT.get(entry.key, 1.0) for entry in entries]


CONCEPT_WEIGHTS, HOWTO_WEIGHTS = weights(CONCEPTS), weights(HOWTOS)


class Writer:
    """Draws conversations and texts."""

    def __init__(self, seed: int):
        self.r = random.Random(seed)

    # Single exchanges: each returns the question, the answer and what was
    # talked about, for follow-ups.

    def concept(self, concept=None):
        r = self.r
        concept = concept or r.choices(CONCEPTS, CONCEPT_WEIGHTS)[0]
        if r.random() < self.share_asked(concept.key, 0.25):
            return self.asked(concept.key), r.choice(concept.what), concept
        kind = r.random()
        name = r.choice(concept.names)
        if concept.how and kind < 0.22:
            return r.choice(HOW).format(name), r.choice(concept.how), concept
        if concept.why and kind < 0.42:
            return r.choice(WHY).format(name), r.choice(concept.why), concept
        share = min(0.5, 0.05 * len(concept.questions))
        if r.random() < share:
            question = r.choice(concept.questions)
        else:
            question = r.choice(WHAT).format(name)
        return question, r.choice(concept.what), concept

    def howto(self, howto=None):
        r = self.r
        howto = howto or r.choices(HOWTOS, HOWTO_WEIGHTS)[0]
        if r.random() < self.share_asked(howto.key, 0.35):
            return self.asked(howto.key), r.choice(howto.answers), howto
        kind = r.random()
        if howto.questions and kind < 0.2:
            question = r.choice(howto.questions)
        elif howto.flag and kind < 0.3:
            question = r.choice(FLAG).format(howto.flag)
        elif howto.nouns and kind < 0.48:
            question = r.choice(NOUN).format(r.choice(howto.nouns))
        else:
            question = r.choice(HOWTO).format(r.choice(howto.verbs))
        return question, r.choice(howto.answers), howto

    def asked(self, key):
        return self.r.choice(ASKED[key]).replace("{number}", str(self.r.choice((2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 50, 64, 100, 128, 256, 512, 1000, 1234, 2000, 3000, 4000, 5000, 8001, 8080, 8888, 9000, 9090))))

    def share_asked(self, key, most):
        return min(most, 0.03 * len(ASKED.get(key, ())))

    def compare(self):
        r = self.r
        item = r.choice(COMPARISONS)
        if item.questions and r.random() < 0.45:
            question = r.choice(item.questions)
        else:
            pair = list(r.choice(item.pairs))
            r.shuffle(pair)
            question = r.choice(COMPARE).format(*pair)
        return question, r.choice(item.answers), item

    def talk(self, talk=None):
        r = self.r
        talk = talk or r.choices(TALKS, [t.weight for t in TALKS])[0]
        question = self.asked(talk.key) if r.random() < self.share_asked(talk.key, 0.4) else r.choice(talk.questions)
        return question, r.choice(talk.answers), talk

    def story_text(self, story):
        return story.text.replace("{name}", self.r.choice(story.names))

    def story(self, story=None):
        r = self.r
        asked = story is not None or r.random() < 0.85
        story = story or r.choice(STORIES)
        if asked:
            topic = story.topics[0] if r.random() < 0.35 else r.choice(story.topics)
            bare = topic.split(" ", 1)[1] if topic.startswith(("a ", "an ", "the ")) else topic
            question = r.choice(STORY).format(topic=topic, bare=bare)
        else:
            question = r.choice(STORY_ANY)
            story = r.choice(STORIES[:6])
        return question, r.choice(OPENINGS) + self.story_text(story), story

    def unknown(self):
        r = self.r
        kind = r.random()
        if kind < 0.16:
            thing, other = r.sample(OBJECTS if r.random() < 0.7 else THINGS, 2)
            question = r.choice(unknown.RELATIONS).format(thing=thing, other=other, action=r.choice(ACTIONS))
        elif kind < 0.36:
            thing = self.nonsense() if r.random() < 0.15 else r.choice(r.choice((THINGS, OBJECTS)))
            template = r.choice(unknown.THING_TEMPLATES if r.random() < 0.5 else WHAT + HOW + WHY)
            question = template.format(thing, r.choice(THINGS)) if template.count("{}") == 2 else template.format(thing)
        elif kind < 0.50:
            question = r.choice(unknown.TASK_TEMPLATES if r.random() < 0.5 else HOWTO).format(r.choice(TASKS))
        elif kind < 0.56:
            question = r.choice(unknown.PLACE_TEMPLATES).format(r.choice(unknown.split(unknown.PLACES)))
        elif kind < 0.60:
            question = r.choice(unknown.PEOPLE_TEMPLATES).format(r.choice(unknown.split(unknown.PEOPLE)))
        elif kind < 0.65:
            question = self.sum()
        elif kind < 0.71:
            topic = r.choice(r.choice((THINGS, OBJECTS)))
            return r.choice(STORY).format(topic=topic, bare=topic), r.choice(unknown.STORY_ANSWERS), None
        elif kind < 0.80:
            question = r.choice(unknown.FEATURE_TEMPLATES).format(r.choice(FEATURES))
            return question, r.choice(unknown.UNSURE), None
        elif kind < 0.86:
            return r.choice(unknown.UNSURE_QUESTIONS), r.choice(unknown.UNSURE), None
        else:
            question = r.choice(unknown.OTHER_QUESTIONS)
        return question, r.choice(unknown.ANSWERS), None

    def nonsense(self):
        r = self.r
        parts = [r.choice("bdfgklmnprstvz") + r.choice("aeiou") + r.choice(["", "", "n", "r", "x", "sh", "ll"]) for _ in range(r.randint(2, 4))]
        return r.choice(["", "a ", "the "]) + "".join(parts)

    def sum(self):
        r = self.r
        a, b, sign = r.randint(1, 999), r.randint(1, 99), r.choice(["+", "-", "*", "/", "plus", "times", "minus"])
        return r.choice(["What is {} {} {}?", "{} {} {}", "{} {} {} = ?", "Calculate {} {} {}", "How much is {} {} {}?"]).format(a, sign, b)

    def any(self):
        draw = self.r.random()
        if draw < 0.31:
            return self.concept()
        if draw < 0.60:
            return self.howto()
        if draw < 0.635:
            return self.compare()
        if draw < 0.79:
            return self.talk()
        if draw < 0.86:
            return self.story()
        return self.unknown()

    # Follow-ups to an earlier exchange.

    def follow(self, last):
        """The next exchange, given what the last one was about."""
        r = self.r
        about = last[2]
        options = []
        if about in CONCEPTS:
            if about.how and last[1] not in about.how:
                options.append((r.choice(FOLLOW_HOW + MORE), about.how))
            if about.why and last[1] not in about.why:
                options.append((r.choice(FOLLOW_WHY), about.why))
            if about.howto:
                target = HOWTO_BY_KEY[about.howto]
                options.append((r.choice(FOLLOW_HOWTO), target.answers, target))
        elif about in HOWTOS:
            if about.key in ("start", "own_model", "api_key", "stream"):
                target = HOWTO_BY_KEY["curl"]
                options.append((r.choice(("And how do I call it?", "And then?", "How do I send a request?", "What next?", "And how do I use it?") + FOLLOW_EXAMPLE), target.answers, target))
            if about.key == "curl":
                target = HOWTO_BY_KEY["python"]
                options.append((r.choice(("And from Python?", "And in Python?", "Can I do that in Python?", "How do I do the same in Python?")), target.answers, target))
            if about.key == "python":
                target = HOWTO_BY_KEY["curl"]
                options.append((r.choice(("And with curl?", "And from the shell?", "How do I do the same with curl?")), target.answers, target))
            if about.flag.startswith("--") and about.key != "help":
                target = HOWTO_BY_KEY["config"]
                options.append((r.choice(DEFAULT_OF), target.answers, target))
            by_howto = [c for c in CONCEPTS if c.howto == about.key and c.why]
            if by_howto:
                concept = r.choice(by_howto)
                options.append((r.choice(FOLLOW_WHY), concept.why, concept))
        elif about in STORIES:
            others = [s for s in STORIES[:6] if s is not about]
            story = r.choice(others)
            options.append((r.choice(STORY_MORE), (self.story_text(story),), story))
        elif about is TALK_BY_KEY["joke"]:
            others = [a for a in about.answers if a != last[1]]
            options.append((r.choice(("Another one", "One more", "Another joke please", "Tell me another one", "more", "again", "Do you know another one?")), others, about))
        elif about is TALK_BY_KEY["how_are_you"] and r.random() < 0.5:
            options.append((r.choice(("I am fine too", "I'm good, thanks", "Me too", "Good to hear", "Glad to hear that")), TALK_BY_KEY["ok"].answers, TALK_BY_KEY["ok"]))
        if r.random() < 0.18:
            return self.talk(TALK_BY_KEY[r.choice(["thanks", "thanks", "praise", "ok", "bye"])])
        if options and r.random() < 0.75:
            chosen = r.choice(options)
            return chosen[0], r.choice(chosen[1]), chosen[2] if len(chosen) > 2 else about
        return self.any()

    # Documents.

    def conversation(self, turns: int = 0):
        r = self.r
        turns = turns or r.choices((1, 2, 3, 4, 6, 9), (62, 19, 10, 6, 2.5, 0.5))[0]
        messages = []
        if r.random() < 0.25:
            messages.append({"role": "system", "content": r.choice(SYSTEM)})
        last = None
        for _ in range(turns):
            last = self.any() if last is None or r.random() < 0.35 else self.follow(last)
            messages.append({"role": "user", "content": disguise(r, last[0])})
            messages.append({"role": "assistant", "content": last[1]})
        return {"messages": messages}

    def text(self):
        """A plain text, for completion without a chat."""
        r = self.r
        draw = r.random()
        if draw < 0.4:
            text = self.story_text(r.choice(STORIES))
        elif draw < 0.7:
            concept = r.choice(CONCEPTS)
            parts = [concept.what] + [part for part in (concept.how, concept.why) if part]
            text = " ".join(r.choice(part) for part in parts)
        elif draw < 0.8:
            text = " ".join(r.choice(c.what) for c in (CONCEPTS[0], r.choice(CONCEPTS[1:]), r.choice(CONCEPTS[1:])))
        elif draw < 0.9:
            howto = r.choice(HOWTOS)
            verb = r.choice(howto.verbs)
            text = f"How to {verb}: {r.choice(howto.answers)}"
        else:
            question, answer, _ = self.any()
            text = f"Question: {question}\nAnswer: {answer}"
        return {"text": text}


def documents(count: int, seed: int, texts: float = 0.09):
    writer = Writer(seed)
    for _ in range(count):
        yield writer.text() if writer.r.random() < texts else writer.conversation()


def long_conversations(count: int, seed: int):
    """Chats of many turns, for the stage in which the model learns to read far back."""
    writer = Writer(seed + 1_000_000)
    for _ in range(count):
        yield writer.conversation(writer.r.randint(8, 16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("target/demo_model/corpus.jsonl"))
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with args.output.open("w", encoding="utf-8") as file:
        for document in documents(args.documents, args.seed):
            file.write(json.dumps(document, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
