// Export: the configuration as a command line, a file, server lines, a page and an address.

import { ask, askFile } from "./ask.js";
import { el } from "./format.js";
import { state } from "./state.js";

function block(title, text) {
  const copy = el("button", { type: "button", onclick: async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
  } }, "Copy");
  return [el("div", { class: "head" }, el("h3", {}, title), copy), el("pre", { tabindex: "0" }, text)];
}

function save(blob, name) {
  const link = el("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export async function showExport() {
  const dialog = document.getElementById("exporting"), words = structuredClone(state.words);
  const close = el("button", { type: "button", class: "strong", onclick: () => dialog.close() }, "Close");
  let content;
  try {
    const found = await ask("api/export", { words });
    const report = el("button", { type: "button", onclick: async () => {
      report.disabled = true;
      save(await askFile("api/report", { words }), "windtunnel-report.html");
      report.disabled = false;
    } }, "Report (HTML)");
    const yaml = el("button", { type: "button", onclick: () => save(new Blob([found.yaml]), "scenario.yaml") }, "YAML file");
    content = [...block("The same figures on the command line", found.command), ...block("Scenario file: windtunnel run --scenario scenario.yaml", found.yaml),
      ...found.serve.flatMap(({ name, line }) => block(found.serve.length > 1 ? `Start one replica of ${name}` : "Start one replica", line)),
      ...block("This page", location.href), el("div", { class: "foot" }, yaml, report, close)];
  } catch (error) {
    content = [el("p", { class: "trouble", role: "alert" }, error.message), el("div", { class: "foot" }, close)];
  }
  dialog.replaceChildren(el("h2", { id: "exporting-title" }, "Export"), ...content);
  dialog.showModal();
}
