// What each stream would say if the model ended here: top tokens per depth, for the pinned token.
import { post } from "./api.js";
import { amount, css, inkOn } from "./colour.js";
import { empty, fault, fill, h, panel, short, takeAlong } from "./dom.js";
import { idsOf, pinnedToken } from "./pinned.js";

export function lensPanel(store) {
  const body = h("div", { class: "scroll" });
  let found = null, wanted = "", timer = 0, stop = null;
  const node = panel("Lens per stream", "The likeliest next token if the final norm and the head were put here: on each stream alone, on their mean, and on the head's own merge. Darker is surer.",
    { wide: true, name: "lens", tools: takeAlong(() => found ?? {}, () => `import birkhoff\n\nengine = birkhoff.load("nano")\nlens = engine.lens(${JSON.stringify(idsOf(store.state, store.state.pin?.position ?? -1))})\nfor depth in range(lens.depths):\n    print(depth, [lens.top(depth, of=view, k=3) for view in lens.views])`) }, body);
  const draw = () => {
    if (!found) return;
    fill(body, h("table", { class: "lens" }, h("thead", {}, h("tr", {}, h("th", {}, "depth"), found.views.map((v) => h("th", { scope: "col" }, typeof v === "number" ? `stream ${v}` : v)))),
      h("tbody", {}, found.top.map((views, depth) => h("tr", {}, h("th", { scope: "row" }, found.depths[depth]), views.map((tokens) => {
        const rgb = amount(tokens[0].probability * 0.75);
        return h("td", { title: tokens.map((t) => `${short(t.text)} ${(t.probability * 100).toFixed(1)} %`).join("\n"), style: { "background-color": css(rgb), color: inkOn(rgb) } }, short(tokens[0].text, 14));
      }))))));
  };
  const load = async () => {
    const state = store.state, token = pinnedToken(state);
    if (!token) { found = null; wanted = ""; fill(body, empty("Pin a token to read its streams.")); return; }
    const ids = idsOf(state, state.pin.position), key = ids.join();
    if (key === wanted) return;
    wanted = key;
    stop?.abort();
    stop = new AbortController();
    try {
      const answer = await post("/v1/lens", { token_ids: ids, position: -1, k: 5 }, stop.signal);
      if (wanted === key) { found = answer; draw(); }
    } catch (error) {
      if (error.name !== "AbortError") { wanted = ""; fill(body, fault(error)); }
    }
  };
  store.on(["pin", "run"], (state) => { clearTimeout(timer); if (state.run.status !== "running") timer = setTimeout(load, 60); });
  store.on(["theme"], draw, false);
  return node;
}
