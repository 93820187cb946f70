// Drop a picture or take a sample: membership maps, class attention, the likeliest classes.

import { postImage, sample } from "./api.js";
import { bars, Choice, colour, el, intro, labelled, options, panel, scale, shade, svg } from "./dom.js";
import { stack } from "./draw.js";

const SIDE = 320; // of the large map, in units of the drawing
const SMALL = 96;

/** Least and largest number of the maps that share a scale: of all heads of a layer, or of one head of the class token. */
function range(found, by, layer) {
  const numbers = by.startsWith("class") ? [0, ...found.class_attention[Number(by.slice(5))].flat()] : found.maps[layer].flat(2);
  return numbers.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [numbers[0], numbers[0]]);
}

/** The largest share of each patch. */
const largest = (maps) => maps[0].flatMap((row, r) => row.map((_, c) => Math.max(...maps.map((map) => map[r][c]))));

/** The picture with a map over it: groups by colour, or one map from dark blue to yellow; `by` as in the view. */
export function overlay(found, by, layer, side, label) {
  const scaled = side / Math.max(found.width, found.height);
  const [width, height] = [found.width * scaled, found.height * scaled];
  const whole = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  whole.append(svg("image", { href: found.picture, width, height, preserveAspectRatio: "none", "image-rendering": "pixelated" }));
  if (by === "none") return whole;
  const isClass = by.startsWith("class");
  const maps = isClass ? [found.class_attention[Number(by.slice(5))]] : found.maps[layer];
  const one = isClass ? maps[0] : maps[Number(by)]; // none for the groups
  const [rows, columns] = [maps[0].length, maps[0][0].length];
  const shares = (r, c) => maps.map((map) => map[r][c]);
  const even = 1 / maps.length;
  const [low, high] = range(found, by, layer);
  for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) {
    const at = shares(r, c);
    const head = at.indexOf(Math.max(...at));
    const paint = one ? { fill: shade((one[r][c] - low) / (high - low || 1)), opacity: 0.78 } :
      { fill: colour(head), opacity: by === "group" ? 0.65 : (0.08 + (0.77 * (at[head] - even)) / (high - even || 1)).toFixed(3) };
    whole.append(svg("rect", { x: (c * width) / columns, y: (r * height) / rows, width: width / columns, height: height / rows, "data-i": r * columns + c, ...paint }));
  }
  return whole;
}

export class ImageView {
  constructor(shared, root) { Object.assign(this, { shared, root, found: null, patch: 0, asked: 0 }); }

  build() {
    const { shared } = this;
    this.model = el("select", { onchange: () => { this.fillSamples(); this.update(); } });
    this.side = el("select", { onchange: () => this.update() });
    this.layer = new Choice("image-layer", "Layer", () => this.draw());
    this.by = new Choice("image-by", "Show", () => this.draw());
    this.file = el("input", { type: "file", accept: "image/*", onchange: () => this.take(this.file.files[0], "") });
    this.samples = el("div", { class: "samples", role: "group", "aria-label": "Samples" });
    const zone = el("div", { class: "drop", id: "drop" }, el("label", {}, "Drop a picture here, or choose one", this.file), this.samples);
    for (const [name, over] of [["dragover", true], ["dragleave", false], ["drop", false]])
      zone.addEventListener(name, (event) => {
        event.preventDefault();
        zone.classList.toggle("over", over);
        if (name === "drop" && event.dataTransfer.files[0]) this.take(event.dataTransfer.files[0], "");
      });
    this.map = el("div", { class: "map", id: "map" });
    this.caption = el("div", {});
    this.small = el("div", { class: "small" });
    this.top = el("div", { id: "top" });
    this.detail = el("div", { id: "patch", class: "panel", "aria-live": "polite" });
    this.layers = el("div", { class: "row middle" }, this.layer.root, this.layer.player("▶ Watch the groups form"));
    this.root.append(
      intro("Which parts of a picture belong together?",
        "The model cuts the picture into patches and sorts them into groups, one for each head. A patch has the colour of the group that has most of it; a map of one head is bright where that head has most.",
        labelled("Model", this.model), labelled("Longer side", this.side)),
      el("div", { class: "columns" },
        el("div", {}, panel("", zone),
          this.result = panel("", this.layers, this.by.root,
            el("div", { class: "maps" }, el("div", {}, this.map, this.caption), this.small),
            shared.tools("image", () => this.found && this.drawing(), () => this.python()))),
        this.beside = el("div", {}, panel("What the model takes it for", this.top), this.detail)));
    this.result.hidden = this.beside.hidden = true;
    options(this.model, shared.of("image").map(({ name }) => [name, name]), shared.settings.image_model ?? shared.withGroups("image"));
    options(this.side, [["", "as trained"], ...["32", "48", "64", "96", "128"].map((n) => [n, `${n} pixels`])], shared.settings.side ?? "");
    this.fillSamples();
  }

