// The token × layer heat map; clicking a cell pins it, and all other panels show that token.
import { post } from "./api.js";
import { nice } from "./chart.js";
import { amount, rampLegend, signed } from "./colour.js";
import { empty, fault, fill, h, panel, short, stack } from "./dom.js";
import { Heatmap } from "./heatmap.js";
import { ordinary, tokenIds, pinnedToken } from "./pinned.js";
import { heatmapPython } from "./python.js";
import { picture, SCALARS } from "./scalars.js";
import { tokensOf } from "./store.js";

export function heatmapPanel(store) {
  const map = new Heatmap({
    label: "token by layer heat map",
    height: 320,
    onPin: (column, row) =>
      store.set({ pin: { position: column, row, twin: store.state.pin?.twin ?? false } }),
    onHover: (cell) => read(cell),
  });
  // Values are read out below the map: a pop-up would cover the cells around the pointer.
  const readout = h("p", { class: "note mono readout" });
  const read = (cell) => {
    if (!cell || !map.value) return fill(readout, "Point at a cell to read its value.");
    const value = map.value(cell.column, cell.row),
      token = tokensOf(store.state.run, store.state.pin?.twin)[cell.column];
    fill(
      readout,
      `“${short(token?.text ?? "", 30)}”  ·  position ${cell.column}  ·  `,
      `${map.rows[cell.row]}: ${value === undefined ? "no value" : nice(value)}`,
    );
  };
  read(null);
  const scalar = h("select", { "aria-label": "heat map value" },
    Object.entries(SCALARS).map(([name, { title }]) => h("option", { value: name }, title)),
  );
  const streams = h("span", { class: "picker", role: "group", "aria-label": "stream" });
  const vector = h("select", { "aria-label": "vector" }),
    view = h("select", { "aria-label": "lens view" });
  const which = h("button", {
      "aria-pressed": "false",
      onclick: () =>
        store.set({
          pin: { ...(store.state.pin ?? { position: 0, row: 0 }), twin: !store.state.pin?.twin },
        }),
    },
    "Show unsteered twin",
  );
  const vectorLabel = h("label", {}, "vector", vector),
    viewLabel = h("label", {}, "read from", view);
  const body = stack(),
    legend = h("div", { class: "legend" });
  const node = panel(
    "Tokens × layers",
    "Columns are tokens, rows are sublayers from first to last. Click to pin a cell; drag to pan; " +
      "scroll or press + and − to zoom; use the arrow keys to move the pin.",
    {
      wide: true,
      name: "heatmap",
      data: () => data(store.state),
      python: () => heatmapPython(store.state, SCALARS[store.state.scalar].title),
    },
    h("div", { class: "row" },
      h("label", {}, "value", scalar),
      vectorLabel,
      viewLabel,
      h("span", { class: "field" }, "stream", streams),
      which,
    ),
    body,
  );
  scalar.addEventListener("change", () => {
    store.set({ scalar: scalar.value });
    ask(store);
  });
  vector.addEventListener("change", () => store.set({ vector: vector.value }));
  view.addEventListener("change", () => store.set({ lensView: view.value }));
  const draw = (state) => {
    const one = ordinary(state);
    for (const option of scalar.options) option.disabled = one && option.value !== "lens";
    if (one && (state.scalar !== "lens" || state.lensView !== "head")) {
      store.set({ scalar: "lens", lensView: "head" });
      return;
    }
    scalar.value = state.scalar;
    const kind = SCALARS[state.scalar],
      m = one ? 0 : (state.props?.num_streams ?? 4);
    if (streams.childElementCount !== m + 1)
      fill(
        streams,
        ["all", ...Array(m).keys()].map((s) =>
          h(
            "button",
            { "data-stream": s, onclick: () => store.set({ stream: s }) },
            s === "all" ? "all" : `${s}`,
          ),
        ),
      );
    for (const button of streams.children)
      button.setAttribute("aria-pressed", String(button.dataset.stream === String(state.stream)));
    streams.parentElement.hidden = !kind.perStream;
    vectorLabel.hidden = !kind.perVector;
    viewLabel.hidden = !kind.perView;
    which.hidden = !state.run.twin;
    which.setAttribute("aria-pressed", String(Boolean(state.pin?.twin)));
    const names = (state.vectors ?? []).map((v) => v.name);
    if (vector.options.length !== names.length)
      fill(
        vector,
        names.map((name) => h("option", { value: name }, name)),
      );
    vector.value = state.vector ?? names[0] ?? "";
    const views = one ? ["head"] : ["head", "mean", ...Array(m).keys()];
    if (view.options.length !== views.length)
      fill(
        view,
        views.map((v) =>
          h("option", { value: v },
            typeof v === "number" ? `stream ${v}` : v === "mean" ? "mean of streams" : one ? "residual" : "head mix",
          ),
        ),
      );
    view.value = state.lensView;
    const shown = picture(state),
      asked = kind.ask ? state.asked?.[`${kind.ask}:${state.pin?.twin ? "twin" : "run"}`] : null;
    if (asked?.error) return fill(body, fault(asked.error));
    if (!shown) {
      const why = !tokensOf(state.run).length
        ? "Send a message first; activations appear here during generation."
        : kind.perVector
          ? "Cosines are computed during generation: select a vector and send again."
          : kind.ask
            ? state.run.status === "running"
              ? "Computed when generation has finished."
              : state.frozen
                ? "Not in this file."
                : "Computing…"
            : "Not recorded in this run.";
      fill(body, empty(why));
      return;
    }
    if (!map.node.isConnected) fill(body, map.node, legend, readout);
    const text = tokensOf(state.run, state.pin?.twin);
    map.show({ ...shown, names: (x) => short(text[x]?.text ?? "", 10) });
    map.pin(state.pin?.position ?? null, state.pin?.row);
    fill(
      legend,
      rampLegend(
        nice(map.low),
        nice(map.high),
        shown.scale === "signed" ? signed : amount,
        shown.scale === "signed" ? -1 : 0,
      ),
      h("span", { class: "note" },
        ` ${kind.unit}${map.clipped ? "; values outside the 1st to 99th percentile are clipped" : ""}`,
      ),
    );
  };
  store.on(
    ["run", "pin", "scalar", "stream", "vector", "lensView", "asked", "theme", "props", "vectors"],
    draw,
  );
  store.on(
    ["run"],
    (state) => {
      if (state.run.status === "done") ask(store);
    },
    false,
  );
  store.on(["pin"], () => ask(store), false);
  return node;
}

