// Two models on the same input, side by side.

import { post, postImage } from "./api.js";
import { bars, colour, el, labelled, lineChart, options, size, stack, svg } from "./dom.js";
import { drawTokens, TokenList } from "./tokens.js";

/** Mean of the numbers up to each one. */
function runningMean(values) {
  let [sum, count] = [0, 0];
  return values.map((value) => {
    if (value == null) return null;
    sum += value;
    count += 1;
    return sum / count;
  });
}

export class CompareView {
  constructor(shared, root) { Object.assign(this, { shared, root, asked: 0, sides: [] }); }

  build() {
    const { shared } = this;
    const names = shared.models.map(({ name }) => [name, name]);
    const texts = shared.of("text").map(({ name }) => name);
    this.selects = ["a", "b"].map((key, i) => {
      const select = el("select", { onchange: () => this.update() });
      options(select, names, shared.settings[key] ?? texts[Math.min(texts.length - 1, i)]);
      return select;
    });
    this.by = el("select", { onchange: () => this.draw() });
    options(this.by, [["surprise", "surprise (bits)"], ["group", "group, first layer"], ["group-last", "group, last layer"]], shared.settings.compare_by);
    this.input = el("textarea", { id: "compare-input", spellcheck: "false", maxlength: 20000,
      oninput: () => { shared.text = this.input.value; this.update(); } });
    this.field = el("div", {}, el("label", { for: "compare-input", class: "quiet" }, "Text"), this.input);
    this.columns = el("div", { class: "halves" });
    this.chart = el("div", {});
    this.root.append(
      el("div", { class: "controls" }, labelled("Left", this.selects[0]), labelled("Right", this.selects[1]), labelled("Colour by", this.by)),
      this.field, this.columns, this.chart,
      shared.tools("compare", () => this.drawing(), () => this.python()));
  }

  show() { this.input.value = this.shared.text; return this.update(); }

  chosen() { return this.selects.map((select) => this.shared.model(select.value)); }

  async update() {
    const { shared } = this;
    const ask = ++this.asked;
    const models = this.chosen();
    if (models.some((model) => !model)) return;
    shared.choose({ a: models[0].name, b: models[1].name });
    const kind = models[0].kind;
    this.field.hidden = kind !== "text";
    const sides = await shared.attempt(async () => {
      if (models[1].kind !== kind) throw new Error("choose two models of text, or two of images.");
      if (kind === "text" && !shared.text) throw new Error("type something.");
      return Promise.all(models.map((model) => (kind === "text" ? this.readText(model) : this.readImage(model))));
    });
    if (!sides || ask !== this.asked) return;
    shared.say("");
    this.sides = sides;
    this.draw();
  }

  async readText(model) {
    const about = { model: model.name, text: this.shared.text };
    const [found, memory] = await Promise.all([post("text", about), post("memory", about)]);
    return { model, found, memory };
  }

  async readImage(model) {
    if (!this.shared.picture) throw new Error("choose a picture in the view Image first.");
    return { model, found: await postImage("image", { model: model.name }, this.shared.picture.file) };
  }

  draw() {
    const { sides } = this;
    this.shared.choose({ compare_by: this.by.value });
    this.columns.replaceChildren(...sides.map((side) => el("div", { class: "panel" }, el("h2", {}, side.model.name),
      el("p", { class: "quiet" }, `${side.model.description || side.model.model}; ${(side.model.parameters / 1e6).toFixed(2)}M parameters`),
      side.found.tokens ? this.text(side) : this.image(side))));
    const [first] = sides;
    this.chart.replaceChildren(...(first?.found.tokens ? [lineChart({
      title: "Bits per token up to here", x: "token", y: "bits", width: 760, height: 260,
      lines: sides.map((side, i) => ({ name: side.model.name, values: runningMean(side.found.bits), dash: i ? "6 3" : null })),
    })] : []));
  }

  choice(found) {
    if (this.by.value === "surprise" || !found.pi) return { layer: 0, by: "surprise" };
    return { layer: this.by.value === "group" ? 0 : found.layers - 1, by: "group" };
  }

  text({ found, memory, model }) {
    const list = new TokenList(`Tokens of ${model.name}`, () => {});
    list.show(found, this.choice(found));
    return el("div", {},
      el("p", {}, `${found.mean_bits?.toFixed(3) ?? "–"} bits per token; keeps ${size(memory.state_bytes)} after ${found.tokens.length} tokens`), list.root);
  }

  image({ found }) {
    const picture = svg("svg", { viewBox: `0 0 ${found.width} ${found.height}`, role: "img", "aria-label": "the picture as the model sees it, with its groups", class: "map" });
    picture.append(svg("image", { href: found.picture, width: found.width, height: found.height, "image-rendering": "pixelated" }));
    const maps = found.maps?.at(-1) ?? found.class_attention;
    maps?.[0].forEach((row, r) => row.forEach((_, c) => {
      const shares = maps.map((map) => map[r][c]);
      const [wide, high] = [found.width / row.length, found.height / maps[0].length];
      picture.append(svg("rect", { x: c * wide, y: r * high, width: wide, height: high, opacity: 0.6, fill: colour(shares.indexOf(Math.max(...shares))) }));
    }));
    return el("div", {}, picture, bars(found.top.map(({ label, p }) => ({ label, value: p }))));
  }

  drawing() {
    if (!this.sides.length) return null;
    const drawn = this.sides.map(({ found }) => (found.tokens ? drawTokens(found, this.choice(found)) : null)).filter(Boolean);
    return stack([...drawn, ...this.root.querySelectorAll(".halves svg"), ...this.chart.querySelectorAll("svg")]);
  }

  python() {
    const [a, b] = this.chosen().map((model) => `tost.load_${model.pretrained ? "pretrained" : "model"}(${JSON.stringify(model.name)})`);
    return [
      "import torch, tost, tost.analysis",
      `text = ${JSON.stringify(this.shared.text)}`,
      `[tost.analysis.surprise(model, torch.tensor(list(text.encode())), text).summary() for model in (${a}, ${b})]`,
    ].join("\n");
  }
}
