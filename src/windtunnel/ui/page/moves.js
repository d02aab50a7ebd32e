// One step in every direction: each slider moved by one stop, alone, and what that changes.

import { whole } from "./ask.js";
import { sliders } from "./controls.js";
import { el, number, table } from "./format.js";
import { change, state } from "./state.js";

const FIGURES = [["TTFT p99", (run) => run.document.ttft.p99, true], ["TPOT p99", (run) => run.document.tpot.p99, true], ["good", (run) => run.document.attainment, false], ["$/M tokens", (run) => run.usd_per_million, true]];
const LEFT_OUT = ["num_prompts", "attainment"];
let latest = 0;

function candidates(shown) {
  return Object.entries(sliders).filter(([word]) => !LEFT_OUT.includes(word)).flatMap(([word, { label, places, usual, say }]) => {
    const own = shown.pools[0][word];
    const now = Number(state.words[word] ?? usual ?? own ?? (word === "request_rate" ? shown.request_rate : NaN));
    if (!(now > 0)) return [];
    const far = word === "request_rate" ? 1.25 : 1.0001;
    const steps = [[...places].reverse().find((stop) => stop < now / far), places.find((stop) => stop > now * far)];
    return steps.filter((stop) => stop !== undefined).map((stop) => ({ word, label: label.replace(/ \(.*/, ""), stop, said: say(stop) }));
  });
}

function cell(now, base, less) {
  if (!Number.isFinite(now) || !Number.isFinite(base) || now === null || base === null) return "–";
  const ratio = now / base - 1;
  if (Math.abs(ratio) < 0.005) return "=";
  const text = now / base > 3 ? `× ${number(now / base, 2)}` : `${ratio > 0 ? "+" : "−"}${number(100 * Math.abs(ratio), 2)} %`;
  return el("span", { class: (ratio > 0) === less ? "worse" : "better" }, text);
}

export async function moves(shown) {
  const number_ = ++latest, place = document.getElementById("moves"), button = document.getElementById("moves-go");
  const words = structuredClone(state.words), rows = [];
  const show = () => place.replaceChildren(table(["", ...FIGURES.map(([name]) => name), ""], rows));
  button.disabled = true;
  for (const { word, label, stop, said } of candidates(shown)) {
    let cells;
    try {
      const run = await whole({ ...words, [word]: String(stop) });
      cells = FIGURES.map(([, of, less]) => cell(of(run), of(shown), less));
    } catch (error) {
      cells = [el("span", { title: error.message }, "cannot run"), "", "", ""];
    }
    if (number_ !== latest) break;
    rows.push([[label, `→ ${said}`], ...cells, el("button", { type: "button", "aria-label": `Set ${label} to ${said}`, onclick: () => change({ [word]: stop }, { redraw: true }) }, "set")]);
    show();
  }
  button.disabled = false;
}
