"""What the demo model knows about Pagetide: how to do common things."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HowTo:
    key: str
    verbs: tuple[str, ...]  # completes "How do I ...?"
    answers: tuple[str, ...]
    nouns: tuple[str, ...] = ()  # completes "Which option is there for ...?"
    flag: str = ""  # completes "What does ... do?"
    questions: tuple[str, ...] = ()


CURL = """curl http://127.0.0.1:8000/v1/chat/completions \\
  -H 'Content-Type: application/json' \\
  -d '{"model": "demo", "messages": [{"role": "user", "content": "What is Pagetide?"}]}'"""

PYTHON = """from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
reply = client.chat.completions.create(
    model="demo",
    messages=[{"role": "user", "content": "What is Pagetide?"}],
)
print(reply.choices[0].message.content)"""

HOWTOS = (
    HowTo(
        "start",
        ("start the server", "start Pagetide", "run Pagetide", "run the server", "launch the server", "start it", "get started", "use Pagetide", "try Pagetide", "begin", "install Pagetide", "set up Pagetide", "start serving", "boot the server", "get Pagetide running", "fire up the server", "bring the server up"),
        (
            "Run `cargo run --release` in the repository. It builds Pagetide and starts the server with the demo model at http://127.0.0.1:8000. If Pagetide is already built, `pagetide serve` does the same.",
        ),
        ("starting the server", "startup", "installation", "a quick start"),
        "pagetide serve",
        ("What is the command to start the server?", "Quick start", "Getting started", "How do I begin with Pagetide?", "What should I do first?", "Installation?", "How to run this", "How is the server started?"),
    ),
    HowTo(
        "build",
        ("build Pagetide", "compile Pagetide", "compile it", "build it from source", "build the program", "make a release build"),
        ("Run `cargo build --release` in the repository. You find the program at `target/release/pagetide`.",),
        ("compiling", "the build"),
        "cargo build --release",
        ("Where is the binary?",),
    ),
    HowTo(
        "own_model",
        ("load my own model", "load a model", "serve my own model", "use another model", "use a different model", "change the model", "serve a model", "run my own Llama", "load a Llama model", "use a bigger model", "switch the model", "choose the model", "point it at my model", "use my own weights", "serve a Hugging Face model", "host my own LLM", "replace the demo model", "use my fine-tuned model"),
        (
            "Start the server with `pagetide serve --model DIR`, where DIR is a folder in the Hugging Face layout: config.json, tokenizer.json and safetensors weights.",
        ),
        ("the model", "the model directory", "the model path", "loading a model"),
        "--model",
        ("Can it serve other models?", "Can I use a real model?", "Does it work with my own model?"),
    ),
    HowTo(
        "which_models",
        ("find out which models are supported",),
        ("Pagetide is made for models of the Llama family in the Hugging Face layout. The README says which architectures it reads today.",),
        (),
        "",
        ("Which models does Pagetide support?", "Which models can I use?", "What models are supported?", "Does Pagetide support Llama?", "Does it support Qwen?", "Does it support Mistral?", "Can it run Llama 3?", "Which architectures are supported?", "Supported models?"),
    ),
    HowTo(
        "list_models",
        ("list the models", "see the model name", "see which model is loaded", "get the list of models", "find the model name"),
        ("Send GET /v1/models, for example with `curl http://127.0.0.1:8000/v1/models`. The answer lists the models that the server offers.",),
        ("the list of models",),
        "/v1/models",
    ),
    HowTo(
        "port",
        ("set the port", "change the port", "use another port", "listen on port 9000", "choose the port", "serve on a different port", "run it on port 8080", "switch to another port", "change the port number"),
        ("Use `--port`, for example `pagetide serve --port 9000`. The default port is 8000.",),
        ("the port", "the port number", "the default port"),
        "--port",
        ("Which port does Pagetide use?", "What is the default port?", "On which port does the server listen?", "Port 8000 is already in use", "The port is taken, what now?", "where is the server listening"),
    ),
    HowTo(
        "block_size",
        ("set the block size", "change the block size", "choose the block size", "use larger blocks", "use smaller blocks", "make the blocks bigger", "configure the block size", "set the number of tokens per block"),
        ("Use `--block-size`, for example `pagetide serve --block-size 16`. The number is how many tokens one block holds.",),
        ("the block size", "the number of tokens per block", "the size of a block"),
        "--block-size",
    ),
    HowTo(
        "device_blocks",
        ("set the number of device blocks", "set the number of blocks", "limit the number of blocks", "give the KV cache more memory", "limit the KV cache", "change the size of the KV cache", "make the KV cache bigger", "choose how many blocks there are", "increase the number of blocks", "set the cache size"),
        ("Use `--num-device-blocks N`, for example `pagetide serve --num-device-blocks 512`. That is how many KV blocks the device has; more blocks let more sequences run at once.",),
        ("the number of device blocks", "device blocks", "the number of blocks", "the size of the KV cache", "KV cache memory"),
        "--num-device-blocks",
        ("How many device blocks are there?", "What are device blocks?"),
    ),
    HowTo(
        "swap_space",
        ("set the swap space", "change the swap space", "give it more swap space", "enable swapping", "turn on swapping", "turn on the tide", "limit the swap memory", "set how much CPU memory is used", "increase the swap space", "use CPU memory for the cache", "turn off swapping", "disable swapping"),
        ("Use `--swap-space-gib G`, for example `pagetide serve --swap-space-gib 4`. It sets how many GiB of CPU memory the tide may use; with 0 there is no swapping.",),
        ("swap space", "the swap space", "the size of the swap space", "CPU memory for swapping", "swap memory"),
        "--swap-space-gib",
    ),
    HowTo(
        "preemption_mode",
        ("set the preemption mode", "choose the preemption mode", "change the preemption mode", "make it recompute", "make it swap", "switch from swap to recompute", "force swapping", "force recompute", "choose between swap and recompute", "configure preemption"),
        ("Use `--preemption-mode` with `auto`, `swap` or `recompute`, for example `pagetide serve --preemption-mode swap`. With `auto`, Pagetide chooses for each sequence.",),
        ("the preemption mode", "preemption", "choosing swap or recompute"),
        "--preemption-mode",
        ("Which preemption modes are there?", "What does auto preemption mean?"),
    ),
    HowTo(
        "max_num_seqs",
        ("limit the number of sequences", "set the maximum number of sequences", "limit the batch size", "set the batch size", "limit how many requests run at once", "limit concurrent requests", "allow more sequences", "change the number of parallel requests", "limit concurrency", "increase concurrency", "set max num seqs"),
        ("Use `--max-num-seqs N`, for example `pagetide serve --max-num-seqs 32`. At most that many sequences run at the same time; the others wait in the queue.",),
        ("the number of sequences", "the batch size", "concurrency", "the number of parallel requests", "concurrent requests"),
        "--max-num-seqs",
    ),
    HowTo(
        "max_num_batched_tokens",
        ("limit the tokens per step", "set the token budget", "change the token budget", "limit the number of batched tokens", "make prefill chunks smaller", "set the prefill chunk size", "set max num batched tokens", "set how many tokens are processed per step"),
        ("Use `--max-num-batched-tokens N`, for example `pagetide serve --max-num-batched-tokens 2048`. It is the token budget of one step; a smaller one gives smaller prefill chunks.",),
        ("the token budget", "tokens per step", "batched tokens", "the chunk size"),
        "--max-num-batched-tokens",
    ),
    HowTo(
        "dtype",
        ("set the dtype", "change the dtype", "use bfloat16", "use float16", "use float32", "choose the precision", "set the data type", "run in half precision", "change the precision", "set the number format"),
        ("Use `--dtype` with `auto`, `float32`, `float16` or `bfloat16`, for example `pagetide serve --dtype float32`. With `auto`, Pagetide takes the type that the model was saved in.",),
        ("the dtype", "the data type", "the precision", "half precision"),
        "--dtype",
        ("Which dtypes are there?", "What data types are supported?"),
    ),
    HowTo(
        "api_key",
        ("use an API key", "set an API key", "protect the server", "require a password", "secure the server", "add authentication", "set a key", "make the server private", "restrict access", "require an API key", "add a token for access", "lock down the API", "keep strangers out"),
        ("Start the server with `pagetide serve --api-key KEY`. Clients must then send the header `Authorization: Bearer KEY`; an OpenAI client does that when you give it the key as `api_key`.",),
        ("the API key", "authentication", "access control", "security"),
        "--api-key",
        ("Does Pagetide need an API key?", "How does authentication work?", "Why do I get 401 Unauthorized?", "I get a 401 error"),
    ),
    HowTo(
        "metrics",
        ("see the metrics", "get metrics", "monitor Pagetide", "monitor the server", "use Prometheus", "watch the server", "scrape metrics", "see statistics", "see how busy the server is", "see how many blocks are in use", "check the KV cache usage", "draw graphs in Grafana", "observe the server", "see the number of swapped sequences", "see how many preemptions there were", "get stats"),
        ("Send GET /metrics, for example with `curl http://127.0.0.1:8000/metrics`. The answer is in the Prometheus format, so Prometheus and Grafana can read it.",),
        ("metrics", "monitoring", "Prometheus", "statistics"),
        "/metrics",
        ("Where are the metrics?", "Does Pagetide have metrics?", "Which metrics are there?", "Is there a Prometheus endpoint?"),
    ),
    HowTo(
        "health",
        ("check the health of the server", "check whether the server is up", "do a health check", "check if the server is ready", "test whether the server is alive", "see if it is running", "write a readiness probe", "write a liveness probe", "know that the model is loaded", "check that the server works"),
        ("Send GET /health to see whether the server is alive, and GET /ready to see whether the model is loaded and requests are welcome. For example: `curl http://127.0.0.1:8000/health`.",),
        ("health checks", "the health check", "readiness", "liveness", "a probe"),
        "/health",
        ("Is there a health endpoint?", "What does /ready do?", "What is the difference between /health and /ready?", "Is the server up?", "Is the server running?"),
    ),
    HowTo(
        "curl",
        ("call it with curl", "send a request with curl", "call the API with curl", "use curl", "send a request", "send a chat message", "ask it a question from the shell", "test it from the command line", "make a request", "call the chat endpoint", "query the server", "talk to the server from a terminal", "send a prompt", "chat with the model over HTTP"),
        ("Like this:\n\n```\n" + CURL + "\n```",),
        ("curl", "a curl request", "an example request", "an HTTP request"),
        "curl",
        ("Give me a curl example", "Show me a curl command", "What does a request look like?", "Show me an example request", "curl example please", "Example of a chat request"),
    ),
    HowTo(
        "python",
        ("call it from Python", "use the openai client", "use the OpenAI Python client", "use the openai package", "connect with the OpenAI library", "use the OpenAI SDK", "use Pagetide from Python", "call Pagetide from a Python program", "connect my Python script", "use the Python client", "set the base URL"),
        ("Point the OpenAI client at Pagetide with `base_url`:\n\n```\n" + PYTHON + "\n```",),
        ("Python", "the OpenAI client", "the Python client", "the base URL", "the OpenAI SDK"),
        "base_url",
        ("Give me a Python example", "Show me Python code", "Does the OpenAI client work?", "What is the base URL?", "Can I use the openai library?", "Python example", "Show me how the openai client is used"),
    ),
    HowTo(
        "stream",
        ("stream the answer", "stream the output", "stream tokens", "get tokens as they come", "turn on streaming", "enable streaming", "receive the answer piece by piece", "stream a response", "see the tokens one by one", "get partial results"),
        ("Send `\"stream\": true` in the request. The server then sends each piece of the answer at once as a server-sent event, and `data: [DONE]` at the end. With curl, add `-N` to see it live.",),
        ("streaming", "a streamed answer", "streamed output"),
        "stream",
        ("Does Pagetide support streaming?", "Can it stream?", "Is streaming possible?", "How do I use stream in the openai client?"),
    ),
    HowTo(
        "temperature",
        ("set the temperature", "change the temperature", "get more random answers", "get the same answer every time", "make the answers deterministic", "get more varied answers", "set top_p", "use greedy decoding", "control randomness", "make it more creative"),
        ("Send `\"temperature\"` in the request: 0 always takes the likeliest token, and about 0.7 gives more variety. You can send `\"top_p\"` in the same way.",),
        ("the temperature", "randomness", "sampling", "top_p", "creativity"),
        "temperature",
    ),
    HowTo(
        "max_tokens",
        ("limit the length of the answer", "get a longer answer", "set max_tokens", "set the maximum number of tokens", "make the answers shorter", "make the answers longer", "stop the answer early", "cut the answer off"),
        ("Send `\"max_tokens\"` in the request, for example `\"max_tokens\": 200`. The answer ends there at the latest; with `\"stop\"` you can also name a text at which it ends.",),
        ("the length of the answer", "max_tokens", "the answer length", "stop sequences"),
        "max_tokens",
        ("Why is my answer cut off?", "My answer stops in the middle", "The output is truncated"),
    ),
    HowTo(
        "offline",
        ("run an offline batch", "process a file of requests", "run many prompts at once", "generate offline", "run a batch job", "run a batch without a server", "process many prompts from a file", "use pagetide generate", "generate answers for a JSONL file", "run inference without HTTP", "use it without the server", "run a list of prompts", "do offline inference"),
        ("Put one request on each line of a JSONL file and run `pagetide generate --model DIR --input requests.jsonl --output results.jsonl`. No server is needed.",),
        ("an offline batch", "offline inference", "batch jobs", "offline generation", "JSONL files"),
        "pagetide generate",
        ("Can Pagetide work without a server?", "Is there an offline mode?", "Does Pagetide have a batch mode?"),
    ),
    HowTo(
        "bench",
        ("run a benchmark", "benchmark Pagetide", "measure the speed", "measure throughput", "measure latency", "see how fast it is", "test the performance", "run a load test", "measure the performance", "benchmark a running server", "find out how many tokens per second I get", "time it"),
        ("Use `pagetide bench throughput` for tokens per second, `pagetide bench latency` for the time of one request, and `pagetide bench serve` to put load on a running server.",),
        ("benchmarks", "benchmarking", "performance tests", "a load test"),
        "pagetide bench",
        ("Which benchmarks are there?", "How fast is Pagetide?", "Is Pagetide fast?", "What is the performance like?", "How many tokens per second does it make?", "How fast is it?"),
    ),
    HowTo(
        "config",
        ("configure Pagetide", "see the configuration", "show the config", "check the configuration", "use a config file", "write a config file", "set options in a file", "use environment variables", "set an option with an environment variable", "validate my config", "change the settings", "configure the server", "see all settings", "print the configuration", "save my settings", "make a setting permanent"),
        ("Settings come from `config/pagetide.toml`, from environment variables such as `PAGETIDE_SERVER__PORT`, and from flags. `pagetide config show` prints the result, and `pagetide config check` looks for mistakes.",),
        ("configuration", "the config file", "settings", "environment variables", "options"),
        "pagetide config",
        ("Where is the config file?", "Where are the settings?", "Which environment variables are there?", "What does pagetide config check do?", "What does pagetide config show do?", "What is PAGETIDE_SECTION__KEY?", "What is config/pagetide.toml?", "Is there a configuration file?"),
    ),
    HowTo(
        "memory",
        ("save memory", "reduce memory use", "fix an out of memory error", "deal with too little memory", "make it use less memory", "run it with little memory", "avoid running out of memory", "lower the memory usage", "handle memory pressure", "fit a model into little memory"),
        ("When memory is short, give the tide more room with `--swap-space-gib`, let fewer sequences run with `--max-num-seqs`, or use a smaller type with `--dtype bfloat16`. If the KV cache itself is too large, lower `--num-device-blocks`.",),
        ("memory problems", "saving memory", "low memory", "too little memory"),
        "",
        ("I run out of memory", "What should I do when memory is short?", "Out of memory!", "I get an out of memory error", "What happens when memory is full?", "What happens when there is not enough memory?", "My machine does not have enough memory", "The server uses too much memory", "What if there are no free blocks?", "memory is short, what can I do", "oom what now", "What happens when the KV cache is full?"),
    ),
    HowTo(
        "faster",
        ("make it faster", "speed it up", "improve performance", "improve the throughput", "tune Pagetide", "get more speed", "optimize the server", "reduce latency", "increase the throughput"),
        ("Build with `--release`, give the KV cache as many blocks as fit with `--num-device-blocks`, and raise `--max-num-seqs` for more throughput. Then measure with `pagetide bench` what really helps.",),
        ("more speed", "tuning", "better performance", "speed"),
        "",
        ("The server is slow", "Why is it so slow?", "It is too slow, what can I do?"),
    ),
    HowTo(
        "stop_server",
        ("stop the server", "shut down the server", "quit Pagetide", "end the server", "turn the server off", "kill the server", "exit"),
        ("Press Ctrl-C in the terminal where the server runs.",),
        ("stopping the server", "shutdown"),
    ),
    HowTo(
        "help",
        ("see all flags", "get help on the command line", "list the options", "see all options", "find out which flags there are", "see the command line help", "list all commands"),
        ("`pagetide --help` lists the commands, and `pagetide serve --help` lists the flags of the server.",),
        ("the list of flags", "help", "the command line"),
        "--help",
        ("Which flags are there?", "Which commands are there?", "What options does pagetide serve have?", "What subcommands does pagetide have?", "What commands does Pagetide know?"),
    ),
    HowTo(
        "docs",
        ("find the documentation", "learn more about Pagetide", "read more", "find out more", "read the docs", "find the manual", "learn how Pagetide works"),
        ("Start with the README in the repository; it leads to the rest of the documentation. `pagetide --help` explains the command line.",),
        ("documentation", "more information", "the manual", "the docs"),
        "",
        ("Where is the documentation?", "Is there a manual?", "Where can I learn more?"),
    ),
    HowTo(
        "bug",
        ("report a bug", "report a problem", "contribute", "help with the project", "request a feature", "file an issue", "send a patch"),
        ("Open an issue in the Pagetide repository and say what you did, what you expected and what happened. Patches are welcome there too.",),
        ("bug reports", "issues", "contributions"),
        "",
        ("I found a bug", "Something is broken", "It does not work", "It crashed"),
    ),
    HowTo(
        "retrain",
        ("train the demo model", "train you", "retrain the demo model", "make the demo model myself", "rebuild the demo model", "teach you something new"),
        ("The folder `scripts/demo_model` has everything: it writes the corpus, trains the tokenizer and the weights, and puts them into `models/demo`. Its README tells you the one command to run.",),
        ("training the demo model", "the training script"),
        "scripts/demo_model",
        ("How were you trained?", "Where does your training data come from?", "What were you trained on?", "Who trained you?", "How were you made?", "What is your training data?"),
    ),
)
