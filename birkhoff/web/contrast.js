// The contrast page: compares two sets of texts by layer and stream and saves the direction as a vector.
import { post } from "./api.js";
import { amount, shadedCell } from "./colour.js";
import { empty, fault, fill, h, panel, exportButtons, rowHead, table, toast } from "./dom.js";
import { loadVectors } from "./vectors.js";

export function contrastPage(store) {
  const area = (label, id, text) => {
    const box = h("textarea", { rows: 6, id });
    box.value = text;
    return [h("label", { style: { flex: "1 1 240px" } }, label, box), box];
  };
  const [left, positive] = area(
    "positive texts, one per line",
    "positive",
    [
      "The birthday party was full of laughing and cake.",
      "She hugged her happy puppy in the sunshine.",
      "He smiled because he had won the big prize.",
      "They danced and sang with joy all day.",
    ].join("\n"),
  );
  const [right, negative] = area(
    "negative texts, one per line",
    "negative",
    [
      "The boy cried because his kite was broken.",
      "She sat alone in the cold rain and wept.",
      "He was sad because his dog was lost.",
      "They felt very bad and did not want to play.",
    ].join("\n"),
  );
  const hook = h("select", { "aria-label": "site" }),
    name = h("input", { type: "text", value: "happy", style: { width: "9em" } }),
    body = h("div", { class: "stack" });
  let result = null;
  const lines = (box) =>
    box.value
      .split("\n")
      .map((s) => s.trim())
      .filter(Boolean);
  const run = async (save) => {
    const request = { positive: lines(positive), negative: lines(negative), hook: hook.value, ...save };
    if (!request.positive.length || !request.negative.length) {
      fill(body, fault(new Error("Both sets need at least one text.")));
      return;
    }
    fill(body, h("p", { class: "note" }, "Comparing…"));
    try {
      result = await post("/v1/interp/contrast", request);
      draw();
      if (save) {
        toast(`Saved as ${save.name}.`);
        await loadVectors(store);
      }
    } catch (error) {
      fill(body, fault(error));
    }
  };
  const draw = () => {
    if (!result) {
      fill(body, empty("Nothing compared yet."));
      return;
    }
    const best = result.best;
    const cell = (auc) => shadedCell(amount(Math.max(0, (auc - 0.5) * 2)), auc.toFixed(2));
    const rows = result.table.map((row, i) => [rowHead(String(result.layers[i])), row.map(cell)]);
    fill(
      body,
      table("matrix", ["layer", ...result.columns], rows),
      h(
        "p",
        { class: "note" },
        "Values: ROC AUC of one direction on held-out texts (0.5 is chance). " +
          `Best: layer ${best.layer}, ${best.column}.`,
      ),
      h(
        "div",
        { class: "row" },
        h("label", {}, "save the best as", name),
        h(
          "button",
          {
            type: "button",
            class: "main",
            id: "save-vector",
            onclick: () => run({ name: name.value.trim(), layer: best.layer, column: best.column }),
          },
          "Save vector",
        ),
      ),
    );
  };
  store.on(["props"], ({ props }) => {
    const names = Object.entries(props?.sites ?? {})
      .filter(([, s]) => s.steerable)
      .map(([n]) => n);
    fill(
      hook,
      names.map((n) => h("option", { value: n }, n)),
    );
    const best = ["mhc_streams_pre_attn", "post_mlp"].find((name) => names.includes(name));
    hook.value = best ?? names[0] ?? "";
  });
  draw();
  return h(
    "div",
    { class: "stack" },
    panel(
      "Contrast builder",
      "Enter two sets of texts that differ in one property. The table shows how well each layer and stream " +
        "separates them. Save the best direction as a vector to steer with.",
      {
        name: "contrast",
        tools: exportButtons(
          () => result ?? {},
          () =>
            [
              "import birkhoff",
              "from birkhoff import contrast",
              "",
              'engine = birkhoff.load("nano")',
              `positive = ${JSON.stringify(lines(positive))}`,
              `negative = ${JSON.stringify(lines(negative))}`,
              `hook, layers = ${JSON.stringify(hook.value)}, [${result?.best?.layer ?? 4}]`,
              "vector = contrast(engine, positive, negative, hook=hook, layers=layers)",
              `engine.modules[${JSON.stringify(name.value)}] = vector`,
            ].join("\n"),
        ),
      },
      h(
        "div",
        { class: "stack" },
        h("div", { class: "row" }, left, right),
        h(
          "div",
          { class: "row" },
          h("label", {}, "site", hook),
          h(
            "button",
            { type: "button", class: "main", id: "contrast-run", onclick: () => run() },
            "Compare",
          ),
        ),
        body,
      ),
    ),
  );
}
