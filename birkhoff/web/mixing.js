// The mixers of every sublayer for one token, and their product between two sublayers.
import { amount, css, ink, paintedCanvas, rampLegend, shadedCell, streamColour, streamLegend } from "./colour.js";
import { empty, fill, h, hideTip, note, panel, rowHead, showTip, stack, table } from "./dom.js";
import { notHere, pinnedFrame, sublayerName } from "./pinned.js";
import { filmPython, lineagePython } from "./python.js";

const GAP = 5,
  BAR = 15,
  ACROSS = 8; // tiles in a line, where there is room

/** One canvas with a tile per sublayer; bars at the left show reads, bars below show writes. */
export function filmStrip(store) {
  const body = stack();
  const node = panel(
    "Mixing film strip",
    "One tile per sublayer, in order. Rows of a tile are source streams, columns are target streams; " +
      "every row and column sums to 1. Bars on the left: read weights; bars below: write weights.",
    { wide: true, name: "film", data: () => pinnedFrame(store.state) ?? {}, python: () => filmPython(store.state) },
    body,
  );
  const draw = () => {
    const frame = pinnedFrame(store.state);
    if (!frame?.res_mix) {
      const hint = "Pin a token: click one in the response or in the heat map.";
      fill(body, empty(notHere(store.state, "Mixing of streams") ?? hint));
      return;
    }
    const count = frame.res_mix.length,
      m = frame.res_mix[0].length,
      room = (body.clientWidth || 600) / ACROSS - BAR - GAP * 2,
      cell = Math.max(14, Math.min(22, Math.floor(room / m))),
      tile = m * cell,
      wide = tile + BAR + GAP * 2,
      tall = tile + BAR + 30;
    const across = Math.max(1, Math.floor((body.clientWidth || 600) / wide)),
      lines = Math.ceil(count / across);
    const paint = (context) => {
      context.font = "10px system-ui, sans-serif";
      for (let s = 0; s < count; s++) {
        const left = (s % across) * wide,
          top = Math.floor(s / across) * tall,
          x0 = left + BAR + 2,
          y0 = top + 14;
        context.fillStyle = ink("soft");
        context.fillText(sublayerName(s), x0, top + 10);
        frame.res_mix[s].forEach((line, from) =>
          line.forEach((value, to) => {
            context.fillStyle = css(amount(value));
            context.fillRect(x0 + to * cell, y0 + from * cell, cell - 1, cell - 1);
          }),
        );
        const most = Math.max(...(frame.pre_mix?.[s] ?? [1]), 1e-9),
          mostOut = Math.max(...(frame.post_mix?.[s] ?? [1]), 1e-9);
        frame.pre_mix?.[s]?.forEach((value, stream) => {
          context.fillStyle = streamColour(stream);
          const w = (value / most) * BAR;
          context.fillRect(x0 - 2 - w, y0 + stream * cell + 2, w, cell - 5);
        });
        frame.post_mix?.[s]?.forEach((value, stream) => {
          context.fillStyle = streamColour(stream);
          context.fillRect(x0 + stream * cell + 2, y0 + tile + 2, cell - 5, (value / mostOut) * BAR);
        });
      }
    };
    const label = `mixing matrices of ${count} sublayers for the pinned token`,
      canvas = paintedCanvas(Math.min(across, count) * wide, lines * tall, label, paint);
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect(),
        s =
          Math.floor((event.clientY - box.top) / tall) * across +
          Math.floor((event.clientX - box.left) / wide);
      if (s >= count || s < 0) return hideTip();
      showTip(event.clientX, event.clientY, describe(frame, s));
    });
    canvas.addEventListener("pointerleave", hideTip);
    const worst = Math.max(...frame.res_mix.map(stochasticError));
    fill(
      body,
      h("div", { class: "row centre" }, streamLegend(m), rampLegend("tile: 0", "1")),
      h("div", { class: "scroll" }, canvas),
      note(
        "Row: the stream it comes from, column: the stream it goes to, 0 to 3 from the top and from the left. " +
          `Largest deviation of a row or column sum from 1 over all ${count} sublayers: ` +
          `${worst.toExponential(1)}.`,
      ),
    );
  };
  store.on(["run", "pin", "theme", "props"], draw);
  new ResizeObserver(draw).observe(node);
  return node;
}

