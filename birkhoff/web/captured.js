// Rows of a capture, hook by hook: one number per token and layer.
import { nice } from "./chart.js";
import { amount, rampLegend } from "./colour.js";
import { empty, fill, h, note, panel, short, stack } from "./dom.js";
import { Heatmap } from "./heatmap.js";
import { pyText } from "./pinned.js";
import { tokensOf } from "./store.js";

/** `state.captured`: `{directory, request, hooks: {name: {shape, dtype, rows: [label], values: [[number or null]]}}}`. */
export function capturedPanel(store) {
  const map = new Heatmap({
    label: "norms of captured rows",
    height: 260,
    onPin: (column, row) => store.set({ pin: { position: column, row, twin: false } }),
  });
  const hook = h("select", { "aria-label": "captured hook", onchange: () => draw(store.state) }),
    body = stack();
  const current = () => store.state.captured?.hooks?.[hook.value];
  const node = panel(
    "Captured rows",
    "Norm of every stored row: columns are tokens, rows are layers.",
    {
      wide: true,
      name: "captured",
      data: () => ({ hook: hook.value, ...current() }),
      python: () => capturedPython(store.state.captured, hook.value),
    },
    h("div", { class: "row" }, h("label", {}, "hook", hook)),
    body,
  );
  function draw(state) {
    const names = Object.keys(state.captured?.hooks ?? {});
    if (!names.length) return fill(body, empty("This capture has no rows."));
    if (hook.options.length !== names.length)
      fill(
        hook,
        names.map((name) => h("option", { value: name }, name)),
      );
    const shown = current(),
      text = tokensOf(state.run);
    fill(body, map.node);
    map.show({
      columns: shown.values[0].length,
      rows: shown.rows,
      value: (x, y) => shown.values[y][x] ?? undefined,
      names: (x) => short(text[x]?.text ?? String(x), 10),
    });
    map.pin(state.pin?.position ?? null, state.pin?.row);
    fill(
      body,
      map.node,
      h("div", { class: "legend" }, rampLegend(nice(map.low), nice(map.high), amount), " norm"),
      note(`Rows of ${shown.shape.join(" × ") || "1"} numbers, stored as ${shown.dtype}.`),
    );
  }
  store.on(["pin", "theme"], draw);
  return node;
}

function capturedPython(captured, hook) {
  return `from birkhoff.capture.store.reader import ${captured?.sharded ? "read_sharded" : "read_request"}
import numpy as np

entries = ${captured?.sharded ? `read_sharded(${pyText(captured.directory)})[${pyText(captured.request)}]` : `read_request(${pyText(captured?.directory ?? "DIR")})`}
rows = {layer: entry.values() for (hook, layer), entry in entries.items() if hook == ${pyText(hook)}}
values = [np.linalg.norm(row.reshape(len(row), -1).astype(np.float32), axis=1) for _, row in sorted(rows.items())]
print(values)`;
}
