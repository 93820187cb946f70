// What the layers do to this very input: coding rates against an untrained control, coherence, gains, block statistics.

import { post, postImage } from "./api.js";
import { Choice, colour, el, formulas, intro, labelled, options, panel, scale } from "./dom.js";
import { lineChart, matrix, matrixGrid, stack } from "./draw.js";

const RATES = {
  rate: ["R: all tokens together", "Nats to store all tokens at once; higher is more spread out."],
  compression: ["R_c: group by group", "Nats to store the tokens of each group by themselves; lower is tighter groups."],
  variational: ["R_c^var: what the attention lowers", "The bound on R_c of which every attention layer is meant to take one step down."],
};
/** What rates mean in a model whose heads have windows in place of groups. */
const WINDOWS = {
  compression: "The same with the shares of the coding-rate gain as groups.",
  variational: "Log-determinants of the covariances about the means of the windows, mean over the tokens; the attention is meant to take one step down.",
};

export class InsideView {
  constructor(shared, root) { Object.assign(this, { shared, root, asked: 0 }); }

  build() {
    const { shared } = this;
    this.model = el("select", { onchange: () => this.update() });
    this.place = new Choice("inside-place", "Measured", () => this.draw());
    this.place.offer([["attention", "after the attention"], ["input", "before it"]], shared.settings.place);
    this.input = el("p", { class: "quiet" });
    this.verdict = el("p", { id: "verdict", class: "verdict" });
    this.charts = el("div", { class: "charts" });
    this.matrices = el("div", {});
    this.root.append(
      intro("What does each layer do to this input?",
        "In theory every attention layer makes the groups cheaper to store. The solid lines are this model, the dashed ones the same model before any training, on the very same input.",
        labelled("Model", this.model)),
      panel("", this.verdict, el("div", { class: "row middle" }, this.place.root, this.input)), this.charts, this.matrices,
      panel("", shared.tools("inside", () => this.charts.children.length && stack([...this.root.querySelectorAll(".charts svg, .matrices svg")]), () => this.python())));
    const known = shared.models.filter(({ groups }) => groups);
    options(this.model, (known.length ? known : shared.models).map(({ name }) => [name, name]), shared.settings.inside_model ?? shared.withGroups("text"));
  }

  show() { return this.update(); }

  async update() {
    const { shared } = this;
    const ask = ++this.asked;
    const model = shared.model(this.model.value);
    if (!model) return;
    shared.choose({ inside_model: model.name });
    shared.say("Measuring …");
    this.found = await shared.attempt(async () => {
      if (model.kind === "text") return post("inside", { model: model.name, text: shared.text });
      return postImage("inside", { model: model.name }, (await shared.pictureFor(model)).file);
    });
    if (ask !== this.asked) return;
    if (!this.found) { this.charts.replaceChildren(); this.matrices.replaceChildren(); this.verdict.textContent = ""; return; }
    shared.say("");
    this.input.textContent = model.kind === "text" ? "Input: the text of the tab Text." : "Input: the picture of the tab Image.";
    this.verdict.replaceChildren(...formulas(this.found.verdict));
    this.draw();
  }

  draw() {
    const { found } = this;
    if (!found) return;
    const place = this.place.value;
    this.shared.choose({ place });
    const at = (source) => found.curves.find((curve) => curve.source === source && curve.place === place).values;
    const [trained, control] = [at("trained"), at("control")];
    const charts = Object.entries(RATES).map(([measure, [title, text]], i) => panel(title, el("p", { class: "quiet" }, ...formulas((found.predicted && WINDOWS[measure]) || text)), lineChart({
      title, x: "layer", y: "nats", width: 560, height: 250,
      lines: [{ name: "this model", values: trained[measure], tint: colour(i) }, { name: "untrained", values: control[measure], tint: "#7F7F7F", dash: "5 4" }],
    })));
    const share = this.shared.share(this.model.value);
    const byHead = (title, text, table) => panel(title, el("p", { class: "quiet" }, text), lineChart({ title, x: "layer", y: "share", width: 560, height: 270,
      lines: Array.from(table[0], (_, head) => ({ name: `head ${head}`, values: table.map((row) => row[head]) })) }));
    charts.push(byHead("Use of the heads", `The mean ${share} of each head over the tokens.`, found.usage));
    if (found.predicted) charts.push(byHead("What the windows predict", "The share of a token's squares that the mean of the window before it predicts.", found.predicted));
    this.charts.replaceChildren(...charts);
    const group = (title, text, key, drawings) => panel(title, el("p", { class: "quiet" }, text), key, el("div", { class: "matrices" }, ...drawings));
    const most = Math.max(...found.coherence.blocks.flat(2), 2 * found.coherence.random);
    const parts = [
      group("D by layer: what is kept, what is taken away",
        `D = 1 / (1 + second moment${found.predicted ? " about the mean of the window" : ""}) is the share of a direction that the operator takes away from the tokens of a ${found.predicted ? "head" : "group"}. A row for each head, a column for each direction.`,
        scale("0 kept", "1 suppressed"),
        found.gains.map((rows, layer) => matrix({ title: `layer ${layer}`, rows, cell: Math.max(5, Math.min(12, Math.floor(270 / rows[0].length))), names: ["head", "direction"] }))),
      group("Coherence of the subspaces", `Mean |cosine| between the directions of two heads. In theory heads look at different things, off the diagonal dark; random directions have ${found.coherence.random.toFixed(3)}.`,
        scale("0 apart", `${most.toFixed(2)} alike`),
        found.coherence.blocks.map((rows, layer) => matrix({ title: `layer ${layer}`, rows, high: most, cell: 24, names: ["head", "head"] }))),
    ];
    if (found.blocks) parts.push(group("Block statistics",
      `This model takes second moments of ${found.blocks[0][0][0].length} features at a time. Each small matrix shows how the features of one block vary together; a row for each head.`,
      scale("-1 against", "1 together", "signed"), found.blocks.map((grid, layer) => matrixGrid({ title: `layer ${layer}`, grid, cell: Math.max(3, Math.min(8, Math.floor(48 / grid[0][0].length))) }))));
    this.matrices.replaceChildren(...parts);
  }

  python() {
    return this.shared.python([this.shared.model(this.model.value)],
      () => "(look.coding_rate_by_layer(source.model, [inputs]) + look.coding_rate_by_layer(source.control, [inputs], source=\"control\")).figure()");
  }
}
