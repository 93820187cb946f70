// Answers the requests of the page from a recording, and offers the texts that were recorded.
(() => {
  const { answers, texts } = window.TOST_RECORDED;
  const PAUSE = 25; // ms between two tokens of a generated text
  const MISSING = "this page is a recording and has no answer to that; run `tost explore` on your machine.";
  const shown = {}; // tokens of a generated text that the page has received so far

  const json = (content, status = 200) => new Response(JSON.stringify(content), { status, headers: { "Content-Type": "application/json" } });
  const sorted = (content) => JSON.stringify(Object.fromEntries(Object.entries(content).sort(([a], [b]) => (a < b ? -1 : 1))));
  const inBase64 = async (body) => btoa(String.fromCharCode(...new Uint8Array(await new Response(body).arrayBuffer())));

  /** A text that is still being generated, as far as it has come. */
  function soFar(found, count) {
    if (!count || count >= found.tokens.length) return found;
    const part = { ...found, tokens: found.tokens.slice(0, count), bits: found.bits.slice(0, count) };
    return found.pi ? { ...part, pi: found.pi.map((rows) => rows.slice(0, count)) } : part;
  }

  function generate(lines, signal, length) {
    const text = new TextEncoder();
    const { session } = lines[0];
    shown[session] = length;
    const body = new ReadableStream({
      async start(stream) {
        for (const line of lines) {
          if (signal?.aborted) return stream.error(new DOMException("stopped", "AbortError"));
          stream.enqueue(text.encode(`${JSON.stringify(line)}\n`));
          if (line.token !== undefined) shown[session] += 1;
          await new Promise((done) => { setTimeout(done, PAUSE); });
        }
        return stream.close();
      },
    });
    return new Response(body);
  }

  async function answer(path, request = {}) {
    if (!request.body) {
      const found = answers[path];
      return found?.base64 ? fetch_(`data:image/png;base64,${found.base64}`) : json(found ?? { error: MISSING }, found ? 200 : 400);
    }
    if (request.headers["Content-Type"] !== "application/json") {
      const found = answers[`${path} ${await inBase64(request.body)}`];
      return json(found ?? { error: MISSING }, found ? 200 : 400);
    }
    const { temperature, top_p, count, ...about } = JSON.parse(request.body);
    const found = answers[`${path} ${sorted(about)}`];
    if (!found) return json({ error: MISSING }, 400);
    if (path === "generate") return generate(found, request.signal, answers[`text ${sorted(about)}`].tokens.length);
    return json(path === "text" && about.session ? soFar(found, shown[about.session]) : found);
  }

  const fetch_ = window.fetch.bind(window);
  window.fetch = (address, request) => (String(address).startsWith("api/") ? answer(String(address).slice(4), request) : fetch_(address, request));

  // The page starts with the text in its address, so that choosing another one is going to another address.
  const start = new URLSearchParams(location.hash.slice(1));
  if (!Object.values(texts).includes(start.get("text"))) {
    start.set("text", Object.values(texts)[0]);
    history.replaceState(null, "", `#${start}`);
  }
  const choice = document.createElement("p");
  choice.className = "recorded";
  choice.style.marginBottom = "1rem";
  choice.append("Recorded texts: ");
  for (const [name, text] of Object.entries(texts)) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    button.addEventListener("click", () => {
      location.hash = new URLSearchParams({ view: "text", text });
      location.reload();
    });
    choice.append(button, " ");
  }
  document.querySelector("main").prepend(choice);
  new MutationObserver(() => {
    for (const field of document.querySelectorAll("textarea")) field.readOnly = true;
    for (const field of document.querySelectorAll("input[type=file]")) field.disabled = true;
  }).observe(document.querySelector("main"), { childList: true, subtree: true });
})();
