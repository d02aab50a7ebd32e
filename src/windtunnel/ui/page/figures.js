// The figures of a run: cards, curves, what limits it, bars, and how sure it is.

import { chart, colour, spark } from "./chart.js";
import { count, el, gib, money, number, percent, seconds, split, table } from "./format.js";
import { state } from "./state.js";

const $ = (id) => document.getElementById(id);
const NAMES = { ttft: "TTFT", tpot: "TPOT", itl: "ITL", e2el: "E2EL", queue: "queue" };
const LONG = { ttft: "first token", tpot: "per token", itl: "between tokens", e2el: "whole request", queue: "before the first step" };
const LAST = 40;
const flown = []; // the key figures of the last settings, for the small lines

const factors = (shown, name) => shown.factors?.[name];
const spanOf = (ends) => (ends && ends[0] !== null ? `${seconds(ends[0], 2)} – ${seconds(ends[1], 2)}` : "");

/** The key figures: name, value, how it is said, what stands below, and whether less is better. */
export function vitals(shown) {
  const { document: run, price_per_hour: price } = shown;
  const bands = run.bands;
  const around = (name, statistic) => bands?.[name]?.[statistic] ?? (factors(shown, name) && run[name][statistic] !== null ? factors(shown, name).map((factor) => factor * run[name][statistic]) : null);
  const share = bands?.capacity?.share;
  const good = run.attainment !== null;
  return [
    { key: "ttft", name: "TTFT p99", value: run.ttft.p99, said: seconds, more: `${spanOf(around("ttft", "p99"))}`, less: true, bad: missed(run, "ttft") },
    { key: "tpot", name: "TPOT p99", value: run.tpot.p99, said: seconds, more: `${spanOf(around("tpot", "p99"))}`, less: true, bad: missed(run, "tpot") },
    good
      ? { key: "good", name: "Good requests", value: run.attainment, said: percent, more: bands?.attainment ? `${number(100 * bands.attainment[0], 2)} – ${percent(bands.attainment[1], 2)}` : `${number(run.goodput)} /s in time`, good: run.attainment >= wanted(), bad: run.attainment < wanted() }
      : { key: "e2el", name: "E2EL p99", value: run.e2el.p99, said: seconds, more: spanOf(around("e2el", "p99")), less: true },
    { key: "rate", name: "Served", value: run.request_throughput, said: (value) => `${number(value)} /s`, more: `${count(run.output_throughput)} tokens/s` },
    { key: "cost", name: "$ per M tokens out", value: shown.usd_per_million, said: money, more: price ? `${money(price)}/h, ${shown.gpus} GPU${shown.gpus > 1 ? "s" : ""}` : `${shown.gpus} GPUs, no price`, less: true },
    { key: "busy", name: share === null || share === undefined ? "GPUs busy" : "Load", value: share ?? run.utilisation.busy, said: percent, gauge: share === null || share === undefined ? [run.utilisation.busy, run.utilisation.busy] : [share * bands.capacity.request_rate / bands.capacity.ends[1], share * bands.capacity.request_rate / bands.capacity.ends[0]], more: share === null || share === undefined ? `KV ${percent(run.utilisation.kv, 2)}, MFU ${percent(run.utilisation.mfu, 2)}` : `${number(bands.capacity.request_rate)} /s at most`, less: true, bad: share >= 1 },
  ];
}

const wanted = () => Number(state.words.attainment ?? 0.9);
function missed(run, name) {
  const limit = limits()[name];
  return limit !== undefined && run[name].p50 > limit;
}

function limits() {
  const found = {};
  for (const each of String(state.words.goodput ?? "").split(/[\s,]+/)) {
    const [name, value] = each.split(":");
    if (Number(value) > 0) found[name] = Number(value) / 1000;
  }
  return found;
}

function delta(now, before) {
  if (!before || !Number.isFinite(now.value) || !Number.isFinite(before.value) || now.key !== before.key || now.name !== before.name) return el("div", { class: "delta" });
  const ratio = now.value / before.value - 1;
  if (!Number.isFinite(ratio) || Math.abs(ratio) < 0.0005) return el("div", { class: "delta" }, before.value === now.value ? "as before" : "");
  const worse = now.less ? ratio > 0 : ratio < 0;
  const times = now.value / before.value;
  const size = times > 3 ? `× ${number(times, 2)}` : times < 1 / 3 ? `÷ ${number(1 / times, 2)}` : `${ratio > 0 ? "+" : "−"}${number(100 * Math.abs(ratio), 2)} %`;
  return el("div", { class: `delta ${worse ? "worse" : "better"}` }, `${ratio > 0 ? "▲" : "▼"} ${size}`);
}

