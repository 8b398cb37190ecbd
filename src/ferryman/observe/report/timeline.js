// The lanes of a step over time, and below them device memory on the same axis. Times are in microseconds.

const ROW = 25, ROW_GAP = 3, GROUP_GAP = 9, AXIS = 28, MEMORY = 150;
const plots = byId("plots"), lanesCanvas = byId("lanes"), memoryCanvas = byId("memory");

const rows = []; // {rank, lane, top}
let rowsEnd = AXIS;
RANKS.forEach((rank, place) => {
  if (RANKS.length > 1) rowsEnd += place ? 34 : 22; // its heading
  rank.lanes.forEach((lane, i) => {
    if (i && lane.resource !== rank.lanes[i - 1].resource) rowsEnd += GROUP_GAP;
    rows.push({ rank, lane, top: rowsEnd, heads: RANKS.length > 1 && i === 0 });
    rowsEnd += ROW + ROW_GAP;
  });
});

const reach = { from: Infinity, to: -Infinity }; // the time range of the whole trace
for (const rank of RANKS) {
  for (const { start, length } of rank.lanes) {
    reach.from = Math.min(reach.from, start[0]);
    reach.to = Math.max(reach.to, start.at(-1) + length.at(-1));
  }
  for (const { whole } of rank.accounts) {
    reach.from = Math.min(reach.from, whole.start);
    reach.to = Math.max(reach.to, whole.end);
  }
}
const view = { from: 0, to: 1 };
let chosen = RANKS[0].typical; // the selected step, as an index into the accounts of the first rank
let pointed = null; // {row, index}: the piece of work under the pointer, or selected with the keyboard
let cursor = null; // a time
let selection = null; // two times, while a range is being selected
let gutter = 120, plotWidth = 1;

const accountOf = (rank) => rank.accounts.find((account) => account.number === RANKS[0].accounts[chosen].number);
const xOf = (time) => gutter + ((time - view.from) / (view.to - view.from)) * plotWidth;
const timeAt = (x) => view.from + ((x - gutter) / plotWidth) * (view.to - view.from);
const stepStart = () => RANKS[0].accounts[chosen].whole.start;

/** The last piece of work of a lane that begins at or before a time; -1 if there is none. */
function lastBefore(lane, time) {
  let low = 0, high = lane.start.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.start[middle] <= time) low = middle + 1; else high = middle;
  }
  return low - 1;
}

function lookAt(from, to) {
  const least = 5, most = (reach.to - reach.from) * 1.04; // microseconds
  const length = Math.min(most, Math.max(least, to - from)), middle = (from + to) / 2;
  from = middle - length / 2;
  const slack = (reach.to - reach.from) * 0.02;
  from = Math.min(Math.max(from, reach.from - slack), reach.to + slack - length);
  view.from = from;
  view.to = from + length;
  paintTimeline();
}
function zoom(factor, at = (view.from + view.to) / 2) {
  lookAt(at - (at - view.from) * factor, at + (view.to - at) * factor);
}
const pan = (share) => lookAt(view.from + (view.to - view.from) * share, view.to + (view.to - view.from) * share);
function wholeStep() {
  const { start, end } = RANKS[0].accounts[chosen].whole, margin = (end - start) * 0.012;
  lookAt(start - margin, end + margin);
}

let due = false;
/** Draws at most once per frame. */
function paintTimeline() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => { due = false; paintLanes(); paintMemory(); });
}

function paintAxis(context, width, height) {
  const unit = view.to - view.from > 2e6 ? [1e6, "s"] : view.to - view.from > 2e3 ? [1e3, "ms"] : [1, "µs"];
  const zero = stepStart();
  const { step, values } = ticks((view.from - zero) / unit[0], (view.to - zero) / unit[0], plotWidth / 95);
  const places = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  context.textAlign = "center";
  context.font = `12px ${FONT}`;
  for (const value of values) {
    const x = Math.round(xOf(zero + value * unit[0])) + 0.5;
    if (x < gutter) continue;
    context.strokeStyle = color("line");
    context.beginPath(); context.moveTo(x, AXIS - 6); context.lineTo(x, height); context.stroke();
    context.fillStyle = color("soft");
    const text = `${value.toFixed(places)} ${unit[1]}`, half = context.measureText(text).width / 2;
    if (x - half > gutter - 10) context.fillText(text, Math.min(x, width - half), 10);
  }
}

