// Explore: the knee of what is set, and stored studies with their best points.

import { ask, get } from "./ask.js";
import { chart } from "./chart.js";
import { el, money, number, percent, seconds, table } from "./format.js";
import { change, replace, state } from "./state.js";

const AXES = {
  request_rate: ["requests/s", (value) => number(value), false], price_per_hour: ["$ per hour", money, true], gpus: ["GPUs", String, true],
  ttft_p50: ["TTFT p50", seconds, true], ttft_p90: ["TTFT p90", seconds, true], ttft_p99: ["TTFT p99", seconds, true],
  tpot_p50: ["TPOT p50", seconds, true], tpot_p90: ["TPOT p90", seconds, true], tpot_p99: ["TPOT p99", seconds, true], e2el_p99: ["E2EL p99", seconds, true],
  output_throughput: ["output tokens/s", number, false], attainment: ["good requests", percent, false], cost_usd: ["cost, $", money, true],
};
let parts = null;

export function openExplore() {
  if (parts) return;
  parts = { knee: el("div", { class: "chart none" }), kneeNote: el("p", { class: "quiet" }, "Nine rates around what is served when all requests come at once."), study: el("div") };
  const go = el("button", { type: "button", id: "knee-go", onclick: () => knee(go) }, "Find the knee");
  document.getElementById("explore").replaceChildren(
    el("section", { class: "panel", "aria-labelledby": "knee-title" }, el("div", { class: "head" }, el("h2", { id: "knee-title" }, "The knee of these settings"), go), parts.knee, parts.kneeNote),
    el("section", { class: "panel", "aria-labelledby": "study-title" }, el("h2", { id: "study-title" }, "Stored studies"), parts.study));
  studies();
}

async function knee(button) {
  button.disabled = true;
  parts.kneeNote.textContent = "simulating…";
  try {
    parts.knee.className = "chart tall";
    drawKnee(await ask("api/sweep", { words: state.words }), (rate) => change({ request_rate: Number(rate.toPrecision(3)) }, { redraw: true }));
  } catch (error) {
    parts.kneeNote.textContent = error.message;
  }
  button.disabled = false;
}

function drawKnee(found, pick, place = parts.knee, note = parts.kneeNote) {
  const rates = found.points.map((point) => point.request_rate);
  const lines = [["TTFT p50", "ttft", "p50", 0], ["TTFT p99", "ttft", "p99", 1], ["TPOT p99", "tpot", "p99", 2]];
  const series = lines.map(([name, latency, statistic, colour]) => ({ name, place: colour, x: rates, y: found.points.map((point) => (point[latency][statistic] === null ? NaN : 1000 * point[latency][statistic])) }));
  const marks = [];
  if (found.knee) marks.push({ x: found.knee, label: `knee ${number(found.knee)}/s`, place: 3 });
  if (state.words.request_rate) marks.push({ x: Number(state.words.request_rate), label: "now", place: 5 });
  chart(place, { title: "Latency against the rate", series, marks, x: { label: "requests/s", zero: true, say: (value) => number(value, 2), tip: (value) => `${number(value)} /s` }, y: { label: "ms", log: true, tip: (value) => `${number(value)} ms` } });
  note.replaceChildren(found.knee ? `Keeps up to ${number(found.knee)} requests/s${state.words.goodput ? " within the goals" : ""}. ` : "Keeps up with no rate. ",
    ...rates.map((rate) => el("button", { type: "button", "aria-label": `Set ${number(rate)} requests per second`, onclick: () => pick(rate) }, number(rate))));
}

async function studies() {
  const offered = (await get("api/choices")).studies;
  if (!offered.length) {
    parts.study.replaceChildren(el("p", { class: "quiet" }, "None: start windtunnel ui with --studies and stores of plan --store, documents of sweep --json or plan --json, or folders of run --output."));
    return;
  }
  const select = el("select", { id: "study-name" }, ...offered.map(({ study, kind, error }) => el("option", { value: study, disabled: Boolean(error) }, `${study} (${kind})`)));
  const body = el("div");
  select.addEventListener("change", () => show(select.value, body));
  parts.study.replaceChildren(el("div", { class: "row" }, el("label", { for: "study-name" }, "Study", select)), body);
  const first = offered.find((each) => !each.error);
  if (first) await show((select.value = first.study), body);
}

async function show(name, body) {
  try {
    const found = await get(`api/study?name=${encodeURIComponent(name)}`);
    layOut(found, body);
  } catch (error) {
    body.replaceChildren(el("p", { class: "trouble", role: "alert" }, error.message));
  }
}

