// Elements, controls and colours. Text is only ever set as text, never as markup.

export const PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#F0E442"];
export const colour = (head) => PALETTE[head % PALETTE.length];

export const SVG = "http://www.w3.org/2000/svg";
const CIVIDIS = [[0, 34, 78], [65, 77, 107], [124, 123, 120], [188, 175, 111], [254, 232, 56]];

/** A colour between dark blue (0) and yellow (1) that everybody can tell apart. */
export function shade(value) {
  const place = Math.min(Math.max(value, 0), 1) * (CIVIDIS.length - 1);
  const low = Math.min(Math.floor(place), CIVIDIS.length - 2);
  const mixed = CIVIDIS[low].map((part, i) => Math.round(part + (place - low) * (CIVIDIS[low + 1][i] - part)));
  return `rgb(${mixed.join(" ")})`;
}

/** Paint of a number from -1 (blue) over nothing to 1 (orange). */
export const signed = (value) => ({ fill: value < 0 ? PALETTE[0] : PALETTE[1], opacity: Math.min(Math.abs(value), 1).toFixed(3) });

/** What the ends of a scale mean; `kind` is `signed`, `bits`, or nothing for dark blue to yellow. */
export const scale = (low, high, kind = "") => el("span", { class: `scale ${kind}` }, low, el("i", { "aria-hidden": "true" }), high);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

/** Run some work, one at a time: of all calls while it is under way, one more run follows. Typing fast asks no more than that. */
export function oneAtATime(work) {
  let [again, running] = [false, null];
  const run = async () => {
    try {
      while (again) {
        again = false;
        await work();
      }
    } finally {
      running = null;
    }
  };
  return () => {
    again = true;
    running ??= run();
    return running;
  };
}

/** A labelled control for a row of controls. */
export const labelled = (text, control) => el("label", { class: "field" }, el("span", {}, text), control);

/** The head of a view: a question, what one sees in a sentence, and the controls that matter most. */
export const intro = (title, lead, ...controls) => el("div", { class: "intro" },
  el("div", {}, el("h2", {}, title), el("p", {}, lead)), el("div", { class: "row" }, ...controls));

/** A text with the names of the rates set as formulas. */
export const formulas = (text) => text.split(/(R_c\^var|R_c)/).map((part) => (
  part.startsWith("R_c") ? el("span", {}, "R", el("sub", {}, "c"), part === "R_c" ? null : el("sup", {}, "var")) : part));

/** A box with a heading. */
export const panel = (title, ...children) => el("div", { class: "panel" }, title ? el("h3", {}, ...formulas(title)) : null, ...children);

/** A few numbers, large, each with its name. */
export const tiles = (entries) => el("dl", { class: "tiles" },
  ...Object.entries(entries).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));

export function options(select, entries, chosen) {
  select.replaceChildren(...entries.map(([value, text]) => el("option", { value }, text)));
  select.value = entries.some(([value]) => value === String(chosen)) ? chosen : entries[0]?.[0] ?? "";
}

/** A row of choices of which one is taken: radio buttons that look like chips. */
export class Choice {
  constructor(id, label, onchange) {
    Object.assign(this, { id, onchange, known: "" });
    this.root = el("fieldset", { class: "choice", id, onchange: () => this.onchange() }, el("legend", {}, label));
  }

  get value() { return this.root.querySelector("input:checked")?.value ?? ""; }

  set value(value) {
    const input = [...this.root.querySelectorAll("input")].find((one) => one.value === value);
    if (input) input.checked = true;
  }

  /**
   * Offer entries `[value, text, colour, words]`; those that are there already stay, with the focus that one may have.
   * Words are what a screen reader says in place of the text. An entry without a value begins a new line.
   */
  offer(entries, chosen) {
    if (this.known !== JSON.stringify(entries)) {
      this.known = JSON.stringify(entries);
      this.root.replaceChildren(this.root.firstChild, ...entries.flatMap(([value, text, tint, words]) => (value == null ? [el("i", { class: "turn" }), el("span", { class: "words" }, text)] :
        el("label", { class: "chip" }, el("input", { type: "radio", name: this.id, value, "aria-label": words }),
          el("span", {}, tint ? el("i", { class: "swatch", "--c": tint }) : null, text)))));
      this.value = entries[0]?.[0] ?? "";
    }
    if (chosen != null) this.value = String(chosen);
  }

  /** A button that goes through the entries. */
  player(text) { return el("button", { type: "button", onclick: () => this.play() }, text); }

  async play(pause = 700) {
    const run = this.run = Symbol("run");
    for (const input of this.root.querySelectorAll("input")) {
      if (this.run !== run) return;
      input.checked = true;
      this.onchange();
      await new Promise((done) => { setTimeout(done, pause); });
    }
  }
}

/** Bars of shares in [0, 1], as a list that can be read out. */
export function bars(entries) {
  const parts = entries.flatMap(({ label, value, tint, text }) => [
    el("dt", {}, label),
    el("dd", { class: "bar", "aria-hidden": "true" },
      el("i", { "--w": `${100 * value}%`, "--c": tint ?? "var(--accent)" })),
    el("dd", {}, text ?? `${(100 * value).toFixed(0)} %`),
  ]);
  return el("dl", { class: "bars" }, ...parts);
}

export const size = (bytes) =>
  bytes < 1e4 ? `${bytes} B` : bytes < 1e6 ? `${Number((bytes / 1e3).toPrecision(3))} kB` : `${(bytes / 1e6).toFixed(2)} MB`;
