// The steer page: edits as sliders, steered and unsteered outputs with one seed, and health indicators.
import { post } from "./api.js";
import { lineChart, nice } from "./chart.js";
import { streamColour, ink } from "./colour.js";
import { empty, fault, fill, h, note, panel, short, stack, table, visible } from "./dom.js";
import { firstEdit, grammar, interventions, kindEdit, layersOf, vectorEdit } from "./edits.js";
import { CLASSES, KINDS } from "./kinds.js";
import { chatPython, sweepPython } from "./python.js";
import { stochasticError } from "./mixing.js";
import { ordinary } from "./pinned.js";
import { chatEntries, divergence, firstDifference, repetition, runOf, startRun } from "./runs.js";
import { strip, update } from "./strip.js";

const DEBOUNCE_MS = 180; // milliseconds a slider must rest before a new run
const PHASES = [
  ["both", "prompt and output"],
  ["prefill", "prompt"],
  ["decode", "output"],
];
const READS = [
  ["both", "read and carried"],
  ["read", "read only"],
  ["carry", "carried only"],
];
const featureTitle = (edit) => `feature ${edit.feature}${edit.label ? `: ${edit.label}` : ""}`;

/** The buttons that choose the streams of an edit. */
function streamPicker(edit, m, change) {
  const chosen = Array.isArray(edit.streams) ? edit.streams : [];
  const button = (text, pressed, streams, rest = {}) =>
    h(
      "button",
      { "aria-pressed": String(pressed), onclick: () => change(edit.id, { streams }), ...rest },
      text,
    );
  const toggled = (s) => {
    const now = chosen.includes(s) ? chosen.filter((each) => each !== s) : [...chosen, s].sort();
    return now.length ? now : "all";
  };
  return h("span", { class: "stack" },
    h("span", { class: "note" }, "streams"),
    h("span", { class: "picker", role: "group", "aria-label": "streams" },
      button("own", edit.streams === "own", "own", { title: "streams stored with the vector" }),
      button("all", edit.streams === "all", "all"),
      Array.from({ length: m }, (_, s) =>
        button(`${s}`, chosen.includes(s), toggled(s), { style: { "border-color": streamColour(s) } }),
      ),
    ),
  );
}

