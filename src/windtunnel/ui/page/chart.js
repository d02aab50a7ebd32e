// Lines and points in SVG: axes, bands, marks, and a cursor that says the values below it.

import { number } from "./format.js";

const NS = "http://www.w3.org/2000/svg";
export const colour = (place) => `var(--c${place % 8})`;

export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== undefined) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function ticks(low, high, log, most) {
  if (log) {
    const found = [];
    const wide = Math.log10(high / low) > 2.5;
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const digit of wide ? [1] : [1, 2, 5]) found.push(digit * 10 ** power);
    return found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  }
  const raw = (high - low) / most || 1;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((digit) => digit * unit >= raw) * unit;
  return Array.from({ length: Math.floor((high - low) / step + 1e-9) + 2 }, (_, i) => (Math.ceil(low / step) + i) * step).filter((value) => value <= high + 1e-9 * step);
}

function scale(low, high, from, to, log) {
  const [a, b] = log ? [Math.log(low), Math.log(high)] : [low, high];
  const width = b - a || 1;
  const at = (value) => from + ((log ? Math.log(Math.max(value, low / 1e3)) : value) - a) / width * (to - from);
  at.back = (place) => {
    const value = a + (place - from) / (to - from) * width;
    return log ? Math.exp(value) : value;
  };
  return at;
}

function extent(values, log, fromZero) {
  const known = values.filter((value) => Number.isFinite(value) && value !== null && (!log || value > 0));
  if (!known.length) return log ? [0.1, 1] : [0, 1];
  let low = Math.min(...known), high = Math.max(...known);
  if (fromZero && !log) low = Math.min(low, 0);
  if (low === high) high = log ? low * 2 : low + (Math.abs(low) || 1);
  return [low, high];
}

/**
 * Draw into a place. `series`: {name, x, y, place, kind: line | ghost | dots, band: [x or y low, high], dash, onpick, labels, missed}.
 * `x`, `y`: {label, log, low, high, say, zero}; `marks`: [{x | y, label, place}]; `along`: "x" or "y", the axis that the cursor follows.
 */
export function chart(place, options) {
  place.drawn = options;
  if (!place.watched) {
    place.watched = new ResizeObserver(() => render(place, place.drawn));
    place.watched.observe(place);
  }
  render(place, options);
}

