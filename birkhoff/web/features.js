// The features page: most active SAE features per token, one feature over all tokens, and its dashboard.
import { call, post } from "./api.js";
import { nice } from "./chart.js";
import { amount } from "./colour.js";
import { empty, fault, fill, h, note, panel, short, stack, toast, visible } from "./dom.js";
import { addToBench, newEdit } from "./edits.js";
import { tokenIds } from "./pinned.js";
import { dashboardPython, featuresPython } from "./python.js";
import { orderOf, tokensOf } from "./store.js";
import { strip, update } from "./strip.js";

export function featurePage(store) {
  const choose = h("select", {
    "aria-label": "dictionary",
    onchange: () => {
      store.set({ sae: choose.value, featureChosen: null });
      load();
    },
  });
  const order = h(
    "select",
    { "aria-label": "order of features", onchange: () => store.set({ featureOrder: order.value }) },
    [
      ["specific", "specific to this token"],
      ["strength", "strength"],
    ].map(([value, title]) => h("option", { value }, title)),
  );
  const query = h("input", {
    type: "text",
    id: "feature-search",
    placeholder: "sea, said, before was …",
    autocomplete: "off",
    onkeydown: (event) => {
      if (event.key === "Enter" && !event.isComposing) search();
    },
  });
  const found = h("div", { class: "stack", "data-found": "" });
  const body = stack(),
    text = strip([], { name: "features" }),
    top = stack(),
    dash = stack();
  let result = null,
    requestKey = "",
    stop = null,
    asked = false; // the feature of a link was asked for
  const node = stack(
    panel(
      "Features per token",
      "A sparse autoencoder (SAE) decomposes activations into a few active features. " +
        "Click a token to see its most active features; click a feature to see where else it is active.",
      { name: "features", data: () => result ?? {}, python: () => featuresPython(store.state) },
      stack(
        h("div", { class: "row" },
          h("label", {}, "dictionary", choose),
          h("label", { class: "live" }, "order by", order),
        ),
        h("div", { class: "row live" },
          h("label", { class: "search" }, "search all features by word", query),
          h("button", { id: "feature-find", onclick: () => search() }, "Search"),
        ),
        found,
        body,
      ),
    ),
    panel(
      "Feature dashboard",
      "The selected feature: how its label was made and how well it predicts, where it is strongest, examples.",
      { name: "dashboard", data: () => store.state.dashboard ?? {}, python: () => dashboardPython(store.state) },
      dash,
    ),
  );

  async function load() {
    const state = store.state,
      ids = tokenIds(state),
      by = orderOf(state),
      key = `${state.sae}|${by}|${ids.join()}`;
    if (!state.sae || !ids.length || state.run.status === "running" || key === requestKey) return draw();
    if (state.answers.features?.key === key || state.frozen) {
      requestKey = key;
      result = state.answers.features?.key === key ? state.answers.features.result : null;
      return draw();
    }
    requestKey = key;
    stop?.abort();
    stop = new AbortController();
    try {
      const answer = await post(
        "/v1/interp/features",
        { sae: state.sae, token_ids: ids, k: READ, order: by },
        stop.signal,
      );
      if (requestKey === key) {
        result = answer;
        store.state.answers.features = { key, result };
        draw();
      }
    } catch (error) {
      if (error.name !== "AbortError") {
        result = { error };
        requestKey = "";
        draw();
      }
    }
  }
  function draw() {
    const state = store.state,
      saes = state.saes ?? [];
    if (choose.options.length !== saes.length)
      fill(
        choose,
        saes.map((s) => h("option", { value: s.name }, s.title ?? s.name)),
      );
    choose.value = state.sae ?? "";
    if (!saes.length) return fill(
        body,
        empty(
          "No SAE is attached to this server. Attach one with birkhoff serve --sae NAME=PATH, or with " +
            "engine.attach in Python.",
        ),
      );
    const tokens = tokensOf(state.run, state.pin?.twin);
    if (!tokens.length) {
      fill(body, empty("Send a message first; the features of the text appear here."));
      return;
    }
    if (result?.error) return fill(body, fault(result.error));
    if (!result) return fill(body, note(state.frozen ? "Not in this file." : "Encoding the text…"));
    order.value = orderOf(state);
    const chosen = state.featureChosen,
      strength = new Map(),
      most = Math.max(
        1e-9,
        ...result.tokens.flatMap((t) =>
          t.features.filter((f) => chosen === null || f.feature === chosen).map((f) => f.activation),
        ),
      );
    for (const token of result.tokens) {
      const one = chosen === null ? token.features[0] : token.features.find((f) => f.feature === chosen);
      strength.set(token.position, one ? one.activation / most : 0);
    }
    update(text, tokens, {
      pinned: state.pin?.position,
      paint: `${chosen}${document.documentElement.dataset.theme}${result.tokens.length}`,
      onPin: (token) =>
        store.set({
          pin: { position: token.position, row: state.pin?.row ?? 0, twin: state.pin?.twin ?? false },
        }),
      colourOf: (token) =>
        strength.get(token.position) ? amount(strength.get(token.position) * 0.7) : null,
    });
    const here = result.tokens.find((t) => t.position === state.pin?.position),
      first = (here?.features ?? []).slice(0, SHOWN),
      largest = Math.max(1e-9, ...first.map((f) => f.activation));
    fill(
      top,
      here
        ? first.map((f) => line(f, f.feature === chosen, nice(f.activation), f.activation / largest))
        : empty("Click a token to see its features."),
    );
    fill(
      body,
      text,
      note(
        chosen === null
          ? "Colours: activation of the first feature of each token. “Specific” counts a feature by its activation times " +
              "−log(how often it is active), so that features of most tokens come last."
          : `Colours: activation of feature #${chosen} where it is among a token's most active.`,
      ),
      top,
    );
  }
  /** One feature as a button: number, label with its score, a bar or a context, and a number at the right. */
  function line(f, pressed, right, share = null, below = null) {
    return h("button", {
        class: "feature",
        "aria-pressed": String(pressed),
        onclick: () => choose_(f.feature),
      },
      h("span", { class: "mono" }, `#${f.feature}`),
      h("span", {},
        h("span", {}, visible(f.label ?? "no label"), " ", scoreBadge(f.score)),
        share === null ? null : h("div", { class: "bar", style: { width: `${Math.max(1, share * 100)}%` } }),
        below ? h("div", { class: "context text note" }, marked(below)) : null,
      ),
      h("span", { class: "mono" }, right),
    );
  }
  async function search() {
    const words = query.value.trim(),
      { sae } = store.state;
    if (!words || !sae) return fill(found);
    try {
      const path = `/v1/interp/features/${encodeURIComponent(sae)}`,
        answer = await call(`${path}?q=${encodeURIComponent(words)}&limit=12`),
        share = (f) => `${(f.density * 100).toFixed(1)} %`;
      fill(
        found,
        answer.features.length
          ? note(`Features with “${visible(words)}”, best first; right: share of tokens.`)
          : empty(`None of the ${answer.described} described features has “${visible(words)}”.`),
        answer.features.map((f) => line(f, false, share(f), null, f.context)),
      );
    } catch (error) {
      fill(found, fault(error));
    }
  }
  async function choose_(feature) {
    store.set({ featureChosen: feature, dashboard: null });
    try {
      store.set({
        dashboard: await call(`/v1/interp/features/${encodeURIComponent(store.state.sae)}/${feature}`),
      });
    } catch (error) {
      store.set({ dashboard: { error } });
    }
  }
  store.on(["run", "pin", "sae", "saes", "featureChosen", "featureOrder", "theme"], (state) => {
    draw();
    load();
    // a link names a feature; what it is comes from the server
    if (state.sae && state.saes.length && state.featureChosen !== null && !state.dashboard && !asked && !state.frozen) {
      asked = true;
      choose_(state.featureChosen);
    }
  });
  store.on(["dashboard", "featureChosen", "theme"], ({ dashboard, featureChosen, sae }) => {
    if (featureChosen === null || featureChosen === undefined) return fill(dash, empty("Select a feature above."));
    if (!dashboard) return fill(dash, note("Loading…"));
    if (dashboard.error) return fill(dash, fault(dashboard.error));
    const clamp = () => {
      addToBench(
        store,
        newEdit({
          kind: "feature",
          module: sae,
          feature: featureChosen,
          label: dashboard.label,
          name: `${sae}/${featureChosen}`,
          strength: Number(((dashboard.x_max ?? 4) * 1.5).toPrecision(3)),
          most: (dashboard.x_max ?? 4) * 4,
        }),
      );
      toast(`Feature ${featureChosen} is on the bench: run both.`);
    };
    const logits = (title, list) =>
      list?.length
        ? h("div", {},
            h("h3", {}, title),
            h("div", { class: "row" },
              list.slice(0, 10).map((t) => h("span", { class: "mono" }, short(t.text ?? String(t), 16))),
            ),
          )
        : null;
    fill(
      dash,
      h("div", { class: "row centre" },
        h("strong", {}, `#${featureChosen} ${visible(dashboard.label ?? "no label")}`),
        scoreBadge(dashboard.score),
        h("button", { id: "clamp", onclick: clamp }, "Clamp it on the bench"),
      ),
      note(
        dashboard.density === undefined
          ? "density unknown"
          : `active on ${(dashboard.density * 100).toFixed(2)} % of tokens`,
        `, maximum ${nice(dashboard.x_max ?? NaN)}`,
        dashboard.made ? `. ${MADE[dashboard.made] ?? ""}` : "",
        dashboard.score === null || dashboard.score === undefined
          ? ""
          : ` It correlates ${dashboard.score.toFixed(2)} with the activation on ${dashboard.scored_rows} tokens of ` +
              "texts it was not chosen on.",
      ),
      logits("makes likelier", dashboard.top_logits),
      logits("makes less likely", dashboard.bottom_logits),
      partners(dashboard.cofires, choose_),
      h("h3", {}, "strongest contexts"),
      contexts(dashboard.contexts),
      h("h3", {}, "examples of its other activations, drawn at random"),
      contexts(dashboard.examples),
    );
  });
  return node;
}