/** Lines where steps begin, and where a step goes from one phase to the next. */
function paintSteps(context, height) {
  RANKS[0].accounts.forEach((account) => {
    const { start, end } = account.whole;
    if (end < view.from || start > view.to) return;
    const line = (time, dash) => {
      const x = Math.round(xOf(time)) + 0.5;
      if (x < gutter || x > gutter + plotWidth) return;
      context.strokeStyle = color(dash.length ? "faint" : "soft");
      context.setLineDash(dash);
      context.beginPath(); context.moveTo(x, AXIS - 8); context.lineTo(x, height); context.stroke();
      context.setLineDash([]);
    };
    line(start, []); line(end, []);
    account.phases.slice(1).forEach((phase) => line(phase.start, [2, 3]));
  });
}

function paintLanes() {
  const { context, width, height } = canvasOf(lanesCanvas, rowsEnd + 4);
  gutter = width < 620 ? 76 : 136;
  plotWidth = width - gutter - 1;
  for (const { top } of rows) {
    context.fillStyle = color("row");
    context.fillRect(gutter, top, plotWidth, ROW);
  }
  paintAxis(context, width, height);
  rows.forEach((row, i) => {
    paintName(context, row, i);
    context.save();
    context.beginPath(); context.rect(gutter, row.top, plotWidth, ROW); context.clip();
    paintWork(context, row);
    context.restore();
  });
  paintSteps(context, height);
  paintCursor(context, height);
}

function paintName(context, { rank, lane, top, heads }, i) {
  const narrow = gutter < 100, account = accountOf(rank), used = account && account.lanes[lane.name];
  const share = used ? used.busy / ((account.whole.end - account.whole.start) / 1e6) : 0;
  context.textAlign = "left";
  if (heads) {
    context.font = `600 12.5px ${FONT}`;
    context.fillStyle = color("soft");
    context.fillText(`rank ${rank.rank}`, 0, top - 11);
  }
  context.font = `${pointed && pointed.row === i ? 650 : 550} ${narrow ? 12 : 13}px ${FONT}`;
  context.fillStyle = color("ink");
  context.fillText(lane.name, 0, top + ROW / 2 + 0.5);
  context.textAlign = "right";
  context.font = `12px ${FONT}`;
  context.fillStyle = color("soft");
  if (!narrow) context.fillText(showPercent(share), gutter - 10, top + ROW / 2 + 0.5);
}

/** Spans narrower than a pixel are drawn once per pixel, so that drawing any number of spans is fast. */
function paintWork(context, { rank, lane, top }) {
  let drawn = -1;
  const first = Math.max(0, lastBefore(lane, view.from));
  context.textAlign = "left";
  context.font = `11.5px ${FONT}`;
  for (let i = first; i < lane.start.length && lane.start[i] < view.to; i += 1) {
    const from = xOf(lane.start[i]), to = xOf(lane.start[i] + lane.length[i]);
    if (to < Math.max(gutter, drawn + 0.6)) continue;
    const left = Math.max(from, gutter), right = Math.max(left + 0.8, Math.min(to, gutter + plotWidth));
    drawn = right;
    const label = rank.labels[lane.label[i]], fill = color(label.kind), room = right - left;
    context.fillStyle = fill;
    if (room > 6) {
      context.beginPath(); context.roundRect(left, top + 1, room - 0.7, ROW - 2, 3); context.fill();
    } else {
      context.fillRect(left, top + 1, room > 2 ? room - 0.5 : room, ROW - 2);
    }
    if (room > 18) {
      const text = fit(context, [label.text, label.short], room - 5);
      if (text) {
        context.fillStyle = inkOn(fill);
        context.fillText(text, left + Math.min(6, (room - widths.get(text)) / 2), top + ROW / 2 + 0.5);
      }
    }
  }
  if (pointed !== null && rows[pointed.row].lane === lane) {
    const i = pointed.index, left = xOf(lane.start[i]), room = Math.max(2, xOf(lane.start[i] + lane.length[i]) - left);
    context.strokeStyle = color("ink");
    context.lineWidth = 1.5;
    context.strokeRect(left, top + 1, room, ROW - 2);
    context.lineWidth = 1;
  }
}

