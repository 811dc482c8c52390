// Pictures of panels as SVG and PNG, and downloads. Canvases are drawn again into SVG by the function that painted
// them; tables and text are read from the page, so that every panel gives real vector graphics.

const XML = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const HIDDEN = new RegExp("[\\u0000-\\u0008\\u000b\\u000c\\u000e-\\u001f\\ufffe\\uffff]", "g"); // not allowed in XML
const escapeXml = (text) => String(text).replace(HIDDEN, "").replace(/[&<>"]/g, (c) => XML[c]);
const fixed = (number) => Number(number.toFixed(2));

/** The part of CanvasRenderingContext2D that the page draws with, written as SVG elements. */
class SvgContext {
  constructor() {
    Object.assign(this, {
      parts: [],
      fillStyle: "#000",
      strokeStyle: "#000",
      lineWidth: 1,
      font: "11px sans-serif",
      textAlign: "left",
      textBaseline: "alphabetic",
      imageSmoothingEnabled: true,
    });
    this.dash = [];
    this.path = [];
    this.stack = [];
  }
  _stroke() {
    const dash = this.dash.length ? ` stroke-dasharray="${this.dash.join(" ")}"` : "";
    return `stroke="${escapeXml(this.strokeStyle)}" stroke-width="${this.lineWidth}"${dash}`;
  }
  fillRect(x, y, width, height) {
    const size = `width="${fixed(Math.abs(width))}" height="${fixed(Math.abs(height))}"`;
    this.parts.push(
      `<rect x="${fixed(Math.min(x, x + width))}" y="${fixed(Math.min(y, y + height))}" ${size} ` +
        `fill="${escapeXml(this.fillStyle)}"/>`,
    );
  }
  strokeRect(x, y, width, height) {
    const size = `width="${fixed(width)}" height="${fixed(height)}"`;
    this.parts.push(`<rect x="${fixed(x)}" y="${fixed(y)}" ${size} fill="none" ${this._stroke()}/>`);
  }
  fillText(text, x, y) {
    const anchor = { right: "end", center: "middle" }[this.textAlign] ?? "start",
      size = Number(this.font.match(/([\d.]+)px/)?.[1] ?? 11),
      down = this.textBaseline === "middle" ? size * 0.35 : this.textBaseline === "top" ? size * 0.8 : 0;
    this.parts.push(
      `<text x="${fixed(x)}" y="${fixed(y + down)}" font-size="${size}" text-anchor="${anchor}" ` +
        `fill="${escapeXml(this.fillStyle)}" xml:space="preserve">${escapeXml(text)}</text>`,
    );
  }
  beginPath() {
    this.path = [];
  }
  moveTo(x, y) {
    this.path.push(`M${fixed(x)} ${fixed(y)}`);
  }
  lineTo(x, y) {
    this.path.push(`L${fixed(x)} ${fixed(y)}`);
  }
  quadraticCurveTo(cx, cy, x, y) {
    this.path.push(`Q${fixed(cx)} ${fixed(cy)} ${fixed(x)} ${fixed(y)}`);
  }
  bezierCurveTo(ax, ay, bx, by, x, y) {
    this.path.push(`C${[ax, ay, bx, by, x, y].map(fixed).join(" ")}`);
  }
  closePath() {
    this.path.push("Z");
  }
  /** Whole circles only. */
  arc(x, y, radius) {
    const r = fixed(radius);
    this.path.push(
      `M${fixed(x - radius)} ${fixed(y)}a${r} ${r} 0 1 0 ${fixed(2 * radius)} 0a${r} ${r} 0 1 0 ${fixed(-2 * radius)} 0`,
    );
  }
  rect(x, y, width, height) {
    this.path.push(`M${fixed(x)} ${fixed(y)}h${fixed(width)}v${fixed(height)}h${fixed(-width)}Z`);
  }
  stroke() {
    if (this.path.length) this.parts.push(`<path d="${this.path.join("")}" fill="none" ${this._stroke()}/>`);
  }
  fill() {
    if (this.path.length)
      this.parts.push(`<path d="${this.path.join("")}" fill="${escapeXml(this.fillStyle)}"/>`);
  }
  setLineDash(dash) {
    this.dash = dash;
  }
  save() {
    this.stack.push({ fillStyle: this.fillStyle, strokeStyle: this.strokeStyle, lineWidth: this.lineWidth, open: 0 });
  }
  restore() {
    const { open, ...style } = this.stack.pop();
    Object.assign(this, style);
    this.parts.push("</g>".repeat(open));
  }
  clip() {
    const id = `clip-${++clips}`;
    this.parts.push(`<clipPath id="${id}"><path d="${this.path.join("")}"/></clipPath><g clip-path="url(#${id})">`);
    if (this.stack.length) this.stack.at(-1).open++;
  }
  clearRect() {}
  /** A bitmap of one pixel per cell becomes one rectangle per run of equal cells. */
  drawImage(image, x, y, width, height) {
    const pixels = image.getContext("2d").getImageData(0, 0, image.width, image.height).data,
      across = width / image.width,
      down = height / image.height,
      same = (a, b) => [0, 1, 2, 3].every((c) => pixels[a + c] === pixels[b + c]);
    for (let row = 0; row < image.height; row++)
      for (let from = 0, to; from < image.width; from = to) {
        const at = (row * image.width + from) * 4;
        for (to = from + 1; to < image.width && same(at, (row * image.width + to) * 4); to++);
        if (!pixels[at + 3]) continue;
        this.fillStyle = `rgb(${pixels[at]},${pixels[at + 1]},${pixels[at + 2]})`;
        this.fillRect(x + from * across, y + row * down, (to - from) * across + 0.3, down + 0.3);
      }
  }
}
let clips = 0;

const SKIPPED = "button, select, input, textarea, label, .tools, .hint, .about, .readout, [hidden], details:not([open])";
const seen = (colour) => colour && colour !== "transparent" && !/, 0\)$|\/ 0\)$/.test(colour);

