// Type a text, see its groups, let it be continued, go back.

import { post, stream } from "./api.js";
import { bars, Choice, colour, el, intro, labelled, oneAtATime, options, panel, scale, size, tiles } from "./dom.js";
import { lineChart, matrix } from "./draw.js";
import { drawTokens, TokenList } from "./tokens.js";

const PAUSE = 400; // ms between two colourings while tokens are coming
const DWELL = 200; // ms that a pointer or a keyboard rests before what is slower is computed

export class TextView {
  constructor(shared, root) {
    Object.assign(this, { shared, root, found: null, session: null, prompt: 0, running: null, asked: 0, update: oneAtATime(() => this.refresh()) });
  }

  build() {
    const { shared } = this;
    this.model = el("select", { onchange: () => { this.explain(); this.forget(); this.update(); } });
    this.layer = new Choice("text-layer", "Layer", () => this.recolour());
    this.by = new Choice("text-by", "Colour by", () => this.recolour());
    this.input = el("textarea", { id: "text-input", spellcheck: "false", placeholder: "Type or paste a text …", oninput: () => this.typed() });
    this.list = new TokenList("Tokens, coloured by group", (i, firm) => this.pick(i, firm));
    this.legend = el("div", {});
    this.temperature = this.slider("temperature", 0, 2, 0.05, 0.7);
    this.topP = this.slider("top_p", 0.05, 1, 0.05, 0.95);
    this.count = el("input", { type: "number", min: 1, max: 2000, value: shared.settings.count ?? 200 });
    this.go = el("button", { type: "button", class: "main", id: "generate", onclick: () => this.generate() }, "Generate");
    this.stop = el("button", { type: "button", id: "stop", disabled: true, onclick: () => this.running?.abort() }, "Stop");
    this.back = el("button", { type: "button", id: "back", disabled: true, onclick: () => this.goBack() }, "Go back to this token");
    this.speed = el("div", { class: "quiet grow", id: "speed" });
    this.detail = el("div", { id: "detail", class: "panel" });
    this.memory = el("div", { id: "memory", class: "panel" });
    this.layers = el("div", { class: "row middle" }, this.layer.root, this.layer.player("▶ Watch the groups form"));
    this.clear();
    this.root.append(
      this.intro = intro("", "", labelled("Model", this.model)),
      el("div", { class: "columns" },
        el("div", {},
          panel("", el("label", { for: "text-input" }, el("h3", {}, "Your text")), this.input,
            el("div", { class: "row" }, this.temperature.box, this.topP.box, labelled("Tokens", this.count),
              el("div", { class: "row end" }, this.stop, this.go))),
          panel("", this.layers, this.by.root, this.list.root, this.legend,
            el("div", { class: "row middle" }, this.back, this.speed),
            shared.tools("text", () => this.found && drawTokens(this.found, this.choice()), () => this.python()))),
        el("div", {}, this.detail, this.memory)));
    options(this.model, shared.of("text").map(({ name }) => [name, name]), shared.settings.model ?? shared.withGroups("text"));
    this.input.value = shared.text;
    this.explain();
  }

  /** Introduce what the chosen model has: groups, windows, or a surprise only. */
  explain() {
    const model = this.shared.model(this.model.value);
    const [title, lead] = model?.groups === false ?
      ["How surprising is each token?", "This model has no groups. The stronger the colour of a token, the more bits it cost the model."] :
      model?.gated ? ["Which head gains most from each token?", "The heads of this model have windows with a mean and a covariance. The share of a head in the coding-rate gain of a token takes the place of the membership: each token below has the colour of the head with the largest share."] :
      ["Which group does each token belong to?", "A ToST layer sorts its tokens into groups, one for each head, and a token meets the others only in the statistics of its groups. Each token below has the colour of the group it belongs to most."];
    this.intro.querySelector("h2").textContent = title;
    this.intro.querySelector("p").textContent = lead;
    this.list.root.setAttribute("aria-label", title);
  }

  slider(name, min, max, step, value) {
    const start = this.shared.settings[name] ?? value;
    const title = { temperature: "Temperature", top_p: "Top-p" }[name];
    const shown = el("output", {}, Number(start).toFixed(2));
    const input = el("input", { type: "range", min, max, step, value: start, "aria-label": title,
      oninput: () => { shown.textContent = Number(input.value).toFixed(2); },
      onchange: () => this.shared.choose({ [name]: input.value }) });
    return { input, box: el("label", { class: "field" }, el("span", {}, `${title} `, shown), input) };
  }

  show() {
    if (!this.model.value) return this.shared.say("There is no language model here; name one after `tost explore`.");
    if (this.input.value !== this.shared.text) { this.input.value = this.shared.text; this.forget(); }
    return this.update();
  }

