// Uses a server as Continue does: node continue.mjs URL MODEL. Prints the results as a JSON object for the test.
//
// Its package for chats, embeddings and ranks is the real one. Its core is not published. What that sends to Ollama and
// llama.cpp, and for autocompletion, is sent as version 2.1.0 has it in core/llm/llms/{OpenAI,Ollama,LlamaCpp}.ts and
// core/llm/openaiTypeConverters.ts, and read by its package for streams.
import { streamResponse, streamSse } from "@continuedev/fetch";
import { constructLlmApi } from "@continuedev/openai-adapters";

const [url, model] = process.argv.slice(2);
const key = "none";
const signal = () => new AbortController().signal;
const messages = [
  { role: "system", content: "You are brief." },
  { role: "user", content: "What is Pagetide?" },
];
const closed = (properties) => ({
  type: "object",
  properties,
  required: Object.keys(properties),
  additionalProperties: false,
});
const weather = {
  type: "function",
  function: { name: "weather", description: "The weather", parameters: closed({ city: { enum: ["Oslo", "Lima"] } }) },
};
const apis = {
  openai: constructLlmApi({ provider: "openai", apiBase: `${url}/v1/`, apiKey: key }),
  vllm: constructLlmApi({ provider: "vllm", apiBase: `${url}/v1/`, apiKey: key }),
  ollama: constructLlmApi({ provider: "ollama", apiBase: url, apiKey: key }),
  "llama.cpp": constructLlmApi({ provider: "llama.cpp", apiBase: `${url}/`, apiKey: key }),
  anthropic: constructLlmApi({ provider: "anthropic", apiBase: `${url}/v1/`, apiKey: key }),
};

const gather = async (stream) => {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
};

/** Tool calls of a stream, put together. */
const callsOf = (chunks) => {
  const calls = [];
  for (const delta of chunks.flatMap((chunk) => chunk.choices?.[0]?.delta?.tool_calls ?? [])) {
    const call = (calls[delta.index] ??= { arguments: "" });
    call.id ??= delta.id;
    // That of Anthropic's API says it again with every part.
    call.name ??= delta.function?.name;
    call.arguments += delta.function?.arguments ?? "";
  }
  return calls;
};

async function chat(api) {
  const asked = { model, messages, max_tokens: 40 };
  const chunks = await gather(api.chatCompletionStream({ ...asked, stream: true }, signal()));
  const whole = await api.chatCompletionNonStream({ ...asked, stream: false }, signal());
  return {
    whole: whole.choices[0].message.content,
    pieces: chunks.map((chunk) => chunk.choices?.[0]?.delta?.content).filter(Boolean),
    usage: chunks.findLast((chunk) => chunk.usage)?.usage,
  };
}

// The call is required, so that any model makes it. The choice is the model's again when the call is answered.
async function tools(api) {
  const asked = { model, tools: [weather], max_tokens: 100, parallel_tool_calls: false };
  const calling = { ...asked, messages, stream: true, tool_choice: "required" };
  const [call] = callsOf(await gather(api.chatCompletionStream(calling, signal())));
  const called = { id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } };
  const answered = [
    ...messages,
    { role: "assistant", content: "", tool_calls: [called] },
    { role: "tool", tool_call_id: call.id, content: "sunny" },
  ];
  const after = await gather(api.chatCompletionStream({ ...asked, messages: answered, stream: true }, signal()));
  return { ...call, after: after.map((chunk) => chunk.choices?.[0]?.delta?.content ?? "").join("") };
}

async function structured(api) {
  const schema = closed({ size: { enum: [1, 2, 3] } });
  const format = { type: "json_schema", json_schema: { name: "form", schema, strict: true } };
  const asked = { model, messages, max_tokens: 60, stream: false, response_format: format };
  return JSON.parse((await api.chatCompletionNonStream(asked, signal())).choices[0].message.content);
}