function drawVitals(shown, before) {
  const now = vitals(shown), old = before ? vitals(before) : [];
  if (shown.stage !== "small") {
    flown.push(Object.fromEntries(now.map((each) => [each.key, each.value])));
    if (flown.length > LAST) flown.shift();
  }
  $("vitals").replaceChildren(...now.map((each) => {
    const [value, unit] = split(each.said(each.value));
    const box = el("div", { class: `vital${each.bad ? " bad" : each.good ? " good" : ""}` }, el("div", { class: "name" }, each.name),
      el("div", { class: "value" }, value, unit ? el("small", {}, ` ${unit}`) : ""));
    if (each.gauge) {
      const bar = el("div", { class: "gauge", "aria-hidden": "true" }, el("b"), el("i"));
      bar.children[0].style.width = `${Math.min(100 * each.gauge[1], 100)}%`;
      bar.children[1].style.width = `${Math.min(100 * each.gauge[0], 100)}%`;
      box.append(bar);
    }
    box.append(el("div", { class: "more" }, each.more), delta(each, old.find((other) => other.key === each.key)));
    if (!each.gauge) box.append(spark(flown.map((one) => one[each.key])));
    return box;
  }));
}

/** The distribution of the chosen latency, with its band, the setting before and the pins. */
function drawCurve(shown, before) {
  const name = state.latency, curve = shown.curves[name], unit = 1000;
  const scaled = (one, factor = 1) => one.curves[name].seconds.map((value) => value * unit * factor);
  const ends = factors(shown, name);
  const series = [];
  if (before?.curves) series.push({ name: "before", kind: "ghost", x: scaled(before), y: before.curves[name].percent, dash: "4 3" });
  state.pins.forEach((pin, place) => pin.figures && series.push({ name: pin.name, place: place + 1, x: scaled(pin.figures), y: pin.figures.curves[name].percent }));
  series.push({ name: "now", place: 0, x: scaled(shown), y: curve.percent, band: ends ? { x: [scaled(shown, ends[0]), scaled(shown, ends[1])] } : null });
  const all = series.flatMap((one) => one.x).filter((value) => value > 0);
  const inner = series.flatMap((one) => [one.x[2], one.x[one.x.length - 1]]).filter((value) => value > 0);
  const limit = limits()[name];
  const low = Math.min(...inner, limit ? 1000 * limit : Infinity) * 0.9, high = Math.max(...inner, limit ? 1000 * limit : 0) * 1.05;
  chart($("curve"), {
    title: `${NAMES[name]}: share of values that are no longer than so many milliseconds`,
    series, marks: limit ? [{ x: 1000 * limit, label: "limit", place: 1 }] : [],
    x: { label: `${NAMES[name]}, ${LONG[name]}, ms`, log: true, low: all.length ? low : 1, high: all.length ? high : 10, tip: (value) => `≤ ${number(value)} ms` },
    y: { low: 0, high: 100, say: (value) => `${value} %`, tip: (value) => `${number(value)} %` },
  });
}

function drawPercentiles(shown) {
  const { document: run } = shown, statistics = ["mean", "p50", "p90", "p95", "p99"];
  const rows = Object.keys(NAMES).map((name) => [
    [NAMES[name], LONG[name]],
    ...statistics.map((statistic) => {
      const value = run[name][statistic];
      const ends = run.bands?.[name]?.[statistic] ?? (factors(shown, name) && value !== null ? factors(shown, name).map((factor) => factor * value) : null);
      return [number(value === null ? null : 1000 * value), ends ? `${number(1000 * ends[0], 2)} – ${number(1000 * ends[1], 2)}` : " "];
    }),
  ]);
  const verdicts = shown.verdicts.map(({ name, met, value, limit }) =>
    el("p", { class: met ? "quiet" : "warning" }, `${name} ≤ ${seconds(limit)}: ${met ? "kept" : "missed"}, ${seconds(value)}`));
  $("percentiles").replaceChildren(table(["", ...statistics], rows), ...verdicts);
}

function drawBottlenecks(found, run) {
  const rows = found.slice(0, 4).map((each, place) => {
    const bar = el("div", { class: "bar" }, el("i"));
    bar.firstChild.style.width = `${100 * each.share}%`;
    return el("div", { class: "finding" }, el("strong", {}, each.name), el("span", { class: "share" }, percent(each.share, 2)), bar, el("p", {}, each.evidence), place < 2 ? el("p", {}, `Try: ${each.advice}.`) : null);
  });
  const parts = Object.entries(run.ttft_parts ?? {}).map(([name, values]) => [name, values.mean ?? 0]).filter(([, value]) => value > 0);
  const first = parts.length ? [el("h3", {}, "Mean time to first token"), ...stack(parts, seconds)] : [];
  $("bottlenecks").replaceChildren(...(rows.length ? rows : [el("p", { class: "quiet" }, "Nothing ran.")]), ...first);
}