  fillSamples() {
    const model = this.shared.model(this.model.value);
    this.samples.replaceChildren(...(model?.samples ?? []).map((name) => {
      const picture = el("img", { alt: "" });
      sample(model.name, name).then((file) => { picture.src = URL.createObjectURL(file); });
      return el("button", { type: "button", "aria-label": `sample ${name}`, "aria-pressed": "false", onclick: () => this.sample(name) }, picture);
    }));
  }

  async show() {
    const model = this.shared.model(this.model.value);
    if (!model) return this.shared.say("There is no image classifier here; name one after `tost explore`.");
    await this.shared.attempt(() => this.shared.pictureFor(model));
    return this.update();
  }

  sample(name) { return this.shared.attempt(async () => this.take(await sample(this.model.value, name), name)); }

  async take(file, name) {
    if (!file) return;
    this.shared.picture = { file, sample: name };
    await this.update();
  }

  async update() {
    const { shared } = this;
    const { picture, settings } = shared;
    if (!picture) return;
    const ask = ++this.asked;
    const query = { model: this.model.value, ...(this.side.value ? { side: this.side.value } : {}) };
    const found = await shared.attempt(() => postImage("image", query, picture.file));
    if (ask !== this.asked) return;
    if (!found) { shared.picture = this.accepted ?? null; return; } // no view shows or cites a file that was refused
    this.accepted = picture;
    this.found = found;
    this.result.hidden = this.beside.hidden = false;
    const heads = Array.from(found.maps?.[0] ?? [], (_, i) => [String(i), `head ${i}`, colour(i)]);
    this.layers.hidden = !heads.length;
    this.layer.offer((found.maps ?? []).map((_, i) => [String(i), String(i)]), this.layer.value || settings.image_layer);
    this.by.offer([
      ...(heads.length ? [["group", "groups, hard"], ["soft", "groups, soft"], ...heads] : []), ["none", "picture"],
      ...(found.class_attention ? [[null, "Attention of the class token"]] : []),
      ...(found.class_attention ?? []).map((_, i) => [`class${i}`, `head ${i}`, null, `attention of the class token, head ${i}`]),
    ], this.by.value || settings.image_by);
    this.shared.say(`${found.width} x ${found.height} pixels: ${found.top[0].label}, ${(100 * found.top[0].p).toFixed(0)} %`);
    this.top.replaceChildren(bars(found.top.map(({ label, p }) => ({ label, value: p }))));
    for (const button of this.samples.children)
      button.setAttribute("aria-pressed", button.getAttribute("aria-label") === `sample ${picture.sample}`);
    this.draw();
  }