async function others(api) {
  const completion = { model, prompt: "Paging is", max_tokens: 12, temperature: 0 };
  const embedded = await api.embed({ model, input: ["a tide", "a page"] });
  const chunks = await gather(api.completionStream({ ...completion, stream: true }, signal()));
  return {
    whole: (await api.completionNonStream(completion, signal())).choices[0].text,
    streamed: chunks.map((chunk) => chunk.choices[0].text).join(""),
    embeddings: embedded.data.map((one) => one.embedding.length),
    models: (await api.list()).map((listed) => listed.id),
  };
}

async function failure(request) {
  try {
    await request();
  } catch (error) {
    return { status: error.status ?? null, message: error.message };
  }
  return null;
}

// What the core sends itself.

const post = (path, body) => fetch(new URL(path, `${url}/`), {
  method: "POST",
  headers: { "Content-Type": "application/json", Authorization: `Bearer ${key}`, "api-key": key },
  body: JSON.stringify(body),
});

// Autocompletion fills one of its templates in, and asks for a completion. The marks are no tokens of the demo model.
async function autocomplete() {
  const stop = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "/src/", "```", "\n\n"];
  const prompt = "<|fim_prefix|>def f(a):\n    <|fim_suffix|>\n    return b<|fim_middle|>";
  const asked = { prompt, model, max_tokens: 20, temperature: 0.01, stop };
  const pieces = [];
  for await (const value of streamSse(await post("v1/completions", { ...asked, stream: true }))) {
    if (value.choices?.[0]?.text && value.finish_reason !== "eos") pieces.push(value.choices[0].text);
  }
  return pieces;
}

async function lines(path, body) {
  let text = "";
  for await (const value of streamResponse(await post(path, body))) text += value;
  return text.split("\n").filter((line) => line.trim()).map((line) => JSON.parse(line));
}

async function ollama() {
  const options = { temperature: 0.5, num_predict: 20, num_ctx: 8192, stop: ["\n\n\n"], num_thread: 4, use_mmap: true };
  const common = { model, options, keep_alive: 1800, stream: true };
  const shown = await (await post("api/show", { name: model })).json();
  const chat = await lines("api/chat", { ...common, messages, tools: [weather] });
  const completion = await lines("api/generate", { ...common, prompt: "Paging is", raw: true });
  const suffix = await failure(() => lines("api/generate", { ...common, prompt: "def f(", suffix: "return b" }));
  const embedded = await (await post("api/embed", { model, input: ["a tide", "a page"] })).json();
  const tags = await (await fetch(`${url}/api/tags`)).json();
  return {
    parameters: shown.parameters,
    template: shown.template,
    chat: chat.map((line) => line.message.content),
    done: chat.at(-1).done,
    completion: completion.map((line) => line.response).join(""),
    suffix: suffix.message,
    embeddings: embedded.embeddings.length,
    tags: tags.models.map((listed) => listed.name),
  };
}

async function llamaCpp() {
  const pieces = [];
  const asked = { model, prompt: "Paging is", stream: true, n_predict: 16, stop: ["\n\n\n"], top_k: 40, top_p: 1 };
  for await (const value of streamSse(await post("completion", { ...asked, temperature: 0, min_p: 0, mirostat: 0 }))) {
    if (value.content) pieces.push(value.content);
  }
  return pieces;
}

const seen = { chat: {}, tools: {}, structured: {}, others: {}, failures: {} };
for (const [name, api] of Object.entries(apis)) {
  seen.chat[name] = await chat(api);
  seen.tools[name] = await tools(api);
  seen.failures[name] = await failure(() => chat({
    chatCompletionStream: (body, signal) => api.chatCompletionStream({ ...body, temperature: -1 }, signal),
  }));
  // The others are not of Anthropic's API, or Continue sends them itself.
  if (name === "anthropic") continue;
  seen.structured[name] = await structured(api);
  seen.others[name] = await others(api);
}
const ranked = await apis.vllm.rerank({ model, query: "memory", documents: ["a page of memory", "a boat", "a tide"] });
const fim = { model, prompt: "def f(", suffix: "return b", max_tokens: 9, stream: true };
seen.failures.fim = await failure(() => gather(apis.openai.fimStream(fim, signal())));
Object.assign(seen, { ranked, autocomplete: await autocomplete(), ollama: await ollama(), llamaCpp: await llamaCpp() });
console.log(JSON.stringify(seen));
