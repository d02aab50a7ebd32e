// The timeline: levels over a stretch of time, its batches and its requests, with one cursor through all of them.

import { ask } from "./ask.js";
import { count, el, number, percent, seconds } from "./format.js";
import { state, write } from "./state.js";

const HEIGHTS = { levels: 120, batches: 96, requests: 260 };
const LEFT = 46, RIGHT = 10, ROW = 5, LANES = 8;
let data = null, cursor = null, held = null, latest = 0, parts = null, waiting = 0;

const colours = {};
function palette() {
  const probe = el("i");
  document.body.append(probe);
  for (const name of ["ink", "soft", "line", "card", "c0", "c1", "c2", "c3", "c4", "c5", "accent"]) {
    probe.style.color = `var(--${name})`;
    colours[name] = getComputedStyle(probe).color;
  }
  probe.remove();
}

const from = () => state.from ?? data.first, until = () => state.until ?? data.last;
const width = () => parts.levels.clientWidth;
const across = (time) => LEFT + (time - from()) / (until() - from()) * (width() - LEFT - RIGHT);
const back = (x) => from() + (x - LEFT) / (width() - LEFT - RIGHT) * (until() - from());

/** Read the stretch again and draw it. */
export async function openTimeline() {
  if (!parts) build();
  palette();
  const number_ = ++latest;
  try {
    const found = await ask("api/closeup", { words: state.words, start: state.from, end: state.until });
    if (number_ !== latest) return;
    data = found;
    if (cursor === null || cursor < from() || cursor > until()) cursor = (from() + until()) / 2;
    parts.trouble.hidden = true;
    drawAll();
  } catch (error) {
    if (number_ !== latest) return;
    parts.trouble.hidden = false;
    parts.trouble.textContent = error.message;
    if (state.from !== null) {
      state.from = state.until = null;
      write();
    }
  }
}

/** Show another stretch: at once with what is known, and exactly as soon as it is read. */
function look(begin, end) {
  if (!data) return;
  const whole = data.last - data.first, least = 0.02;
  const span = Math.min(Math.max(end - begin, least), whole);
  const start = Math.min(Math.max(begin, data.first), data.last - span);
  const all = span >= whole * 0.999;
  state.from = all ? null : start;
  state.until = all ? null : start + span;
  cursor = Math.min(Math.max(cursor, from()), until());
  write();
  drawAll();
  clearTimeout(waiting);
  waiting = setTimeout(openTimeline, 60);
}

function zoom(factor, at = cursor) {
  look(at - (at - from()) * factor, at + (until() - at) * factor);
}

function shift(share) {
  const step = share * (until() - from());
  look(from() + step, until() + step);
}

