// The steer page: edits as sliders, steered and unsteered outputs with one seed, and health indicators.
import { lineChart } from "./chart.js";
import { ink } from "./colour.js";
import { empty, fault, fill, h, note, panel, stack, visible } from "./dom.js";
import { editCard } from "./editcard.js";
import { activeEdits, firstEdit, grammar, interventions, kindEdit, vectorEdit } from "./edits.js";
import { KINDS } from "./kinds.js";
import { stochasticError } from "./mixing.js";
import { chatPython } from "./python.js";
import { divergence, firstDifference, repetition, runOf, startRun } from "./runs.js";
import { strip, update } from "./strip.js";
import { sweepPanel } from "./sweep.js";

const DEBOUNCE_MS = 180; // milliseconds a slider must rest before a new run

export function steerPage(store) {
  const list = stack(),
    result = stack(),
    health = h("div", { class: "health", role: "status" });
  const prompt = h("textarea", {
    rows: 2,
    id: "steer-prompt",
    "aria-label": "Prompt",
    onchange: () => store.set({ benchPrompt: prompt.value }),
  });
  const add = h("select", { id: "add-edit", "aria-label": "edit to add" });
  const run = h("button", { class: "main", id: "steer-run", onclick: () => pair() },
    "Run both",
  );
  const line = h("p", { class: "mono note", "data-grammar": "" });
  const left = strip([], { name: "plain" }),
    right = strip([], { name: "steered" });
  let timer = 0;

  const messages = () => [{ role: "user", content: store.state.benchPrompt }];
  function pair() {
    clearTimeout(timer);
    store.set({ benchPrompt: prompt.value, benchError: null });
    try {
      if (!interventions(store.state.edits).length)
        throw new Error("There are no edits. Add a vector or clamp a feature first.");
    } catch (error) {
      store.set({ benchError: error });
      return;
    }
    startRun(store, { messages: messages(), steered: true, baseline: true, keepOld: true });
  }
  const scheduleRun = () => {
    clearTimeout(timer);
    if (runOf(store.state, "steer").run.pair || store.state.live) timer = setTimeout(pair, DEBOUNCE_MS);
  };
  const change = (id, changes) => {
    store.set({
      edits: store.state.edits.map((edit) =>
        edit.id === id ? { ...edit, ...changes, suggested: false } : edit,
      ),
    });
    scheduleRun();
  };
  const remove = (id) => {
    store.set({ edits: store.state.edits.filter((edit) => edit.id !== id) });
    scheduleRun();
  };

  const live = h("input", { type: "checkbox", id: "live", onchange: () => store.set({ live: live.checked }) }),
    unfolded = new Set(); // edits whose details are open

  const node = stack(
    panel(
      "Steer",
      "Adds vectors or SAE clamps and shows the steered and the unsteered output, generated with the same " +
        "seed in the same batch. Wavy underlines mark differences.",
      {
        name: "bench",
        data: () => ({
          edits: store.state.edits,
          steered: runOf(store.state, "steer").run.tokens,
          plain: runOf(store.state, "steer").run.twin?.tokens,
        }),
        python: () => chatPython(store.state, messages(), activeEdits(store.state)),
      },
      h("div", { class: "bench" },
        stack(
          h("label", {}, "prompt", prompt),
          h("div", { class: "row centre live" },
            run,
            h("label", { class: "inline" },
              live,
              "run when sliders move",
            ),
          ),
          list,
          h("div", { class: "row live" },
            h("label", {}, "another edit", add),
            h("button", { id: "add-button", onclick: () => addEdit() }, "Add"),
          ),
          line,
        ),
        stack(result, health),
      ),
    ),
    sweepPanel(store, messages),
  );

  function addEdit() {
    const kind = add.value.slice(1);
    if (add.value)
      store.set({
        edits: [...store.state.edits, KINDS[kind] ? kindEdit(kind) : vectorEdit(store.state, add.value)],
      });
    else add.focus();
    scheduleRun();
  }
  store.on(["vectors", "props"], (state) => {
    const { vectors } = state,
      kinds = state.props?.num_streams ? Object.entries(KINDS) : [];
    if (state.suggestEdit && vectors.length) {
      store.set({ suggestEdit: false, ...(state.edits.length ? {} : { edits: firstEdit(state) }) });
    }
    const chosen = add.value; // keep the selection when the list is reloaded
    fill(
      add,
      vectors.length
        ? vectors.map((v) => h("option", { value: v.name }, v.title ?? v.name))
        : h("option", { value: "" }, "none yet: create one under Contrast"),
      kinds.map(([kind, { title }]) => h("option", { value: `:${kind}` }, `edit ${title}`)),
    );
    if ([...add.options].some((option) => option.value === chosen)) add.value = chosen;
  });
  store.on(["benchPrompt"], ({ benchPrompt }) => {
    prompt.value = benchPrompt;
  });
  store.on(["live"], (state) => {
    live.checked = Boolean(state.live);
  });
  store.on(["edits", "props", "vectors"], (state) => {
    const focused = document.activeElement?.dataset?.edit;
    const holding =
      focused && list.contains(document.activeElement) && document.activeElement.type === "range";
    if (!holding || list.childElementCount !== state.edits.length)
      fill(
        list,
        state.edits.length
          ? state.edits.map((edit) => editCard(edit, state, { change, remove, unfolded }))
          : empty("No edits yet. Add a vector, or clamp a feature under Features."),
      );
    line.textContent = grammar(state.edits);
  });
  store.on(["run", "aside", "pin", "tint", "benchError", "theme"], (state) =>
    showPair(store, state, { left, right, result, health }),
  );
  return node;
}

