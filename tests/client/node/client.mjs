// Uses a server through the Vercel AI SDK: node client.mjs URL MODEL. Prints the results as a JSON object for the test.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "pagetide",
  baseURL: `${url}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider(name);
const question = { model, prompt: "What is Pagetide?", maxRetries: 0 };

async function chat() {
  const whole = await generateText({ ...question, temperature: 0, maxOutputTokens: 40 });
  const stream = streamText({ ...question, temperature: 0, maxOutputTokens: 40 });
  const pieces = [];
  for await (const piece of stream.textStream) pieces.push(piece);
  return {
    whole: whole.text,
    pieces,
    finishReason: await stream.finishReason,
    usage: await stream.usage,
  };
}

// The call is required, so that any model makes it.
async function toolCall() {
  const weather = tool({
    description: "The weather of a city",
    inputSchema: z.object({ city: z.enum(["Oslo", "Lima"]), days: z.enum(["1", "2"]) }),
  });
  const one = { seed: 2, maxOutputTokens: 500, providerOptions: { pagetide: { parallel_tool_calls: false } } };
  const stream = streamText({ ...question, tools: { weather }, toolChoice: "required", ...one });
  const kinds = [];
  let streamed = "";
  for await (const part of stream.fullStream) {
    if (part.type === "error") throw part.error;
    kinds.push(part.type);
    if (part.type === "tool-input-delta") streamed += part.delta;
  }
  const calls = (await stream.toolCalls).map(({ toolName, input }) => ({ toolName, input }));
  return { kinds, streamed, calls, finishReason: await stream.finishReason };
}

// A tool that is called has a result, with which the model goes on.
async function agent() {
  const weather = tool({
    description: "The weather of a city",
    inputSchema: z.object({ city: z.enum(["Oslo", "Lima"]) }),
    execute: ({ city }) => `sunny in ${city}`,
  });
  const answer = await generateText({
    ...question,
    tools: { weather },
    maxOutputTokens: 200,
    providerOptions: { pagetide: { parallel_tool_calls: false } },
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" }),
    stopWhen: ({ steps }) => steps.length === 2,
  });
  return { text: answer.text, results: answer.steps[0].toolResults.map((result) => result.output) };
}

async function structured() {
  const asked = { ...question, output: Output.object({ schema: z.object({ size: z.enum(["small", "large"]) }) }) };
  const stream = streamText({ ...asked, maxOutputTokens: 100 });
  const parts = [];
  for await (const part of stream.partialOutputStream) parts.push(part);
  return { whole: (await generateText({ ...asked, maxOutputTokens: 100 })).output, last: parts.at(-1) };
}

async function embeddings() {
  const embedded = await embedMany({ model: provider.embeddingModel(name), values: ["a tide", "a page"] });
  return embedded.embeddings.map((one) => one.length);
}

async function failure() {
  try {
    await generateText({ ...question, temperature: -1 });
  } catch (error) {
    return { status: error.statusCode, message: error.message };
  }
}

const results = { chat: await chat(), toolCall: await toolCall(), agent: await agent() };
Object.assign(results, { structured: await structured(), embeddings: await embeddings(), failure: await failure() });
console.log(JSON.stringify(results));
