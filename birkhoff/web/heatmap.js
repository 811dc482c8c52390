// Token × sublayer heat map on a canvas. Values are painted once into a bitmap, one pixel per cell; panning
// and zooming only redraw the bitmap, so the cost of a frame does not depend on the number of cells.
import { amount, ink, signed, sizeCanvas } from "./colour.js";
import { h } from "./dom.js";

const LEFT = 58,
  BOTTOM = 20;

export class Heatmap {
  /** Options: `label`, `height`, and the callbacks `onPin(column, row)` and `onHover(cell, event)`. */
  constructor({ label, height = 300, onPin, describe, onHover }) {
    this.canvas = h("canvas", {
      role: "application",
      tabindex: 0,
      "aria-label": label,
      "aria-roledescription": "heat map: arrow keys move the pinned cell, plus and minus zoom",
    });
    this.node = h("div", { class: "figure" }, this.canvas);
    Object.assign(this, {
      height,
      onPin,
      describe,
      onHover,
      columns: 0,
      rows: [],
      pinned: null,
      view: { x: 0, y: 0, zoom: 1 },
      frame: 0,
    });
    this.canvas.repaint = (context) => this._paintInto(context);
    this.bitmap = document.createElement("canvas");
    this._listen();
    new ResizeObserver(() => this.draw()).observe(this.node);
  }

  /** `rows`: row labels from the top; `value(column, row)`: a number, or undefined for no value. */
  show({ columns, rows, value, scale = "amount", low, high, names }) {
    const fresh = columns !== this.columns || rows.length !== this.rows.length;
    Object.assign(this, { columns, rows, value, scale, names });
    if (!columns || !rows.length) {
      this.draw();
      return;
    }
    const values = new Float64Array(columns * rows.length).fill(NaN);
    for (let y = 0; y < rows.length; y++)
      for (let x = 0; x < columns; x++) {
        const number = value(x, y);
        if (number === undefined || number === null) continue;
        values[y * columns + x] = number;
      }
    // Colour range from the 1st to the 99th percentile: the first token's large norms would flatten the rest.
    const sorted = values.filter(Number.isFinite).sort(),
      at = (share) => sorted[Math.round(share * (sorted.length - 1))];
    this.low = low ?? (sorted.length ? at(0.01) : 0);
    this.high = high ?? (sorted.length ? Math.max(at(0.99), this.low + 1e-12) : 1);
    this.clipped = sorted.length > 0 && (sorted[0] < this.low || sorted.at(-1) > this.high);
    if (this.scale === "signed") {
      this.high = Math.max(Math.abs(this.low), Math.abs(this.high), 1e-12);
      this.low = -this.high;
    }
    this.bitmap.width = columns;
    this.bitmap.height = rows.length;
    const context = this.bitmap.getContext("2d"),
      image = context.createImageData(columns, rows.length),
      span = this.high - this.low || 1;
    for (let i = 0; i < values.length; i++) {
      if (Number.isNaN(values[i])) continue; // no value: transparent
      const at = (values[i] - this.low) / span,
        [r, g, b] = this.scale === "signed" ? signed(at * 2 - 1) : amount(at);
      image.data.set([r, g, b, 255], i * 4);
    }
    context.putImageData(image, 0, 0);
    if (fresh) this.view = { x: 0, y: 0, zoom: 1 };
    this.draw();
  }

  pin(column, row) {
    this.pinned = column === null ? null : { column, row };
    this.draw();
  }

