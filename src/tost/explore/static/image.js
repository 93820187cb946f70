// Drop a picture or take a sample: membership maps, class attention, the likeliest classes.

import { postImage } from "./api.js";
import { bars, colour, el, labelled, options, shade, stack, svg } from "./dom.js";

const SIDE = 320; // of the large map, in units of the drawing

export class ImageView {
  constructor(shared, root) { Object.assign(this, { shared, root, found: null, patch: 0, asked: 0 }); }

  build() {
    const { shared } = this;
    this.model = el("select", { onchange: () => { this.fillSamples(); this.update(); } });
    this.side = el("select", { onchange: () => this.update() });
    this.layer = el("select", { onchange: () => this.draw() });
    this.by = el("select", { onchange: () => this.draw() });
    this.file = el("input", { type: "file", accept: "image/*", onchange: () => this.take(this.file.files[0], "") });
    this.samples = el("div", { class: "samples" });
    const zone = el("div", { class: "drop", id: "drop" }, el("label", {}, "Drop a picture here, or choose one: ", this.file), this.samples);
    for (const [name, over] of [["dragover", true], ["dragleave", false], ["drop", false]])
      zone.addEventListener(name, (event) => {
        event.preventDefault();
        zone.classList.toggle("over", over);
        if (name === "drop" && event.dataTransfer.files[0]) this.take(event.dataTransfer.files[0], "");
      });
    this.map = el("div", { class: "map", id: "map" });
    this.small = el("div", { class: "small" });
    this.top = el("div", { id: "top" });
    this.detail = el("div", { id: "patch", "aria-live": "polite" });
    this.root.append(
      el("div", { class: "controls" }, labelled("Model", this.model), labelled("Longer side", this.side), labelled("Layer", this.layer), labelled("Show", this.by)),
      zone,
      el("div", { class: "columns" },
        el("div", {}, this.map, this.small, shared.tools("image", () => this.found && this.drawing(), () => this.python())),
        el("div", {},
          el("div", { class: "panel" }, el("h2", {}, "What it is"), this.top),
          el("div", { class: "panel" }, el("h2", {}, "This patch"), this.detail))));
    options(this.model, shared.of("image").map(({ name }) => [name, name]), shared.settings.image_model);
    options(this.side, [["", "as trained"], ...["32", "48", "64", "96", "128"].map((n) => [n, `${n} pixels`])], shared.settings.side ?? "");
    this.fillSamples();
  }

  fillSamples() {
    const model = this.shared.model(this.model.value);
    this.samples.replaceChildren(...(model?.samples ?? []).map((name) => {
      const address = `api/sample?${new URLSearchParams({ model: model.name, name })}`;
      return el("button", { type: "button", "aria-label": `sample ${name}`, onclick: () => this.sample(name) }, el("img", { src: address, alt: "" }));
    }));
  }

  async show() {
    const model = this.shared.model(this.model.value);
    if (!model) return this.shared.say("There is no image classifier here; name one after `tost explore`.");
    if (this.shared.picture) return this.update();
    const wanted = this.shared.settings.sample;
    const name = model.samples.includes(wanted) ? wanted : model.samples[model.samples.length >> 1];
    return name === undefined ? this.shared.say("Drop a picture.") : this.sample(name);
  }

  async sample(name) {
    await this.shared.attempt(async () => {
      const response = await fetch(`api/sample?${new URLSearchParams({ model: this.model.value, name })}`);
      await this.take(await response.blob(), name);
    });
  }

  async take(file, sample) {
    if (!file) return;
    this.shared.picture = { file, sample };
    await this.update();
  }

  query() { return { model: this.model.value, ...(this.side.value ? { side: this.side.value } : {}) }; }

  async update() {
    if (!this.shared.picture) return;
    const ask = ++this.asked;
    const found = await this.shared.attempt(() => postImage("image", this.query(), this.shared.picture.file));
    if (!found || ask !== this.asked) return;
    this.found = found;
    const { settings } = this.shared;
    const heads = found.maps?.[0].length ?? 0;
    options(this.layer, (found.maps ?? [0]).map((_, i) => [String(i), `layer ${i}`]), this.layer.value || settings.image_layer);
    options(this.by, [
      ...(heads ? [["group", "groups (hard)"], ...Array.from({ length: heads }, (_, i) => [String(i), `head ${i} (soft)`])] : []),
      ...(found.class_attention ?? []).map((_, i) => [`class${i}`, `class attention, head ${i}`]), ["none", "the picture"],
    ], this.by.value || settings.image_by);
    this.shared.say(`${found.width} x ${found.height} pixels: ${found.top[0].label}, ${(100 * found.top[0].p).toFixed(0)} %`);
    this.top.replaceChildren(bars(found.top.map(({ label, p }) => ({ label, value: p }))));
    this.draw();
  }

