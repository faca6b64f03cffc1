// Uses a server through LangChain.js: node langchain.mjs URL MODEL. Prints the results as a JSON object for the test.
import { ChatAnthropic } from "@langchain/anthropic";
import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOllama, OllamaEmbeddings } from "@langchain/ollama";
import { ChatOpenAI, OpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const common = { model, apiKey: "none", maxTokens: 60, maxRetries: 0 };
const openai = { ...common, configuration: { baseURL: `${url}/v1` } };
const apis = {
  chat: (more) => new ChatOpenAI({ ...openai, temperature: 0, ...more }),
  responses: (more) => new ChatOpenAI({ ...openai, temperature: 0, useResponsesApi: true, ...more }),
  messages: (more) => new ChatAnthropic({ ...common, anthropicApiUrl: url, ...more }),
  ollama: (more) => new ChatOllama({ model, baseUrl: url, numPredict: 60, temperature: 0, ...more }),
};
const question = "What is Pagetide?";
const form = z.object({ size: z.enum(["small", "large"]) });
const weather = tool(({ city }) => `sunny in ${city}`, {
  name: "weather",
  description: "The weather of a city",
  schema: z.object({ city: z.enum(["Oslo", "Lima"]) }),
});

const gather = async (stream) => {
  const chunks = [];
  for await (const chunk of await stream) chunks.push(chunk);
  return chunks;
};

const together = (chunks) => chunks.slice(1).reduce((all, chunk) => all.concat(chunk), chunks[0]);

async function chat(make) {
  const whole = await make().invoke([["system", "You are brief."], ["human", question]]);
  const chunks = await gather(make().stream([["system", "You are brief."], ["human", question]]));
  return {
    whole: whole.text,
    usage: whole.usage_metadata,
    pieces: chunks.map((chunk) => chunk.text).filter(Boolean),
    streamedUsage: together(chunks).usage_metadata,
  };
}

async function structured(make, method) {
  return make().withStructuredOutput(form, { name: "form", method }).invoke("How big is it?");
}

async function toolCall(make) {
  const caller = make().bindTools([weather], { tool_choice: "weather" });
  const asked = [new HumanMessage("How is the weather?")];
  const answer = await caller.invoke(asked);
  const [call] = answer.tool_calls;
  const result = await weather.invoke(call);
  const after = await make().bindTools([weather]).invoke([...asked, answer, result]);
  const streamed = together(await gather(caller.stream(asked))).tool_calls;
  return { call, streamed, isResult: result instanceof ToolMessage, result: result.content, after: after.text };
}

async function failure(make) {
  try {
    await make({ temperature: -1 }).invoke(question);
  } catch (error) {
    return error.message;
  }
  return null;
}

const seen = { chat: {}, structured: {}, toolCall: {}, failure: {} };
for (const [name, make] of Object.entries(apis)) {
  seen.chat[name] = await chat(make);
  // For Anthropic's API, LangChain.js writes an enum into the description of a schema.
  seen.structured[name] = await structured(make, name === "messages" ? "functionCalling" : "jsonSchema");
  seen.failure[name] = await failure(make);
  // Ollama's API cannot demand a call. LangChain.js keeps "any" and "required" from the Responses API.
  if (name !== "ollama") seen.toolCall[name] = await toolCall(make);
}
seen.byTool = await structured(apis.chat, "functionCalling");
const completion = new OpenAI({ ...openai, temperature: 0 });
seen.completion = { whole: await completion.invoke("Paging is") };
seen.completion.streamed = (await gather(completion.stream("Paging is"))).join("");
seen.embeddings = [];
for (const embeddings of [new OpenAIEmbeddings(openai), new OllamaEmbeddings({ model, baseUrl: url })]) {
  seen.embeddings.push((await embeddings.embedDocuments(["a tide", "a page"])).map((one) => one.length));
}
console.log(JSON.stringify(seen));
