// Elements, colours and small drawings. Text is only ever set as text, never as markup.

export const PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#F0E442"];
export const colour = (head) => PALETTE[head % PALETTE.length];

const SVG = "http://www.w3.org/2000/svg";
const CIVIDIS = [[0, 34, 78], [65, 77, 107], [124, 123, 120], [188, 175, 111], [254, 232, 56]];

/** A colour between dark blue (0) and yellow (1) that everybody can tell apart. */
export function shade(value) {
  const place = Math.min(Math.max(value, 0), 1) * (CIVIDIS.length - 1);
  const low = Math.min(Math.floor(place), CIVIDIS.length - 2);
  const mixed = CIVIDIS[low].map((part, i) => Math.round(part + (place - low) * (CIVIDIS[low + 1][i] - part)));
  return `rgb(${mixed.join(" ")})`;
}

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

/** A labelled control for a row of controls. */
export const labelled = (text, control) => el("label", {}, text, control);

export function options(select, entries, chosen) {
  select.replaceChildren(...entries.map(([value, text]) => el("option", { value }, text)));
  select.value = entries.some(([value]) => value === String(chosen)) ? chosen : entries[0]?.[0] ?? "";
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
  bytes < 1e4 ? `${bytes} B` : bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB` : `${(bytes / 1e6).toFixed(2)} MB`;

/** Lines over layers or tokens. Each has `name`, `values`, and maybe `dash`; `labels` name the places along x. */
export function lineChart({ title, x, y, lines, labels, width = 420, height = 260 }) {
  const [left, right, top, bottom] = [52, 12, 30, 42 + 18 * Math.ceil(lines.length / 2)];
  const known = lines.flatMap((line) => line.values.filter((value) => value != null));
  const low = Math.min(0, ...known);
  const high = Math.max(...known, low + 1e-9);
  const longest = Math.max(...lines.map((line) => line.values.length));
  const atX = (i) => left + (longest < 2 ? 0.5 : i / (longest - 1)) * (width - left - right);
  const atY = (value) => height - bottom - ((value - low) / (high - low)) * (height - top - bottom);
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": describe(title, lines) });
  const words = (text, px, py, more = {}) => svg("text", { x: px, y: py, "font-size": 12, fill: "currentColor", ...more }, text);
  chart.append(words(title, left, 16, { "font-weight": 600 }));
  for (let step = 0; step <= 4; step++) {
    const value = low + ((high - low) * step) / 4;
    chart.append(
      svg("line", { x1: left, x2: width - right, y1: atY(value), y2: atY(value), stroke: "currentColor", opacity: 0.15 }),
      words(Number(value.toPrecision(3)), left - 6, atY(value) + 4, { "text-anchor": "end" }));
  }
  const ticks = Math.min(longest, 8);
  for (let step = 0; step < ticks; step++) {
    const i = ticks < 2 ? 0 : Math.round((step * (longest - 1)) / (ticks - 1));
    chart.append(words(labels?.[i] ?? i, atX(i), height - bottom + 16, { "text-anchor": "middle" }));
  }
  chart.append(words(x, (left + width - right) / 2, height - bottom + 32, { "text-anchor": "middle" }));
  chart.append(words(y, 12, (top + height - bottom) / 2,
    { "text-anchor": "middle", transform: `rotate(-90 12 ${(top + height - bottom) / 2})` }));
  lines.forEach((line, i) => {
    const tint = line.tint ?? colour(i);
    const points = line.values.map((value, j) => (value == null ? null : `${atX(j).toFixed(1)},${atY(value).toFixed(1)}`));
    chart.append(svg("polyline", { points: points.filter(Boolean).join(" "), fill: "none", stroke: tint,
      "stroke-width": 2, "stroke-dasharray": line.dash }));
    const [px, py] = [left + (i % 2) * ((width - left) / 2), height - 8 - 18 * (Math.ceil(lines.length / 2) - 1 - Math.floor(i / 2))];
    chart.append(svg("line", { x1: px, x2: px + 20, y1: py - 4, y2: py - 4, stroke: tint, "stroke-width": 3,
      "stroke-dasharray": line.dash }), words(line.name, px + 26, py));
  });
  return chart;
}

function describe(title, lines) {
  const ends = lines.map(({ name, values }) => {
    const known = values.filter((value) => value != null);
    return `${name} from ${known[0]?.toPrecision(3)} to ${known.at(-1)?.toPrecision(3)}`;
  });
  return `${title}: ${ends.join("; ")}`;
}

/** A small matrix, drawn from `low` (dark blue) to `high` (yellow). */
export function matrix({ title, rows, low = 0, high = 1, cell = 12, names = ["row", "column"] }) {
  const [width, height] = [rows[0].length * cell, rows.length * cell];
  const flat = rows.flat();
  const label = `${title}: ${rows.length} ${names[0]}s by ${rows[0].length} ${names[1]}s, ` +
    `${Math.min(...flat).toFixed(2)} to ${Math.max(...flat).toFixed(2)}`;
  const picture = svg("svg", { viewBox: `0 0 ${Math.max(width, 60)} ${height + 18}`, width: Math.max(width, 60),
    height: height + 18, role: "img", "aria-label": label });
  picture.append(svg("text", { x: 0, y: 12, "font-size": 11, fill: "currentColor" }, title));
  rows.forEach((row, i) => row.forEach((value, j) => {
    picture.append(svg("rect", { x: j * cell, y: 18 + i * cell, width: cell, height: cell,
      fill: shade((value - low) / (high - low || 1)) },
      svg("title", {}, `${names[0]} ${i}, ${names[1]} ${j}: ${value.toFixed(3)}`)));
  }));
  return picture;
}

/** Put drawings below each other into one, to be saved. */
export function stack(drawings) {
  let top = 0;
  let widest = 0;
  const whole = svg("svg", {});
  for (const drawing of drawings) {
    const [, , width, height] = drawing.getAttribute("viewBox").split(" ").map(Number);
    const copy = drawing.cloneNode(true);
    for (const [name, value] of Object.entries({ x: 0, y: top, width, height })) copy.setAttribute(name, value);
    whole.append(copy);
    top += height + 10;
    widest = Math.max(widest, width);
  }
  whole.setAttribute("viewBox", `0 0 ${widest} ${top}`);
  return whole;
}

/** Save a drawing as a file, on the background and in the colour of the page. */
export async function save(drawing, name, kind) {
  const copy = drawing.cloneNode(true);
  const [, , width, height] = copy.getAttribute("viewBox").split(" ").map(Number);
  const style = getComputedStyle(document.body);
  for (const [key, value] of Object.entries({ xmlns: SVG, width, height, color: style.color, "font-family": "sans-serif" }))
    copy.setAttribute(key, value);
  copy.prepend(svg("rect", { width: "100%", height: "100%", fill: style.backgroundColor }));
  const file = new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" });
  if (kind === "svg") return offer(file, `${name}.svg`);
  const address = URL.createObjectURL(file);
  try {
    const picture = new Image();
    picture.src = address;
    await picture.decode();
    const canvas = el("canvas", { width: 2 * width, height: 2 * height });
    canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
    offer(await new Promise((done) => canvas.toBlob(done, "image/png")), `${name}.png`);
  } finally {
    URL.revokeObjectURL(address);
  }
}

function offer(file, name) {
  const address = URL.createObjectURL(file);
  const link = el("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
