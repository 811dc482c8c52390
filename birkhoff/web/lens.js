// The logit lens of the pinned token: top tokens per depth and stream.
import { amount, shadedCell } from "./colour.js";
import { fill, panel, rowHead, short, stack, table } from "./dom.js";
import { askAboutPin } from "./pinned.js";
import { lensPython } from "./python.js";

export function lensPanel(store) {
  const body = stack();
  const node = panel(
    "Lens per stream",
    "Top next token if the final norm and the head are applied at this depth: to each stream, " +
      "to their mean and to the head's mix. Darker means more probable.",
    { wide: true, name: "lens", data: () => current() ?? {}, python: () => lensPython(store.state) },
    body,
  );
  const cell = (tokens) => {
    const lines = tokens.map((t) => `${short(t.text)} ${(t.probability * 100).toFixed(1)} %`);
    return shadedCell(amount(tokens[0].probability * 0.75), short(tokens[0].text, 14), lines.join("\n"));
  };
  const draw = (result) => {
    const views = result.views.map((v) => (typeof v === "number" ? `stream ${v}` : v));
    const rows = result.top.map((tokens, depth) => [rowHead(result.depths[depth]), tokens.map(cell)]);
    fill(body, table("lens", ["depth", ...views], rows));
  };
  const question = {
    path: "/v1/lens",
    fields: { k: 5 },
    hint: "Pin a token to see its logit lens.",
    delay: 60,
  };
  const current = askAboutPin(store, body, question, draw);
  return node;
}