export function steerPage(store) {
  const list = stack(),
    result = stack(),
    health = h("div", { class: "health", role: "status" }),
    sweepBody = stack();
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

  function card(edit, state) {
    const m = ordinary(state) ? 0 : (state.props?.num_streams ?? 4),
      most = edit.most ?? 8;
    const shown = h("output", { class: "mono" }, signed(edit.strength));
    const slider = h("input", {
      type: "range",
      min: -most,
      max: most,
      step: most / 80,
      value: edit.strength,
      "aria-label": `strength of ${edit.name}`,
      "data-edit": edit.id,
      oninput: () => {
        shown.textContent = signed(Number(slider.value));
        change(edit.id, { strength: Number(slider.value) });
      },
    });
    const field = (title, node) => h("label", {}, title, node);
    const choose = (name, values) => {
      const node = h(
        "select",
        { onchange: () => change(edit.id, { [name]: node.value }) },
        values.map(([v, t]) => h("option", { value: v }, t)),
      );
      node.value = edit[name] ?? "";
      return node;
    };
    const typed = (name, title, rest = {}) =>
      field(
        title,
        h("input", {
          type: "text",
          value: edit[name] ?? "",
          style: { width: "7em" },
          onchange: (e) => change(edit.id, { [name]: e.target.value }),
          ...rest,
        }),
      );
    const head = h("div", { class: "head" },
      h("label", { class: "inline" },
        h("input", {
          type: "checkbox",
          checked: edit.on,
          onchange: (e) => change(edit.id, { on: e.target.checked }),
        }),
        h("strong", {}, edit.kind === "feature" ? featureTitle(edit) : edit.name),
      ),
      h("span", { class: "row centre" },
        KINDS[edit.kind] ? null : shown,
        h("button", {
            class: "small",
            "aria-label": `remove ${edit.name}`,
            onclick: () => {
              store.set({ edits: state.edits.filter((e) => e.id !== edit.id) });
              scheduleRun();
            },
          },
          "Remove",
        ),
      ),
    );
    const phase = field("when", choose("phase", PHASES)),
      layers = typed("layers", "layers", { placeholder: "4, 2..5, *" }),
      box = (...parts) => h("div", { class: edit.on ? "edit" : "edit off", "data-kind": edit.kind }, head, parts);
    if (KINDS[edit.kind])
      return box(
        h("div", { class: "row" }, layers, KINDS[edit.kind].fields.map(([name, title]) => typed(name, title)), phase),
      );
    if (edit.kind === "feature")
      return box(slider, note(`SAE ${edit.module}: the feature is clamped to this value.`));
    const hooks = Object.entries(state.props?.sites ?? {})
      .filter(([, site]) => site.steerable)
      .map(([name]) => [name, name]);
    const single = ordinary(state) || (edit.hook && !edit.hook.startsWith("mhc_streams")),
      gates = [...state.vectors.map((v) => [v.name, `along ${v.name}`]), ...CLASSES.map((c) => [`:${c}`, c])];
    return box(
      slider,
      noteOf(edit, state),
      more(
        edit,
        field("site", choose("hook", [["", "default of the vector"], ...hooks])),
        edit.hook ? layers : null,
        single ? null : streamPicker(edit, m, change),
        phase,
        single ? null : field("path", choose("path", READS)),
        field("only tokens", choose("gate", [["", "all"], ...gates])),
        edit.gate && !edit.gate.startsWith(":") ? typed("above", "above") : null,
      ),
    );
  }

  const live = h("input", { type: "checkbox", id: "live", onchange: () => store.set({ live: live.checked }) }),
    unfolded = new Set(); // edits whose details are open
  /** Where and when an edit acts, folded away: vectors bring a site of their own. */
  const more = (edit, ...fields) => {
    const node = h("details", { class: "more live" },
      h("summary", {}, "where and when"),
      h("div", { class: "row" }, fields),
    );
    node.open = unfolded.has(edit.id);
    node.addEventListener("toggle", () => (node.open ? unfolded.add(edit.id) : unfolded.delete(edit.id)));
    return node;
  };

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
        python: () => chatPython(store.state, messages(), active(store.state)),
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
    panel(
      "Strength sweep",
      "The first edit at nine strengths: surprisal of the output under the unsteered model, and " +
        "repetition. The knee is the largest strength before either leaves the normal range.",
      {
        name: "sweep",
        data: () => store.state.sweep ?? {},
        python: () => sweepPython(store.state, messages(), active(store.state), strengthsOf(active(store.state)[0])),
      },
      stack(
        h("div", { class: "row live" },
          h("button", { id: "sweep-run", onclick: () => sweep(store, messages()) },
            "Sweep",
          ),
        ),
        sweepBody,
      ),
    ),
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
          ? state.edits.map((edit) => card(edit, state))
          : empty("No edits yet. Add a vector, or clamp a feature under Features."),
      );
    line.textContent = grammar(state.edits);
  });
  store.on(["run", "aside", "pin", "tint", "benchError", "theme"], (state) => {
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
  });
  store.on(["sweep", "theme"], ({ sweep: sweepResult }) => {
    if (!sweepResult) return fill(sweepBody, empty("No sweep yet."));
    if (sweepResult.error) return fill(sweepBody, fault(sweepResult.error));
    const done = sweepResult.points.filter(Boolean);
    fill(
      sweepBody,
      sweepResult.running
        ? h("progress", { max: sweepResult.points.length, value: done.length, "aria-label": "sweep" })
        : null,
      done.length > 1
        ? lineChart({
            series: [
              {
                name: "surprisal under the unsteered model (nats per token)",
                colour: ink("accent"),
                points: done.map((p) => [p.strength, p.surprise]),
              },
              {
                name: "repetition × 10",
                colour: ink("warm"),
                points: done.map((p) => [p.strength, p.repetition * 10]),
              },
            ],
            marks:
              sweepResult.knee === null
                ? []
                : [{ x: sweepResult.knee, text: `knee ${nice(sweepResult.knee)}` }],
            xName: `strength of ${sweepResult.name}`,
            label: "strength sweep",
          })
        : null,
      done.length
        ? table(
            "sweep",
            ["strength", "surprisal", "answer"],
            done.map((p) => [
              h("td", { class: "number" }, nice(p.strength)),
              h("td", { class: "number" }, nice(p.surprise)),
              h("td", {}, short(p.text, 90).replace(/·/g, " ")),
            ]),
          )
        : null,
      sweepResult.running
        ? null
        : note(
            sweepResult.knee === null
              ? "Both stay in the normal range."
              : `Above ${nice(sweepResult.knee)} surprisal or repetition leaves the unsteered range.`,
          ),
    );
  });
  return node;
}

