// The settings: sliders, lists and words, each the same word as a flag of `windtunnel run`.

import { count, el, number, seconds } from "./format.js";
import { change, state } from "./state.js";

const RATES = Array.from({ length: 161 }, (_, i) => Number((10 ** (i / 40 - 1)).toPrecision(3))); // 0.1 to 1000 a second
const LENGTHS = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768];
const TTFT = [50, 75, 100, 150, 200, 300, 400, 500, 750, 1000, 1500, 2000, 3000, 5000, 10000];
const TPOT = [5, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60, 75, 100, 150, 200];
const SHARES = [0.5, 0.75, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999];
const BURSTS = [0.1, 0.15, 0.25, 0.4, 0.6, 0.8, 1, 1.5, 2, 4];
const POOLS = ["prefill", "decode"];
const RANDOM = "random lengths";
const SHOWN = ["model", "device", "engine", "scheduler", "router", "tensor_parallel_size", "replicas", "max_num_seqs", "max_num_batched_tokens", "trace", "request_rate",
  "burstiness", "num_prompts", "random_input_len", "random_output_len", "seed", "goodput", "attainment", "enable_prefix_caching", "quantization"];
const text = (value) => (Array.isArray(value) ? value.join(" ") : (value ?? ""));

let offered = null;
let numbers = 0;
export const sliders = {}; // by word: the stops, for "one step in every direction"

function field(label, control, shown = null) {
  control.id = `field-${numbers++}`;
  const name = el("label", { for: control.id }, label);
  if (shown) name.append(shown);
  return el("div", { class: "field" }, name, control);
}

/** A slider over stops; with `free` its left end leaves the word out. */
function slider(label, stops, value, say, set, free = null) {
  const places = free === null ? stops : [null, ...stops];
  const near = (wanted) => (wanted === null ? 0 : places.reduce((best, each, place) =>
    (each !== null && (places[best] === null || Math.abs(Math.log(each / wanted)) < Math.abs(Math.log(places[best] / wanted))) ? place : best), 0));
  const output = el("output");
  const input = el("input", { type: "range", min: 0, max: places.length - 1, step: 1 });
  const wrap = field(label, input, output);
  const show = (said, own) => {
    output.textContent = said;
    input.setAttribute("aria-valuetext", said);
    wrap.classList.toggle("own", own);
  };
  input.value = near(value);
  show(value === null ? free : say(value), value === null);
  input.addEventListener("input", () => {
    const chosen = places[Number(input.value)];
    show(chosen === null ? free : say(chosen), chosen === null);
    set(chosen);
  });
  return wrap;
}

/** A slider of a word. */
function stops(word, label, places, { say = count, free = null, usual = null } = {}) {
  sliders[word] = { label, places, usual, say };
  const given = Number(text(state.words[word]));
  const value = word in state.words && given > 0 ? given : free === null ? usual : null;
  const made = slider(label, places, value, say, (chosen) => change({ [word]: chosen }), free);
  made.querySelector("input").dataset.word = word;
  return made;
}

function list(label, value, options, set) {
  const known = options.some(([name]) => name === value);
  const all = known ? options : [[value, value], ...options];
  const select = el("select", { onchange: () => set(select.value) }, ...all.map(([name, said]) => el("option", { value: name }, said)));
  select.value = value;
  return field(label, select);
}

function typed(label, value, set, more = {}) {
  const input = el("input", { type: "text", spellcheck: "false", autocomplete: "off", value, onchange: () => set(input.value.trim()), ...more });
  return field(label, input);
}

const group = (legend, ...fields) => el("fieldset", {}, el("legend", {}, legend), ...fields.filter(Boolean));

// Words inside a word: "replicas=2 tensor_parallel_size=4", "ttft:300 tpot:50".
const parts = (value, between) => Object.fromEntries(text(value).split(/\s+/).filter(Boolean).map((each) => each.split(between)));
const joined = (found, between) => Object.entries(found).map((pair) => pair.join(between)).join(" ");
const simple = (role) => !Array.isArray(state.words[role]) || state.words[role].length === 1;

function pools() {
  const apart = POOLS.some((role) => role in state.words);
  const choice = list("Pools", apart ? "apart" : "one", [["one", "prefill and decode together"], ["apart", "separate prefill and decode"]], (chosen) =>
    change(chosen === "apart" ? { prefill: "replicas=1", decode: "replicas=1", replicas: null } : { prefill: null, decode: null, link: null, handover: null, decode_router: null }, { redraw: true }));
  if (!apart) return [choice, stops("replicas", "Replicas", offered.stops.replicas, { usual: 1 })];
  const sides = POOLS.filter((role) => role in state.words && simple(role)).flatMap((role) => {
    const own = parts(state.words[role], "=");
    const set = (word) => (value) => {
      const now = parts(state.words[role], "=");
      if (value === null) delete now[word];
      else now[word] = value;
      change({ [role]: joined(now, "=") });
    };
    return [
      slider(`${role} replicas`, offered.stops.replicas, Number(own.replicas ?? 1), count, set("replicas")),
      slider(`${role} TP`, offered.stops.tensor_parallel_size, own.tensor_parallel_size ? Number(own.tensor_parallel_size) : null, count, set("tensor_parallel_size"), "same"),
    ];
  });
  return [choice, el("div", { class: "two" }, ...sides)];
}

