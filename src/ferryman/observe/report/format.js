// Formatting of numbers, creation of elements, colors and the theme.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RANKS = DATA.ranks;
const byId = (id) => document.getElementById(id);

const KINDS = {
  forward: "forward", turn: "turn (forward and backward)", backward: "backward (with recomputation)",
  weights: "weights in", gradients: "gradients", stash: "stash", state: "optimizer state", update: "update",
  check: "norms and checks", exchange: "gradient exchange (with waiting for other ranks)", share: "updated weights to all ranks",
  other: "other",
};
const LANES = {
  compute: "visits of units", h2d: "weights to the device", "stash in": "stash back to the device",
  "state in": "optimizer state to the device", d2h: "gradients to the host", "stash out": "stash to the host",
  "state out": "updated state to the host", update: "updates on the device", norms: "norms on the device",
  host: "updates and norms on the host", checks: "checks for inf and NaN",
  exchange: "gradients to the ranks that own them", share: "updated weights to all ranks",
};

/** At least three significant digits. */
function digits(value) {
  const size = Math.abs(value);
  return value.toFixed(size >= 100 || size === 0 ? 0 : size >= 10 ? 1 : 2);
}
function scaled(value, units, base) {
  let at = 0;
  while (at < units.length - 1 && Math.abs(value) >= base * 0.9995) { value /= base; at += 1; }
  return `${at === 0 && base !== 1000 ? Math.round(value) : digits(value)} ${units[at]}`;
}
const showBytes = (n) => scaled(n, ["B", "KiB", "MiB", "GiB", "TiB"], 1024); // memory
const showTraffic = (n) => (n < 1000 ? `${n} B` : scaled(n, ["B", "kB", "MB", "GB", "TB"], 1000));
const showRate = (n) => scaled(n, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"], 1000);
const showCount = (n) => (n < 1000 ? `${n}` : scaled(n, ["", "k", "M", "B", "T"], 1000));
const showPercent = (share) => `${(share * 100).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;
function showMicro(micro) {
  const size = Math.abs(micro);
  if (size === 0) return "0";
  if (size >= 1e6) return `${digits(micro / 1e6)} s`;
  return size >= 1000 ? `${digits(micro / 1e3)} ms` : `${digits(micro)} µs`;
}
const showSeconds = (seconds) => showMicro(seconds * 1e6);

/** Creates an element. Strings become text nodes, so text from a trace is never interpreted as markup. */
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

let palette = null;
/** A color of the theme, by the name of its CSS variable. */
function color(name) {
  if (palette === null) palette = {};
  if (!(name in palette)) palette[name] = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return palette[name];
}
/** A text color that is readable on this background. */
function inkOn(hex) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255).map((c) => (c <= 0.04 ? c / 12.9 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.26 ? "#10202e" : "#ffffff";
}

const painters = []; // functions that draw on a canvas, called again when the theme or the size changes
function repaint() {
  for (const paint of painters) paint();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  palette = null;
  repaint();
}
{
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem("ferryman-theme"); } catch { /* pages opened from a file may have no storage */ }
  setTheme(chosen || (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => { if (!chosen) setTheme(dark.matches ? "dark" : "light"); });
  byId("theme").addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("ferryman-theme", chosen); } catch { /* as above */ }
    setTheme(chosen);
  });
}

/** Resizes a canvas to its parent, in device pixels; returns its context and its size in CSS pixels. */
function canvasOf(canvas, height) {
  const width = Math.max(60, canvas.parentElement.clientWidth), ratio = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.textBaseline = "middle";
  return { context, width, height };
}
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif";

/** Round values from low to high, about `count` of them. */
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((m) => m * power >= rough) * power;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high * (1 + 1e-12) + step * 1e-9; at += 1) found.push(at * step);
  return { step, values: found };
}

const tip = byId("tip");
function showTip(x, y, title, lines) {
  tip.replaceChildren(make("b", {}, title), ...lines.filter(Boolean).map((line) => make("span", {}, line)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 16 + width > innerWidth ? Math.max(6, x - width - 14) : x + 16;
  const top = y + 18 + height > innerHeight ? Math.max(6, y - height - 12) : y + 18;
  tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
}
function hideTip() {
  tip.hidden = true;
}