export function stochasticError(matrix) {
  const m = matrix.length;
  let worst = 0;
  for (let i = 0; i < m; i++) {
    let row = 0,
      column = 0;
    for (let j = 0; j < m; j++) {
      row += matrix[i][j];
      column += matrix[j][i];
    }
    worst = Math.max(worst, Math.abs(row - 1), Math.abs(column - 1));
  }
  return worst;
}

function describe(frame, s) {
  const numbers = (list) => list.map((x) => x.toFixed(3)).join("  ");
  const matrix = frame.res_mix[s],
    sums = matrix[0].map((_, to) => matrix.reduce((t, line) => t + line[to], 0));
  return [
    h("strong", {}, sublayerName(s)),
    h("div", { class: "mono" },
      matrix.map((line, i) =>
        h("div", {}, `from ${i}:  ${numbers(line)}   Σ ${line.reduce((a, b) => a + b, 0).toFixed(4)}`),
      ),
    ),
    h("div", { class: "mono" }, `Σ to:    ${numbers(sums)}`),
    frame.pre_mix ? h("div", { class: "mono" }, `read:    ${numbers(frame.pre_mix[s])}`) : null,
    frame.post_mix ? h("div", { class: "mono" }, `write:   ${numbers(frame.post_mix[s])}`) : null,
  ];
}

function multiply(a, b) {
  return a.map((line) => b[0].map((_, j) => line.reduce((t, x, k) => t + x * b[k][j], 0)));
}

/** Product of the mixers from `a` to `b`: share of each stream before `a` in each stream before `b`. */
export function lineage(matrices, a, b) {
  const m = matrices[0].length;
  let product = Array.from({ length: m }, (_, i) => Array.from({ length: m }, (_, j) => (i === j ? 1 : 0)));
  for (let s = a; s < b; s++) product = multiply(product, matrices[s]);
  return product;
}

export function lineagePanel(store) {
  const body = stack(),
    from = h("select", { "aria-label": "from sublayer" }),
    to = h("select", { "aria-label": "to sublayer" });
  const value = () => {
    const frame = pinnedFrame(store.state);
    return frame?.res_mix ? lineage(frame.res_mix, Number(from.value), Number(to.value)) : [];
  };
  const node = panel(
    "Stream lineage",
    "Product of the mixers between two sublayers: how much of each source stream remains in each target " +
      "stream through mixing alone, without what the sublayers write.",
    {
      name: "lineage",
      data: () => ({ from: Number(from.value), to: Number(to.value), product: value() }),
      python: () => lineagePython(store.state, Number(from.value), Number(to.value)),
    },
    h("div", { class: "row" }, h("label", {}, "from", from), h("label", {}, "to", to)),
    body,
  );
  const draw = () => {
    const frame = pinnedFrame(store.state);
    if (!frame?.res_mix) {
      const hint = "Pin a token to see the mixing of its streams.";
      fill(body, empty(notHere(store.state, "Lineage of streams") ?? hint));
      return;
    }
    const count = frame.res_mix.length;
    if (from.options.length !== count + 1) {
      for (const select of [from, to])
        fill(
          select,
          Array.from({ length: count + 1 }, (_, s) =>
            h("option", { value: s }, s === count ? "the head" : `before ${sublayerName(s)}`),
          ),
        );
      from.value = Math.min(store.state.lineage?.from ?? 0, count);
      to.value = Math.min(store.state.lineage?.to ?? count, count);
    }
    if (Number(to.value) < Number(from.value)) to.value = from.value;
    const product = value(),
      m = product.length;
    const names = product.map((_, i) => `stream ${i}`);
    const cell = (x) => shadedCell(amount(x), x.toFixed(3));
    const rows = product.map((line, i) => [rowHead(names[i]), line.map(cell)]);
    fill(
      body,
      table("matrix", ["from \\ to", ...names], rows),
      note(spread(product, m)),
    );
  };
  for (const select of [from, to])
    select.addEventListener("change", () => {
      store.set({ lineage: { from: Number(from.value), to: Number(to.value) } });
      draw();
    });
  store.on(["run", "pin", "theme", "props"], draw);
  return node;
}

function spread(product, m) {
  const kept = product.reduce((t, line, i) => t + line[i], 0) / m;
  const percent = (x) => `${(x * 100).toFixed(0)} %`;
  return `A stream retains ${percent(kept)} on average; full mixing gives ${percent(1 / m)}.`;
}
