// Line charts on a canvas: named series over one axis, with axis labels.
import { ink, paintedCanvas } from "./colour.js";
import { h } from "./dom.js";

/** series: [{name, colour, points: [[x, y], ...]}]; marks: [{x, text}] are vertical lines; `whole`: x counts. */
export function lineChart({ series, width = 460, height = 170, xName, yName, marks = [], label, whole = false }) {
  const points = series.flatMap((s) => s.points).filter(([, y]) => Number.isFinite(y));
  const left = 46,
    bottom = 30,
    top = 8,
    right = 8;
  const paint = (context) => {
    if (!points.length) return;
    const xs = points.map((p) => p[0]),
      ys = points.map((p) => p[1]);
    const x0 = Math.min(...xs),
      x1 = Math.max(...xs),
      y0 = Math.min(0, ...ys),
      highest = Math.max(...ys),
      y1 = highest - y0 > 1e-6 ? highest : y0 + 1; // a flat line gets a scale of its own
    const X = (x) => left + ((x - x0) / (x1 - x0 || 1)) * (width - left - right);
    const Y = (y) => height - bottom - ((y - y0) / (y1 - y0)) * (height - bottom - top);
    context.font = "11px system-ui, sans-serif";
    context.strokeStyle = ink("line");
    context.fillStyle = ink("soft");
    context.textAlign = "right";
    for (const y of ticks(y0, y1, 4)) {
      context.beginPath();
      context.moveTo(left, Y(y));
      context.lineTo(width - right, Y(y));
      context.stroke();
      context.fillText(nice(y), left - 5, Y(y) + 4);
    }
    context.textAlign = "center";
    for (const x of ticks(x0, x1, Math.max(2, Math.floor(width / 60)), whole)) {
      context.fillText(nice(x), X(x), height - bottom + 13);
    }
    context.fillText(xName, (left + width) / 2, height - 4);
    for (const mark of marks) {
      context.strokeStyle = ink("warm");
      context.setLineDash([4, 3]);
      context.beginPath();
      context.moveTo(X(mark.x), top);
      context.lineTo(X(mark.x), height - bottom);
      context.stroke();
      context.setLineDash([]);
      context.fillStyle = ink("warm");
      context.textAlign = X(mark.x) > width - 90 ? "right" : "left";
      context.fillText(mark.text, X(mark.x) + (context.textAlign === "left" ? 4 : -4), top + 10);
    }
    for (const one of series) {
      context.strokeStyle = context.fillStyle = one.colour;
      context.lineWidth = 1.8;
      context.beginPath();
      one.points
        .filter(([, y]) => Number.isFinite(y))
        .forEach(([x, y], i) => (i ? context.lineTo(X(x), Y(y)) : context.moveTo(X(x), Y(y))));
      context.stroke();
      for (const [x, y] of one.points)
        if (Number.isFinite(y)) {
          context.beginPath();
          context.arc(X(x), Y(y), 2.4, 0, 7);
          context.fill();
        }
    }
  };
  const canvas = paintedCanvas(width, height, label, paint);
  const legend = h(
    "div",
    { class: "legend" },
    yName ? h("span", {}, `${yName}: `) : null,
    series.map((s) => h("span", {}, h("span", { style: { color: s.colour } }, "● "), s.name)),
  );
  return h("div", { class: "figure scroll" }, canvas, legend);
}

/** At most `most` + 1 round numbers from `low` to `high`: steps of 1, 2 or 5 times a power of ten; never below 1 for
 *  whole numbers. */
export function ticks(low, high, most, whole = false) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(span / most)),
    fitting = [1, 2, 5, 10].map((n) => n * power).find((s) => span / s <= most),
    step = whole ? Math.max(1, Math.ceil(fitting)) : fitting,
    first = Math.ceil(low / step - 1e-9);
  const count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: count }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

export function nice(number) {
  if (!Number.isFinite(number)) return "–";
  const size = Math.abs(number);
  if (size !== 0 && (size < 0.001 || size >= 1e5)) return number.toExponential(1);
  return String(Number(number.toPrecision(size >= 100 ? 4 : 3)));
}
