// What the layers do to this very input: coding rates against an untrained control, coherence, gains.

import { post, postImage } from "./api.js";
import { colour, el, labelled, lineChart, matrix, options, stack } from "./dom.js";

const NAMES = { rate: "R", compression: "R_c", variational: "R_c^var" };

export class InsideView {
  constructor(shared, root) { Object.assign(this, { shared, root, asked: 0 }); }

  build() {
    const { shared } = this;
    this.model = el("select", { onchange: () => this.update() });
    this.input = el("p", { class: "quiet" });
    this.verdict = el("p", { id: "verdict" });
    this.charts = el("div", { class: "charts" });
    this.matrices = el("div", {});
    this.root.append(el("div", { class: "controls" }, labelled("Model", this.model)), this.input, this.verdict, this.charts, this.matrices,
      shared.tools("inside", () => this.charts.children.length && stack([...this.root.querySelectorAll(".charts svg, .matrices svg")]), () => this.python()));
    options(this.model, shared.models.map(({ name }) => [name, name]), shared.settings.inside_model ?? shared.models.find(({ options: { mixer } }) => mixer !== "softmax")?.name);
  }

  show() { return this.update(); }

  async update() {
    const { shared } = this;
    const ask = ++this.asked;
    const model = shared.model(this.model.value);
    if (!model) return;
    shared.choose({ inside_model: model.name });
    shared.say("Measuring …");
    const found = await shared.attempt(async () => {
      if (model.kind === "text") return post("inside", { model: model.name, text: shared.text });
      if (!shared.picture && model.samples.length) {
        const name = model.samples[model.samples.length >> 1];
        const sample = await fetch(`api/sample?${new URLSearchParams({ model: model.name, name })}`);
        shared.picture = { file: await sample.blob(), sample: name };
      }
      if (!shared.picture) throw new Error("choose a picture in the view Image first.");
      return postImage("inside", { model: model.name }, shared.picture.file);
    });
    if (ask !== this.asked) return;
    if (!found) { this.charts.replaceChildren(); this.matrices.replaceChildren(); this.verdict.textContent = ""; return; }
    shared.say("");
    this.input.textContent = model.kind === "text" ? "Measured on the text of the view Text." : "Measured on the picture of the view Image.";
    this.verdict.textContent = found.verdict;
    this.draw(found);
  }

  draw(found) {
    const at = (source) => found.curves.find((curve) => curve.source === source && curve.place === "attention").values;
    const [trained, control] = [at("trained"), at("control")];
    const charts = Object.entries(NAMES).map(([measure, name], i) => lineChart({
      title: `${name} after the attention`, x: "layer", y: "nats",
      lines: [{ name: "trained", values: trained[measure], tint: colour(i) }, { name: "untrained", values: control[measure], tint: "#7F7F7F", dash: "5 4" }],
    }));
    const heads = found.usage[0].length;
    charts.push(lineChart({ title: "Use of the heads", x: "layer", y: "share",
      lines: Array.from({ length: heads }, (_, head) => ({ name: `head ${head}`, values: found.usage.map((row) => row[head]) })) }));
    this.charts.replaceChildren(...charts);
    const group = (title, text, drawings) => el("div", { class: "panel" }, el("h2", {}, title), el("p", { class: "quiet" }, text), el("div", { class: "matrices" }, ...drawings));
    const most = Math.max(...found.coherence.blocks.flat(2), 2 * found.coherence.random);
    this.matrices.replaceChildren(
      group("Coherence of the subspaces", `Mean |cosine| of directions of two heads, by layer; random directions have ${found.coherence.random.toFixed(3)}.`,
        found.coherence.blocks.map((rows, layer) => matrix({ title: `layer ${layer}`, rows, high: most, cell: 22, names: ["head", "head"] }))),
      group("Gain D = 1 / (1 + moment)", "A row per head, a column per direction; dark is kept (0), bright is suppressed (1).",
        found.gains.map((rows, layer) => matrix({ title: `layer ${layer}`, rows, cell: Math.max(5, Math.min(12, Math.floor(300 / rows[0].length))), names: ["head", "direction"] }))));
  }

  python() {
    const name = JSON.stringify(this.model.value);
    const loader = this.shared.model(this.model.value)?.pretrained ? "pretrained" : "model";
    return [
      "import torch, tost, tost.analysis as look",
      `model, batch = tost.load_${loader}(${name}), ${this.shared.model(this.model.value)?.kind === "text" ? `torch.tensor([list(${JSON.stringify(this.shared.text)}.encode())])` : "images"}`,
      "(look.coding_rate_by_layer(model, [batch]) + look.coding_rate_by_layer(look.control_of(model), [batch], source=\"control\")).figure()",
    ].join("\n");
  }
}