function deployment() {
  const models = el("datalist", { id: "models" }, ...offered.model.map((name) => el("option", { value: name })));
  const devices = offered.device.map((each) => [each.name, `${each.name} · ${number(each.gib, 2)} GiB${each.price ? ` · $${each.price}/h` : ""}`]);
  const alias = text(state.words.device) || offered.usual.device;
  const device = devices.some(([name]) => name === alias) ? alias : (devices.find(([name]) => name.startsWith(`${alias}_`)) ?? [alias])[0];
  const own = text(state.words.scheduler);
  return group("Deployment",
    typed("Model", text(state.words.model), (value) => change({ model: value }), { list: "models" }), models,
    list("Device", device, devices, (value) => change({ device: value })),
    stops("tensor_parallel_size", "Tensor parallel size", offered.stops.tensor_parallel_size, { usual: 1 }),
    ...pools(),
    stops("max_num_seqs", "Batch (max_num_seqs)", offered.stops.max_num_seqs, { free: "default" }),
    stops("max_num_batched_tokens", "Token budget of a step", offered.stops.max_num_batched_tokens, { free: "default" }),
    list("Engine", text(state.words.engine) || offered.usual.engine, offered.engine.map((name) => [name, name]), (value) => change({ engine: value })),
    list("Scheduler", own, [["", "default"], ...offered.scheduler.map((name) => [name, name])], (value) => change({ scheduler: value })),
    list("Router", text(state.words.router) || offered.usual.router, Object.keys(offered.router).map((name) => [name, name]), (value) => change({ router: value })),
    list("Weights", text(state.words.quantization), [["", "as the checkpoint"], ["fp8", "fp8"]], (value) => change({ quantization: value })));
}

function load() {
  const random = "random_input_len" in state.words || "random_output_len" in state.words;
  const traces = [...offered.trace.map((each) => [each.name, `${each.name} · ${count(each.requests)} requests`]), [RANDOM, RANDOM]];
  const set = (chosen) => change(chosen === RANDOM
    ? { trace: null, time_scale: null, repeat: null, random_input_len: 1024, random_output_len: 256, request_rate: state.words.request_rate ?? 5 }
    : { trace: chosen, ...Object.fromEntries(Object.keys(state.words).filter((word) => word.startsWith("random_")).map((word) => [word, null])) }, { redraw: true });
  const trace = offered.trace.find((each) => each.name === (text(state.words.trace) || offered.usual.trace));
  const rate = random ? "all at once" : trace ? `${number(trace.rate)}/s, the trace’s` : "the trace’s";
  return group("Load",
    list("Requests", random ? RANDOM : text(state.words.trace) || offered.usual.trace, traces, set),
    random && stops("random_input_len", "Prompt tokens", LENGTHS, { usual: 1024 }),
    random && stops("random_output_len", "Output tokens", LENGTHS, { usual: 128 }),
    stops("request_rate", "Requests per second", RATES, { say: (value) => `${number(value)}/s`, free: rate }),
    "request_rate" in state.words && stops("burstiness", "Burstiness (1: Poisson)", BURSTS, { say: String, usual: 1 }),
    stops("num_prompts", "How many", offered.stops.num_prompts, random ? { usual: offered.usual.num_prompts } : { free: "all of the trace" }),
    typed("Seed", text(state.words.seed) || "0", (value) => change({ seed: value === "0" ? null : value }), { inputmode: "numeric" }));
}

function goals() {
  const limits = parts(state.words.goodput, ":");
  const set = (name) => (value) => {
    const now = parts(state.words.goodput, ":");
    if (value === null) delete now[name];
    else now[name] = value;
    const left = joined(now, ":");
    change({ goodput: left, ...(left ? {} : { attainment: null }) });
  };
  const limit = (name) => (name in limits ? Number(limits[name]) : null);
  const say = (value) => seconds(value / 1000);
  const made = [slider("TTFT limit", TTFT, limit("ttft"), say, set("ttft"), "none"), slider("TPOT limit", TPOT, limit("tpot"), say, set("tpot"), "none")];
  return group("Goals", ...made,
    Object.keys(limits).length > 0 && stops("attainment", "Share of good requests wanted", SHARES, { say: (value) => `${number(100 * value)} %`, free: "not set" }));
}

// Every other word, as text: what the page has no slider for is still there.
function more() {
  const shown = (word) => SHOWN.includes(word) || (POOLS.includes(word) && simple(word));
  const quoted = (value) => (/\s/.test(value) ? `"${value}"` : value);
  const line = Object.entries(state.words).filter(([word]) => !shown(word))
    .flatMap(([word, value]) => [].concat(value).map((each) => `${word}=${quoted(each)}`)).join(" ");
  return group("More words", typed("word=value, as flags of run", line, (value) => {
    const found = {};
    for (const [, word, quote, plain] of value.matchAll(/([\w-]+)=(?:"([^"]*)"|(\S*))/g)) {
      const key = word.replaceAll("-", "_"), said = quote ?? plain;
      found[key] = key in found ? [].concat(found[key], said) : said;
    }
    const old = Object.fromEntries(Object.keys(state.words).filter((word) => !shown(word)).map((word) => [word, null]));
    change({ ...old, ...found }, { redraw: true });
  }, { placeholder: "enable_prefix_caching=false" }));
}

export function draw(choices) {
  offered = choices ?? offered;
  const form = document.getElementById("controls");
  const focus = document.activeElement?.id;
  const top = form.scrollTop;
  numbers = 0;
  for (const word of Object.keys(sliders)) delete sliders[word];
  form.replaceChildren(deployment(), load(), goals(), more());
  form.scrollTop = top;
  if (focus?.startsWith("field-")) document.getElementById(focus)?.focus();
}
