// Two sets of texts → where in the model they differ, per layer and stream → a named vector.
import { post } from "./api.js";
import { amount, css, inkOn } from "./colour.js";
import { empty, fault, fill, h, panel, takeAlong, toast } from "./dom.js";
import { loadVectors } from "./vectors.js";

export function contrastPage(store) {
  const area = (label, id, text) => { const box = h("textarea", { rows: 6, id }); box.value = text; return [h("label", { style: { flex: "1 1 240px" } }, label, box), box]; };
  const [left, positive] = area("one kind, a text per line", "positive", "The birthday party was full of laughing and cake.\nShe hugged her happy puppy in the sunshine.\nHe smiled because he had won the big prize.\nThey danced and sang with joy all day.");
  const [right, negative] = area("the other kind, a text per line", "negative", "The boy cried because his kite was broken.\nShe sat alone in the cold rain and wept.\nHe was sad because his dog was lost.\nThey felt very bad and did not want to play.");
  const hook = h("select", { "aria-label": "site" }), name = h("input", { type: "text", value: "happy", style: { width: "9em" } }), body = h("div", { class: "stack" });
  let found = null;
  const lines = (box) => box.value.split("\n").map((s) => s.trim()).filter(Boolean);
  const run = async (save) => {
    const request = { positive: lines(positive), negative: lines(negative), hook: hook.value, ...save };
    if (!request.positive.length || !request.negative.length) { fill(body, fault(new Error("Both sides need at least one text."))); return; }
    fill(body, h("p", { class: "note" }, "Reading the texts…"));
    try { found = await post("/v1/interp/contrast", request); draw(); if (save) { toast(`Saved as ${save.name}.`); await loadVectors(store); } } catch (error) { fill(body, fault(error)); }
  };
  const draw = () => {
    if (!found) { fill(body, empty("Nothing compared yet.")); return; }
    const best = found.best;
    fill(body, h("div", { class: "scroll" }, h("table", { class: "matrix" }, h("thead", {}, h("tr", {}, h("th", {}, "layer"), found.columns.map((c) => h("th", { scope: "col" }, c)))),
      h("tbody", {}, found.table.map((row, i) => h("tr", {}, h("th", { scope: "row" }, String(found.layers[i])), row.map((auc) => { const rgb = amount(Math.max(0, (auc - 0.5) * 2)); return h("td", { style: { "background-color": css(rgb), color: inkOn(rgb) } }, auc.toFixed(2)); })))))),
      h("p", { class: "note" }, `Numbers: how well one direction tells the two kinds apart on texts left out (area under the curve; 0.5 is chance). Best: layer ${best.layer}, ${best.column}.`),
      h("div", { class: "row" }, h("label", {}, "save the best as", name), h("button", { type: "button", class: "main", id: "save-vector", onclick: () => run({ name: name.value.trim(), layer: best.layer, column: best.column }) }, "Save vector")));
  };
  store.on(["props"], ({ props }) => { const names = Object.entries(props?.sites ?? {}).filter(([, s]) => s.steerable).map(([n]) => n); fill(hook, names.map((n) => h("option", { value: n }, n))); hook.value = names.includes("mhc_streams_pre_attn") ? "mhc_streams_pre_attn" : names[0] ?? ""; });
  draw();
  return h("div", { class: "stack" }, panel("Contrast builder", "Write two sets of texts that differ in one thing. The table shows where in the model, and in which stream, that thing can be read off; save the best direction as a vector and push it.",
    { name: "contrast", tools: takeAlong(() => found ?? {}, () => `import birkhoff\nfrom birkhoff import contrast\n\nengine = birkhoff.load("nano")\nvector = contrast(engine, ${JSON.stringify(lines(positive))},\n    ${JSON.stringify(lines(negative))}, hook=${JSON.stringify(hook.value)}, layers=[${found?.best?.layer ?? 4}])\nengine.modules[${JSON.stringify(name.value)}] = vector`) },
    h("div", { class: "stack" }, h("div", { class: "row" }, left, right), h("div", { class: "row" }, h("label", {}, "site", hook), h("button", { type: "button", class: "main", id: "contrast-run", onclick: () => run() }, "Compare")), body)));
}
