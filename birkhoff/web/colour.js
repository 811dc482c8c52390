// Colour ramps that are safe for colour-blind users: one sequential, one diverging.
import { h } from "./dom.js";

const AMOUNT = [
  [247, 251, 242],
  [199, 224, 200],
  [119, 183, 178],
  [56, 126, 150],
  [36, 73, 111],
  [20, 28, 62],
];
const AMOUNT_DARK = [
  [26, 33, 40],
  [31, 62, 82],
  [35, 104, 119],
  [70, 154, 143],
  [152, 206, 150],
  [244, 247, 200],
];
const MIDDLE = [
  [122, 55, 12],
  [205, 125, 55],
  [246, 215, 175],
  [245, 245, 240],
  [168, 208, 213],
  [61, 143, 155],
  [9, 76, 88],
];
const MIDDLE_DARK = [
  [255, 200, 130],
  [217, 133, 62],
  [108, 69, 44],
  [32, 39, 46],
  [36, 84, 95],
  [64, 155, 165],
  [175, 238, 236],
];

export const isDark = () => document.documentElement.dataset.theme === "dark";

function along(stops, at) {
  const position = Math.max(0, Math.min(1, at)) * (stops.length - 1),
    low = Math.min(Math.floor(position), stops.length - 2),
    part = position - low;
  return stops[low].map((c, i) => Math.round(c + (stops[low + 1][i] - c) * part));
}

/** [r, g, b] for 0..1; NaN gives red. */
export function amount(at) {
  return Number.isFinite(at) ? along(isDark() ? AMOUNT_DARK : AMOUNT, at) : [190, 30, 45];
}

/** [r, g, b] for -1..1. */
export function signed(at) {
  return Number.isFinite(at) ? along(isDark() ? MIDDLE_DARK : MIDDLE, (at + 1) / 2) : [190, 30, 45];
}

export const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;
const light = (c) => {
  const x = c / 255;
  return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
};
/** Black or white, whichever has more contrast with this colour (at least 4.5:1). */
export const textColourOn = ([r, g, b]) =>
  0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b) > 0.179 ? "#000000" : "#ffffff";
export const ink = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
export const streamColour = (stream) => ink(`s${stream % 4}`);

/** The colours of the streams with their numbers. */
export function streamLegend(count) {
  const key = (_, stream) =>
    h("span", {}, h("span", { class: "swatch", style: { "background-color": `var(--s${stream % 4})` } }), ` stream ${stream}`);
  return h("div", { class: "legend streams" }, Array.from({ length: count }, key));
}

/** A canvas painted by `paint(context)` in CSS pixels, scaled for the device pixel ratio. `paint` is kept as `repaint`,
 *  which draws the same picture into an SVG file. */
export function paintedCanvas(width, height, label, paint) {
  const canvas = h("canvas", { role: "img", "aria-label": label });
  canvas.repaint = paint;
  paint(sizeCanvas(canvas, width, height));
  return canvas;
}

export function sizeCanvas(canvas, width, height) {
  const ratio = Math.min(devicePixelRatio || 1, 2);
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

/** A colour bar with labels at both ends. */
export function rampLegend(low, high, ramp = amount, from = 0) {
  const canvas = paintedCanvas(110, 10, `colours from ${low} to ${high}`, (context) => {
    for (let x = 0; x < 110; x++) {
      context.fillStyle = css(ramp(from + (x / 109) * (1 - from)));
      context.fillRect(x, 0, 1.5, 10);
    }
  });
  return h("div", { class: "legend" }, low, canvas, high);
}

/** A table cell in this colour. */
export const shadedCell = (rgb, text, title = "") =>
  h("td", { style: { "background-color": css(rgb), color: textColourOn(rgb) }, title }, text);