/** Points that no other one beats in both values. */
export function frontier(points, x, y) {
  const better = (name, a, b) => (AXES[name][2] ? a < b : a > b);
  const known = points.filter((point) => point.met && point.values[x] !== null && point.values[y] !== null && point.values[x] !== undefined && point.values[y] !== undefined);
  return known.filter((one) => !known.some((other) => {
    const [ox, oy, mx, my] = [other.values[x], other.values[y], one.values[x], one.values[y]];
    return !better(x, mx, ox) && !better(y, my, oy) && (better(x, ox, mx) || better(y, oy, my));
  })).sort((a, b) => a.values[x] - b.values[x]);
}

/** Without what all points have in common. */
function shortened(points) {
  const words = points.map((point) => point.label.split(", "));
  const shared = words[0]?.filter((word) => words.every((others) => others.includes(word))) ?? [];
  return points.map((point, i) => ({ ...point, label: (points.length > 1 && words[i].filter((word) => !shared.includes(word)).join(", ")) || point.label }));
}

function layOut({ points, ...rest }, body) {
  const found = { ...rest, points: shortened(points) };
  const names = Object.keys(AXES).filter((name) => new Set(found.points.map((point) => point.values[name]).filter((value) => value !== null && value !== undefined)).size > 0);
  const varied = names.filter((name) => new Set(found.points.map((point) => point.values[name])).size > 1);
  if (!found.points.length || names.length < 2) {
    body.replaceChildren(el("p", { class: "quiet" }, "This study has no points to lay out."));
    return;
  }
  const usual = found.kind === "plan" ? ["price_per_hour", "request_rate"] : ["request_rate", "ttft_p99"];
  const chosen = usual.map((name, place) => (names.includes(name) ? name : (varied[place] ?? names[place])));
  const plot = el("div", { class: "chart tall" }), best = el("div", { class: "scroll words", tabindex: "0", role: "region", "aria-label": "Best points" }), log = el("input", { type: "checkbox", id: "study-log" });
  log.checked = true;
  const pick = (place, label) => {
    const select = el("select", { id: `study-${label}` }, ...names.map((name) => el("option", { value: name }, AXES[name][0])));
    select.value = chosen[place];
    select.addEventListener("change", () => {
      chosen[place] = select.value;
      draw();
    });
    return el("label", { for: `study-${label}` }, label, select);
  };
  log.addEventListener("change", () => draw());
  const draw = () => {
    const [x, y] = chosen, front = frontier(found.points, x, y);
    const of = (points, name) => points.map((point) => point.values[name] ?? NaN);
    const label = (point) => `${point.label}: ${AXES[x][0]} ${AXES[x][1](point.values[x])}, ${AXES[y][0]} ${AXES[y][1](point.values[y])}${point.met ? "" : ", misses a limit"}`;
    const fly = (points) => (i) => points[i].words && replace(points[i].words);
    const others = found.points.filter((point) => !front.includes(point));
    const marks = found.knee && x === "request_rate" ? [{ x: found.knee, label: `knee ${number(found.knee)}/s`, place: 3 }] : [];
    const one = (points, place, radius) => ({ kind: "dots", place, radius, x: of(points, x), y: of(points, y), labels: points.map(label), missed: points.map((point) => !point.met), onpick: points.some((point) => point.words) ? fly(points) : null });
    chart(plot, {
      title: `${AXES[y][0]} against ${AXES[x][0]}: ${found.points.length} points, ${front.length} of them unbeaten`, legend: false, marks,
      series: [{ ...one(others, 5, 4), onpick: null, name: "others" }, { name: "unbeaten", place: 0, x: of(front, x), y: of(front, y) }, { ...one(front, 0, 6), name: "unbeaten" }],
      x: { label: AXES[x][0], log: log.checked && x !== "gpus", say: AXES[x][1] }, y: { label: AXES[y][0], log: log.checked, say: AXES[y][1] },
    });
    const columns = names.filter((name) => !["ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90", "cost_usd"].includes(name)).slice(0, 8);
    best.replaceChildren(table(["unbeaten", ...columns.map((name) => AXES[name][0]), ""], front.slice(0, 20).map((point) => [point.label, ...columns.map((name) => (point.values[name] === null || point.values[name] === undefined ? "–" : AXES[name][1](point.values[name]))),
      point.words ? el("button", { type: "button", "aria-label": `Fly ${point.label}`, onclick: () => replace(point.words) }, "fly") : ""])));
  };
  body.replaceChildren(el("div", { class: "row" }, pick(0, "Across"), pick(1, "Up"), el("label", { for: "study-log" }, log, " logarithmic")), plot, best,
    el("p", { class: "quiet" }, "Unbeaten: no other point that keeps the limits is better in both values. Faint points miss a limit. Fly: the page simulates that point."));
  draw();
}
