// Talks to the server that the page came from.

async function answer(response) {
  if (response.ok) return response.json();
  const text = await response.text();
  let reason = text;
  try { reason = JSON.parse(text).error ?? text; } catch { /* a plain message */ }
  throw new Error(reason.trim() || `the server answered ${response.status}`);
}

export const get = async (path) => answer(await fetch(`api/${path}`));

export const post = async (path, content, signal) => answer(await fetch(`api/${path}`, {
  method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content), signal,
}));

/** Send an image file; `query` names the model and maybe the size. */
export const postImage = async (path, query, file) => answer(await fetch(
  `api/${path}?${new URLSearchParams(query)}`,
  { method: "POST", headers: { "Content-Type": "application/octet-stream" }, body: file },
));

/** Send a request and receive lines of JSON as they come. */
export async function* stream(path, content, signal) {
  const response = await fetch(`api/${path}`, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content), signal,
  });
  if (!response.ok) await answer(response);
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
