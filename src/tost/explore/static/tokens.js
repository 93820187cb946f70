// A text as coloured tokens: a list of which one is picked, by pointer or by keyboard.

import { colour, el, svg } from "./dom.js";

const SURPRISED = "#D55E00";
const MOST_BITS = 8;

/** How to colour token i: by its group, by one head, or by its surprise. */
export function paintOf(found, { layer, by }, i) {
  if (by === "surprise" || !found.pi) return { tint: SURPRISED, share: Math.min((found.bits[i] ?? 0) / MOST_BITS, 1) };
  const pi = found.pi[layer][i];
  if (by !== "group") return { tint: colour(Number(by)), share: pi[by] };
  const head = pi.indexOf(Math.max(...pi));
  return { tint: colour(head), share: pi[head] };
}

export function spoken(found, { layer }, i) {
  const bits = found.bits[i] == null ? "" : `, ${found.bits[i].toFixed(1)} bits`;
  const pi = found.pi?.[layer][i];
  const group = pi ? `, group ${pi.indexOf(Math.max(...pi))}` : "";
  return `token ${i} ${JSON.stringify(found.tokens[i])}${group}${bits}`;
}

export class TokenList {
  constructor(label, pick) {
    this.pick = pick;
    this.picked = -1;
    this.spans = []; // counting the children of a node takes time in their number
    this.id = `tokens-${TokenList.count = (TokenList.count ?? 0) + 1}`;
    this.root = el("div", { class: "tokens", role: "listbox", tabindex: "0", "aria-label": label, id: this.id });
    this.root.addEventListener("click", (event) => this.choose(this.indexOf(event.target), true));
    this.root.addEventListener("mouseover", (event) => this.choose(this.indexOf(event.target), false));
    this.root.addEventListener("keydown", (event) => this.key(event));
  }

  indexOf(target) { return target.dataset?.i === undefined ? -1 : Number(target.dataset.i); }

  key(event) {
    const last = this.spans.length - 1;
    const next = { ArrowRight: this.picked + 1, ArrowDown: this.picked + 1, ArrowLeft: this.picked - 1,
      ArrowUp: this.picked - 1, Home: 0, End: last }[event.key];
    if (next === undefined || last < 0) return;
    event.preventDefault();
    this.choose(Math.min(Math.max(next, 0), last), true);
    this.spans[this.picked].scrollIntoView({ block: "nearest" });
  }

  /** Pick a token; a firm choice stays when the pointer moves on. */
  choose(i, firm) {
    if (i < 0 || i >= this.spans.length) return;
    if (firm) {
      this.spans[this.picked]?.classList.remove("picked");
      this.spans[this.picked]?.setAttribute("aria-selected", "false");
      this.picked = i;
      this.spans[i].classList.add("picked");
      this.spans[i].setAttribute("aria-selected", "true");
      this.root.setAttribute("aria-activedescendant", this.spans[i].id);
    }
    this.pick(i, firm);
  }

  /** Show tokens; `fresh` is where those begin that were generated. */
  show(found, choice, fresh = Infinity) {
    if (this.picked >= found.tokens.length) this.forget();
    found.tokens.forEach((token, i) => {
      const span = this.spans[i] ?? this.add();
      const text = token === "\n" ? "↵\n" : token;
      if (span.textContent !== text) span.textContent = text;
      const { tint, share } = paintOf(found, choice, i);
      span.style.setProperty("--c", tint);
      span.style.setProperty("--a", share.toFixed(3));
      span.classList.toggle("new", i >= fresh);
      span.setAttribute("aria-label", spoken(found, choice, i));
    });
    for (const span of this.spans.splice(found.tokens.length)) span.remove();
  }

  /** Add a token that has no colour yet. */
  add(text = "") {
    const i = this.spans.length;
    const span = el("span", { role: "option", "aria-selected": "false", "data-i": i, id: `${this.id}-${i}` },
      text === "\n" ? "↵\n" : text);
    this.root.append(span);
    this.spans.push(span);
    return span;
  }

  /** Show the end of the text in the next frame; asking for its height at every token would lay out all of them anew. */
  scrollToEnd() {
    this.scrolling ??= requestAnimationFrame(() => {
      this.scrolling = null;
      this.root.scrollTop = this.root.scrollHeight;
    });
  }

  forget() {
    this.spans[this.picked]?.classList.remove("picked");
    this.picked = -1;
    this.root.removeAttribute("aria-activedescendant");
  }
}

/** The same as a drawing, to be saved. */
export function drawTokens(found, choice) {
  const [width, line, step] = [760, 22, 8.4];
  let [x, y] = [8, 10];
  const whole = svg("svg", {});
  found.tokens.forEach((token, i) => {
    const text = token === "\n" ? "↵" : token;
    const length = text.length * step;
    if (x + length > width) [x, y] = [8, y + line];
    const { tint, share } = paintOf(found, choice, i);
    whole.append(svg("rect", { x, y, width: length, height: line - 3, fill: tint, opacity: (0.45 * share).toFixed(3) }),
      svg("text", { x, y: y + 14, "font-size": 14, fill: "currentColor", "font-family": "monospace", "xml:space": "preserve",
        textLength: length, lengthAdjust: "spacingAndGlyphs" }, text));
    x += length;
    if (token === "\n") [x, y] = [8, y + line];
  });
  whole.setAttribute("viewBox", `0 0 ${width + 8} ${y + line + 8}`);
  return whole;
}
