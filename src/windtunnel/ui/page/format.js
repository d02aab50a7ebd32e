// Numbers as people read them, with as many digits as they can tell apart.

export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const decimals = Math.max(digits - 1 - Math.floor(Math.log10(Math.abs(value))), 0);
  return value.toLocaleString("en-US", { minimumFractionDigits: Math.min(decimals, 6), maximumFractionDigits: Math.min(decimals, 6) });
}

export function seconds(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (Math.abs(value) < 0.9995) return `${number(1000 * value, digits)} ms`;
  if (value < 119.5) return `${number(value, digits)} s`;
  return value < 7170 ? `${number(value / 60, digits)} min` : `${number(value / 3600, digits)} h`;
}

export const percent = (value, digits = 3) => (Number.isFinite(value) && value !== null ? `${number(100 * value, digits)} %` : "–");
export const money = (value) => (Number.isFinite(value) && value !== null ? `$${number(value)}` : "–");
export const count = (value) => (Number.isFinite(value) && value !== null ? Math.round(value).toLocaleString("en-US") : "–");
export const gib = (value) => `${number(value / 2 ** 30, 3)} GiB`;

/** The unit apart from the number, so that it can be set in small letters. */
export function split(text) {
  const at = text.lastIndexOf(" ");
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 1)];
}

/** An element with properties and children; every text is set as text. */
export function el(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "value" || key === "textContent") made[key] = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** A table: heads, and rows of cells, each text or [text, small text] or a node. */
export function table(heads, rows, picked = () => false) {
  const cell = (kind, content) => {
    if (Array.isArray(content)) return el(kind, {}, content[0], el("small", {}, content[1]));
    return el(kind, {}, content instanceof Node ? content : String(content));
  };
  const body = rows.map((row, place) => el("tr", { class: picked(place) ? "picked" : null }, ...row.map((each) => cell("td", each))));
  return el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((head) => (head === "" ? el("td") : el("th", { scope: "col" }, head))))), el("tbody", {}, ...body));
}
