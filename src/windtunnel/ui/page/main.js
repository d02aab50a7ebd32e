// The page: reads the address, asks for figures while settings change, and draws them as they come.

import { get, stages } from "./ask.js";
import { draw as drawControls } from "./controls.js";
import { showExport } from "./exporting.js";
import { openExplore } from "./explore.js";
import { draw, drawCurve } from "./figures.js";
import { count, el, number } from "./format.js";
import { moves } from "./moves.js";
import { addPin, drawPins, loadPins } from "./pins.js";
import { onChange, read, state, write } from "./state.js";
import { openTimeline } from "./timeline.js";

const $ = (id) => document.getElementById(id);
const REST = 900; // milliseconds after which a setting counts as one to compare with
let shown = null, before = null, settled = null, asked = 0, control = null, restless = 0;
let unseen = false, again = false; // the first figures of what was asked are under way; there are newer settings

/** Figures of the state, each stage drawn as it comes. While the first one is under way newer settings wait, so that a
 *  slider that never rests shows something; later stages are given up for them. */
async function simulate() {
  if (unseen) {
    again = true;
    return;
  }
  control?.abort();
  control = new AbortController();
  unseen = true;
  again = false;
  const number_ = ++asked, began = performance.now();
  clearTimeout(restless);
  $("status").classList.add("busy");
  const slow = setTimeout(() => number_ === asked && say("simulating… what is new on this machine is compiled or tabulated once"), 1500);
  let current = null;
  const seen = () => {
    if (number_ !== asked || !unseen) return;
    unseen = false;
    if (again) simulate();
  };
  try {
    await stages(state.words, control.signal, (stage) => {
      if (number_ !== asked) return;
      current = { ...current, ...stage };
      shown = current;
      before = settled && settled.asked !== number_ ? settled.figures : before;
      trouble(null);
      draw(current, before);
      drawPins(undefined, current);
      const part = stage.stage === "small" ? `the first ${count(current.document.requests.total)} of ` : "";
      say(`${part}${count(current.requests)} requests of ${current.load}, simulated in ${number(1000 * stage.seconds, 2)} ms`, stage.stage !== "ends");
      document.documentElement.dataset.stage = `${number_} ${stage.stage}`;
      window.dispatchEvent(new CustomEvent("figures", { detail: { stage: stage.stage, asked: number_, milliseconds: performance.now() - began } }));
      seen();
    });
    if (number_ !== asked) return;
    restless = setTimeout(() => (settled = { figures: current, asked: number_ }), settled ? REST : 0);
    if (state.view === "timeline") openTimeline();
  } catch (error) {
    if (error.name === "AbortError" || number_ !== asked) return;
    trouble(error.message);
  } finally {
    clearTimeout(slow);
    seen();
    if (number_ === asked) $("status").classList.remove("busy");
  }
}

function say(text, busy = true) {
  $("status").textContent = text;
  $("status").classList.toggle("busy", busy);
  $("status").classList.remove("stuck");
}

function trouble(text) {
  $("trouble").hidden = text === null;
  $("trouble").textContent = text ?? "";
  $("figures").classList.toggle("stale", text !== null);
  for (const place of [$("vitals"), $("live")]) place.classList.toggle("waiting", text !== null);
  if (text !== null) {
    $("status").textContent = shown ? "the figures below are those of the settings before" : "nothing to show yet";
    $("status").classList.add("stuck");
    document.documentElement.dataset.stage = `${asked} trouble`;
    if (!shown) $("title").textContent = "windtunnel";
  }
}

function choose(view) {
  state.view = document.body.dataset.view = view;
  for (const name of ["live", "timeline", "explore"]) {
    $(name).hidden = name !== view;
    $(`tab-${name}`).setAttribute("aria-selected", name === view);
    $(`tab-${name}`).tabIndex = name === view ? 0 : -1;
  }
  write();
  if (view === "timeline") openTimeline();
  if (view === "explore") openExplore();
  if (view === "live" && shown) draw(shown, before);
}

function tabs() {
  const names = ["live", "timeline", "explore"];
  for (const name of names) $(`tab-${name}`).addEventListener("click", () => choose(name));
  document.querySelector(".views").addEventListener("keydown", (event) => {
    const turn = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!turn) return;
    const next = names[(names.indexOf(state.view) + turn + names.length) % names.length];
    choose(next);
    $(`tab-${next}`).focus();
  });
}

function latencies() {
  const names = { ttft: "TTFT", tpot: "TPOT", itl: "ITL", e2el: "E2EL" };
  $("curve-choice").replaceChildren(...Object.entries(names).map(([name, text]) => {
    const input = el("input", { type: "radio", name: "latency", value: name, onchange: () => {
      state.latency = name;
      write();
      if (shown) drawCurve(shown, before);
    } });
    input.checked = state.latency === name;
    return el("label", {}, input, el("span", {}, text));
  }));
}

function theme() {
  const root = document.documentElement;
  try {
    const kept = localStorage.getItem("windtunnel-theme");
    if (kept) root.dataset.theme = kept;
  } catch { /* a page without storage follows the system */ }
  $("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try {
      localStorage.setItem("windtunnel-theme", root.dataset.theme);
    } catch { /* as above */ }
    if (state.view === "timeline") openTimeline();
  });
}

function keys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input:not([type=range]), select, textarea, dialog")) return;
    if (event.key === "p") $("pin").click();
    if (event.key === "e") $("export").click();
  });
}

async function begin() {
  theme();
  let offered;
  try {
    offered = await get("api/choices");
  } catch (error) {
    trouble(`the server does not answer (${error.message}): is windtunnel ui still running?`);
    return;
  }
  read(offered.start);
  drawControls(offered);
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  latencies();
  tabs();
  keys();
  onChange((redraw) => {
    if (redraw) drawControls();
    simulate();
  });
  $("pin").addEventListener("click", () => shown && addPin(shown, () => draw(shown, before)));
  $("export").addEventListener("click", showExport);
  $("moves-go").addEventListener("click", () => shown && moves(shown));
  choose(state.view);
  await simulate();
  await loadPins();
  drawPins(() => shown && draw(shown, before), shown);
  if (shown) draw(shown, before);
}

begin();
