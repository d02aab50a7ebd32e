"use strict";
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const palette = {
    light: ["#2457d6", "#d9480f", "#0b7f74", "#8a35c9", "#a16207", "#5b6675", "#be185d", "#4d7c0f", "#0e7490", "#9f1239"],
    dark: ["#7aa2ff", "#ff9a62", "#4fd1c5", "#c69aff", "#e3b341", "#9aa6b5", "#f78fb9", "#a3d65c", "#67d4ee", "#ff8fa3"],
  };

  function style(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function axis(own) {
    const line = style("--line");
    const look = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, tickfont: { size: 11.5 } };
    return Object.assign(look, own, { title: Object.assign({ font: { size: 12.5 }, standoff: 8 }, own.title) });
  }

  function themed(figure) {
    const colours = dark.matches ? palette.dark : palette.light;
    const pick = (index) => colours[index % colours.length];
    const data = figure.data.map((trace) => {
      const colour = pick(trace.meta || 0);
      const copy = Object.assign({}, trace);
      if (trace.type === "bar") {
        copy.marker = { color: colour, line: { width: 0 } };
        copy.textfont = { color: dark.matches ? "#11151b" : "#ffffff", size: 12 };
      } else if (trace.type !== "heatmap") {
        copy.line = Object.assign({}, trace.line, { color: colour });
        if (trace.mode === "markers") copy.marker = Object.assign({ color: colour }, trace.marker);
        if (trace.error_x) copy.error_x = Object.assign({}, trace.error_x, { color: colour });
      }
      return copy;
    });
    const layout = {
      margin: { l: 56, r: 14, t: 22, b: 46 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: style("--ink") },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
      hoverlabel: { bgcolor: style("--card"), bordercolor: style("--line"), font: { color: style("--ink") } },
    };
    for (const key of Object.keys(figure.layout)) {
      if (/^[xy]axis/.test(key)) layout[key] = axis(figure.layout[key]);
      else if (key === "legend") Object.assign(layout.legend, figure.layout.legend);
      else layout[key] = figure.layout[key];
    }
    layout.shapes = (figure.layout.shapes || []).map((shape) =>
      Object.assign({}, shape, { line: Object.assign({}, shape.line, { color: pick(shape.meta) }), meta: undefined }));
    layout.annotations = (figure.layout.annotations || []).map((note) =>
      Object.assign({}, note, { font: { color: pick(note.meta), size: 11 }, meta: undefined }));
    return { data, layout };
  }

  window.drawFigure = function (name, figure) {
    figures[name] = figure;
    draw(name);
  };

  function draw(only) {
    for (const [name, figure] of Object.entries(figures)) {
      if (typeof only === "string" && name !== only) continue;
      const place = document.getElementById(name);
      const { data, layout } = themed(figure);
      Plotly.react(place, data, layout, {
        responsive: true, displaylogo: false, displayModeBar: false,
      });
    }
  }

  // what scrolls sideways must be reached without a mouse
  function reachable() {
    for (const panel of document.querySelectorAll(".panel")) {
      if (panel.scrollWidth > panel.clientWidth) panel.tabIndex = 0;
      else panel.removeAttribute("tabindex");
    }
  }

  draw();
  reachable();
  dark.addEventListener("change", draw);
  window.addEventListener("resize", reachable);
  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.addEventListener("click", () => {
      navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent).then(() => {
        button.textContent = "Copied";
      });
    });
  }
})();
