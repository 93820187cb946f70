// Talks to the server that the page came from. Every request goes through `send`.

let send = (path, request) => fetch(`api/${path}`, request);

/** Let something else answer, such as a recording: a function of the path and the request that returns a Response. */
export function answerWith(source) { send = source; }

async function check(response) {
  if (response.ok) return response;
  const text = await response.text();
  let reason = text;
  try { reason = JSON.parse(text).error ?? text; } catch { /* a plain message */ }
  throw new Error(reason.trim() || `the server answered ${response.status}`);
}

const asJson = (content, signal) => (
  { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content), signal });

export const get = async (path) => (await check(await send(path))).json();
export const post = async (path, content, signal) => (await check(await send(path, asJson(content, signal)))).json();

/** Send an image file; `query` names the model and maybe the size. */
export const postImage = async (path, query, file) => (await check(await send(`${path}?${new URLSearchParams(query)}`,
  { method: "POST", headers: { "Content-Type": "application/octet-stream" }, body: file }))).json();

/** Receive an image that comes with a model. */
export const sample = async (model, name) =>
  (await check(await send(`sample?${new URLSearchParams({ model, name })}`))).blob();

/** Send a request and receive lines of JSON as they come. */
export async function* stream(path, content, signal) {
  const response = await check(await send(path, asJson(content, signal)));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line) yield JSON.parse(line);
  }
}
