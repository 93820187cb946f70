// Type a text, see its groups, let it be continued, go back.

import { post, stream } from "./api.js";
import { bars, colour, el, labelled, lineChart, matrix, options, size, svg } from "./dom.js";
import { drawTokens, TokenList } from "./tokens.js";

const PAUSE = 400; // ms between two colourings while tokens are coming

export class TextView {
  constructor(shared, root) {
    Object.assign(this, { shared, root, found: null, session: null, prompt: 0, running: null, asked: 0 });
  }

  build() {
    const { shared } = this;
    const change = () => this.recolour();
    this.model = el("select", { onchange: () => { this.session = null; this.update(); } });
    this.layer = el("select", { onchange: change });
    this.by = el("select", { onchange: change });
    this.input = el("textarea", { id: "text-input", spellcheck: "false", maxlength: 20000, oninput: () => this.typed() });
    this.list = new TokenList("Tokens, coloured by group", (i, firm) => this.pick(i, firm));
    this.legend = el("ul", { class: "legend" });
    this.temperature = this.slider("temperature", 0, 2, 0.05, 0.7);
    this.topP = this.slider("top_p", 0.05, 1, 0.05, 0.95);
    this.count = el("input", { type: "number", min: 1, max: 2000, value: shared.settings.count ?? 200 });
    this.go = el("button", { type: "button", class: "main", id: "generate", onclick: () => this.generate() }, "Generate");
    this.stop = el("button", { type: "button", id: "stop", disabled: true, onclick: () => this.running?.abort() }, "Stop");
    this.back = el("button", { type: "button", id: "back", disabled: true, onclick: () => this.goBack() }, "Go back to this token");
    this.speed = el("p", { class: "quiet", id: "speed" });
    this.detail = el("div", { id: "detail" }, el("p", { class: "quiet" }, "Point at a token, or walk through them with the arrow keys."));
    this.memory = el("div", { id: "memory" });
    this.root.append(
      el("div", { class: "controls" }, labelled("Model", this.model), labelled("Layer", this.layer), labelled("Colour by", this.by)),
      el("div", { class: "columns" },
        el("div", {},
          el("label", { for: "text-input", class: "quiet" }, "Text"), this.input,
          el("div", { class: "controls" }, this.temperature.box, this.topP.box, labelled("Tokens", this.count), this.go, this.stop, this.back),
          this.list.root, this.legend, this.speed,
          shared.tools("text", () => this.found && drawTokens(this.found, this.choice()), () => this.python())),
        el("div", {},
          el("div", { class: "panel" }, el("h2", {}, "This token"), this.detail),
          el("div", { class: "panel" }, el("h2", {}, "What the state remembers"), this.memory))));
    options(this.model, shared.of("text").map(({ name }) => [name, name]), shared.settings.model);
    this.input.value = shared.text;
  }

  slider(name, min, max, step, value) {
    const start = this.shared.settings[name] ?? value;
    const shown = el("output", {}, Number(start).toFixed(2));
    const input = el("input", { type: "range", min, max, step, value: start, "aria-label": name.replace("_", "-"),
      oninput: () => { shown.textContent = Number(input.value).toFixed(2); },
      onchange: () => this.shared.choose({ [name]: input.value }) });
    return { input, box: el("label", {}, el("span", {}, `${name.replace("_", "-")} `, shown), input) };
  }

  show() {
    if (!this.model.value) return this.shared.say("There is no language model here; name one after `tost explore`.");
    if (this.input.value !== this.shared.text) { this.input.value = this.shared.text; this.session = null; }
    return this.update();
  }

  choice() { return { layer: Number(this.layer.value || 0), by: this.by.value || "group" }; }

  typed() {
    this.shared.text = this.input.value;
    this.session = null;
    this.running?.abort();
    this.update();
  }

  /** What a request is about: the generated text, or the one that was typed. */
  about() { return this.session ? { session: this.session } : { model: this.model.value, text: this.shared.text }; }

  /** Colour the text; of several requests only the last counts. */
  async update() {
    const ask = ++this.asked;
    if (!this.shared.text && !this.session) {
      this.list.show({ tokens: [], bits: [] }, this.choice());
      return this.shared.say("Type something.");
    }
    const found = await this.shared.attempt(() => post("text", this.about()));
    if (!found || ask !== this.asked) return undefined;
    this.found = found;
    this.fillChoices(found);
    if (!this.running) this.shared.say(`${found.tokens.length} tokens, ${found.mean_bits?.toFixed(2) ?? "–"} bits per token`);
    if (this.session && !this.running) { this.shared.text = this.input.value = found.text; }
    this.recolour();
    if (!this.running) this.remember(ask);
    return undefined;
  }

  fillChoices(found) {
    const { settings } = this.shared;
    options(this.layer, Array.from({ length: Math.max(found.layers, 1) }, (_, i) => [String(i), `layer ${i}`]), this.layer.value || settings.layer);
    const heads = Array.from({ length: found.heads }, (_, i) => [String(i), `head ${i}`]);
    options(this.by, [...(found.heads ? [["group", "group (largest head)"], ...heads] : []), ["surprise", "surprise (bits)"]], this.by.value || settings.by);
  }

  recolour() {
    if (!this.found) return;
    const choice = this.choice();
    this.list.show(this.found, choice, this.session ? this.prompt : Infinity);
    const heads = choice.by === "surprise" || !this.found.heads ? [] : Array.from({ length: this.found.heads }, (_, i) => i);
    this.legend.replaceChildren(...heads.map((i) => el("li", {}, el("span", { class: "swatch", "--c": colour(i) }), `head ${i}`)));
    this.shared.choose({ model: this.model.value, ...choice });
    if (this.list.picked >= 0) this.pick(this.list.picked, false);
  }