  draw() {
    if (!this.found) return;
    const by = this.by.value;
    const layer = Number(this.layer.value || 0);
    const large = this.overlay(by, layer, SIDE, this.describe(by, layer));
    large.setAttribute("tabindex", "0");
    large.addEventListener("keydown", (event) => this.key(event));
    large.addEventListener("mousemove", (event) => { if (event.target.dataset.i) this.pick(Number(event.target.dataset.i)); });
    this.map.replaceChildren(large);
    this.small.replaceChildren(...(this.found.maps?.[layer] ?? []).map((_, head) => el("figure", {},
      this.overlay(String(head), layer, 96, `head ${head} of layer ${layer}`), el("figcaption", {}, el("span", { class: "swatch", "--c": colour(head) }), `head ${head}`))));
    this.pick(Math.min(this.patch, this.cells().length - 1));
    this.shared.choose({ image_model: this.model.value, image_layer: this.layer.value, image_by: by, side: this.side.value, sample: this.shared.picture.sample });
  }

  describe(by, layer) {
    if (by === "none") return "the picture as the model sees it";
    if (by.startsWith("class")) return `where the class token looks, head ${by.slice(5)}`;
    return by === "group" ? `groups of the patches in layer ${layer}` : `head ${by} of layer ${layer}`;
  }

  grid() { return this.found.maps?.[0][0] ?? this.found.class_attention?.[0] ?? [[0]]; }
  cells() { return this.grid().flat(); }

  /** The picture with a map over it: colours of groups, or one head from dark blue to yellow. */
  overlay(by, layer, side, label) {
    const { found } = this;
    const [rows, columns] = [this.grid().length, this.grid()[0].length];
    const scale = side / Math.max(found.width, found.height);
    const [width, height] = [found.width * scale, found.height * scale];
    const whole = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
    whole.append(svg("image", { href: found.picture, width, height, preserveAspectRatio: "none", "image-rendering": "pixelated" }));
    if (by === "none") return whole;
    const maps = by.startsWith("class") ? [found.class_attention[Number(by.slice(5))]] : found.maps[layer];
    const one = by === "group" ? null : by.startsWith("class") ? maps[0] : maps[Number(by)];
    const most = one && Math.max(...one.flat(), 1e-9);
    for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) {
      const shares = maps.map((map) => map[r][c]);
      const head = shares.indexOf(Math.max(...shares));
      whole.append(svg("rect", { x: (c * width) / columns, y: (r * height) / rows, width: width / columns, height: height / rows,
        fill: one ? shade(one[r][c] / most) : colour(head), opacity: one ? 0.7 : 0.65, "data-i": r * columns + c }));
    }
    return whole;
  }

  key(event) {
    const columns = this.grid()[0].length;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (!step) return;
    event.preventDefault();
    this.pick(Math.min(Math.max(this.patch + step, 0), this.cells().length - 1));
  }

  pick(i) {
    this.patch = i;
    const columns = this.grid()[0].length;
    const [r, c] = [Math.floor(i / columns), i % columns];
    const maps = this.found.maps?.[Number(this.layer.value || 0)] ?? [];
    const looks = this.found.class_attention?.map((map) => map[r][c]) ?? [];
    this.detail.replaceChildren(el("p", {}, `row ${r}, column ${c}`),
      bars(maps.map((map, head) => ({ label: `head ${head}`, value: map[r][c], tint: colour(head), text: map[r][c].toFixed(3) }))),
      looks.length ? el("p", { class: "quiet" }, `weight of the class token: ${looks.map((value) => value.toFixed(3)).join(", ")}`) : null);
  }

  drawing() { return stack([this.map.firstChild, ...this.small.querySelectorAll("svg")]); }

  python() {
    const loader = this.shared.model(this.model.value)?.pretrained ? "pretrained" : "model";
    return [
      "import tost, tost.analysis",
      `model = tost.load_${loader}(${JSON.stringify(this.model.value)})  # images: normalized, [B, 3, ${this.found?.height ?? "height"}, ${this.found?.width ?? "width"}]`,
      `tost.analysis.membership_maps(model, [images], layers=[${this.layer.value || 0}]).figure()`,
    ].join("\n");
  }
}