function render(place, { series, x, y, marks = [], title, legend = true }) {
  const width = place.clientWidth, height = place.clientHeight;
  if (!width || !height) return;
  const shown = series.filter((one) => one.x.length);
  const named = legend ? shown.filter((one) => one.kind !== "ghost") : [];
  const margin = { left: y.label ? 56 : 40, right: 12, top: named.length > (legend === "always" ? 0 : 1) ? 22 : 10, bottom: x.label ? 38 : 22 };
  const xs = shown.flatMap((one) => one.x), ys = shown.flatMap((one) => one.y);
  const dotted = shown.some((one) => one.kind === "dots") ? 1.06 : 1; // room for points at the ends
  const [x0, x1] = [x.low ?? extent(xs, x.log, x.zero)[0] / dotted, x.high ?? extent(xs, x.log, x.zero)[1] * dotted];
  const [y0, y1] = [y.low ?? extent(ys, y.log, y.zero)[0] * (y.log ? 0.85 : 1), y.high ?? extent(ys, y.log, y.zero)[1] * (y.log ? 1.15 : 1)];
  const across = scale(x0, x1, margin.left, width - margin.right, x.log), up = scale(y0, y1, height - margin.bottom, margin.top, y.log);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  for (const value of ticks(x0, x1, x.log, Math.max(width / 90, 3))) {
    root.append(svg("line", { class: "grid", x1: across(value), x2: across(value), y1: margin.top, y2: height - margin.bottom }));
    const text = svg("text", { x: across(value), y: height - margin.bottom + 15, "text-anchor": "middle" });
    text.textContent = (x.say ?? brief)(value);
    root.append(text);
  }
  for (const value of ticks(y0, y1, y.log, Math.max(height / 50, 2))) {
    root.append(svg("line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: up(value), y2: up(value) }));
    const text = svg("text", { x: margin.left - 6, y: up(value) + 4, "text-anchor": "end" });
    text.textContent = (y.say ?? brief)(value);
    root.append(text);
  }
  const labels = [[x.label, (margin.left + width) / 2, height - 5, 0], [y.label, 12, (height - margin.bottom + margin.top) / 2, -90]];
  for (const [label, left, top, turn] of labels.filter(([label]) => label)) {
    const text = svg("text", { x: left, y: top, "text-anchor": "middle", transform: turn ? `rotate(${turn} ${left} ${top})` : null });
    text.textContent = label;
    root.append(text);
  }
  const inner = svg("svg", { x: margin.left, y: 0, width: Math.max(width - margin.left - margin.right, 1), height, viewBox: `${margin.left} 0 ${Math.max(width - margin.left - margin.right, 1)} ${height}` });
  inner.style.overflow = shown.some((one) => one.kind === "dots") ? "visible" : "hidden";
  for (const one of shown) draw(inner, one, across, up);
  root.append(inner);
  for (const mark of marks) {
    const at = mark.x !== undefined ? across(mark.x) : up(mark.y);
    if (!Number.isFinite(at) || (mark.x !== undefined && (at < margin.left - 1 || at > width - margin.right + 1))) continue;
    const ends = mark.x !== undefined ? { x1: at, x2: at, y1: margin.top, y2: height - margin.bottom } : { x1: margin.left, x2: width - margin.right, y1: at, y2: at };
    root.append(svg("line", { class: "mark", stroke: colour(mark.place ?? 1), ...ends }));
    const right = mark.x !== undefined && at > width * 0.7;
    const text = svg("text", { x: mark.x !== undefined ? at + (right ? -4 : 4) : width - margin.right, y: mark.x !== undefined ? height - margin.bottom - 6 : at - 4, "text-anchor": right || mark.x === undefined ? "end" : "start" });
    text.textContent = mark.label;
    text.style.fill = colour(mark.place ?? 1);
    root.append(text);
  }
  let left = margin.left;
  for (const one of named.length > (legend === "always" ? 0 : 1) ? named : []) {
    root.append(svg("rect", { x: left, y: 4, width: 10, height: 10, rx: 2, fill: colour(one.place) }));
    const text = svg("text", { class: "key", x: left + 14, y: 13 });
    text.textContent = one.name;
    root.append(text);
    left += 26 + 6.8 * one.name.length;
  }
  place.replaceChildren(root);
  if (!shown.some((one) => one.kind === "dots")) cursor(place, root, shown, across, { x, y, margin, width, height });
}

const brief = (value) => (value === 0 ? "0" : Math.abs(value) >= 10000 ? `${number(value / 1000, 2)}k` : String(Number(value.toPrecision(3))));

function draw(root, one, across, up) {
  if (one.kind === "dots") {
    one.x.forEach((value, i) => {
      if (!Number.isFinite(value) || !Number.isFinite(one.y[i])) return;
      const dot = svg("circle", { class: `dot${one.missed?.[i] ? " missed" : ""}`, cx: across(value), cy: up(one.y[i]), r: one.radius ?? 5, fill: colour(one.place), tabindex: one.onpick ? 0 : null, role: one.onpick ? "button" : null, "aria-label": one.labels?.[i] });
      const title = svg("title");
      title.textContent = one.labels?.[i] ?? "";
      dot.append(title);
      if (one.onpick) {
        dot.style.cursor = "pointer";
        dot.addEventListener("click", () => one.onpick(i));
        dot.addEventListener("keydown", (event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), one.onpick(i)));
      }
      root.append(dot);
    });
    return;
  }
  const path = (xs, ys) => xs.map((value, i) => (Number.isFinite(value) && Number.isFinite(ys[i]) && ys[i] !== null ? `${across(value).toFixed(1)},${up(ys[i]).toFixed(1)}` : null)).filter(Boolean);
  if (one.band) {
    const [low, high] = one.band.x ? one.band.x.map((values) => path(values, one.y)) : one.band.y.map((values) => path(one.x, values));
    root.append(svg("polygon", { class: "band", fill: colour(one.place), points: [...low, ...high.reverse()].join(" ") }));
  }
  const points = path(one.x, one.y);
  root.append(svg("polyline", { class: `line${one.kind === "ghost" ? " ghost" : ""}`, stroke: one.kind === "ghost" ? null : colour(one.place), "stroke-dasharray": one.dash, points: points.join(" ") }));
}

/** A line under the pointer, and what each series says there. */
function cursor(place, root, shown, across, { x, y, margin, width, height }) {
  const line = svg("line", { class: "cursor", y1: margin.top, y2: height - margin.bottom, visibility: "hidden" });
  root.append(line);
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  place.append(tip);
  root.addEventListener("pointermove", (event) => {
    const at = event.clientX - root.getBoundingClientRect().left;
    if (at < margin.left || at > width - margin.right) return;
    const value = across.back(at);
    line.setAttribute("x1", at);
    line.setAttribute("x2", at);
    line.setAttribute("visibility", "visible");
    const said = shown.map((one) => {
      const i = one.x.findIndex((each) => each >= value);
      const found = i < 0 ? one.y[one.y.length - 1] : one.y[i];
      return `${one.name}: ${(y.tip ?? y.say ?? number)(found)}`;
    });
    tip.textContent = [(x.tip ?? x.say ?? number)(value), ...said].join("\n");
    tip.hidden = false;
    tip.style.left = `${Math.min(Math.max(at + 12, 0), width - tip.offsetWidth - 4)}px`;
    tip.style.top = `${margin.top}px`;
  });
  root.addEventListener("pointerleave", () => {
    tip.hidden = true;
    line.setAttribute("visibility", "hidden");
  });
}

/** A line of the last values, without axes. */
export function spark(values) {
  const known = values.filter((value) => Number.isFinite(value));
  const root = svg("svg", { viewBox: "0 0 62 20", "aria-hidden": "true" });
  const low = Math.min(...known), high = Math.max(...known);
  if (known.length < 2 || low === high) return root;
  const points = known.map((value, i) => `${(1 + 60 * i / (known.length - 1)).toFixed(1)},${(18 - 16 * (value - low) / (high - low)).toFixed(1)}`);
  root.append(svg("polyline", { points: points.join(" "), fill: "none", stroke: "var(--accent)", "stroke-width": 1.5, opacity: 0.7 }));
  return root;
}
