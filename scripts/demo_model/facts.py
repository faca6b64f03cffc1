"""What the demo model knows about Pagetide: the ideas.

Each concept has answers to "what is it", "how does it work" and "what is it
good for". ``howto`` names the entry of ``howto.py`` that a follow-up such as
"and how do I change it?" leads to.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Concept:
    key: str
    names: tuple[str, ...]
    what: tuple[str, ...]
    how: tuple[str, ...] = ()
    why: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()  # further ways to ask "what is it"
    howto: str = ""


CONCEPTS = (
    Concept(
        "pagetide",
        ("Pagetide", "Pagetide", "pagetide", "page tide", "this project", "this software", "this server", "this program"),
        (
            "Pagetide is a server for large language models, written in Rust. It keeps the memory of every conversation in small blocks, moves blocks to CPU memory when space is short, and answers through an OpenAI-compatible HTTP API.",
            "Pagetide is an LLM serving runtime written in Rust. It uses paged attention and continuous batching, it can swap to CPU memory, and it reuses common prompt beginnings through a prefix cache.",
        ),
        ("Pagetide reads your request over HTTP, turns the text into tokens, and gives the sequence blocks of KV cache. Its scheduler then runs all active sequences together, one step at a time, and sends each new token back as soon as it is ready.",),
        ("Pagetide is good for serving many conversations at once from one machine. Memory is handed out in small blocks, so little is wasted, and when it runs short, Pagetide swaps or recomputes a sequence and does not refuse it.",),
        ("What is Pagetide about?", "What does Pagetide do?", "What kind of software is Pagetide?", "Introduce Pagetide", "Give me an overview of Pagetide", "What can Pagetide do?", "What are the features of Pagetide?", "What is this?", "Summarize Pagetide", "Tell me about Pagetide in one sentence", "Why the name Pagetide?", "What is Pagetide used for?", "What is this repository about?"),
        "start",
    ),
    Concept(
        "paged_attention",
        ("paged attention", "PagedAttention", "attention with pages"),
        (
            "Paged attention stores the KV cache of a sequence in small blocks of equal size, which may lie anywhere in memory. A block table says where each block is, just as a page table does in an operating system.",
            "Paged attention is attention that reads the keys and values from blocks scattered through memory. Each sequence has a block table that lists its blocks in order, so no large contiguous piece of memory is needed.",
        ),
        ("For each new token, the attention kernel walks through the block table of the sequence, finds the block that holds each earlier token, and reads the keys and values there. A new block is allocated only when the last one is full.",),
        ("With paged attention almost no memory is wasted: only the last block of a sequence can be partly empty. So more sequences fit into the same memory, and equal prefixes can share their blocks.",),
        ("What does paged mean in paged attention?", "Why is it called paged attention?"),
    ),
    Concept(
        "kv_cache",
        ("the KV cache", "KV cache", "a KV cache", "the key-value cache", "the key value cache", "kv caching"),
        (
            "The KV cache holds the keys and values that the model computed for the earlier tokens of a sequence. With it, each new token needs only one small step, because nothing from the past has to be computed again.",
            "The KV cache is the memory of a conversation: the attention keys and values of all tokens so far. Pagetide keeps it in blocks of equal size.",
        ),
        ("When a token passes through the model, each layer writes its key and its value into the KV cache. Later tokens read them from there. In Pagetide the cache is cut into blocks, and a block table says which blocks belong to a sequence.",),
        ("Without a KV cache, the model would have to read the whole text again for every new token. The cache makes each step fast, but it takes memory, and Pagetide is built to use that memory well.",),
        ("What is stored in the KV cache?", "What does KV stand for?"),
        "device_blocks",
    ),
    Concept(
        "kv_block",
        ("a KV block", "a block", "KV blocks", "the blocks", "a cache block", "blocks"),
        (
            "A KV block is a small piece of the KV cache with room for a fixed number of tokens, for example 16. A sequence gets a new block when its last one is full.",
        ),
        ("All blocks have the same size and wait in a free list. A sequence takes one when it needs room for more tokens and gives its blocks back when it is finished. Blocks with the same content can be shared.",),
        ("Blocks of equal size fit into any free place, so memory does not become fragmented. They can also be shared between sequences and moved to CPU memory one by one.",),
        ("How many tokens fit into a block?", "How big is a KV block?", "What is in a block?", "How many tokens does a block hold?"),
        "block_size",
    ),
    Concept(
        "block_table",
        ("a block table", "the block table", "block tables"),
        (
            "A block table lists, in order, which blocks of memory hold the KV cache of a sequence. It is like a page table: it maps logical blocks to physical blocks.",
        ),
        ("To find token number 35 with blocks of 16 tokens, Pagetide divides 35 by 16: the token is in logical block 2, at place 3. The block table then says which physical block that is.",),
        ("Thanks to the block table, the blocks of a sequence may lie anywhere in memory, in any order. Two sequences can even point to the same block when they begin with the same text.",),
        ("What is the difference between a logical and a physical block?", "What is a page table here?"),
    ),
    Concept(
        "swapping",
        ("swapping", "the tide", "KV swapping", "swap", "swapping to CPU memory", "tide", "block swapping"),
        (
            "Swapping moves the KV blocks of a sequence from device memory to CPU memory when space is short, and brings them back later. In Pagetide we call it the tide: blocks flow out, and they flow in again.",
            "The tide is our name for swapping. When device memory is full, the blocks of a sequence flow out to CPU memory; when there is room again, they flow back and the sequence goes on where it stopped.",
        ),
        ("When no free block is left, the scheduler picks a sequence, copies its blocks to CPU memory, and frees them on the device. As soon as enough blocks are free, it copies them back, and the sequence continues.",),
        ("With swapping, a busy server does not have to refuse requests or throw work away. A sequence waits in CPU memory for a moment and then goes on without computing anything again.",),
        ("What happens at high tide?", "Why is it called the tide?", "What does the tide do?", "Where do swapped blocks go?", "What happens when blocks are swapped out?", "What is swapped to the CPU?"),
        "swap_space",
    ),
    Concept(
        "preemption",
        ("preemption", "a preemption", "preempting a sequence", "preempted sequences"),
        (
            "Preemption means that the scheduler pauses a running sequence because memory is short, so that others can go on. Pagetide either swaps its blocks to CPU memory or drops them and computes them again later.",
        ),
        ("When a sequence needs a block and none is free, the scheduler pauses the sequence that arrived last. Its blocks are swapped out or dropped. Later, when memory is free, it is resumed and gives the same answer.",),
        ("Preemption lets Pagetide accept more requests than would fit if all of them became long. If memory does run out, one sequence waits for a while and nothing fails.",),
        ("When is a sequence preempted?", "What happens to a sequence that is preempted?", "Do preempted requests fail?", "Is my answer lost when a sequence is preempted?"),
        "preemption_mode",
    ),
    Concept(
        "recompute",
        ("recompute", "recomputation", "recomputing", "preemption by recompute"),
        (
            "Recompute is one way to preempt a sequence: its blocks are simply freed, and later the model reads the prompt and the tokens made so far once more. It needs no CPU memory, but it costs computing time.",
        ),
        ("The scheduler frees all blocks of the sequence and puts it back into the waiting queue. When its turn comes, the whole text is run through the model in one prefill, and then decoding goes on.",),
        ("Recompute is good for short sequences, because reading a short text again is quicker than copying its blocks twice. It also works when there is no swap space left.",),
        (),
        "preemption_mode",
    ),
    Concept(
        "prefix_caching",
        ("prefix caching", "the prefix cache", "automatic prefix caching", "a prefix cache", "prefix cache", "prefix sharing"),
        (
            "Prefix caching keeps the KV blocks of earlier prompts. When a new prompt begins with the same text, such as the same system prompt, Pagetide uses those blocks again and skips that part of the work.",
            "Prefix caching means that equal beginnings are computed only once. Pagetide gives each full block a hash of its tokens and of all the tokens before it, and looks that hash up when a new prompt arrives.",
        ),
        ("Each full block gets a hash made from its tokens and the hash of the block before it. For a new prompt, Pagetide looks up the hashes one after another and takes every block it finds. Only the rest of the prompt is computed.",),
        ("Prefix caching saves time when many prompts share a beginning, for example a long system prompt or the earlier turns of a chat. The first token then comes much sooner, and shared blocks use memory only once.",),
        ("What happens when two prompts start with the same text?", "How are shared prompts handled?", "Does Pagetide reuse prompts?", "What happens with repeated system prompts?", "Do I have to turn on prefix caching?"),
    ),
    Concept(
        "hash",
        ("a block hash", "block hashing", "the hash of a block", "hashed blocks"),
        (
            "A block hash is a number computed from the tokens of a full block and from the hash of the block before it. Two blocks with the same hash hold the same text with the same past, so they can be shared.",
        ),
    ),
    Concept(
        "continuous_batching",
        ("continuous batching", "continuous batches", "batching", "dynamic batching"),
        (
            "Continuous batching means that the batch is put together anew at every step. A finished sequence leaves at once and a waiting one takes its place, so nobody waits for the slowest.",
        ),
        ("Before each step, the scheduler looks at which sequences are running and which are waiting. It fills the batch up to its token budget, runs the model once, and removes the sequences that are done.",),
        ("Continuous batching keeps the hardware busy all the time. Short answers are not held up by long ones, so throughput goes up and waiting time goes down.",),
        ("How are requests batched?", "Can Pagetide serve many users at once?", "How does Pagetide handle many requests at the same time?", "Can several people use it at once?"),
        "max_num_seqs",
    ),
    Concept(
        "chunked_prefill",
        ("chunked prefill", "prefill chunks", "prefill in chunks", "chunking"),
        (
            "Chunked prefill cuts a long prompt into pieces and runs one piece per step, together with the decoding of the other sequences. So a long prompt does not stop everybody else.",
        ),
        ("Each step has a budget of tokens. Running sequences take one token each, and what is left of the budget goes to the next piece of a waiting prompt.",),
        ("Without chunks, one very long prompt would block all other answers until it is read. With chunked prefill, the others keep getting their tokens at a steady pace.",),
        ("How are long prompts handled?", "What happens with a very long prompt?"),
        "max_num_batched_tokens",
    ),
    Concept(
        "copy_on_write",
        ("copy-on-write", "copy on write", "COW", "copying on write"),
        (
            "Copy-on-write means that sequences share a block as long as they only read it. When one of them wants to write into it, Pagetide copies the block first, so the others keep theirs unchanged.",
        ),
        ("Every block has a reference count. Before a write, Pagetide looks at it: if the count is greater than one, the block is copied, the block table is changed to the copy, and the count of the old block goes down by one.",),
        ("Copy-on-write saves memory when one prompt has several answers: the prompt is kept only once, and only the blocks that really differ are copied.",),
    ),
    Concept(
        "reference_count",
        ("a reference count", "reference counting", "the reference count of a block", "ref count"),
        ("The reference count of a block says how many sequences use it. When it falls to zero, the block is free, and it may stay in the prefix cache until its memory is needed.",),
    ),
    Concept(
        "eviction",
        ("eviction", "evicting blocks", "cache eviction", "LRU"),
        ("Eviction means that a cached block which nobody uses is given up to make room for a new one. The block that has not been used for the longest time goes first.",),
    ),
    Concept(
        "fragmentation",
        ("fragmentation", "memory fragmentation", "wasted memory"),
        ("Fragmentation means that free memory lies in pieces that are too small to use. Pagetide avoids it with blocks of equal size: any free block fits any sequence.",),
    ),
    Concept(
        "paging",
        ("paging", "memory paging", "virtual memory", "pages", "a page"),
        (
            "Paging cuts memory into pieces of equal size, so that each piece can lie anywhere and be moved on its own. Operating systems do this for programs, and Pagetide does it for the KV cache.",
        ),
        ("A table maps each logical page to a physical one. When a sequence grows, it gets one more page; when memory is short, pages move to CPU memory and come back later.",),
        ("With paging there is no need to reserve memory for the longest possible answer. Each sequence gets only the pages it really uses, so many more sequences fit.",),
        ("How is an operating system like Pagetide?", "Where does the idea of paging come from?"),
    ),
    Concept(
        "prefill",
        ("prefill", "the prefill phase", "prompt processing"),
        ("Prefill is the first phase of a request: the model reads all tokens of the prompt and fills the KV cache. At its end comes the first token of the answer.",),
        ("Many prompt tokens run through the model at the same time, so prefill is limited by computing power. Their keys and values are written into the blocks of the sequence.",),
    ),
    Concept(
        "decode",
        ("decoding", "decode", "the decode phase", "token generation"),
        ("Decoding is the second phase of a request: the model makes one new token per step, and each step reads the KV cache of everything before. It is limited mostly by memory speed.",),
        ("In each step the last token runs through the model, the next one is sampled, and its key and value go into the cache. This repeats until a stop token or the length limit is reached.",),
    ),
    Concept(
        "token",
        ("a token", "tokens", "the tokenizer", "a tokenizer", "tokenization"),
        ("A token is a small piece of text, often a word or part of a word. The tokenizer cuts text into tokens, because the model reads and writes numbers that stand for tokens.",),
    ),
    Concept(
        "scheduler",
        ("the scheduler", "a scheduler", "scheduling", "the Pagetide scheduler"),
        ("The scheduler decides before each step which sequences run. It fills the batch, hands out blocks, and preempts a sequence when memory is short.",),
        ("The scheduler keeps three queues: waiting, running and swapped. It first serves the running sequences, then brings swapped ones back, and then admits new ones as long as blocks and token budget last.",),
    ),
    Concept(
        "sequence",
        ("a sequence", "sequences", "a request"),
        ("A sequence is one text that the model is working on: the prompt and the tokens it has made so far. Each sequence has its own block table.",),
    ),
    Concept(
        "block_size_concept",
        ("the block size", "block size"),
        ("The block size is the number of tokens that one KV block holds. Small blocks waste less memory and can be shared more often; large blocks need less bookkeeping. 16 is a good choice.",),
        questions=("Which block size should I use?", "What is a good block size?", "What is the best block size?", "Is a block size of 16 good?"),
        howto="block_size",
    ),
    Concept(
        "swap_space_concept",
        ("swap space", "the swap space", "CPU swap space"),
        ("Swap space is the CPU memory that Pagetide may use for swapped blocks. When it is full, Pagetide recomputes a preempted sequence and does not swap it.",),
        questions=("How much swap space do I need?", "What happens when the swap space is full?"),
        howto="swap_space",
    ),
    Concept(
        "streaming_concept",
        ("streaming", "token streaming", "a streamed answer", "server-sent events", "SSE"),
        ("Streaming means that the server sends each piece of the answer as soon as it is ready, so you can read along. Pagetide does it with server-sent events.",),
        howto="stream",
    ),
    Concept(
        "llm",
        ("an LLM", "a large language model", "LLMs", "a language model", "language models"),
        ("A large language model is a program that has learned from much text to predict the next token. By doing so again and again it writes whole answers. I am a very small one.",),
    ),
    Concept(
        "throughput",
        ("throughput", "tokens per second"),
        ("Throughput is how much work the server does in a given time, usually counted in tokens per second over all requests. Bigger batches raise it. You can measure it with `pagetide bench throughput`.",),
        howto="bench",
    ),
    Concept(
        "latency",
        ("latency", "time to first token", "TTFT", "response time"),
        ("Latency is how long a user waits: first for the first token, and then for each further token. You can measure it with `pagetide bench latency`.",),
        howto="bench",
    ),
    Concept(
        "sampling",
        ("sampling", "the temperature", "temperature", "top_p", "greedy decoding", "nucleus sampling"),
        ("Sampling picks the next token from the probabilities that the model gives. A low temperature keeps to the likeliest tokens, and a high one brings more variety; temperature 0 always takes the likeliest. Send `temperature` and `top_p` with your request.",),
        howto="temperature",
    ),
    Concept(
        "openai_api",
        ("the OpenAI-compatible API", "the API", "the HTTP API", "the endpoints", "OpenAI compatibility", "the REST API"),
        ("Pagetide speaks the OpenAI HTTP API: POST /v1/chat/completions for chats, POST /v1/completions for plain text, and GET /v1/models for the list of models. Existing OpenAI clients work when you change their base URL.",),
        questions=("Which endpoints are there?", "What endpoints does Pagetide have?", "Is Pagetide compatible with OpenAI?", "Does Pagetide have an API?", "Which API does Pagetide offer?", "List the endpoints", "What URLs does the server have?", "Does it work with the OpenAI API?", "Is there a chat completions endpoint?"),
        howto="curl",
    ),
    Concept(
        "actors",
        ("actors", "actix", "the actor model", "an actor"),
        ("An actor is a part of a program that keeps its own state and talks to others only by messages. Pagetide is built from actix actors: the HTTP server passes requests to the engine as messages.",),
    ),
    Concept(
        "rust",
        ("Rust", "the Rust language", "the programming language of Pagetide"),
        ("Rust is the programming language in which Pagetide is written. It is fast and catches many memory errors before the program ever runs, which is good for a server that juggles memory all day.",),
        questions=("Why is Pagetide written in Rust?", "In which language is Pagetide written?", "What language is Pagetide written in?", "Is Pagetide written in Python?", "Is it written in C++?"),
    ),
    Concept(
        "cpu_backend",
        ("the CPU backend", "a CPU backend", "running on a CPU"),
        ("Pagetide has a fast CPU backend, so it runs on a machine without a GPU. The demo model needs nothing more than that.",),
        questions=("Do I need a GPU?", "Does it run without a GPU?", "Can I run Pagetide on a CPU?", "Can Pagetide run on my laptop?", "Does Pagetide need a graphics card?", "What hardware do I need?", "Is a GPU required?", "What are the hardware requirements?", "can i use it on a laptop"),
    ),
    Concept(
        "demo_model",
        ("the demo model", "this model", "the model in the repository", "models/demo", "the small model"),
        ("The demo model is me: a very small Llama that ships with Pagetide, so that you can try the server at once. I know Pagetide, some small talk and a few little stories, and not much more.",),
        questions=("Which model is this?", "What model are you?", "Which model am I talking to?", "How many parameters do you have?", "How big are you?", "How large is the demo model?", "What model is running here?", "What type of model are you?"),
        howto="own_model",
    ),
    Concept(
        "safetensors",
        ("safetensors", "a safetensors file", "the model files", "the model format"),
        ("Safetensors is a simple and safe file format for model weights. Pagetide reads a model folder in the Hugging Face layout: config.json, tokenizer.json and the weights as safetensors.",),
        questions=("Which model formats does Pagetide read?", "What files does a model need?", "Which files must be in the model directory?", "What format must my model have?"),
        howto="own_model",
    ),
    Concept(
        "chat_template",
        ("a chat template", "the chat template", "ChatML"),
        ("A chat template says how the messages of a chat are written as one text for the model. It lies in the model folder, and Pagetide applies it to every request to /v1/chat/completions.",),
    ),
    Concept(
        "context",
        ("the context length", "the context window", "the maximum length"),
        ("The context length is the greatest number of tokens that prompt and answer may have together. It is a property of the model: for me it is 2048 tokens.",),
        questions=("How long may a prompt be?", "How long can my prompt be?", "What is your context size?"),
    ),
    Concept(
        "inflight",
        ("a waiting queue", "the waiting queue", "the queue"),
        ("The queue holds the requests that are waiting for their turn. The scheduler admits them in the order in which they came, as soon as there are enough free blocks.",),
    ),
)


@dataclass(frozen=True)
class Comparison:
    pairs: tuple[tuple[str, str], ...]
    answers: tuple[str, ...]
    questions: tuple[str, ...] = ()


COMPARISONS = (
    Comparison(
        (("swap", "recompute"), ("swapping", "recomputing"), ("swapping", "recompute"), ("swap mode", "recompute mode")),
        ("Swapping copies the blocks of a sequence to CPU memory and back, which needs swap space. Recompute drops the blocks and reads the text again, which needs computing time. With `auto`, Pagetide chooses for you.",),
        ("Which preemption mode is better?", "Which preemption mode should I choose?", "Should I use swap or recompute?", "When should I use recompute?"),
    ),
    Comparison(
        (("paging", "swapping"), ("paged attention", "swapping"), ("pages", "the tide")),
        ("Paging cuts the KV cache into blocks that may lie anywhere. Swapping moves such blocks to CPU memory and back. Paging comes first: it is what makes swapping simple.",),
    ),
    Comparison(
        (("prefill", "decode"), ("prefill", "decoding"), ("the prefill phase", "the decode phase")),
        ("Prefill reads the whole prompt at once and is limited by computing power. Decoding makes one token per step and is limited by memory speed.",),
    ),
    Comparison(
        (("latency", "throughput"), ("time to first token", "throughput")),
        ("Latency is how long one user waits, and throughput is how much all users get together. Bigger batches raise throughput, but each single answer may become a little slower.",),
    ),
    Comparison(
        (("the KV cache", "the prefix cache"), ("KV caching", "prefix caching")),
        ("The KV cache belongs to a sequence and holds its keys and values. The prefix cache keeps full blocks after their sequence has ended, so that a later prompt with the same beginning can use them again.",),
    ),
    Comparison(
        (("Pagetide", "vLLM"), ("Pagetide", "other servers"), ("Pagetide", "TGI"), ("Pagetide", "llama.cpp"), ("Pagetide", "SGLang"), ("Pagetide", "Ollama"), ("Pagetide", "TensorRT-LLM")),
        ("Other servers are larger, support more models and have been tested by many more people. Pagetide is a small Rust program with paged attention, continuous batching, swapping and a prefix cache, and it tries to be easy to read and to run.",),
        ("Is Pagetide better than vLLM?", "Is Pagetide faster than vLLM?", "Why should I use Pagetide and not vLLM?", "What makes Pagetide different?", "How is Pagetide different from other servers?", "Why Pagetide and not something else?", "Is Pagetide the best server?", "What is special about Pagetide?", "Compare Pagetide to other servers", "Are there alternatives to Pagetide?", "is it faster than llama.cpp"),
    ),
)