  draw() {
    if (!this.found) return;
    const by = this.by.value;
    const layer = Number(this.layer.value || 0);
    const large = overlay(this.found, by, layer, SIDE, this.describe(by, layer));
    large.setAttribute("tabindex", "0");
    large.addEventListener("keydown", (event) => this.walk(event));
    large.addEventListener("mousemove", (event) => { if (event.target.dataset.i) this.pick(Number(event.target.dataset.i)); });
    this.map.replaceChildren(large);
    const words = { group: "Colour: the head that has most of the patch.", soft: "Colour: the head that has most. Strength: by how much.", none: "What the model sees." }[by];
    this.caption.replaceChildren(words ? el("p", { class: "quiet" }, words, by === "none" ? "" : ` ${this.strength(layer)}`) : this.key(by, layer));
    this.small.replaceChildren(...(this.found.maps?.[layer] ?? []).map((_, head) => el("button", { type: "button", onclick: () => { this.by.value = String(head); this.draw(); } },
      overlay(this.found, String(head), layer, SMALL, `head ${head} of layer ${layer}`), el("span", {}, el("i", { class: "swatch", "--c": colour(head) }), `head ${head}`))));
    this.pick(Math.min(this.patch, this.cells().length - 1));
    this.shared.choose({ image_model: this.model.value, image_layer: this.layer.value, image_by: by, side: this.side.value, sample: this.shared.picture.sample });
  }

  describe(by, layer) {
    if (by === "none") return "the picture as the model sees it";
    if (by.startsWith("class")) return `where the class token looks, head ${by.slice(5)}`;
    return by === "group" || by === "soft" ? `groups of the patches in layer ${layer}` : `head ${by} of layer ${layer}`;
  }

  /** How decided the groups are: bright colours alone would not tell. */
  strength(layer) {
    const shares = largest(this.found.maps[layer]);
    const mean = shares.reduce((sum, share) => sum + share, 0) / shares.length;
    return `It has ${mean.toFixed(2)} of a patch on average; ${(1 / this.found.maps[layer].length).toFixed(2)} would be an even share.`;
  }

  /** What the ends of the scale of a map are. */
  key(by, layer) {
    const [low, high] = range(this.found, by, layer).map((value) => value.toFixed(3));
    return by.startsWith("class") ? scale(low, `${high} of the attention`) :
      scale(low, `${high} of a patch; ${(1 / this.found.maps[layer].length).toFixed(3)} is an even share`);
  }

  grid() { return this.found.maps?.[0][0] ?? this.found.class_attention?.[0] ?? [[0]]; }
  cells() { return this.grid().flat(); }

  walk(event) {
    const columns = this.grid()[0].length;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (!step) return;
    event.preventDefault();
    this.pick(Math.min(Math.max(this.patch + step, 0), this.cells().length - 1));
  }

  pick(i) {
    this.map.querySelector(".picked")?.classList.remove("picked");
    this.map.querySelector(`[data-i="${i}"]`)?.classList.add("picked");
    this.patch = i;
    const columns = this.grid()[0].length;
    const [r, c] = [Math.floor(i / columns), i % columns];
    const maps = this.found.maps?.[Number(this.layer.value || 0)] ?? [];
    const looks = this.found.class_attention ?? [];
    this.detail.replaceChildren(el("h3", {}, `Patch in row ${r}, column ${c}`),
      ...(maps.length ? [el("h4", {}, `Membership, layer ${this.layer.value}`),
        bars(maps.map((map, head) => ({ label: `head ${head}`, value: map[r][c], tint: colour(head), text: map[r][c].toFixed(3) })))] : []),
      ...(looks.length ? [el("h4", {}, "Attention of the class token"),
        bars(looks.map((map, head) => ({ label: `head ${head}`, value: map[r][c], text: map[r][c].toFixed(3) })))] : []));
  }

  drawing() { return stack([this.map.firstChild, ...this.small.querySelectorAll("svg")]); }

  python() {
    return this.shared.python([this.shared.model(this.model.value)], () => (this.found?.maps ?
      `look.membership_maps(source.model, [inputs], layers=[${this.layer.value || 0}]).figure()` : "look.class_attention_maps(source.model, [inputs]).figure()"));
  }
}
