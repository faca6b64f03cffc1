// A proxy in front of a server. It answers chats with text from the test, and forwards everything else.
import http from "node:http";

/** `script` is a list of texts to send, one after the other. A number in it is a wait in milliseconds. */
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
