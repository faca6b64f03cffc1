// Uses a server through the ollama package: node ollama.mjs URL MODEL. Prints the results as a JSON object for the
// test.
import { Ollama } from "ollama";

const [host, model] = process.argv.slice(2);
const llama = new Ollama({ host });
const messages = [{ role: "user", content: "What is Pagetide?" }];
const options = { temperature: 0 };

async function chat() {
  const whole = await llama.chat({ model, messages, options });
  const parts = [];
  for await (const part of await llama.chat({ model, messages, options, stream: true })) parts.push(part);
  return { whole, parts };
}

async function generate() {
  const first = await llama.generate({ model, prompt: "What is Pagetide?", system: "You are brief.", options });
  const more = { options: { num_predict: 5 }, stream: true };
  const parts = [];
  for await (const part of await llama.generate({ model, prompt: "And then?", context: first.context, ...more })) {
    parts.push(part);
  }
  return { first, parts };
}

// A call in this model's format is JSON, which a schema demands of the demo model.
async function toolCall() {
  const object = (properties) => ({
    type: "object",
    properties,
    required: Object.keys(properties),
    additionalProperties: false,
  });
  const city = object({ city: { type: "string", maxLength: 8 } });
  const format = object({ name: { const: "weather" }, parameters: city });
  const tools = [{ type: "function", function: { name: "weather", description: "The weather", parameters: city } }];
  const asked = { model, tools, format, options: { num_predict: 200 } };
  const answer = await llama.chat({ ...asked, messages });
  const calls = [];
  for await (const part of await llama.chat({ ...asked, messages, stream: true })) {
    calls.push(...(part.message.tool_calls ?? []));
  }
  const result = { role: "tool", tool_name: "weather", content: "sunny" };
  const after = await llama.chat({ model, messages: [...messages, answer.message, result], tools });
  return { calls: answer.message.tool_calls, streamed: calls, after };
}

async function structured() {
  const format = { type: "object", properties: { size: { enum: [1, 2, 3] } }, required: ["size"], additionalProperties: false };
  return JSON.parse((await llama.chat({ model, messages, format, options: { num_predict: 50 } })).message.content);
}

async function stopped() {
  const stream = await llama.chat({ model, messages, options: { ...options, num_predict: 100000 }, stream: true });
  const seen = [];
  try {
    for await (const part of stream) {
      seen.push(part);
      stream.abort();
    }
  } catch (error) {
    return { name: error.name, seen: seen.length };
  }
  return { name: null, seen: seen.length };
}

async function about() {
  const shown = await llama.show({ model });
  return {
    list: (await llama.list()).models.map((listed) => listed.model),
    running: (await llama.ps()).models.map((listed) => listed.model),
    capabilities: shown.capabilities,
    version: (await llama.version()).version,
    embeddings: (await llama.embed({ model, input: ["a tide", "a page"] })).embeddings.map((one) => one.length),
  };
}

async function failures() {
  const calls = {
    suffix: () => llama.generate({ model, prompt: "a", suffix: "b" }),
    temperature: () => llama.chat({ model, messages, options: { temperature: -1 } }),
    model: () => llama.chat({ model: "other", messages }),
    pull: () => llama.pull({ model: "other" }),
  };
  const seen = {};
  for (const [name, call] of Object.entries(calls)) {
    try {
      await call();
    } catch (error) {
      seen[name] = { status: error.status_code, message: error.message };
    }
  }
  return seen;
}

const results = { chat: await chat(), generate: await generate(), toolCall: await toolCall() };
Object.assign(results, { structured: await structured(), stopped: await stopped(), about: await about() });
console.log(JSON.stringify({ ...results, failures: await failures() }));