  _sizes() {
    const width = Math.max(160, this.node.clientWidth || 600),
      inner = width - LEFT,
      tall = this.height - BOTTOM;
    return {
      width,
      inner,
      tall,
      cellWidth: (inner / Math.max(this.columns, 1)) * this.view.zoom,
      cellHeight: (tall / Math.max(this.rows.length, 1)) * Math.max(1, Math.min(this.view.zoom / 4, 4)),
    };
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this._paint());
  }

  _paint() {
    const context = sizeCanvas(this.canvas, this._sizes().width, this.height);
    context.clearRect(0, 0, this._sizes().width, this.height);
    this._paintInto(context);
  }

  _paintInto(context) {
    const { inner, tall, cellWidth, cellHeight } = this._sizes(),
      view = this.view;
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = ink("soft");
    if (!this.columns) return;
    view.x = Math.max(0, Math.min(view.x, this.columns - inner / cellWidth));
    view.y = Math.max(0, Math.min(view.y, this.rows.length - tall / cellHeight));
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, inner, tall);
    context.clip();
    context.imageSmoothingEnabled = false;
    context.drawImage(
      this.bitmap,
      LEFT - view.x * cellWidth,
      -view.y * cellHeight,
      this.columns * cellWidth,
      this.rows.length * cellHeight,
    );
    if (this.pinned) {
      const { column, row } = this.pinned,
        x = LEFT + (column - view.x) * cellWidth;
      context.strokeStyle = ink("warm");
      context.lineWidth = 1.5;
      context.strokeRect(x, -2, Math.max(cellWidth, 2), tall + 4);
      if (row !== null && row !== undefined)
        context.strokeRect(x, (row - view.y) * cellHeight, Math.max(cellWidth, 3), Math.max(cellHeight, 3));
    }
    context.restore();
    const every = Math.ceil(13 / cellHeight);
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (let y = 0; y < this.rows.length; y += every) {
      const at = (y - view.y + Math.min(every, 1) / 2) * cellHeight;
      if (at > 4 && at < tall - 2) context.fillText(this.rows[y], LEFT - 6, Math.max(at, 6));
    }
    context.textAlign = "left";
    context.textBaseline = "alphabetic";
    const step = Math.max(1, Math.ceil(58 / cellWidth)),
      ruler = this.canvas.getContext("2d"); // a file has no measures of text
    ruler.font = context.font;
    for (
      let x = Math.ceil(view.x / step) * step;
      x < Math.min(this.columns, view.x + inner / cellWidth);
      x += step
    ) {
      const text = this.names ? this.names(x) : String(x),
        left = LEFT + (x - view.x) * cellWidth;
      if (left + 1 + ruler.measureText(text).width > LEFT + inner) continue; // the edge would cut it
      context.save();
      context.beginPath();
      context.rect(left, tall, step * cellWidth - 3, BOTTOM);
      context.clip();
      context.fillText(text, left + 1, this.height - 6);
      context.restore();
    }
  }

  cellAt(event) {
    const box = this.canvas.getBoundingClientRect(),
      { cellWidth, cellHeight, tall } = this._sizes();
    const x = event.clientX - box.left - LEFT,
      y = event.clientY - box.top;
    if (x < 0 || y < 0 || y > tall) return null;
    const column = Math.floor(x / cellWidth + this.view.x),
      row = Math.floor(y / cellHeight + this.view.y);
    return column < this.columns && row < this.rows.length ? { column, row } : null;
  }

  zoomBy(factor, aroundX) {
    const { inner, cellWidth } = this._sizes(),
      x = aroundX ?? inner / 2,
      column = this.view.x + x / cellWidth;
    this.view.zoom = Math.max(1, Math.min(64, this.view.zoom * factor));
    this.view.x = column - x / this._sizes().cellWidth;
    this.draw();
  }

  _listen() {
    const canvas = this.canvas;
    let drag = null;
    canvas.addEventListener(
      "wheel",
      (event) => {
        if (!this.columns) return;
        if (
          event.ctrlKey ||
          event.metaKey ||
          event.altKey ||
          Math.abs(event.deltaY) > Math.abs(event.deltaX)
        ) {
          if (this.view.zoom === 1 && event.deltaY > 0) return; // let the page scroll
          event.preventDefault();
          this.zoomBy(
            Math.exp(-event.deltaY / 300),
            event.clientX - canvas.getBoundingClientRect().left - LEFT,
          );
        } else {
          event.preventDefault();
          this.view.x += event.deltaX / this._sizes().cellWidth;
          this.draw();
        }
      },
      { passive: false },
    );
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, y: event.clientY, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (drag) {
        const { cellWidth, cellHeight } = this._sizes(),
          dx = event.clientX - drag.x,
          dy = event.clientY - drag.y;
        if (drag.moved || Math.hypot(dx, dy) > 4) {
          this.view.x -= dx / cellWidth;
          this.view.y -= dy / cellHeight;
          drag = { x: event.clientX, y: event.clientY, moved: true };
          this.draw();
        }
        return;
      }
      const cell = this.cellAt(event);
      this.onHover?.(cell, event);
    });
    canvas.addEventListener("pointerup", (event) => {
      const cell = drag && !drag.moved ? this.cellAt(event) : null;
      drag = null;
      if (cell) this.onPin?.(cell.column, cell.row);
    });
    canvas.addEventListener("pointerleave", () => this.onHover?.(null));
    canvas.addEventListener("keydown", (event) => {
      if (!this.columns) return;
      const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
      if (moves[event.key]) {
        event.preventDefault();
        const at = this.pinned ?? { column: 0, row: 0 },
          [dx, dy] = moves[event.key];
        this.onPin?.(
          Math.max(0, Math.min(this.columns - 1, at.column + dx)),
          Math.max(0, Math.min(this.rows.length - 1, (at.row ?? 0) + dy)),
        );
      } else if (event.key === "+" || event.key === "=") this.zoomBy(1.5);
      else if (event.key === "-") this.zoomBy(1 / 1.5);
      else if (event.key === "0") {
        this.view = { x: 0, y: 0, zoom: 1 };
        this.draw();
      }
    });
  }
}
