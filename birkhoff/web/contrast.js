// The contrast page: compares two sets of texts by layer and stream and saves the direction as a vector.
import { post } from "./api.js";
import { amount, shadedCell } from "./colour.js";
import { empty, fault, fill, h, note, panel, rowHead, stack, table, toast } from "./dom.js";
import { steerWith } from "./edits.js";
import { contrastPython } from "./python.js";
import { loadVectors } from "./vectors.js";

export function contrastPage(store) {
  const area = (label, id, text) => {
    const box = h("textarea", { rows: 6, id });
    box.value = text.join("\n");
    return [h("label", { style: { flex: "1 1 240px" } }, label, box), box];
  };
  const [left, positive] = area(
    "positive texts, one per line",
    "positive",
    store.state.contrast?.positive ?? [
      "The birthday party was full of laughing and cake.",
      "She hugged her happy puppy in the sunshine.",
      "He smiled because he had won the big prize.",
      "They danced and sang with joy all day.",
    ],
  );
  const [right, negative] = area(
    "negative texts, one per line",
    "negative",
    store.state.contrast?.negative ?? [
      "The boy cried because his kite was broken.",
      "She sat alone in the cold rain and wept.",
      "He was sad because his dog was lost.",
      "They felt very bad and did not want to play.",
    ],
  );
  const hook = h("select", { "aria-label": "site" }),
    name = h("input", { type: "text", style: { width: "9em" } }),
    body = stack(),
    saved = stack();
  let result = store.state.answers.contrast ?? null,
    named = false; // the name was typed, so it is not suggested anew
  name.addEventListener("input", () => {
    named = true;
  });
  const suggest = () => {
    const taken = new Set(store.state.vectors.map((v) => v.name));
    let number = 1;
    while (taken.has(`direction-${number}`)) number++;
    if (!named) name.value = `direction-${number}`;
  };
  const lines = (box) =>
    box.value
      .split("\n")
      .map((s) => s.trim())
      .filter(Boolean);
  const request = () => ({ positive: lines(positive), negative: lines(negative), hook: hook.value });
  const run = async () => {
    const asked = request();
    if (!asked.positive.length || !asked.negative.length) return fill(body, fault(new Error("Both sets need at least one text.")));
    fill(body, note("Comparing…"));
    fill(saved);
    store.set({ contrast: asked });
    try {
      result = store.state.answers.contrast = await post("/v1/interp/contrast", asked);
      suggest();
      draw();
    } catch (error) {
      fill(body, fault(error));
    }
  };
  /** Saves the best direction; whatever goes wrong, the table stays. */
  const save = async (replace = false) => {
    const { layer, column } = result.best,
      chosen = name.value.trim();
    fill(saved, note("Saving…"));
    try {
      await post("/v1/interp/contrast", { ...request(), name: chosen, layer, column, replace });
      await loadVectors(store);
      toast(`Saved as ${chosen}.`);
      fill(
        saved,
        note(`Saved as ${chosen}. `),
        h("button", { id: "steer-saved", onclick: () => steerWith(store, chosen) }, "Steer with it"),
      );
      named = false;
    } catch (error) {
      const again = { id: "replace-vector", onclick: () => save(true) };
      fill(
        saved,
        fault(error),
        error.code === "module-taken" ? h("button", again, `Replace ${chosen}`) : null,
      );
    }
  };
  const draw = () => {
    if (!result) return fill(body, empty("Nothing compared yet."));
    const best = result.best;
    const cell = (auc) => shadedCell(amount(Math.max(0, (auc - 0.5) * 2)), auc.toFixed(2));
    const rows = result.table.map((row, i) => [rowHead(String(result.layers[i])), row.map(cell)]);
    fill(
      body,
      table("matrix", ["layer", ...result.columns], rows),
      note(
        "Values: ROC AUC of one direction on held-out texts (0.5 is chance). " +
          `Best: layer ${best.layer}, ${best.column}.`,
      ),
      h("div", { class: "row live" },
        h("label", {}, "save the best as", name),
        h("button", {
            class: "main",
            id: "save-vector",
            onclick: () => save(),
          },
          "Save vector",
        ),
      ),
      saved,
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
    const preferred = [store.state.contrast?.hook, "mhc_streams_pre_attn", "post_mlp"],
      best = preferred.find((name) => names.includes(name));
    hook.value = best ?? names[0] ?? "";
  });
  draw();
  return stack(
    panel(
      "Contrast builder",
      "Enter two sets of texts that differ in one property. The table shows how well each layer and stream " +
        "separates them. Save the best direction as a vector to steer with.",
      {
        name: "contrast",
        data: () => result ?? {},
        python: () => contrastPython(store.state, request(), result?.best, name.value),
      },
      stack(
        h("div", { class: "row" }, left, right),
        h("div", { class: "row live" },
          h("label", {}, "site", hook),
          h("button", { class: "main", id: "contrast-run", onclick: () => run() },
            "Compare",
          ),
        ),
        body,
      ),
    ),
  );
}
