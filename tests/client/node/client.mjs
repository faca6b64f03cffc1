// Uses a server through the Vercel AI SDK: node client.mjs URL MODEL. Prints the results as a JSON object for the test.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "pagetide", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true });
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

async function failure() {
  try {
    await generateText({ ...question, temperature: -1 });
  } catch (error) {
    return { status: error.statusCode, message: error.message };
  }
}

console.log(JSON.stringify({ chat: await chat(), toolCall: await toolCall(), failure: await failure() }));