  pick(i, firm) {
    if (!this.found || i >= this.found.tokens.length) return;
    if (firm) { this.back.disabled = !this.session; this.lookCloser(i); }
    const { layer } = this.choice();
    const pi = this.found.pi?.[layer]?.[i] ?? [];
    const bits = this.found.bits[i];
    this.detail.replaceChildren(
      el("p", {}, `${i}: ${JSON.stringify(this.found.tokens[i])}, `, bits == null ? "the first token" : `surprise ${bits.toFixed(2)} bits`),
      bars(pi.map((value, head) => ({ label: `head ${head}`, value, tint: colour(head), text: value.toFixed(3) }))),
      this.closer?.i === i ? this.closer.box : el("p", { class: "quiet" }, "Choose it for its gains and what may follow."));
  }

  async lookCloser(i) {
    const found = await this.shared.attempt(() => post("token", { ...this.about(), position: i }));
    if (!found) return;
    const follows = found.follows.map(({ token, p }) => ({ label: JSON.stringify(token), value: p }));
    const gains = found.gains.map((rows, layer) =>
      matrix({ title: `layer ${layer}`, rows, cell: Math.max(3, Math.min(10, Math.floor(280 / rows[0].length))), names: ["head", "direction"] }));
    this.closer = { i, box: el("div", {}, el("h2", {}, "What may follow"), bars(follows),
      ...(gains.length ? [el("h2", {}, "Gain D of every direction"), el("p", { class: "quiet" }, "dark: kept (0), bright: suppressed (1)"), ...gains] : [])) };
    this.pick(i, false);
  }

  /** Show how far back the state reaches, and what softmax attention would keep instead. */
  async remember(ask) {
    const found = await this.shared.attempt(() => post("memory", this.about()));
    if (!found || ask !== this.asked) return;
    const most = Math.max(found.cache_bytes, found.state_bytes);
    const sizes = bars([
      { label: "this state", value: found.state_bytes / most, text: size(found.state_bytes) },
      { label: "softmax cache", value: found.cache_bytes / most, text: size(found.cache_bytes), tint: "#D55E00" }]);
    if (!found.recent.length) return this.memory.replaceChildren(sizes, el("p", { class: "quiet" }, "Softmax attention keeps every token."));
    const { layer } = this.choice();
    const lines = found.mass[layer].map((values, head) => ({ name: `head ${head}`, values, tint: colour(head) }));
    const half = found.half_life[layer].map((value, head) => `head ${head}: ${value}`).join(", ");
    const chart = lineChart({ title: `Share of the state, layer ${layer}`, x: "the last so many tokens", y: "share", lines, labels: found.recent, width: 340, height: 250 });
    return this.memory.replaceChildren(sizes, chart, el("p", { class: "quiet" }, `Half of the state is the last so many tokens: ${half}.`));
  }

  async generate() {
    if (this.running) return;
    this.running = new AbortController();
    this.go.disabled = true;
    this.stop.disabled = false;
    this.back.disabled = true;
    const content = { ...this.about(), temperature: Number(this.temperature.input.value), top_p: Number(this.topP.input.value),
      count: Math.min(Math.max(Math.round(Number(this.count.value)) || 1, 1), 2000) };
    if (!this.session) this.prompt = this.found?.tokens.length ?? 0;
    let coloured = performance.now();
    await this.shared.attempt(async () => {
      for await (const part of stream("generate", content, this.running.signal)) {
        if (part.session) this.session = part.session;
        else if (part.ended) this.tell(part);
        else {
          this.list.add(part.token).classList.add("new");
          this.list.root.scrollTop = this.list.root.scrollHeight;
          if (performance.now() - coloured > PAUSE) { coloured = performance.now(); this.update(); }
        }
      }
    });
    if (this.running.signal.aborted) this.speed.textContent = "Stopped; Continue goes on from the saved state.";
    this.running = null;
    this.go.disabled = false;
    this.stop.disabled = true;
    this.go.textContent = this.session ? "Continue" : "Generate";
    await this.update();
  }

  tell(part) {
    const why = { room: "; the text is as long as the page shows", time: "; the time was up" }[part.ended] ?? "";
    this.speed.textContent = `${part.tokens} tokens, ${part.rate} per second; state ${size(part.state_bytes)}, ` +
      `a softmax cache ${size(part.cache_bytes)}${part.resumed ? "; went on from the saved state" : ""}${why}`;
  }

  /** Drop what follows the chosen token, and go on from the state that was saved there. */
  async goBack() {
    const position = this.list.picked + 1;
    const kept = await this.shared.attempt(() => post("back", { session: this.session, position }));
    if (!kept) return;
    this.shared.say(kept.saved ? "Went back to the saved state." : "Went back; the state is computed again.");
    this.prompt = Math.min(this.prompt, position);
    await this.update();
  }

  python() {
    const { layer } = this.choice();
    return [
      "import torch, tost, tost.analysis",
      `model, text = tost.load_${this.shared.model(this.model.value)?.pretrained ? "pretrained" : "model"}(${JSON.stringify(this.model.value)}), ${JSON.stringify(this.shared.text)}`,
      `tost.analysis.text_memberships(model, torch.tensor(list(text.encode())), text, layers=[${layer}]).figure()`,
    ].join("\n");
  }
}
