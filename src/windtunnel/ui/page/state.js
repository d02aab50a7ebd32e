// The state of the page: the words of `windtunnel run`, the pins and the view, all of it in the address.

const OWN = ["pin", "view", "from", "until", "latency"];
const listeners = [];
export const state = { words: {}, pins: [], view: "live", latency: "ttft", from: null, until: null };

function wordsOf(parameters) {
  const words = {};
  for (const [key, value] of parameters) {
    if (OWN.includes(key)) continue;
    words[key] = key in words ? [].concat(words[key], value) : value;
  }
  return words;
}

export function query(words) {
  const parameters = new URLSearchParams();
  for (const [key, value] of Object.entries(words)) for (const each of [].concat(value)) parameters.append(key, each);
  return parameters;
}

function number(text) {
  const value = text === null ? NaN : Number(text);
  return Number.isFinite(value) ? value : null;
}

export function read(start) {
  const parameters = new URLSearchParams(location.search);
  const words = wordsOf(parameters);
  state.words = Object.keys(words).length ? words : { ...start };
  state.pins = parameters.getAll("pin").slice(0, 8).map((text) => {
    const [name, ...rest] = text.split("~");
    return { name, words: wordsOf(new URLSearchParams(rest.join("~"))), figures: null, error: null };
  });
  state.view = ["live", "timeline", "explore"].includes(parameters.get("view")) ? parameters.get("view") : "live";
  state.latency = ["ttft", "tpot", "itl", "e2el"].includes(parameters.get("latency")) ? parameters.get("latency") : "ttft";
  state.from = number(parameters.get("from"));
  state.until = number(parameters.get("until"));
}

let due = 0;
export function write() {
  clearTimeout(due); // browsers refuse more than so many changes of the address a second
  due = setTimeout(() => {
    const parameters = query(state.words);
    for (const pin of state.pins) parameters.append("pin", `${pin.name}~${query(pin.words)}`);
    if (state.view !== "live") parameters.set("view", state.view);
    if (state.latency !== "ttft") parameters.set("latency", state.latency);
    if (state.from !== null) parameters.set("from", state.from.toPrecision(7));
    if (state.until !== null) parameters.set("until", state.until.toPrecision(7));
    history.replaceState(null, "", `?${parameters}`);
  }, 150);
}

/** Change words: null takes one out, so that the engine's own default holds. */
export function change(words, { redraw = false } = {}) {
  for (const [key, value] of Object.entries(words)) {
    if (value === null || value === "" || (Array.isArray(value) && !value.length)) delete state.words[key];
    else state.words[key] = Array.isArray(value) ? value : String(value);
  }
  changed(redraw);
}

export function replace(words) {
  state.words = Object.fromEntries(Object.entries(words).filter(([, value]) => value !== null).map(([key, value]) => [key, Array.isArray(value) ? value.map(String) : String(value)]));
  changed(true);
}

function changed(redraw) {
  state.from = state.until = null; // of the run before
  write();
  for (const listener of listeners) listener(redraw);
}

export const onChange = (listener) => listeners.push(listener);
