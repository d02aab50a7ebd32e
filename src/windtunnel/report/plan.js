"use strict";
(function () {
  const data = JSON.parse(document.getElementById("plan-data").textContent);
  const box = document.getElementById("limits");
  if (!box) return;
  const most = 400;

  function inputs() {
    for (const metric of data.metrics) {
      const asked = data.slo[metric] || {};
      const label = document.createElement("label");
      label.append(metric + " ");
      const choice = document.createElement("select");
      choice.id = "statistic-" + metric;
      for (const statistic of data.statistics) choice.add(new Option(statistic, statistic));
      choice.value = asked.statistic || "p90";
      const limit = document.createElement("input");
      Object.assign(limit, { type: "number", min: 0, step: "any", id: "limit-" + metric, placeholder: "none" });
      if (asked.limit) limit.value = Number((asked.limit * 1000).toPrecision(6));
      label.append(choice, " ≤ ", limit, " ms");
      box.append(label);
      for (const field of [choice, limit]) field.addEventListener("input", recompute);
    }
  }

  function limits() {
    return data.metrics.map((metric) => ({
      metric,
      column: data.statistics.indexOf(document.getElementById("statistic-" + metric).value),
      limit: Number(document.getElementById("limit-" + metric).value) / 1000,
    })).filter((one) => one.limit > 0);
  }

  // How far a point uses the limits: the largest value / limit; more than 1 where one is broken or the queue grows.
  function use(point, wanted) {
    let worst = point.steady ? 0 : Infinity;
    for (const { metric, column, limit } of wanted) {
      const value = point.values[metric][column];
      worst = Math.max(worst, value === null ? Infinity : value / limit);
    }
    return worst;
  }

  // The rate up to which the limits hold: linear in the use between the last point that holds and the next.
  function capacity(configuration, wanted) {
    let held = 0, used = 0;
    for (const point of configuration.points) {
      const now = use(point, wanted);
      if (now > 1) {
        if (held === 0 || !isFinite(now)) return held;
        return held + (point.rate - held) * (1 - used) / (now - used);
      }
      held = point.rate;
      used = now;
    }
    return held;
  }

  function number(value) {
    return value >= 100 ? value.toFixed(0) : value.toPrecision(3);
  }

  // Whether the limits are those that were asked for: then the search knows, which simulated all replicas.
  function asked() {
    return data.metrics.every((metric) => {
      const one = data.slo[metric] || {};
      const limit = one.limit ? Number((one.limit * 1000).toPrecision(6)) : 0;
      const chosen = document.getElementById("statistic-" + metric).value;
      return Number(document.getElementById("limit-" + metric).value) === limit && (!limit || chosen === one.statistic);
    });
  }

  function rows(surveyed) {
    const found = asked() && data.found.length ? data.found : surveyed;
    const body = document.getElementById("slice-rows");
    body.replaceChildren();
    for (const one of found.slice(0, 8)) {
      const row = body.insertRow();
      const cells = [one.name, one.gpus, one.price ? one.price.toFixed(2) : "–", number(one.rate), one.price ? number(one.rate / one.price) : "–"];
      for (const text of cells) row.insertCell().textContent = text;
    }
    const none = document.getElementById("slice-none");
    none.textContent = found === data.found ? "The limits that were asked for: as the search simulated them, all replicas together."
      : found.length ? "Other limits: one replica, interpolated, each limit for itself." : "No surveyed configuration keeps these limits.";
  }

  function capacities(found) {
    const shown = found.slice(0, 40).reverse(), narrow = window.innerWidth < 620;
    window.drawFigure("capacities", {
      data: [{
        type: "bar", orientation: "h", x: shown.map((one) => one.rate), y: shown.map((one) => one.name), meta: 0,
        hovertemplate: "%{y}<br>%{x:.4g} requests/s<extra></extra>",
        text: narrow ? shown.map((one) => one.name) : [], textposition: "auto", textfont: { size: 9 }, cliponaxis: true,
      }],
      layout: {
        xaxis: { title: { text: "requests/s" } }, yaxis: { tickfont: { size: 10 }, showticklabels: !narrow }, showlegend: false,
        margin: { l: narrow ? 10 : 280, r: 14, t: 22, b: 46 }, height: Math.max(200, 60 + 17 * shown.length),
      },
    });
  }

  function heat(found) {
    const device = found.length ? found[0].device : "";
    const cells = new Map();
    for (const one of found.filter((one) => one.device === device)) {
      const key = one.tp + "/" + one.seqs, value = worth(one);
      if (!(cells.get(key) >= value)) cells.set(key, value);
    }
    const sorted = (name) => [...new Set(found.map((one) => one[name]))].sort((a, b) => a - b);
    const rows = sorted("tp"), columns = sorted("seqs");
    const z = rows.map((tp) => columns.map((seqs) => cells.get(tp + "/" + seqs) || null));
    window.drawFigure("heat", {
      data: [{
        type: "heatmap", x: columns.map(String), y: rows.map((tp) => "TP " + tp), z, colorscale: "Viridis",
        text: z.map((row) => row.map((value) => value === null ? "" : number(value))), texttemplate: "%{text}",
        hovertemplate: "%{y}, max_num_seqs %{x}: %{z:.3g} requests/s per " + unit() + "<extra></extra>",
      }],
      layout: { xaxis: { title: { text: "max_num_seqs on " + device }, type: "category" }, yaxis: { type: "category" } },
    });
  }

  function unit() {
    return data.configurations.every((one) => one.price) ? "$/h" : "GPU";
  }

  function worth(one) {
    return one.rate / (unit() === "$/h" ? one.price : one.gpus);
  }

  function recompute() {
    const wanted = limits();
    const found = data.configurations.map((one) => Object.assign({ rate: capacity(one, wanted) }, one))
      .filter((one) => one.rate > 0)
      .sort((a, b) => worth(b) - worth(a));
    rows(found);
    capacities(found);
    heat(found);
  }

  inputs();
  recompute();
})();
