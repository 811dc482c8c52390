// The logit lens of the pinned token: top tokens per depth and stream.
import { post } from "./api.js";
import { amount, css, textColourOn } from "./colour.js";
import { empty, fault, fill, h, panel, short, exportButtons } from "./dom.js";
import { tokenIds, pinnedToken, pythonScript } from "./pinned.js";

export function lensPanel(store) {
  const body = h("div", { class: "scroll" });
  let result = null,
    requestKey = "",
    timer = 0,
    stop = null;
  const node = panel(
    "Lens per stream",
    "Top next token if the final norm and the head are applied at this depth: to each stream, " +
      "to their mean and to the head's mix. Darker means more probable.",
    {
      wide: true,
      name: "lens",
      tools: exportButtons(
        () => result ?? {},
        () =>
          pythonScript(
            `lens = engine.lens(${JSON.stringify(tokenIds(store.state, store.state.pin?.position ?? -1))})`,
            "for depth in range(lens.depths):",
            "    print(depth, [lens.top(depth, of=view, k=3) for view in lens.views])",
          ),
      ),
    },
    body,
  );
  const draw = () => {
    if (!result) return;
    fill(
      body,
      h(
        "table",
        { class: "lens" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", {}, "depth"),
            result.views.map((v) => h("th", { scope: "col" }, typeof v === "number" ? `stream ${v}` : v)),
          ),
        ),
        h(
          "tbody",
          {},
          result.top.map((views, depth) =>
            h(
              "tr",
              {},
              h("th", { scope: "row" }, result.depths[depth]),
              views.map((tokens) => {
                const rgb = amount(tokens[0].probability * 0.75);
                return h(
                  "td",
                  {
                    title: tokens
                      .map((t) => `${short(t.text)} ${(t.probability * 100).toFixed(1)} %`)
                      .join("\n"),
                    style: { "background-color": css(rgb), color: textColourOn(rgb) },
                  },
                  short(tokens[0].text, 14),
                );
              }),
            ),
          ),
        ),
      ),
    );
  };
  const load = async () => {
    const state = store.state,
      token = pinnedToken(state);
    if (!token) {
      result = null;
      requestKey = "";
      fill(body, empty("Pin a token to see its logit lens."));
      return;
    }
    const ids = tokenIds(state, state.pin.position),
      key = ids.join();
    if (key === requestKey) return;
    requestKey = key;
    stop?.abort();
    stop = new AbortController();
    try {
      const answer = await post("/v1/lens", { token_ids: ids, position: -1, k: 5 }, stop.signal);
      if (requestKey === key) {
        result = answer;
        draw();
      }
    } catch (error) {
      if (error.name !== "AbortError") {
        requestKey = "";
        fill(body, fault(error));
      }
    }
  };
  store.on(["pin", "run"], (state) => {
    clearTimeout(timer);
    if (state.run.status !== "running") timer = setTimeout(load, 60);
  });
  store.on(["theme"], draw, false);
  return node;
}
