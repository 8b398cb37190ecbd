// Line charts over the steps.

/**
 * A chart of one or more lines. `lines`: [{name, values, color, dashed, area}], with a value or null for each of
 * `numbers`, the step numbers. `show` formats a value. A click selects a step.
 */
function lineChart(title, numbers, lines, { show, low = null, high = null, choose = () => {} }) {
  const canvas = make("canvas", { role: "img" });
  const known = lines.flatMap((line) => line.values.filter((value) => value !== null));
  const summary = lines.map((line) => {
    const values = line.values.filter((value) => value !== null);
    return values.length ? `${line.name}: first ${show(values[0])}, last ${show(values.at(-1))}` : `${line.name}: none`;
  });
  canvas.setAttribute("aria-label", `${title} over ${numbers.length} steps. ${summary.join(". ")}`);
  const keys = lines.length > 1 ? lines.map((line) => {
    const swatch = make("i", { style: { borderColor: `var(--${line.color})`, borderTopStyle: line.dashed ? "dashed" : "solid" } });
    return make("span", { class: "key" }, swatch, line.name);
  }) : [];
  const chart = make("div", { class: "chart" }, make("h3", {}, title, ...keys), canvas);
  let bottom = low === null ? Math.min(...minmax(known)) : low, top = high === null ? Math.max(...minmax(known)) : high;
  if (low === null) bottom -= (top - bottom) * 0.08;
  if (high === null) top += (top - bottom) * 0.08;
  if (!(top > bottom)) { bottom -= Math.abs(bottom) * 0.1 + 1e-9; top += Math.abs(top) * 0.1 + 1e-9; }
  const [first, last] = [numbers[0], numbers.at(-1)];
  let hovered = null, place = null;

  function paint() {
    const { context, width, height } = canvasOf(canvas, 190);
    context.font = `12px ${FONT}`;
    const marks = ticks(bottom, top, 4).values;
    const gutter = Math.max(...marks.map((value) => context.measureText(show(value)).width)) + 10;
    const x = (number) => gutter + 4 + ((number - first) / Math.max(1, last - first)) * (width - gutter - 14);
    const y = (value) => 8 + (1 - (value - bottom) / (top - bottom)) * (height - 34);
    place = { x, gutter, width };
    context.strokeStyle = color("line");
    context.lineWidth = 1;
    for (const value of marks) {
      const at = Math.round(y(value)) + 0.5;
      context.beginPath(); context.moveTo(gutter, at); context.lineTo(width, at); context.stroke();
      context.fillStyle = color("soft"); context.textAlign = "right";
      context.fillText(show(value), gutter - 8, at);
    }
    context.textAlign = "center";
    for (const value of ticks(first, last, Math.min(8, width / 70)).values) {
      if (Number.isInteger(value)) context.fillText(`${value}`, Math.min(width - 8, x(value)), height - 9);
    }
    for (const line of lines) {
      context.strokeStyle = context.fillStyle = color(line.color);
      context.lineWidth = 1.75; context.lineJoin = "round";
      context.setLineDash(line.dashed ? [5, 4] : []);
      const points = thin(numbers, line.values, x, y);
      if (line.area && points.length) {
        context.globalAlpha = 0.16;
        context.beginPath(); context.moveTo(points[0][0], y(bottom));
        for (const [px, py] of points) context.lineTo(px, py);
        context.lineTo(points.at(-1)[0], y(bottom)); context.fill();
        context.globalAlpha = 1;
      }
      context.beginPath();
      points.forEach(([px, py], i) => (i ? context.lineTo(px, py) : context.moveTo(px, py)));
      context.stroke();
      context.setLineDash([]);
      if (points.length < 41 && !line.dashed) for (const [px, py] of points) disc(context, px, py, 2.2);
      if (hovered !== null && line.values[hovered] !== null) disc(context, x(numbers[hovered]), y(line.values[hovered]), 4.2);
    }
  }
  function nearest(event) {
    const at = event.clientX - canvas.getBoundingClientRect().left;
    let best = 0;
    numbers.forEach((number, i) => { if (Math.abs(place.x(number) - at) < Math.abs(place.x(numbers[best]) - at)) best = i; });
    return best;
  }
  canvas.addEventListener("pointermove", (event) => {
    hovered = nearest(event);
    paint();
    showTip(event.clientX, event.clientY, `step ${numbers[hovered]}`, lines.map((line) =>
      line.values[hovered] === null ? null : `${line.name}: ${show(line.values[hovered])}`));
  });
  canvas.addEventListener("pointerleave", () => { hovered = null; paint(); hideTip(); });
  canvas.addEventListener("click", (event) => choose(numbers[nearest(event)]));
  painters.push(paint);
  return chart;
}

function minmax(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}
function disc(context, x, y, radius) {
  context.beginPath(); context.arc(x, y, radius, 0, 7); context.fill();
}
/** The points to draw: where several fall on one pixel, only the lowest and the highest. */
function thin(numbers, values, x, y) {
  const points = [];
  let pixel = null, low = 0, high = 0;
  const flush = () => { if (pixel !== null) { points.push([pixel, low]); if (high !== low) points.push([pixel, high]); } };
  const many = numbers.length > 2000;
  numbers.forEach((number, i) => {
    if (values[i] === null) return;
    const px = many ? Math.round(x(number)) : x(number), py = y(values[i]);
    if (many && px === pixel) { low = Math.min(low, py); high = Math.max(high, py); return; }
    flush();
    [pixel, low, high] = [px, py, py];
  });
  flush();
  return points;
}