  /** Leave what was generated, and what was found about its tokens. */
  forget() {
    clearTimeout(this.dwell);
    clearTimeout(this.later);
    [this.session, this.closer] = [null, null];
    this.speed.textContent = "Choose a token of a generated text to go back to it and take another way.";
    if (this.list.picked < 0) this.detail.replaceChildren(el("h3", {}, "This token"), el("p", { class: "quiet" }, "Point at a token, or walk through them with the arrow keys."));
  }

  /** Show what there is to see as long as there is nothing. */
  clear() {
    [this.found, this.remembered] = [null, null];
    this.list.show({ tokens: [], bits: [] }, this.choice());
    this.forget();
    this.memory.replaceChildren(el("h3", {}, "What the state remembers"), el("p", { class: "quiet" }, "How far back, and how many bytes of it."));
  }

  share() { return this.shared.share(this.model.value); }

  choice() { return { layer: Number(this.layer.value || 0), by: this.by.value || "group" }; }

  typed() {
    this.shared.text = this.input.value;
    this.forget();
    this.running?.abort();
    this.update();
  }

  /** What a request is about: the generated text, or the one that was typed. */
  about() { return this.session ? { session: this.session } : { model: this.model.value, text: this.shared.text }; }

  /** Colour the text. */
  async refresh() {
    const ask = ++this.asked;
    if (!this.session) this.go.textContent = "Generate";
    if (!this.shared.text && !this.session) {
      this.clear();
      return this.shared.say("Type something.");
    }
    const found = await this.shared.attempt(() => post("text", this.about()));
    if (!found) return undefined;
    this.found = found;
    this.fillChoices(found);
    if (!this.running) this.shared.say(`${found.tokens.length} tokens, ${found.mean_bits?.toFixed(2) ?? "–"} bits per token`);
    if (this.session && !this.running) { this.shared.text = this.input.value = found.text; this.input.scrollTop = this.input.scrollHeight; }
    this.recolour();
    clearTimeout(this.later);
    if (!this.running) this.later = setTimeout(() => this.remember(ask), DWELL); // not while somebody types
    return undefined;
  }

  fillChoices(found) {
    const { settings } = this.shared;
    this.layers.hidden = !found.layers;
    const numbers = (count) => Array.from({ length: count }, (_, i) => i);
    this.layer.offer(numbers(found.layers).map((i) => [String(i), String(i)]), this.layer.value || settings.layer);
    const groups = numbers(found.heads).map((i) => [String(i), `head ${i}`, colour(i)]);
    this.by.offer([...(found.heads ? [["group", "groups"], ...groups] : []), ["surprise", "surprise"]], this.by.value || settings.by);
  }

  recolour() {
    if (!this.found) return;
    const choice = this.choice();
    this.list.show(this.found, choice, this.session ? this.prompt : Infinity);
    const isSurprise = choice.by === "surprise" || !this.found.heads;
    this.legend.replaceChildren(isSurprise ? scale("expected, 0 bits", "surprising, 8 bits", "bits") :
      el("p", { class: "quiet" }, choice.by === "group" ? `Colour: the head with the largest ${this.share()}. Strength: how large it is.` : `Strength: ${this.share()} of head ${choice.by}.`));
    this.shared.choose({ model: this.model.value, ...choice });
    if (this.list.picked >= 0) this.pick(this.list.picked, false);
    this.drawMemory();
  }

  pick(i, firm) {
    if (!this.found || i >= this.found.tokens.length) return;
    clearTimeout(this.dwell);
    this.shown = i;
    if (firm) { this.back.disabled = !this.session; this.lookCloser(i); }
    else if (this.closer?.i !== i && !this.running) this.dwell = setTimeout(() => this.lookCloser(i), DWELL);
    const { layer } = this.choice();
    const pi = this.found.pi?.[layer]?.[i] ?? [];
    const bits = this.found.bits[i];
    this.detail.replaceChildren(el("h3", {}, `Token ${i}`),
      el("p", {}, el("span", { class: "big" }, JSON.stringify(this.found.tokens[i])),
        el("span", { class: "quiet" }, bits == null ? " first token" : ` surprise ${bits.toFixed(2)} bits`)),
      pi.length ? el("h4", {}, `${this.share().replace(/^./, (c) => c.toUpperCase())}, layer ${layer}`) : null,
      bars(pi.map((value, head) => ({ label: `head ${head}`, value, tint: colour(head), text: value.toFixed(3) }))),
      ...(this.closer?.i === i ? this.closerParts(layer) : [el("p", { class: "quiet" }, pi.length ? "What may follow, and the gains …" : "What may follow …")]));
  }

  async lookCloser(i) {
    const found = await this.shared.attempt(() => post("token", { ...this.about(), position: i }));
    if (!found || i !== this.shown) return; // a late answer does not replace the token that is shown now
    this.closer = { i, found };
    this.pick(i, false);
  }