/** What is known about the vector of an edit: its note, how it was made, and its recommended strength. */
function noteOf(edit, state) {
  const known = edit.kind === "vector" ? state.vectors.find((v) => v.name === edit.name) : null;
  if (!known) return null;
  const facts = [
    known.note,
    known.method ? `made by ${known.method}` : null,
    known.hook ? `acts at ${known.hook}, layer ${[].concat(known.layers).join(", ")}` : null,
    known.strength ? `recommended strength ${nice(known.strength)}` : null,
  ];
  return h("p", { class: "note", "data-note": edit.name }, facts.filter(Boolean).join(" · "));
}

const signed = (x) => `${x >= 0 ? "+" : ""}${nice(x)}`;

/** Health indicators of a steered run, each graded ok, warn or bad; those of streams where streams were recorded. */
function healthIndicators(run) {
  const frames = [...run.frames.values()],
    twins = [...run.twinFrames.values()];
  const longest = (list) => Math.max(0, ...list.map((f) => Math.max(...(f.stream_norm?.at(-1) ?? [0]))));
  const growth = twins.length && frames.length ? longest(frames) / (longest(twins) || 1) : 1,
    worst = (list) =>
      Math.max(0, ...list.map((f) => Math.max(...(f.res_mix ?? [[[1]]]).map(stochasticError)))),
    error = worst(frames);
  const repeated = repetition(run.tokens),
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

/** The edits that are switched on; those with a strength first, which a sweep varies. */
const active = (state) =>
  state.edits.filter((e) => e.on && e.name).sort((a, b) => Boolean(KINDS[a.kind]) - Boolean(KINDS[b.kind]));

/** Nine strengths from 0 to the end of the slider, on the side of the present one. */
const strengthsOf = (edit) =>
  Array.from({ length: 9 }, (_, i) => (i / 8) * (edit?.most ?? 8) * ((edit?.strength ?? 1) < 0 ? -1 : 1));

async function sweep(store, messages) {
  const [first, ...rest] = active(store.state);
  if (!first || KINDS[first.kind])
    return store.set({ sweep: { error: new Error("Add an edit first; the sweep varies its strength.") } });
  const strengths = strengthsOf(first);
  const sweepResult = { name: first.name, points: Array(9).fill(null), running: true, knee: null };
  store.set({ sweep: sweepResult });
  const { seed, temperature } = store.state.settings;
  try {
    layersOf(first.layers);
    await Promise.all(
      [0, 1].map(async (lane) => {
        for (let i = lane; i < 9; i += 2) {
          const steered = interventions([{ ...first, strength: strengths[i] }, ...rest], ordinary(store.state));
          const answer = await post("/v1/chat/completions", {
            messages,
            seed,
            temperature,
            max_tokens: 64,
            return_token_ids: true,
            logprobs: true,
            ...(strengths[i] ? { interventions: steered } : {}),
          });
          const choice = answer.choices[0],
            ids = [...answer.prompt_token_ids, ...choice.token_ids];
          const lens = await post("/v1/lens", {
            token_ids: ids,
            surprise: true,
            views: ["head"],
            depths: [-1],
          });
          const surprisals = lens.surprise[0][0]
            .slice(answer.prompt_token_ids.length - 1, -1)
            .filter((x) => x !== null);
          sweepResult.points[i] = {
            strength: strengths[i],
            text: choice.message.content,
            surprise: surprisals.reduce((a, b) => a + b, 0) / Math.max(surprisals.length, 1),
            repetition: repetition(chatEntries(choice.logprobs).map((t) => ({ text: t.token }))),
          };
          store.set({ sweep: { ...sweepResult } });
        }
      }),
    );
    sweepResult.running = false;
    const base = sweepResult.points[0];
    const broken = sweepResult.points.findIndex(
      (p) => p.surprise > base.surprise * 1.6 + 0.3 || p.repetition > base.repetition + 0.25,
    );
    sweepResult.knee = broken > 0 ? sweepResult.points[broken - 1].strength : null;
    store.set({ sweep: { ...sweepResult } });
  } catch (error) {
    store.set({ sweep: { error } });
  }
}