const widths = new Map();
/** The first of the texts that fits. */
function fit(context, texts, room) {
  return texts.find((text) => {
    if (!widths.has(text)) widths.set(text, context.measureText(text).width);
    return widths.get(text) <= room;
  });
}

function paintCursor(context, height) {
  if (selection !== null) {
    const [from, to] = selection.map((time) => Math.max(gutter, xOf(time))).sort((a, b) => a - b);
    context.fillStyle = color("accent");
    context.globalAlpha = 0.16;
    context.fillRect(from, AXIS - 8, to - from, height);
    context.globalAlpha = 1;
  }
  if (cursor === null || xOf(cursor) < gutter) return;
  context.strokeStyle = color("accent");
  const x = Math.round(xOf(cursor)) + 0.5;
  context.beginPath(); context.moveTo(x, AXIS - 8); context.lineTo(x, height); context.stroke();
}

// Memory.

const budget = RANKS[0].facts.budget || null;
const hasMemory = RANKS.some((rank) => rank.memory.at.length);
const account = (RANKS[0].facts.plan || {}).account;
const fixed = account ? Object.values(account).reduce((sum, part) => sum + part, 0) : null;

const DASHES = { solid: [], dashed: [6, 4], dotted: [2, 3] };
/** Horizontal lines that memory is compared with. */
function levels() {
  return [
    { name: "budget", bytes: budget, ink: "warn", dash: "solid" },
    { name: RANKS.length > 1 ? "highest peak of the step" : "peak of the step", bytes: Math.max(...RANKS.map((rank) => (accountOf(rank) || {}).peak || 0)), ink: "accent", dash: "dashed" },
    { name: "always allocated", bytes: fixed, ink: "soft", dash: "dotted" },
  ].filter(({ bytes }) => bytes);
}

function paintMemory() {
  if (!hasMemory) return;
  const { context, width, height } = canvasOf(memoryCanvas, MEMORY);
  const peaks = RANKS.flatMap((rank) => rank.accounts.map((a) => a.peak || 0));
  const top = 1.1 * Math.max(budget || 0, ...peaks, ...RANKS.map((rank) => minmax(rank.memory.bytes)[1]));
  const y = (bytes) => 6 + (1 - bytes / top) * (height - 12);
  const unit = 1024 ** Math.floor(Math.log2(top) / 10);
  context.font = `12px ${FONT}`;
  for (const value of ticks(0, top / unit, 3).values) {
    const at = Math.round(y(value * unit)) + 0.5;
    context.strokeStyle = color("line");
    context.beginPath(); context.moveTo(gutter, at); context.lineTo(width, at); context.stroke();
    context.fillStyle = color("soft"); context.textAlign = "right";
    context.fillText(value ? showBytes(value * unit) : "0", gutter - 10, at);
  }
  context.save();
  context.beginPath(); context.rect(gutter, 0, plotWidth, height); context.clip();
  RANKS.forEach((rank, place) => paintLevel(context, rank.memory, y, levelInk(place)));
  for (const { bytes, ink, dash } of levels()) {
    const at = Math.round(y(bytes)) + 0.5;
    context.strokeStyle = color(ink);
    context.lineWidth = 1.5;
    context.setLineDash(DASHES[dash]);
    context.beginPath(); context.moveTo(gutter, at); context.lineTo(gutter + plotWidth, at); context.stroke();
    context.setLineDash([]);
    context.lineWidth = 1;
  }
  paintSteps(context, height);
  paintCursor(context, height);
  context.restore();
}