  /** What is slower to compute about a token: successors, what its windows say of it, and gains. */
  closerParts(layer) {
    const { found } = this.closer;
    const follows = found.follows.map(({ token, p }) => ({ label: JSON.stringify(token), value: p }));
    const gains = found.gains.map((rows, i) =>
      matrix({ title: `layer ${i}`, rows, cell: Math.max(3, Math.min(10, Math.floor(310 / rows[0].length))), names: ["head", "direction"] }));
    const byHead = (title, values, unit) => {
      const most = Math.max(...values, 1e-9);
      return [el("h4", {}, title), bars(values.map((value, head) => ({ label: `head ${head}`, value: value / most, tint: colour(head), text: `${value.toFixed(2)}${unit}` })))];
    };
    return [el("h4", {}, "What may follow"), bars(follows),
      ...(found.nats.length ? [...byHead(`Coding-rate gain, layer ${layer}`, found.nats[layer], " nats"),
        ...byHead("Distance from the prediction (1: as far as from zero)", found.distance[layer], "")] : []),
      ...(gains.length ? [el("h4", {}, "Gain D of every direction"), scale("0 kept", "1 suppressed"), ...gains] : [])];
  }

  /** Ask how far back the state reaches, and what softmax attention would keep instead. */
  async remember(ask) {
    const found = await this.shared.attempt(() => post("memory", this.about()));
    if (!found || ask !== this.asked) return;
    this.remembered = found;
    this.drawMemory();
  }

  drawMemory() {
    const found = this.remembered;
    if (!found) return;
    const most = Math.max(found.cache_bytes, found.state_bytes);
    const parts = [el("h3", {}, "What the state remembers"), bars([
      { label: "this state", value: found.state_bytes / most, text: size(found.state_bytes) },
      { label: "softmax cache", value: found.cache_bytes / most, text: size(found.cache_bytes), tint: colour(1) }])];
    const layer = Math.min(this.choice().layer, found.mass.length - 1);
    parts.push(el("p", { class: "quiet" }, found.grows ? "This model keeps every token, so its state grows with the text." : "However long the text is, the state keeps its size."));
    if (found.recent.length) {
      const tokens = found.recent.at(-1);
      const lines = found.mass[layer].map((values, head) => ({ name: `head ${head}`, values, tint: colour(head) }));
      const reach = (lengths) => [...new Set([Math.min(...lengths), Math.max(...lengths)])]; // of the windows of a head
      parts.push(el("h4", {}, `Half of layer ${layer}'s state is from the last …`),
        bars(found.half_life[layer].map((lengths, head) => ({ label: `head ${head}`, value: Math.max(...lengths) / tokens, tint: colour(head), text: `${reach(lengths).join(" to ")} tokens` }))),
        el("h4", {}, "Share of the state by age"),
        lineChart({ title: `Share of the state by age, layer ${layer}`, x: "the last … tokens", y: "share", lines, ages: found.recent, width: 340, height: 250 }));
    }
    this.memory.replaceChildren(...parts);
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
    const started = performance.now();
    let [coloured, came] = [started, 0];
    await this.shared.attempt(async () => {
      for await (const part of stream("generate", content, this.running.signal)) {
        if (part.session) this.session = part.session;
        else if (part.ended) this.tell(part);
        else {
          this.list.add(part.token).classList.add("new");
          this.list.scrollToEnd();
          came += 1;
          const now = performance.now();
          if (now - coloured > PAUSE) {
            coloured = now;
            this.shared.say(`${came} tokens, ${((1000 * came) / (now - started)).toFixed(0)} per second`);
            this.update();
          }
        }
      }
    });
    if (this.running.signal.aborted && this.session) this.speed.textContent = "Stopped; Continue goes on from the saved state.";
    this.running = null;
    this.go.disabled = false;
    this.stop.disabled = true;
    this.go.textContent = this.session ? "Continue" : "Generate";
    await this.update();
  }

  tell(part) {
    const why = { room: "the text is as long as the page shows", time: "the time was up" }[part.ended];
    const notes = [part.resumed ? "Went on from the saved state." : "", why ? `It ended because ${why}.` : ""].filter(Boolean).join(" ");
    this.speed.replaceChildren(tiles({ tokens: part.tokens, "tokens per second": part.rate, state: size(part.state_bytes), "softmax cache": size(part.cache_bytes) }), notes);
  }

  /** Drop what follows the chosen token, and go on from the state that was saved there. */
  async goBack() {
    const position = this.list.picked + 1;
    const kept = await this.shared.attempt(() => post("back", { session: this.session, position }));
    if (!kept) return;
    this.prompt = Math.min(this.prompt, position);
    await this.update();
    this.shared.say(kept.saved ? "Went back to the saved state." : "Went back; the state is computed again.");
  }

  python() {
    const { layer } = this.choice();
    return this.shared.python([this.shared.model(this.model.value)], () => (this.found?.heads ?
      `look.text_memberships(source.model, inputs, text.strings(source, inputs), layers=[${layer}]).figure()` :
      "look.surprise(source.model, inputs, text.strings(source, inputs)).summary()"));
  }
}
