// Two models on the same input, side by side.

import { post, postImage } from "./api.js";
import { bars, Choice, el, intro, labelled, oneAtATime, options, panel, scale, size, tiles } from "./dom.js";
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
  constructor(shared, root) { Object.assign(this, { shared, root, sides: [], update: oneAtATime(() => this.refresh()) }); }

  build() {
    const { shared } = this;
    const [left, right] = [el("select", { onchange: () => { this.fillRight(); this.update(); } }), el("select", { onchange: () => this.update() })];
    this.selects = [left, right];
    options(left, shared.models.map(({ name }) => [name, name]), shared.settings.a ?? shared.withGroups("text") ?? shared.withGroups("image"));
    this.fillRight(shared.settings.b);
    this.by = new Choice("compare-by", "Colour by", () => this.draw());
    this.by.offer([["surprise", "surprise"], ["group", "groups, first layer"], ["group-last", "groups, last layer"]], shared.settings.compare_by);
    this.input = el("textarea", { id: "compare-input", spellcheck: "false", placeholder: "Type or paste a text …",
      oninput: () => { shared.text = this.input.value; this.update(); } });
    this.key = scale("expected, 0 bits", "surprising, 8 bits", "bits");
    this.field = panel("", el("label", { for: "compare-input" }, el("h3", {}, "Your text")), this.input,
      el("div", { class: "row middle" }, this.by.root, this.key));
    this.columns = el("div", { class: "halves" });
    this.chart = el("div", {});
    this.root.append(
      intro("Two models, one input", this.lead = el("span"),
        labelled("Left", this.selects[0]), labelled("Right", this.selects[1])),
      this.field, this.columns, this.chart, panel("", shared.tools("compare", () => this.drawing(), () => this.python())));
  }

  show() { this.input.value = this.shared.text; return this.update(); }

  /** Offer models that read what the left one reads. */
  fillRight(wanted) {
    const left = this.shared.model(this.selects[0].value);
    const fitting = this.shared.of(left?.kind).map(({ name }) => name);
    options(this.selects[1], fitting.map((name) => [name, name]), wanted ?? fitting.find((name) => name !== left.name) ?? left?.name);
  }

  chosen() { return this.selects.map((select) => this.shared.model(select.value)); }

  async refresh() {
    const { shared } = this;
    const models = this.chosen();
    if (models.some((model) => !model)) return;
    shared.choose({ a: models[0].name, b: models[1].name });
    const kind = models[0].kind;
    this.field.hidden = kind !== "text";
    this.lead.textContent = kind === "text" ?
      "Both models read the same text. The stronger the colour of a token, the more bits it cost that model; the lower curve belongs to the model that predicts the text better." :
      "Both models see the same picture: what they take it for, and which of its parts belong together.";
    const sides = await shared.attempt(async () => {
      if (kind === "text" && !shared.text) throw new Error("type something.");
      return Promise.all(models.map((model) => (kind === "text" ? this.readText(model) : this.readImage(model))));
    });
    if (!sides) return;
    shared.say(models[0] === models[1] ? "Both sides are the same model; name others after `tost explore`." : "");
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
    this.key.hidden = this.by.value !== "surprise";
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
