// Two models on the same input, side by side.

import { post, postImage } from "./api.js";
import { bars, Choice, el, intro, labelled, options, panel, scale, size, tiles } from "./dom.js";
import { lineChart, stack } from "./draw.js";
import { overlay } from "./image.js";
import { drawTokens, TokenList } from "./tokens.js";

const SIDE = 320;

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
    const first = shared.withGroups("text") ?? shared.withGroups("image");
    const second = shared.of(shared.model(first)?.kind).find(({ name }) => name !== first)?.name ?? first;
    this.selects = [["a", first], ["b", second]].map(([key, usual]) => {
      const select = el("select", { onchange: () => this.update() });
      options(select, names, shared.settings[key] ?? usual);
      return select;
    });
    this.by = new Choice("compare-by", "Colour by", () => this.draw());
    this.by.offer([["surprise", "surprise"], ["group", "groups, first layer"], ["group-last", "groups, last layer"]], shared.settings.compare_by);
    this.input = el("textarea", { id: "compare-input", spellcheck: "false", maxlength: 20000,
      oninput: () => { shared.text = this.input.value; this.update(); } });
    this.field = panel("", el("label", { for: "compare-input" }, el("h3", {}, "Your text")), this.input,
      el("div", { class: "row" }, this.by.root, scale("expected, 0 bits", "surprising, 8 bits", "bits")));
    this.columns = el("div", { class: "halves" });
    this.chart = el("div", {});
    this.root.append(
      intro("Two models, one input", "Both models read the same input. Where a token is dark, it cost that model many bits; the lower curve is the model that understands the input better.",
        labelled("Left", this.selects[0]), labelled("Right", this.selects[1])),
      this.field, this.columns, this.chart, panel("", shared.tools("compare", () => this.drawing(), () => this.python())));
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
    return { model, found: await postImage("image", { model: model.name }, (await this.shared.pictureFor(model)).file) };
  }

  draw() {
    const { sides } = this;
    this.shared.choose({ compare_by: this.by.value });
    this.columns.replaceChildren(...sides.map((side) => panel(side.model.name, el("p", { class: "quiet" }, side.model.description || side.model.model),
      side.found.tokens ? this.text(side) : this.image(side))));
    const [first] = sides;
    const title = "Bits per token up to here";
    this.chart.replaceChildren(...(first?.found.tokens ? [panel(title, lineChart({ title, x: "token", y: "bits", width: 1000, height: 300,
      lines: sides.map((side, i) => ({ name: side.model.name, values: runningMean(side.found.bits), dash: i ? "6 3" : null })) }))] : []));
  }

  choice(found) {
    if (this.by.value === "surprise" || !found.pi) return { layer: 0, by: "surprise" };
    return { layer: this.by.value === "group" ? 0 : found.layers - 1, by: "group" };
  }

  text({ found, memory, model }) {
    const list = new TokenList(`Tokens of ${model.name}`, () => {});
    list.show(found, this.choice(found));
    const words = found.pi || this.by.value === "surprise" ? null : el("p", { class: "quiet" }, "Softmax attention has no groups; the colour is surprise.");
    return el("div", { class: "stack" }, tiles({ "bits per token": found.mean_bits?.toFixed(3) ?? "–", [`kept after ${found.tokens.length} tokens`]: size(memory.state_bytes),
      parameters: `${(model.parameters / 1e6).toFixed(2)} M` }), list.root, words);
  }

  image({ found, model }) {
    const by = found.maps ? "group" : found.class_attention ? "class0" : "none";
    return el("div", { class: "stack" }, tiles({ "likeliest class": found.top[0].label, "its probability": `${(100 * found.top[0].p).toFixed(0)} %`, parameters: `${(model.parameters / 1e6).toFixed(2)} M` }),
      el("div", { class: "map" }, overlay(found, by, (found.maps?.length ?? 1) - 1, SIDE, `the picture as ${model.name} sees it`)),
      el("p", { class: "quiet" }, { group: "Groups in the last layer.", class0: "Where the class token looks.", none: "" }[by]),
      bars(found.top.map(({ label, p }) => ({ label, value: p }))));
  }

  drawing() {
    if (!this.sides.length) return null;
    const drawn = this.sides.map(({ found }) => (found.tokens ? drawTokens(found, this.choice(found)) : null)).filter(Boolean);
    return stack([...drawn, ...this.root.querySelectorAll(".halves svg"), ...this.chart.querySelectorAll("svg")]);
  }

  python() {
    return this.shared.python(this.chosen(), (inputs) => (this.chosen()[0].kind === "text" ?
      `[look.surprise(m.model, ids := ${inputs("m")}, text.strings(m, ids)).summary() for m in models]` :
      `[m.model(${inputs("m")}).softmax(-1).topk(5) for m in models]`));
  }
}
