// Pinned runs: kept in the address, side by side with what is shown now.

import { whole } from "./ask.js";
import { el, money, number, percent, seconds, table } from "./format.js";
import { replace, state, write } from "./state.js";

const ROWS = [
  ["TTFT p50", (run) => run.document.ttft.p50, seconds], ["TTFT p99", (run) => run.document.ttft.p99, seconds],
  ["TPOT p50", (run) => run.document.tpot.p50, seconds], ["TPOT p99", (run) => run.document.tpot.p99, seconds],
  ["E2EL p99", (run) => run.document.e2el.p99, seconds],
  ["good requests", (run) => run.document.attainment, percent],
  ["served", (run) => run.document.request_throughput, (value) => `${number(value)} /s`],
  ["per M output tokens", (run) => run.usd_per_million, money], ["per hour", (run) => run.price_per_hour, money],
  ["GPUs", (run) => run.gpus, String], ["KV in use", (run) => run.document.utilisation.kv, percent],
  ["limited by", (run) => run.bottlenecks?.[0]?.name ?? "–", String],
];
const MOST = 7;
let redraw = () => {};
let latest = null;

/** What of the words is not as in another run. */
export function differences(words, other) {
  const names = [...new Set([...Object.keys(words), ...Object.keys(other)])];
  return names.filter((name) => String(words[name]) !== String(other[name])).map((name) => `${name} ${words[name] ?? "default"}`).join(", ");
}

export function addPin(shown, after) {
  if (state.pins.length >= MOST) state.pins.shift();
  const used = state.pins.map((pin) => pin.name);
  const name = [..."ABCDEFGHIJKLMNOPQRSTUVWXYZ"].find((letter) => !used.includes(letter));
  state.pins.push({ name, words: structuredClone(state.words), figures: shown, error: null });
  write();
  drawPins(after, shown);
  after();
}

export async function loadPins() {
  for (const pin of state.pins) {
    if (pin.figures) continue;
    try {
      pin.figures = await whole(pin.words);
    } catch (error) {
      pin.error = error.message;
    }
  }
}

/** The table of pins, the figures of now below them. */
export function drawPins(after = redraw, shown = latest) {
  redraw = after;
  latest = shown;
  const place = document.getElementById("pins");
  place.hidden = !state.pins.length;
  if (place.hidden) return;
  const first = state.pins[0], now = { name: "now", words: state.words, figures: latest };
  const cell = (pin, [, of, say]) => {
    if (!pin.figures) return pin.error ? "–" : "…";
    const value = of(pin.figures), base = first.figures ? of(first.figures) : null;
    const ratio = value / base - 1;
    const changed = pin !== first && Number.isFinite(ratio) && Math.abs(ratio) > 0.0005;
    return [value === null ? "–" : say(value), changed ? `${ratio > 0 ? "+" : "−"}${number(100 * Math.abs(ratio), 2)} %` : " "];
  };
  const tools = (pin) => el("span", {}, `${pin.name} `,
    el("button", { type: "button", "aria-label": `fly ${pin.name} again`, onclick: () => replace(pin.words) }, "fly"), " ",
    el("button", { type: "button", "aria-label": `× remove ${pin.name}`, onclick: () => {
      state.pins.splice(state.pins.indexOf(pin), 1);
      write();
      drawPins();
      redraw();
    } }, "×"));
  const rows = [...state.pins, now].map((pin) => [pin === now ? "now" : tools(pin), ...ROWS.map((row) => cell(pin, row))]);
  const about = state.pins.map((pin) => el("p", { class: "quiet" }, `${pin.name}: ${pin.error ?? (pin === first ? pin.figures?.title ?? "" : differences(pin.words, first.words) || "as A")}`));
  document.getElementById("pin-table").replaceChildren(table(["", ...ROWS.map(([name]) => name)], rows, (place) => place === rows.length - 1), ...about);
}
