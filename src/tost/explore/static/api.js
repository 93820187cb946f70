// Talks to the server that the page came from. Every request goes through `send`.

let send = (path, request) => fetch(`api/${path}`, request);

/** Let something else answer, such as a recording: a function of the path and the request that returns a Response. */
export function answerWith(source) { send = source; }

const LARGEST = 400_000; // characters of a request; the server takes a little more

async function ask(path, request) {
  let response;
  try {
    response = await send(path, request);
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error("the server does not answer; is `tost explore` still running?");
  }
  if (response.ok) return response;
  const text = await response.text();
  let reason = text;
  try { reason = JSON.parse(text).error ?? text; } catch { /* a plain message */ }
  throw new Error(reason.trim() || `the server answered ${response.status}`);
}

function asJson(content, signal) {
  const body = JSON.stringify(content);
  if (body.length > LARGEST) throw new Error(`the text has ${content.text.length.toLocaleString("en")} characters, far more than the page shows; shorten it.`);
  return { method: "POST", headers: { "Content-Type": "application/json" }, body, signal };
}

export const get = async (path) => (await ask(path)).json();
export const post = async (path, content, signal) => (await ask(path, asJson(content, signal))).json();

/** Send an image file; `query` names the model and maybe the size. */
export const postImage = async (path, query, file) => (await ask(`${path}?${new URLSearchParams(query)}`,
  { method: "POST", headers: { "Content-Type": "application/octet-stream" }, body: file })).json();

/** Receive an image that comes with a model. */
export const sample = async (model, name) =>
  (await ask(`sample?${new URLSearchParams({ model, name })}`)).blob();

/** Send a request and receive lines of JSON as they come. */
export async function* stream(path, content, signal) {
  const response = await ask(path, asJson(content, signal));
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
