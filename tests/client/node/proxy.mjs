// In front of a server: chats get an answer that the test has written, everything else goes through.
import http from "node:http";

/** `script`: texts to write, one after the other; a number waits for so many milliseconds. */
export async function proxy(target, script) {
  const server = http.createServer(async (request, answer) => {
    if (request.url === "/v1/chat/completions") {
      request.resume();
      answer.writeHead(200, { "Content-Type": "text/event-stream" });
      for (const part of script) {
        if (typeof part === "number") await new Promise((done) => setTimeout(done, part));
        else answer.write(part);
      }
      answer.end("data: [DONE]\n\n");
      return;
    }
    const { method, headers, url } = request;
    const through = http.request(target + url, { method, headers }, (theirs) => {
      answer.writeHead(theirs.statusCode, theirs.headers);
      theirs.pipe(answer);
    });
    through.on("error", () => answer.destroy());
    answer.on("close", () => through.destroy());
    request.pipe(through);
  });
  await new Promise((done) => server.listen(0, "127.0.0.1", done));
  return { url: `http://127.0.0.1:${server.address().port}`, close: () => { server.closeAllConnections(); server.close(); } };
}

export const chunk = (content, more = {}) =>
  `data: ${JSON.stringify({ choices: [{ index: 0, delta: { content }, finish_reason: null, ...more }] })}\n\n`;