/** Requests scalars that need a forward pass of their own, once per text. */
async function ask(store) {
  const state = store.state,
    kind = SCALARS[state.scalar],
    run = state.run;
  if (!kind.ask || run.status === "running" || state.frozen) return;
  const ids = tokenIds(state),
    key = `${kind.ask}:${state.pin?.twin ? "twin" : "run"}`;
  if (!ids.length || state.asked?.[key]?.of === ids.join()) return;
  const setResult = (result) => {
    if (store.state.run === run)
      store.set({ asked: { ...store.state.asked, [key]: { of: ids.join(), ...result } } });
  };
  setResult({});
  try {
    if (kind.ask === "lens") {
      const result = await post("/v1/lens", { token_ids: ids, surprise: true });
      setResult({
        rows: result.depths,
        tables: Object.fromEntries(result.views.map((v, i) => [String(v), result.surprise[i]])),
      });
    } else {
      const result = await post("/v1/interp/attention", { token_ids: ids, masses: true });
      setResult({
        rows: result.masses.map((_, layer) => `layer ${layer}`),
        tables: {
          blocks: result.masses.map((layer) => layer.map((m) => m[1])),
          sink: result.masses.map((layer) => layer.map((m) => m[2])),
        },
      });
    }
  } catch (error) {
    setResult({ error });
  }
}

function data(state) {
  const shown = picture(state);
  if (!shown) return {};
  const text = tokensOf(state.run, state.pin?.twin);
  return {
    scalar: state.scalar,
    stream: state.stream,
    rows: shown.rows,
    tokens: text.map((t) => t.text),
    values: shown.rows.map((_, y) => text.map((_, x) => shown.value(x, y) ?? null)),
  };
}

/** Status line with the pinned token. */
export function pinLine(store) {
  const node = h("p", { class: "note", role: "status", "data-pin": "" });
  store.on(["pin", "run"], (state) => {
    const token = pinnedToken(state);
    fill(
      node,
      token
        ? [
            "Pinned: ",
            h("span", { class: "mono" }, `“${short(token.text, 40)}”`),
            ` at position ${state.pin.position}${state.pin.twin ? " of the unsteered twin" : ""}.`,
          ]
        : "No token is pinned. Click one in the response.",
    );
  });
  return node;
}