const READ = 32, // features asked for of each token
  SHOWN = 8;
const MADE = {
  rule: "The label is the simple rule that predicts it best.",
  peaks: "No simple rule predicts it; the label names tokens it is strongest on.",
  clamp: "The label says what raising it does to answers, as measured.",
  given: "The label came with the dictionary.",
};

/** How well a label predicts, as a small mark. */
function scoreBadge(score) {
  if (score === null || score === undefined) return null;
  const kind = score >= 0.5 ? "ok" : score >= 0.3 ? "" : "warn",
    title = "correlation of the label's rule with the activation, on texts it was not chosen on";
  return h("span", { class: `badge ${kind}`, title }, `score ${score.toFixed(2)}`);
}

/** Features that fire on the same tokens, each a button that selects it. */
function partners(list, select) {
  if (!list?.length) return null;
  const button = ({ feature, tokens, correlation, label }) => {
    const title = `both on ${tokens} tokens, correlation ${correlation.toFixed(2)}`,
      onclick = () => select(feature);
    return h("button", { title, onclick }, `#${feature} ${short(label ?? "", 24)}`);
  };
  return h("div", {}, h("h3", {}, "fires together with"), h("div", { class: "row partners" }, list.map(button)));
}

function contexts(list) {
  if (!list?.length) return note("none were kept with this dictionary");
  return list.map((c) =>
    h("p", { class: "context text" }, marked(c.text), h("span", { class: "note" }, `  ${nice(c.value)}`)),
  );
}

/** A context whose peak is in brackets; the bracketed part is highlighted. */
function marked(text) {
  const peak = text.match(/^([^]*)\[([^]*?)\]([^]*)$/);
  return peak
    ? [visible(peak[1]), h("mark", {}, visible(peak[2]).replace(/\n/g, "⏎\n")), visible(peak[3])]
    : visible(text);
}