function build() {
  const canvas = (label, height) => {
    const made = el("canvas", { role: "img", "aria-label": label });
    made.style.height = `${height}px`;
    return made;
  };
  const button = (text, label, act) => el("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
  parts = {
    trouble: el("p", { class: "trouble", role: "alert", hidden: true }),
    levels: canvas("Requests that run and wait, and the share of the KV cache in use", HEIGHTS.levels),
    batches: canvas("Batches: one box for each step, as high as it has tokens", HEIGHTS.batches),
    requests: canvas("Requests: waiting, prompt, answer", HEIGHTS.requests),
    note: el("p", { class: "quiet" }), about: el("p", { class: "quiet" }),
    scrub: el("input", { type: "range", class: "scrub", min: 0, max: 1000, step: 1, "aria-label": "Moment in time" }),
    moment: el("p", { class: "moment", role: "status" }),
  };
  parts.scrub.addEventListener("input", () => {
    cursor = from() + Number(parts.scrub.value) / 1000 * (until() - from());
    held = null;
    drawAll();
  });
  const tools = el("div", { class: "actions" }, button("−", "Zoom out", () => zoom(2)), button("+", "Zoom in", () => zoom(0.5)),
    button("◀", "Earlier", () => shift(-0.5)), button("▶", "Later", () => shift(0.5)), button("All", "All of the run", () => look(data.first, data.last)),
    button("Slowest", "Slowest: the request that waited longest for its first token", slowest), button("Step", "Step: to the next one", () => step(1)));
  const legend = (pairs) => el("ul", { class: "legend" }, ...pairs.map(([name, place]) => {
    const key = el("i");
    key.style.background = `var(--${place})`;
    return el("li", {}, key, name);
  }));
  document.getElementById("timeline").replaceChildren(parts.trouble, el("section", { class: "panel", "aria-labelledby": "timeline-title" },
    el("div", { class: "head" }, el("h2", { id: "timeline-title" }, "Batches and requests"), tools),
    parts.scrub, parts.moment,
    el("div", { class: "strip" }, el("h3", {}, "Levels"), parts.levels, legend([["running", "c0"], ["waiting", "c1"], ["KV cache in use, of all", "c2"]])),
    el("div", { class: "strip" }, el("h3", {}, "Batches"), parts.batches, legend([["decodes only", "c0"], ["decodes and prompts", "c3"], ["prompts only", "c1"]]), parts.note),
    el("div", { class: "strip" }, el("h3", {}, "Requests"), parts.requests, legend([["waits", "c5"], ["prompt, until the first token", "c1"], ["answer", "c0"]]), parts.about),
    el("p", { class: "quiet" }, "Scroll or pinch over it to zoom, drag to move; a batch shows the requests that are in it, a request its batches.")));
  for (const place of [parts.levels, parts.batches, parts.requests]) listen(place);
  new ResizeObserver(() => data && drawAll()).observe(document.getElementById("timeline"));
}

function listen(place) {
  let start = null;
  place.addEventListener("wheel", (event) => {
    if (!data || (!event.ctrlKey && Math.abs(event.deltaX) > Math.abs(event.deltaY))) return;
    event.preventDefault();
    zoom(1.0015 ** event.deltaY, back(event.offsetX));
  }, { passive: false });
  place.addEventListener("pointerdown", (event) => {
    start = { x: event.clientX, begin: from(), end: until() };
    place.setPointerCapture(event.pointerId);
  });
  place.addEventListener("pointerup", () => (start = null));
  place.addEventListener("pointercancel", () => (start = null));
  place.addEventListener("pointermove", (event) => {
    if (!data) return;
    if (start && Math.abs(event.clientX - start.x) > 3) {
      const moved = (start.x - event.clientX) / (width() - LEFT - RIGHT) * (start.end - start.begin);
      look(start.begin + moved, start.end + moved);
      return;
    }
    cursor = Math.min(Math.max(back(event.offsetX), from()), until());
    held = place === parts.requests ? requestAt(event.offsetY) : null;
    drawAll();
  });
}

/** Indices of the step at the cursor (of the first replica that has one), and of the requests in it. */
function stepAt(time) {
  const { batches } = data;
  if (!batches) return -1;
  for (let i = 0; i < batches.start.length; i++) if (batches.start[i] <= time && batches.end[i] > time) return i;
  return -1;
}

function step(turn) {
  const { batches } = data ?? {};
  if (!batches) return zoom(0.25);
  const later = batches.start.filter((time) => time > cursor + 1e-9);
  if (turn > 0 && later.length) cursor = Math.min(...later) + 1e-7;
  if (cursor > until()) return shift(0.5);
  held = null;
  drawAll();
}

function slowest() {
  const { requests } = data;
  let worst = -1;
  requests.first_token.forEach((first, i) => first !== null && (worst < 0 || first - requests.arrival[i] > requests.first_token[worst] - requests.arrival[worst]) && (worst = i));
  if (worst < 0) return;
  const begin = requests.arrival[worst], end = requests.first_token[worst], room = Math.max((end - begin) * 0.6, 0.2);
  cursor = (begin + end) / 2;
  look(begin - room, end + room);
  held = requests.id[worst];
}

function context(place) {
  const ratio = devicePixelRatio || 1, high = place.clientHeight, wide = place.clientWidth;
  if (place.width !== Math.round(wide * ratio) || place.height !== Math.round(high * ratio)) {
    place.width = Math.round(wide * ratio);
    place.height = Math.round(high * ratio);
  }
  const drawn = place.getContext("2d");
  drawn.setTransform(ratio, 0, 0, ratio, 0, 0);
  drawn.clearRect(0, 0, wide, high);
  drawn.font = "11px system-ui, sans-serif";
  return drawn;
}

function axis(drawn, high) {
  const span = until() - from(), unit = 10 ** Math.floor(Math.log10(span / 5)), stepping = [1, 2, 5, 10].find((digit) => span / (digit * unit) <= 8) * unit;
  drawn.strokeStyle = colours.line;
  drawn.fillStyle = colours.soft;
  drawn.textAlign = "center";
  for (let time = Math.ceil((from() - data.first) / stepping) * stepping; time <= until() - data.first; time += stepping) {
    const x = across(time + data.first);
    drawn.beginPath();
    drawn.moveTo(x, 0);
    drawn.lineTo(x, high - 14);
    drawn.stroke();
    if (x > LEFT + 8 && x < width() - 24) drawn.fillText(`${Number(time.toPrecision(6))} s`, x, high - 3);
  }
}

function line(drawn, high) {
  const x = across(cursor);
  drawn.strokeStyle = colours.ink;
  drawn.lineWidth = 1;
  drawn.beginPath();
  drawn.moveTo(x, 0);
  drawn.lineTo(x, high);
  drawn.stroke();
}

function drawLevels() {
  const drawn = context(parts.levels), high = HEIGHTS.levels, bottom = high - 16;
  axis(drawn, high);
  const { lines } = data, most = Math.max(1, ...lines.running, ...lines.waiting);
  const time = (i) => lines.start + (lines.end - lines.start) * (i + 0.5) / lines.running.length;
  drawn.save();
  drawn.beginPath();
  drawn.rect(LEFT, 0, width() - LEFT - RIGHT, high);
  drawn.clip();
  for (const [name, paint, top] of [["running", "c0", most], ["waiting", "c1", most], ["kv", "c2", 1]]) {
    drawn.strokeStyle = colours[paint];
    drawn.lineWidth = 1.6;
    drawn.beginPath();
    lines[name].forEach((value, i) => drawn.lineTo(across(time(i)), bottom - (bottom - 6) * value / top));
    drawn.stroke();
  }
  drawn.restore();
  drawn.fillStyle = colours.soft;
  drawn.textAlign = "right";
  drawn.fillText(count(most), LEFT - 6, 11);
  drawn.fillText("0", LEFT - 6, bottom);
  line(drawn, bottom);
}

function drawBatches(inStep) {
  const drawn = context(parts.batches), high = HEIGHTS.batches, bottom = high - 16, { batches } = data;
  axis(drawn, high);
  if (!batches) {
    parts.note.textContent = `${count(data.batch_count)} steps in this time: zoom in to tell them apart (below 1,500).`;
    drawn.fillStyle = colours.soft;
    drawn.textAlign = "center";
    drawn.fillText("zoom in", width() / 2, bottom / 2);
    line(drawn, bottom);
    return;
  }
  const lanes = [...new Set(batches.replica.map((replica, i) => `${replica}/${batches.lane[i]}`))].sort();
  const shown = lanes.slice(0, LANES), tall = bottom / Math.max(shown.length, 1);
  parts.note.textContent = `${count(data.batch_count)} steps${lanes.length > LANES ? `, of ${LANES} of ${lanes.length} engines` : ""}; as high as the root of their tokens.`;
  const tokens = batches.decodes.map((decodes, i) => decodes + batches.chunk_tokens[i]);
  const most = Math.sqrt(Math.max(1, ...tokens));
  batches.start.forEach((start, i) => {
    const lane = shown.indexOf(`${batches.replica[i]}/${batches.lane[i]}`);
    if (lane < 0 || !tokens[i]) return;
    const x = Math.max(across(start), LEFT), end = Math.min(across(batches.end[i]), width() - RIGHT);
    if (end < LEFT || x > width() - RIGHT) return;
    const tallness = Math.max(2, (tall - 4) * Math.sqrt(tokens[i]) / most);
    const lit = i === inStep || (held !== null && within(i));
    drawn.globalAlpha = lit ? 1 : 0.62;
    drawn.fillStyle = colours[batches.chunk_tokens[i] ? (batches.decodes[i] ? "c3" : "c1") : "c0"];
    drawn.fillRect(x, (lane + 1) * tall - tallness - 1, Math.max(end - x - (end - x > 3 ? 1 : 0), 0.6), tallness);
  });
  drawn.globalAlpha = 1;
  drawn.fillStyle = colours.soft;
  drawn.textAlign = "right";
  if (shown.length > 1) shown.forEach((name, i) => drawn.fillText(name, LEFT - 6, (i + 1) * tall - tall / 2 + 4));
  else drawn.fillText(count(most ** 2), LEFT - 6, 11);
  line(drawn, bottom);
}

/** Whether a batch lies in the life of the request that is pointed at. */
function within(i) {
  const { requests, batches } = data, place = requests.id.indexOf(held);
  return place >= 0 && requests.scheduled[place] !== null && batches.start[i] >= requests.scheduled[place] - 1e-9 && (requests.finish[place] === null || batches.start[i] < requests.finish[place]) && requests.replica[place] === batches.replica[i];
}

let rows = [];
/** A row for each request: the first row that is free when it arrives. */
function place() {
  const { requests } = data, ends = [];
  const end = (i) => requests.finish[i] ?? data.last;
  rows = requests.arrival.map((arrival, i) => {
    let row = ends.findIndex((time) => time < arrival);
    if (row < 0) row = ends.push(0) - 1;
    ends[row] = end(i) + (until() - from()) * 0.002;
    return row;
  });
  return ends.length;
}

function rowHeight(number_) {
  return Math.min(16, Math.max((HEIGHTS.requests - 18) / Math.max(number_, 1), 1.5));
}

function requestAt(y) {
  const { requests } = data, tall = rowHeight(place()), row = Math.floor(y / tall);
  const found = requests.id.findIndex((_, i) => rows[i] === row && requests.arrival[i] <= cursor && (requests.finish[i] ?? data.last) >= cursor);
  return found < 0 ? null : requests.id[found];
}

function drawRequests(inStep) {
  const drawn = context(parts.requests), high = HEIGHTS.requests, { requests } = data;
  axis(drawn, high);
  const tall = rowHeight(place()), thick = Math.max(tall - (tall > ROW ? 2 : 0.4), 1);
  const bar = (begin, end, row, paint) => {
    const x = Math.max(across(begin), LEFT), far = Math.min(across(end), width() - RIGHT);
    if (far <= LEFT || x >= width() - RIGHT || far <= x) return;
    drawn.fillStyle = colours[paint];
    drawn.fillRect(x, row * tall, Math.max(far - x, 0.8), thick);
  };
  requests.arrival.forEach((arrival, i) => {
    const scheduled = requests.scheduled[i], first = requests.first_token[i], finish = requests.finish[i] ?? data.last;
    const there = scheduled !== null && scheduled <= cursor && finish > cursor;
    drawn.globalAlpha = held === requests.id[i] ? 1 : held !== null ? 0.25 : inStep >= 0 && !there ? 0.4 : 0.9;
    bar(arrival, scheduled ?? finish, rows[i], "c5");
    if (scheduled !== null) bar(scheduled, first ?? finish, rows[i], "c1");
    if (first !== null) bar(first, finish, rows[i], "c0");
  });
  drawn.globalAlpha = 1;
  parts.about.textContent = data.request_count > requests.id.length ? `${count(requests.id.length)} of ${count(data.request_count)} requests: those with the longest time to first token.` : `${count(data.request_count)} requests.`;
  line(drawn, high - 14);
}

function say(inStep) {
  const { requests, batches, lines } = data, at = seconds(cursor - data.first, 4);
  if (held !== null) {
    const i = requests.id.indexOf(held), wait = (time) => (time === null ? "–" : seconds(time - requests.arrival[i]));
    if (i >= 0) return `request ${held}: ${count(requests.prompt_tokens[i])} tokens of prompt (${count(requests.cached_tokens[i])} cached), ${count(requests.output_tokens[i])} of output; first step after ${wait(requests.scheduled[i])}, first token after ${wait(requests.first_token[i])}, end after ${wait(requests.finish[i])}${requests.preemptions[i] ? `, ${requests.preemptions[i]} preemptions` : ""}; ${requests.status[i]}`;
  }
  const bin = Math.min(Math.max(Math.floor((cursor - lines.start) / (lines.end - lines.start) * lines.kv.length), 0), lines.kv.length - 1);
  const around = `KV cache ${percent(lines.kv[bin], 2)} in use`;
  if (inStep < 0) return `at ${at}: ${number(lines.running[bin])} running, ${number(lines.waiting[bin])} waiting, ${around}`;
  const chunks = batches.chunks[inStep];
  return `at ${at}: a step of ${seconds(batches.end[inStep] - batches.start[inStep])} with ${count(batches.decodes[inStep])} decodes${chunks ? ` and ${chunks} prompt${chunks > 1 ? "s" : ""} (${count(batches.chunk_tokens[inStep])} tokens)` : ""}; ${count(batches.waiting[inStep])} waiting, ${around}`;
}

let frame = 0;
function drawAll() {
  cancelAnimationFrame(frame);
  frame = requestAnimationFrame(() => {
    if (!data || !width()) return;
    const inStep = stepAt(cursor);
    drawLevels();
    drawBatches(inStep);
    drawRequests(inStep);
    parts.scrub.value = Math.round(1000 * (cursor - from()) / (until() - from()));
    const text = say(inStep);
    parts.scrub.setAttribute("aria-valuetext", text);
    parts.moment.textContent = text;
  });
}