/** Words of a text node with the place of each, so that wrapped lines stay where they are. */
function words(node, origin, out) {
  const style = getComputedStyle(node.parentElement),
    size = parseFloat(style.fontSize),
    range = document.createRange();
  for (const word of node.data.matchAll(/\S+/g)) {
    range.setStart(node, word.index);
    range.setEnd(node, word.index + word[0].length);
    const box = range.getBoundingClientRect();
    if (!box.width) continue;
    const weight = Number(style.fontWeight) >= 600 ? ' font-weight="600"' : "",
      family = style.fontFamily.includes("mono") ? ' font-family="monospace"' : "",
      text = style.textTransform === "uppercase" ? word[0].toUpperCase() : word[0];
    out.push(
      `<text x="${fixed(box.left - origin.left)}" y="${fixed(box.top - origin.top + box.height * 0.5 + size * 0.35)}" ` +
        `font-size="${size}"${weight}${family} fill="${style.color}">${escapeXml(text)}</text>`,
    );
  }
}

function walk(node, origin, out) {
  if (node.nodeType === Node.TEXT_NODE) {
    words(node, origin, out);
    return;
  }
  if (node.nodeType !== Node.ELEMENT_NODE || node.matches(SKIPPED)) return;
  const box = node.getBoundingClientRect(),
    place = `x="${fixed(box.left - origin.left)}" y="${fixed(box.top - origin.top)}"`,
    size = `width="${fixed(box.width)}" height="${fixed(box.height)}"`;
  if (node instanceof HTMLCanvasElement) {
    if (!node.repaint) {
      out.push(`<image ${place} ${size} href="${node.toDataURL()}"/>`);
      return;
    }
    const context = new SvgContext(),
      shrunk = box.width / (parseFloat(node.style.width) || box.width);
    node.repaint(context);
    const move = `translate(${fixed(box.left - origin.left)} ${fixed(box.top - origin.top)}) scale(${fixed(shrunk)})`;
    out.push(`<g transform="${move}">${context.parts.join("")}</g>`);
    return;
  }
  if (node instanceof SVGElement) {
    out.push(`<g transform="translate(${fixed(box.left - origin.left)} ${fixed(box.top - origin.top)})">`);
    out.push(new XMLSerializer().serializeToString(node), "</g>");
    return;
  }
  const style = getComputedStyle(node);
  if (seen(style.backgroundColor))
    out.push(`<rect ${place} ${size} rx="${parseFloat(style.borderRadius) || 0}" fill="${style.backgroundColor}"/>`);
  for (const child of node.childNodes) walk(child, origin, out);
}

/** What a panel shows, as the text of an SVG file. */
export function toSvg(panel) {
  const out = [],
    box = panel.getBoundingClientRect(),
    clones = [...panel.querySelectorAll(".scroll")].map((n) => Math.max(0, n.scrollWidth - n.clientWidth)),
    width = Math.ceil(box.width + Math.max(0, ...clones));
  const parts = [...panel.children].flatMap((child) =>
    child.tagName === "HEADER" ? [child.querySelector("h2")] : [child],
  );
  for (const part of parts.filter(Boolean)) walk(part, box, out);
  const style = getComputedStyle(panel);
  return (
    `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${Math.ceil(box.height)}" ` +
    `viewBox="0 0 ${width} ${Math.ceil(box.height)}" font-family="system-ui, sans-serif">` +
    `<rect width="100%" height="100%" fill="${style.backgroundColor}"/>${out.join("")}</svg>`
  );
}

/** The same picture as a PNG of twice the size. */
export async function toPng(panel) {
  const image = new Image(),
    bytes = new TextEncoder().encode(toSvg(panel));
  let text = "";
  for (let at = 0; at < bytes.length; at += 0x8000) text += String.fromCharCode(...bytes.subarray(at, at + 0x8000));
  image.src = `data:image/svg+xml;base64,${btoa(text)}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = image.width * 2;
  canvas.height = image.height * 2;
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

/** Saves a blob under a name, as a click on a download link does. */
export function download(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 300_000); // a busy browser may read it late
}