/** Fill the nodes with both outputs of a run side by side, where they differ, and the health of the steered one. */
function showPair(store, state, { left, right, result, health }) {
  const { run, pin: pinned } = runOf(state, "steer");
  if (state.benchError) return fill(result, fault(state.benchError));
  if (run.error && run.pair) return fill(result, fault(run.error));
  if (!run.twin) {
    const hint = "No run yet. Run both to see the answer with and without the edits, side by side.";
    fill(result, run.pair ? note("processing the prompt…") : empty(hint));
    fill(health);
    return;
  }
  const from = firstDifference(run),
    paint = document.documentElement.dataset.theme,
    pin = (twin) => (token) =>
      store.set({ pin: { position: token.position, row: pinned?.row ?? 0, twin } });
  const differs = (token) =>
    from !== null &&
    token.position >= from &&
    run.tokens[token.position - run.prompt.length]?.text !==
      run.twin.tokens[token.position - run.prompt.length]?.text;
  for (const [place, tokens, twin, name] of [
    [left, run.twin.tokens, true, "plain"],
    [right, run.tokens, false, "steered"],
  ])
    update(place, tokens, {
      mode: state.tint,
      paint: `${paint}${from}`,
      pinned: pinned && Boolean(pinned.twin) === twin ? pinned.position : null,
      onPin: pin(twin),
      differsFrom: differs,
      name,
    });
  const bars = run.tokens
    .slice(0, (from ?? Infinity) - run.prompt.length + 1)
    .map((token, i) => [token.position, divergence(token, run.twin.tokens[i])])
    .filter(([, kl]) => kl !== null);
  fill(
    result,
    h("div", { class: "pair", "aria-busy": String(run.status === "running") },
      h("div", {}, h("h3", {}, "unsteered"), left),
      h("div", {}, h("h3", {}, "steered"), right),
    ),
    note(
      from === null
        ? run.status === "running"
          ? "No difference so far."
          : "No difference. Increase the strength or choose another site."
        : `First difference at position ${from}: ` +
            `“${visible(run.twin.tokens[from - run.prompt.length].text)}” became ` +
            `“${visible(run.tokens[from - run.prompt.length].text)}”. ` +
            "Colours show the surprisal of each token under the model that generated it.",
    ),
    bars.length > 1
      ? lineChart({
          series: [
            { name: "KL over the top 8 tokens and the remainder", colour: ink("accent"), points: bars },
          ],
          xName: "position, up to the first difference",
          yName: "nats",
          whole: true,
          height: 130,
          width: 420,
          label: "divergence per token",
        })
      : null,
  );
  fill(health, healthIndicators(run));
}

/** Health indicators of a steered run, each graded ok, warn or bad; those of streams where streams were recorded. */
function healthIndicators(run) {
  const frames = [...run.frames.values()],
    twins = [...run.twinFrames.values()];
  const longest = (list) => Math.max(0, ...list.map((f) => Math.max(...(f.stream_norm?.at(-1) ?? [0]))));
  const growth = twins.length && frames.length ? longest(frames) / (longest(twins) || 1) : 1,
    worst = (list) =>
      Math.max(0, ...list.map((f) => Math.max(...(f.res_mix ?? [[[1]]]).map(stochasticError)))),
    error = worst(frames);
  const repeated = repetition(run.tokens.map((t) => t.text)),
    broken = frames.filter((f) =>
      f.stream_norm?.some((norms) => norms.some((x) => x === null || !Number.isFinite(x))),
    ).length;
  const level = (value, amber, red) => (value >= red ? "bad" : value >= amber ? "warn" : "ok");
  const word = { ok: "ok", warn: "high", bad: "too high" };
  const item = (name, text, kind) =>
    h("span", { class: kind }, `${name} `, h("b", {}, text), ` ${word[kind]}`);
  const repeats = item("repetition", `${(repeated * 100).toFixed(0)} %`, level(repeated, 0.15, 0.4));
  if (!frames.some((f) => f.stream_norm)) return [repeats];
  return [
    item("norm growth", `× ${growth.toFixed(2)}`, level(growth, 1.5, 3)),
    item(
      "doubly stochastic within",
      `${error.toExponential(1)} (unsteered ${worst(twins).toExponential(1)})`,
      level(error / Math.max(worst(twins), 1e-3), 1.5, 4),
    ),
    repeats,
    item("NaN", String(broken), broken ? "bad" : "ok"),
  ];
}
