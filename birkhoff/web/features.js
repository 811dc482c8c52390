// The features page: most active SAE features per token, one feature over all tokens, and its dashboard.
import { call, post } from "./api.js";
import { nice } from "./chart.js";
import { amount } from "./colour.js";
import { empty, fault, fill, h, panel, short, exportButtons, visible } from "./dom.js";
import { newEdit } from "./edits.js";
import { tokenIds, pythonScript } from "./pinned.js";
import { tokensOf } from "./store.js";
import { strip, update } from "./strip.js";

export function featurePage(store) {
  const choose = h("select", {
    "aria-label": "dictionary",
    onchange: () => {
      store.set({ sae: choose.value, featureChosen: null });
      load();
    },
  });
  const body = h("div", { class: "stack" }),
    text = strip([], { name: "features" }),
    top = h("div", { class: "stack" }),
    dash = h("div", { class: "stack" });
  let result = null,
    requestKey = "",
    stop = null;
  const node = h(
    "div",
    { class: "stack" },
    panel(
      "Features per token",
      "A sparse autoencoder (SAE) decomposes activations into a few active features. " +
        "Click a token to see its most active features; click a feature to see where else it is active.",
      {
        name: "features",
        tools: exportButtons(
          () => result ?? {},
          () =>
            pythonScript(
              `token_ids = ${JSON.stringify(tokenIds(store.state))}`,
              `print(engine.features(token_ids, ${JSON.stringify(store.state.sae)}, k=5))`,
            ),
        ),
      },
      h("div", { class: "stack" }, h("div", { class: "row" }, h("label", {}, "dictionary", choose)), body),
    ),
    panel(
      "Feature dashboard",
      "Top contexts, density and logits of the selected feature.",
      {
        name: "dashboard",
        tools: exportButtons(
          () => store.state.dashboard ?? {},
          () =>
            pythonScript(
              `print(engine.feature(${JSON.stringify(store.state.sae)}, ${store.state.featureChosen ?? 0}))`,
            ),
        ),
      },
      dash,
    ),
  );

  async function load() {
    const state = store.state,
      ids = tokenIds(state),
      key = `${state.sae}|${ids.join()}`;
    if (!state.sae || !ids.length || state.run.status === "running" || key === requestKey) return draw();
    requestKey = key;
    stop?.abort();
    stop = new AbortController();
    try {
      const answer = await post(
        "/v1/interp/features",
        { sae: state.sae, token_ids: ids, k: 8 },
        stop.signal,
      );
      if (requestKey === key) {
        result = answer;
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
    if (!saes.length) {
      fill(
        body,
        empty(
          "No SAE is attached to this server. Attach one with birkhoff serve --sae NAME=PATH, or with " +
            "engine.attach in Python.",
        ),
      );
      return;
    }
    const tokens = tokensOf(state.run, state.pin?.twin);
    if (!tokens.length) {
      fill(body, empty("Send a message first; the features of the text appear here."));
      return;
    }
    if (result?.error) {
      fill(body, fault(result.error));
      return;
    }
    if (!result) {
      fill(body, h("p", { class: "note" }, "Encoding the text…"));
      return;
    }
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
      largest = here?.features[0]?.activation || 1;
    fill(
      top,
      here
        ? here.features.map((f) =>
            h(
              "button",
              {
                type: "button",
                class: "feature",
                "aria-pressed": String(f.feature === chosen),
                onclick: () => choose_(f.feature),
              },
              h("span", { class: "mono" }, `#${f.feature}`),
              h(
                "span",
                {},
                h("span", {}, visible(f.label ?? "no label")),
                h("div", {
                  class: "bar",
                  style: { width: `${Math.max(1, (f.activation / largest) * 100)}%` },
                }),
              ),
              h("span", { class: "mono" }, nice(f.activation)),
            ),
          )
        : empty("Click a token to see its features."),
    );
    fill(
      body,
      text,
      h(
        "p",
        { class: "note" },
        chosen === null
          ? "Colours: most active feature of each token."
          : `Colours: activation of feature #${chosen} where it is among a token's most active.`,
      ),
      top,
    );
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
  store.on(["run", "pin", "sae", "saes", "featureChosen", "theme"], () => {
    draw();
    load();
  });
  store.on(["dashboard", "featureChosen", "theme"], ({ dashboard, featureChosen, sae }) => {
    if (featureChosen === null || featureChosen === undefined) {
      fill(dash, empty("Select a feature above."));
      return;
    }
    if (!dashboard) {
      fill(dash, h("p", { class: "note" }, "Loading…"));
      return;
    }
    if (dashboard.error) {
      fill(dash, fault(dashboard.error));
      return;
    }
    const clamp = () =>
      store.set({
        edits: [
          ...store.state.edits,
          newEdit({
            kind: "feature",
            module: sae,
            feature: featureChosen,
            label: dashboard.label,
            name: `${sae}/${featureChosen}`,
            strength: Number(((dashboard.x_max ?? 4) * 1.5).toPrecision(3)),
            most: (dashboard.x_max ?? 4) * 4,
          }),
        ],
      });
    const logits = (title, list) =>
      list?.length
        ? h(
            "div",
            {},
            h("h3", {}, title),
            h(
              "div",
              { class: "row" },
              list.slice(0, 10).map((t) => h("span", { class: "mono" }, short(t.text ?? String(t), 16))),
            ),
          )
        : null;
    fill(
      dash,
      h(
        "div",
        { class: "row centre" },
        h("strong", {}, `#${featureChosen} ${dashboard.label ?? "no label"}`),
        h("button", { type: "button", id: "clamp", onclick: clamp }, "Add clamp to Steer"),
      ),
      h(
        "p",
        { class: "note" },
        dashboard.density === undefined
          ? "density unknown"
          : `active on ${(dashboard.density * 100).toFixed(2)} % of tokens`,
        `, maximum ${nice(dashboard.x_max ?? NaN)}`,
      ),
      logits("makes likelier", dashboard.top_logits),
      logits("makes less likely", dashboard.bottom_logits),
      h("h3", {}, "top contexts"),
      (dashboard.contexts ?? []).length
        ? dashboard.contexts.map((c) =>
            h(
              "p",
              { class: "context text" },
              marked(c.text),
              h("span", { class: "note" }, `  ${nice(c.value)}`),
            ),
          )
        : h("p", { class: "note" }, "none were kept with this dictionary"),
    );
  });
  return node;
}

/** A context whose peak is in brackets; the bracketed part is highlighted. */
function marked(text) {
  const peak = text.match(/^([^]*)\[([^]*?)\]([^]*)$/);
  return peak
    ? [visible(peak[1]), h("mark", {}, visible(peak[2]).replace(/\n/g, "⏎\n")), visible(peak[3])]
    : visible(text);
}
