// Small drawings: lines, matrices, and pictures to be saved.

import { colour, el, shade, signed, svg, SVG } from "./dom.js";

/** Round numbers from `low` to `high`, about four steps apart; whole numbers only, where that is asked for. */
function ticks(low, high, whole = false) {
  const rough = (high - low) / 4 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max([1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999) * power, whole ? 1 : 0);
  const size = whole ? Math.ceil(step) : step;
  const found = [];
  for (let i = Math.ceil(low / size - 1e-9); i * size <= high + 1e-9 * size; i++) found.push(Number((i * size).toPrecision(6)));
  return found;
}

const POINTS = 24; // up to so many values have a dot each

/** Lines over layers or tokens. Each has `name`, `values`, and maybe `dash`; `ages` are the places along x on a scale of factors. */
export function lineChart({ title, x, y, lines, ages, width: widest = 420, height = 270 }) {
  const width = Math.min(widest, Math.max(document.documentElement.clientWidth - 60, 240)); // letters keep their size on a phone
  const [left, right, top, bottom] = [46, 14, 14, 46 + 20 * Math.ceil(lines.length / 2)];
  const known = lines.flatMap((line) => line.values.filter((value) => value != null));
  const low = Math.min(0, ...known);
  const scale = ticks(low, Math.max(...known, low + 1e-9));
  const high = Math.max(...known, scale.at(-1));
  const longest = Math.max(...lines.map((line) => line.values.length));
  const share = ages ? (age) => Math.log(age / ages[0]) / Math.log(ages.at(-1) / ages[0]) : (i) => i / (longest - 1);
  const atX = (place) => left + (longest < 2 ? 0.5 : share(place)) * (width - left - right);
  const atY = (value) => height - bottom - ((value - low) / (high - low || 1)) * (height - top - bottom);
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": describe(title, lines) });
  const words = (text, px, py, more = {}) => svg("text", { x: px, y: py, "font-size": 12, fill: "currentColor", opacity: 0.8, ...more }, text);
  for (const value of scale)
    chart.append(
      svg("line", { x1: left, x2: width - right, y1: atY(value), y2: atY(value), stroke: "currentColor", opacity: value === 0 ? 0.45 : 0.13 }),
      words(value, left - 8, atY(value) + 4, { "text-anchor": "end" }));
  const places = ages ? [1, 3, 10, 30, 100, 300, 1000, 3000].filter((age) => age <= ages.at(-1)) : ticks(0, longest - 1, true);
  for (const place of places) chart.append(words(place, atX(place), height - bottom + 17, { "text-anchor": "middle" }));
  chart.append(words(x, (left + width - right) / 2, height - bottom + 34, { "text-anchor": "middle" }),
    words(y, 11, (top + height - bottom) / 2, { "text-anchor": "middle", transform: `rotate(-90 11 ${(top + height - bottom) / 2})` }));
  lines.forEach((line, i) => {
    const tint = line.tint ?? colour(i);
    const points = line.values.flatMap((value, j) => (value == null ? [] : [[atX(ages?.[j] ?? j), atY(value), j, value]]));
    chart.append(svg("polyline", { points: points.map(([px, py]) => `${px.toFixed(1)},${py.toFixed(1)}`).join(" "), fill: "none", stroke: tint,
      "stroke-width": 2.25, "stroke-linejoin": "round", "stroke-dasharray": line.dash }));
    if (points.length <= POINTS)
      for (const [px, py, j, value] of points)
        chart.append(svg("circle", { cx: px, cy: py, r: 3.2, fill: tint }, svg("title", {}, `${line.name}, ${x} ${ages?.[j] ?? j}: ${value.toPrecision(4)}`)));
    const [px, py] = [left + (i % 2) * ((width - left) / 2), height - 8 - 20 * (Math.ceil(lines.length / 2) - 1 - Math.floor(i / 2))];
    chart.append(svg("line", { x1: px, x2: px + 20, y1: py - 4, y2: py - 4, stroke: tint, "stroke-width": 3,
      "stroke-dasharray": line.dash }), words(line.name, px + 27, py, { opacity: 1 }));
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

/** A small matrix from `low` (dark blue) to `high` (yellow); with `diverging` from -1 (blue) to 1 (orange). */
export function matrix({ title, rows, low = 0, high = 1, cell = 12, names = ["row", "column"], diverging = false }) {
  const [width, height] = [rows[0].length * cell, rows.length * cell];
  const flat = rows.flat();
  const label = `${title}: ${rows.length} ${names[0]}s by ${rows[0].length} ${names[1]}s, ` +
    `${Math.min(...flat).toFixed(2)} to ${Math.max(...flat).toFixed(2)}`;
  const [wide, top] = [Math.max(width, title ? 60 : 0), title ? 20 : 0];
  const picture = svg("svg", { viewBox: `0 0 ${wide} ${height + top}`, width: wide, height: height + top, role: "img", "aria-label": label });
  if (title) picture.append(svg("text", { x: 0, y: 12, "font-size": 12, fill: "currentColor", opacity: 0.8 }, title));
  const paint = diverging ? signed : (value) => ({ fill: shade((value - low) / (high - low || 1)) });
  rows.forEach((row, i) => row.forEach((value, j) => {
    picture.append(svg("rect", { x: j * cell, y: top + i * cell, width: cell, height: cell, ...paint(value) },
      svg("title", {}, `${names[0]} ${i}, ${names[1]} ${j}: ${value.toFixed(3)}`)));
  }));
  return picture;
}

/** Matrices of one kind in a grid: a row for each head, a column for each of its blocks. */
export function matrixGrid({ title, grid, cell = 6, gap = 4, diverging = true }) {
  const side = grid[0][0].length * cell + gap;
  const [width, height] = [Math.max(grid[0].length * side, 60), grid.length * side];
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height + 20}`, width, height: height + 20, role: "img",
    "aria-label": `${title}: ${grid.length} heads, ${grid[0].length} blocks of ${grid[0][0].length} features each` });
  picture.append(svg("text", { x: 0, y: 12, "font-size": 12, fill: "currentColor", opacity: 0.8 }, title));
  grid.forEach((blocks, head) => blocks.forEach((rows, block) => {
    const one = matrix({ title: "", rows, cell, names: [`head ${head}, block ${block}: feature`, "feature"], diverging });
    one.removeAttribute("role");
    one.removeAttribute("aria-label");
    one.setAttribute("x", block * side);
    one.setAttribute("y", 20 + head * side);
    one.prepend(svg("rect", { width: side - gap, height: side - gap, fill: "none", stroke: "currentColor", opacity: 0.5 }));
    picture.append(one);
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