/** With one rank, memory is an area; with several, each rank has a line of its own color. */
const LEVEL_INKS = ["turn", "weights", "state", "exchange", "gradients", "stash"];
const levelInk = (place) => LEVEL_INKS[place % LEVEL_INKS.length];

function paintLevel(context, { at, bytes }, y, ink) {
  if (!at.length) return;
  const first = Math.max(0, lastBefore({ start: at }, view.from));
  const path = () => {
    let last = first;
    context.moveTo(xOf(at[first]), y(bytes[first]));
    for (let i = first + 1; i < at.length && at[last] < view.to; i += 1) {
      context.lineTo(xOf(at[i]), y(bytes[last]));
      context.lineTo(xOf(at[i]), y(bytes[i]));
      last = i;
    }
    return last;
  };
  context.beginPath();
  const last = path();
  context.lineTo(xOf(at[last]), y(0)); context.lineTo(xOf(at[first]), y(0));
  context.fillStyle = color(RANKS.length > 1 ? ink : "forward"); context.globalAlpha = RANKS.length > 1 ? 0.08 : 0.22;
  context.fill(); context.globalAlpha = 1;
  context.beginPath(); path();
  context.strokeStyle = color(ink); context.lineWidth = 1.5; context.stroke(); context.lineWidth = 1;
}

// Pointer and keyboard.

function workAt(x, y) {
  const row = rows.findIndex(({ top }) => y >= top && y < top + ROW);
  if (row < 0 || x < gutter) return null;
  const { lane } = rows[row], time = timeAt(x), near = 3 * ((view.to - view.from) / plotWidth);
  let best = null, distance = near;
  const last = lastBefore(lane, time + near);
  for (let i = last; i >= 0 && i > last - 60; i -= 1) {
    const away = Math.max(0, lane.start[i] - time, time - lane.start[i] - lane.length[i]);
    if (away < distance) [best, distance] = [i, away];
    if (away === 0) break;
  }
  return best === null ? null : { row, index: best };
}

function describe({ row, index }, x, y) {
  const { rank, lane } = rows[row], start = lane.start[index], length = lane.length[index], bytes = lane.bytes[index];
  const step = RANKS[0].has_steps && rank.accounts.find(({ whole }) => start >= whole.start && start < whole.end);
  const where = [RANKS.length > 1 ? `rank ${rank.rank}` : null, `lane ${lane.name}`, step ? `step ${step.number}` : null];
  const zero = step ? step.whole.start : stepStart();
  showTip(x, y, rank.labels[lane.label[index]].text, [
    where.filter(Boolean).join(", "),
    `${showMicro(length)}, from ${showMicro(start - zero)}`,
    bytes ? `${showTraffic(bytes)}${length > 0 ? `, ${showRate(bytes / (length / 1e6))}` : ""}` : null,
  ]);
}

function describeMemory(time, x, y) {
  const lines = RANKS.filter((rank) => rank.memory.at.length).map((rank) => {
    const bytes = rank.memory.bytes[Math.max(0, lastBefore({ start: rank.memory.at }, time))];
    const share = budget ? `, ${showPercent(bytes / budget)} of the budget` : "";
    return `${RANKS.length > 1 ? `rank ${rank.rank}: ` : ""}${showBytes(bytes)}${share}`;
  });
  showTip(x, y, lines[0], [...lines.slice(1), `at ${showMicro(time - stepStart())}`]);
}