/** A bar of parts, and what they are. */
function stack(parts, say) {
  const total = parts.reduce((sum, [, value]) => sum + value, 0) || 1;
  const bar = el("div", { class: "stack", role: "img", "aria-label": parts.map(([name, value]) => `${name} ${say(value)}`).join(", ") });
  const legend = el("ul", { class: "legend" });
  parts.forEach(([name, value], place) => {
    const piece = el("i"), key = el("i");
    piece.style.width = `${100 * value / total}%`;
    piece.style.background = key.style.background = colour(place);
    piece.title = `${name} ${say(value)}`;
    bar.append(piece);
    legend.append(el("li", {}, key, `${name} ${say(value)}`));
  });
  return [bar, legend];
}

function drawTime(shown) {
  const parts = Object.entries(shown.time).filter(([, share]) => share > 0.0005).sort((a, b) => b[1] - a[1]);
  const { measured, interpolated, modelled } = shown.document.time_share;
  const { busy, mfu, mbu } = shown.document.utilisation;
  $("time").replaceChildren(...stack(parts, (share) => percent(share, 2)),
    el("p", { class: "quiet" }, `busy ${percent(busy)}, ${percent(mfu)} of FLOP/s, ${percent(mbu)} of memory bandwidth; batches of ${number(shown.document.batch_size)}; kernel times ${percent(measured, 2)} measured, ${percent(interpolated, 2)} interpolated, ${percent(modelled, 2)} modelled`));
}

const FOUND = { history: "the session's earlier prompts", answers: "its answers", system: "system prompts", others: "other prompts" };
const AGAIN = { evicted: "evicted before reuse", elsewhere: "on another replica", early: "not there yet" };

// What prompts found in the cache, and what was computed of them although it had been known.
function reuse(run) {
  const found = Object.values(run.reuse ?? {}).reduce((sum, tokens) => sum + tokens, 0);
  if (!found) return [];
  const computed = run.prompt_tokens - run.cached_tokens;
  const parts = (names, tokens, whole) => Object.entries(names).filter(([key]) => tokens?.[key]).map(([key, name]) => `${percent(tokens[key] / whole, 2)} ${name}`).join(", ");
  const why = parts(AGAIN, run.why_again, computed);
  const again = run.computed_again_tokens ? `, ${percent(run.computed_again_tokens / computed, 2)} of them known before${why ? ` (${why})` : ""}` : "";
  return [el("p", { class: "quiet" }, `${percent(run.prefix_cache_hit_rate, 2)} of prompt tokens cached: ${parts(FOUND, run.reuse, found)}; ${number(computed / (run.requests.total - run.requests.rejected))} tokens computed per prompt${again}`)];
}

function drawMemory(shown) {
  $("memory").replaceChildren(...reuse(shown.document), ...shown.pools.flatMap((pool) => {
    const parts = Object.entries(pool.memory).filter(([, bytes]) => bytes > 0);
    const used = shown.pools.length === 1 ? `, ${percent(shown.document.utilisation.kv)} in use in the mean` : "";
    return [shown.pools.length > 1 ? el("h3", {}, `${pool.name}: ${pool.replicas} × ${pool.gpus / pool.replicas} × ${pool.device}`) : null, ...stack(parts, gib),
      el("p", { class: "quiet" }, `KV for ${count(pool.kv_tokens)} tokens a replica${used}; at most ${count(pool.max_num_seqs)} requests and ${count(pool.max_num_batched_tokens)} tokens a step`)].filter(Boolean);
  }));
}

function drawOver(lines) {
  const xs = lines.running.map((_, i) => (lines.end - lines.start) * (i + 0.5) / lines.running.length);
  const common = { low: 0, high: lines.end - lines.start, say: (value) => `${count(value)} s` };
  chart($("over"), { title: "Requests that run and that wait, over time", series: [{ name: "running", place: 0, x: xs, y: lines.running }, { name: "waiting", place: 1, x: xs, y: lines.waiting }], x: common, y: { zero: true } });
  chart($("over-kv"), { title: "Share of the KV cache in use, over time", series: [{ name: "KV cache in use", place: 2, x: xs, y: lines.kv.map((value) => 100 * value) }], legend: "always", x: common, y: { zero: true, say: (value) => `${number(value, 2)} %` } });
}

function drawNotes(shown) {
  const words = shown.document.bands?.words ?? {};
  const rows = Object.entries(words).flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]);
  const warnings = [...(shown.known_bad ? [shown.known_bad] : []), ...shown.document.warnings].map((text) => el("p", { class: shown.quiet.includes(text) ? "quiet" : "warning" }, text));
  $("notes").replaceChildren(el("dl", {}, ...rows), ...warnings);
}

/** Draw what a stage brings; `before` are the figures of the settings before. */
export function draw(shown, before) {
  $("title").textContent = shown.title;
  document.title = `${shown.title} · windtunnel`;
  drawVitals(shown, before);
  drawCurve(shown, before);
  drawPercentiles(shown);
  if (shown.bottlenecks) {
    drawBottlenecks(shown.bottlenecks, shown.document);
    drawTime(shown);
    drawOver(shown.lines);
  }
  drawMemory(shown);
  if (shown.stage === "ends") drawNotes(shown);
}

export { drawCurve, limits };
