// The page: tabs, theme, the address that restores a view, and what the views share.

import { get, sample } from "./api.js";
import { el } from "./dom.js";
import { save } from "./draw.js";
import { TextView } from "./text.js";
import { ImageView } from "./image.js";
import { InsideView } from "./inside.js";
import { CompareView } from "./compare.js";

const SAMPLE = 'def mean(values):\n    """Return the arithmetic mean."""\n    return sum(values) / len(values)\n';
const LONGEST_LINK = 3000; // characters of a text that still goes into a link
const message = document.getElementById("message");

/** What the views share: models, the text, the picture, and what is chosen. */
const shared = {
  models: [],
  settings: Object.fromEntries(new URLSearchParams(location.hash.slice(1))),
  text: SAMPLE,
  picture: null, // a file, and the name of the sample that it is

  of(kind) { return this.models.filter((model) => model.kind === kind); },
  /** Name of the first model of a kind whose layers form groups, or of the first at all. */
  withGroups(kind) { return (this.of(kind).find((model) => model.groups) ?? this.of(kind)[0])?.name; },
  model(name) { return this.models.find((model) => model.name === name); },
  /** What a head has of a token in a model. */
  share(name) { return this.model(name)?.gated ? "share of the coding-rate gain" : "membership"; },
  say(text, isError = false) {
    message.textContent = text;
    message.classList.toggle("error", isError);
  },
  /** Run something that may fail, and say why it did. */
  async attempt(work) {
    try {
      return await work();
    } catch (error) {
      if (error.name !== "AbortError") this.say(error.message, true);
      return undefined;
    }
  },
  /** Remember a choice in the address. */
  choose(changes) {
    Object.assign(this.settings, changes);
    const kept = Object.entries({ ...this.settings, text: this.text })
      .filter(([key, value]) => value !== "" && value != null && !(key === "text" && value.length > LONGEST_LINK));
    history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
  },
  /** The picture that was dropped, or a sample of a model. */
  async pictureFor(model) {
    if (!this.picture) {
      const { samples } = model;
      const name = samples.includes(this.settings.sample) ? this.settings.sample : samples[samples.length >> 1];
      if (name === undefined) throw new Error("drop a picture on this page first.");
      this.picture = { file: await sample(model.name, name), sample: name };
    }
    return this.picture;
  },
  /** Lines of Python that open models; `last` writes the third from what gives this input to a variable's model. */
  python(models, last) {
    const isText = models[0].kind === "text";
    const file = this.picture?.sample ? null : `open(${JSON.stringify(this.picture?.file.name ?? "picture.png")}, "rb").read()`;
    const inputs = (source) => (isText ? `text.encode(${source}, ${JSON.stringify(this.text)})` :
      `image.read(${source}, ${file ?? `${source}.sample(${JSON.stringify(this.picture.sample)}).read_bytes()`}, ${this.settings.side || "None"})`);
    const opened = `open_models(${JSON.stringify(models.map(({ source }) => source))}).values()`;
    return [
      `import tost.analysis as look; from tost.explore import image, open_models, text`,
      models.length > 1 ? `models = ${opened}` : `source, = ${opened}; inputs = ${inputs("source")}`,
      last(inputs),
    ].join("\n");
  },
  /** Buttons for the link, the picture and the lines of Python of a view. */
  tools(name, draw, python) {
    const code = el("code");
    const lines = el("details", { ontoggle: () => { code.textContent = python(); } },
      el("summary", {}, "The same in Python"), el("pre", { tabindex: "0" }, code));
    const link = async () => {
      this.choose({});
      await navigator.clipboard.writeText(location.href);
      this.say(this.text.length > LONGEST_LINK ? "The link is copied, without the text, which is too long for one." :
        "The link is copied. It works while this server runs.");
    };
    const picture = (kind) => this.attempt(async () => {
      const drawing = draw();
      if (!drawing) throw new Error("there is nothing to save yet.");
      await save(drawing, `tost-${name}`, kind);
    });
    return el("div", { class: "tools" },
      el("button", { type: "button", onclick: () => this.attempt(link) }, "Copy link"),
      el("button", { type: "button", onclick: () => picture("svg") }, "Save SVG"),
      el("button", { type: "button", onclick: () => picture("png") }, "Save PNG"), lines);
  },
};

const views = {
  text: new TextView(shared, document.getElementById("view-text")),
  image: new ImageView(shared, document.getElementById("view-image")),
  inside: new InsideView(shared, document.getElementById("view-inside")),
  compare: new CompareView(shared, document.getElementById("view-compare")),
};
const tabs = Object.keys(views).map((name) => document.getElementById(`tab-${name}`));

let current = "text";
function show(name) {
  current = name;
  for (const tab of tabs) {
    const chosen = tab.id === `tab-${name}`;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    document.getElementById(tab.getAttribute("aria-controls")).hidden = !chosen;
  }
  shared.say("");
  shared.choose({ view: name });
  views[name].show();
}

tabs.forEach((tab, i) => {
  tab.addEventListener("click", () => show(tab.id.slice(4)));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(i + step + tabs.length) % tabs.length];
    next.focus();
    show(next.id.slice(4));
  });
});

// A picture may be dropped anywhere; without this the browser would leave the page to show it.
for (const kind of ["dragover", "drop"])
  addEventListener(kind, (event) => {
    const file = event.dataTransfer?.files[0];
    if (event.defaultPrevented || !event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    if (!file) return;
    shared.picture = { file, sample: "" };
    show("image");
  });

let width = innerWidth;
addEventListener("resize", () => {
  if (width === innerWidth) return;
  width = innerWidth;
  views[current].draw?.(); // charts are as wide as there is room
});

const theme = document.getElementById("theme");
function paint(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  theme.textContent = dark ? "Light" : "Dark";
}
paint(shared.settings.theme ? shared.settings.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
theme.addEventListener("click", () => {
  paint(document.documentElement.dataset.theme !== "dark");
  shared.choose({ theme: document.documentElement.dataset.theme });
});

await shared.attempt(async () => {
  shared.models = (await get("models")).models;
  if (shared.settings.text) shared.text = shared.settings.text;
  for (const view of Object.values(views)) view.build();
  const first = shared.of("text").length ? "text" : "image";
  show(views[shared.settings.view] ? shared.settings.view : first);
});
document.documentElement.dataset.ready = "true";