let drag = null; // {x, from, to, selecting}
plots.addEventListener("pointerdown", (event) => {
  if (event.button !== 0 || event.target.tagName !== "CANVAS") return;
  const x = event.clientX - event.target.getBoundingClientRect().left;
  drag = { x, from: view.from, to: view.to, selecting: event.shiftKey };
  if (drag.selecting) selection = [timeAt(x), timeAt(x)];
  plots.classList.add(drag.selecting ? "selecting" : "dragging");
  event.target.setPointerCapture(event.pointerId);
});
plots.addEventListener("pointermove", (event) => {
  if (event.target.tagName !== "CANVAS") { leave(); return; }
  const box = event.target.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  if (drag !== null && drag.selecting) {
    selection[1] = timeAt(x);
    paintTimeline();
  } else if (drag !== null) {
    const moved = ((x - drag.x) / plotWidth) * (drag.to - drag.from);
    if (Math.abs(x - drag.x) > 2) lookAt(drag.from - moved, drag.to - moved);
  } else {
    cursor = x >= gutter ? timeAt(x) : null;
    pointed = event.target === lanesCanvas ? workAt(x, y) : null;
    if (pointed !== null) describe(pointed, event.clientX, event.clientY);
    else if (event.target === memoryCanvas && cursor !== null) describeMemory(cursor, event.clientX, event.clientY);
    else hideTip();
    paintTimeline();
  }
});
function drop() {
  if (drag !== null && drag.selecting && selection !== null) {
    const [from, to] = [...selection].sort((a, b) => a - b);
    if (xOf(to) - xOf(from) > 4) lookAt(from, to);
  }
  drag = selection = null;
  plots.classList.remove("dragging", "selecting");
  paintTimeline();
}
plots.addEventListener("pointerup", drop);
plots.addEventListener("pointercancel", drop);
function leave() {
  cursor = pointed = null;
  hideTip();
  paintTimeline();
}
plots.addEventListener("pointerleave", leave);
lanesCanvas.addEventListener("dblclick", () => {
  if (pointed === null) return;
  const { lane } = rows[pointed.row], start = lane.start[pointed.index], length = lane.length[pointed.index];
  lookAt(start - length * 0.2, start + length * 1.2);
});

let wheeled = -Infinity; // when the wheel last turned outside: a page that is being scrolled keeps scrolling
addEventListener("wheel", (event) => { if (!event.target.closest || !event.target.closest("#plots canvas")) wheeled = event.timeStamp; }, { passive: true });
plots.addEventListener("wheel", (event) => {
  if (event.target.tagName !== "CANVAS") return;
  if (!event.ctrlKey && event.timeStamp - wheeled < 300) { wheeled = event.timeStamp; return; }
  event.preventDefault();
  const size = event.deltaMode === 1 ? 24 : 1;
  const x = event.clientX - event.target.getBoundingClientRect().left;
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(((event.deltaX || event.deltaY) * size) / plotWidth);
  else zoom(Math.exp(Math.max(-0.6, Math.min(0.6, event.deltaY * size * 0.0025))), timeAt(Math.max(gutter, x)));
}, { passive: false });

/** Keyboard: selects another lane or another piece of work, and scrolls it into view. */
function point(down, along) {
  const row = pointed === null ? 0 : Math.min(rows.length - 1, Math.max(0, pointed.row + down)), { lane } = rows[row];
  const start = pointed === null ? view.from : rows[pointed.row].lane.start[pointed.index];
  const index = along && pointed !== null ? pointed.index + along : lastBefore(lane, start) + (pointed === null ? 1 : 0);
  pointed = { row, index: Math.min(lane.start.length - 1, Math.max(0, index)) };
  const middle = lane.start[pointed.index] + lane.length[pointed.index] / 2, half = (view.to - view.from) / 2;
  if (middle < view.from || middle > view.to) lookAt(middle - half, middle + half);
  const box = lanesCanvas.getBoundingClientRect();
  describe(pointed, box.left + xOf(Math.max(view.from, lane.start[pointed.index])), box.top + rows[row].top + ROW - 10);
  paintTimeline();
}
const KEYS = {
  "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: wholeStep, Home: wholeStep,
  ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), ArrowUp: () => point(-1, 0), ArrowDown: () => point(1, 0),
  n: () => point(0, 1), p: () => point(0, -1), Escape: leave,
};
plots.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
});
plots.addEventListener("blur", leave);
byId("zoom-in").addEventListener("click", () => zoom(0.6));
byId("zoom-out").addEventListener("click", () => zoom(1 / 0.6));
byId("reset").addEventListener("click", wholeStep);
byId("all").addEventListener("click", () => lookAt(reach.from, reach.to));
painters.push(() => { paintLanes(); paintMemory(); });
